"""The whole state dict of a sharded model on rank 0, tensor by tensor."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp.sharding.apply import AppliedSharding

_SAVE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def gather_state_dict(model: nn.Module, applied: AppliedSharding) -> dict[str, torch.Tensor]:
    """Return the whole state dict on the CPU of rank 0 and an empty dict on the others; collective.

    One tensor at a time is whole on the device, so no rank needs more than its shard plus the largest tensor,
    and rank 0 the host memory of the model. Parameters are written in `precision.save_dtype`: by default the dtype
    they were loaded in, since a bf16 model does not become a better one by being stored in fp32. Tied weights are
    one tensor under all their names, as `save_pretrained` expects.
    """
    is_writer = dist.get_rank() == 0
    override = _SAVE_DTYPES.get(applied.config.precision.save_dtype)
    first_name = {name: first for first, names in applied.ties.items() for name in names}
    gathered: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        first = first_name.get(name, name)
        if first in gathered:
            gathered[name] = gathered[first]
            continue
        if name != first and not is_writer:
            continue  # gathered under its first name already
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if is_writer:
            dtype = applied.load_dtypes.get(first)
            if dtype is not None and dtype.is_floating_point:
                whole = whole.to(override or dtype)
            gathered[name] = whole.detach().cpu()
        del whole
    return gathered


def saved_dtype(applied: AppliedSharding) -> torch.dtype:
    """Return the dtype that `gather_state_dict` writes most parameters in: the one `config.json` should name."""
    override = _SAVE_DTYPES.get(applied.config.precision.save_dtype)
    counts = Counter(dtype for dtype in applied.load_dtypes.values() if dtype.is_floating_point)
    return override or counts.most_common(1)[0][0]
