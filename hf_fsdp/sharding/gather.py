"""The whole state dict of a sharded model on rank 0, tensor by tensor, and a `save_pretrained` that writes it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp.policies.packed_weights import packed_names, packed_state
from hf_fsdp.sharding.adapters import adapter_keys
from hf_fsdp.sharding.outcome import wait_for_all_ranks

if TYPE_CHECKING:
    from hf_fsdp.sharding.apply import AppliedSharding

_SAVE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def gather_state_dict(
    model: nn.Module, applied: AppliedSharding, only: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """Return the whole state dict on the CPU of rank 0 and an empty dict on the others; collective.

    One tensor at a time is whole on the device, so no rank needs more than its shard plus the largest tensor,
    and rank 0 the host memory of the model. Parameters are written in `precision.save_dtype`: by default the dtype
    they were loaded in, since a bf16 model does not become a better one by being stored in fp32. Tied weights are
    one tensor under all their names, as `save_pretrained` expects. Packed 4-bit weights come with their scales.

    Args:
        model: sharded.
        applied: what `apply_fsdp` returned for it.
        only: names to gather; others, and the scales of packed weights, are left out.
    """
    packed = packed_names(model)
    is_writer = dist.get_rank() == 0
    override = _SAVE_DTYPES.get(applied.config.precision.save_dtype)
    first_name = {name: first for first, names in applied.ties.items() for name in names}
    gathered: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if only is not None and name not in only:
            continue
        first = first_name.get(name, name)
        if first in gathered:
            gathered[name] = gathered[first]
            continue
        if name != first and not is_writer:
            continue  # gathered under its first name already
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if is_writer:
            dtype = applied.load_dtypes.get(first)
            if dtype is not None and dtype.is_floating_point and first not in packed:
                whole = whole.to(override or dtype)
            gathered[name] = whole.detach().cpu()
        del whole
    return {**gathered, **packed_state(model)} if packed and is_writer and only is None else gathered


def gather_for_saving(model: nn.Module, applied: AppliedSharding) -> dict[str, torch.Tensor]:
    """Return what `save_pretrained` writes of `model`: all of it, or an adapter without its base; collective."""
    adapters = adapter_keys(model)
    only = {name for keys in adapters.values() for name in keys.values()} if adapters else None
    return gather_state_dict(model, applied, only)


def saved_dtype(applied: AppliedSharding) -> torch.dtype:
    """Return the dtype that `gather_state_dict` writes most parameters in: the one `config.json` should name."""
    override = _SAVE_DTYPES.get(applied.config.precision.save_dtype)
    counts = Counter(dtype for dtype in applied.load_dtypes.values() if dtype.is_floating_point)
    return override or counts.most_common(1)[0][0]


def make_save_collective(model: nn.Module, applied: AppliedSharding) -> None:
    """Let ``model.save_pretrained(folder)`` work on a sharded model: all ranks call it, rank 0 writes.

    Its own code would read the storage of shards and fail, at the end of a training run. A caller that brings a
    ``state_dict`` (Trainer does) gets what it asked for; `config.json` names the dtype of the weights beside it.
    """
    original = getattr(model, "save_pretrained", None)
    if original is None:
        return

    names = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(names, args, strict=False))
        if kwargs.get("state_dict") is None:
            wait_for_all_ranks("save_pretrained")
            kwargs["state_dict"] = gather_for_saving(model, applied)
            kwargs["is_main_process"] = dist.get_rank() == 0
            if not kwargs["is_main_process"]:
                return None
        with _quantizer_hands_on(model, kwargs["state_dict"]):
            result = original(**kwargs)
        if kwargs.get("is_main_process", True):
            _write_saved_dtype(Path(kwargs["save_directory"]), applied)
        return result

    model.save_pretrained = save_pretrained  # type: ignore[assignment]


@contextlib.contextmanager
def _quantizer_hands_on(model: nn.Module, state_dict: dict[str, torch.Tensor]) -> Iterator[None]:
    """Let a quantized model's `save_pretrained` write `state_dict`: its quantizer would put the shards in its place."""
    quantizer = vars(model).get("hf_quantizer")
    if quantizer is None:
        yield
        return
    quantizer.get_state_dict_and_metadata = lambda *args, **kwargs: (state_dict, {})
    try:
        yield
    finally:
        del quantizer.get_state_dict_and_metadata


def _write_saved_dtype(folder: Path, applied: AppliedSharding) -> None:
    """Let `config.json` name the dtype of the weights beside it: `save_pretrained` names that of the fp32 masters."""
    path = folder / "config.json"
    if not path.is_file():
        return  # an adapter folder
    config = json.loads(path.read_text(encoding="utf-8"))
    name = str(saved_dtype(applied)).removeprefix("torch.")
    if config.get("dtype", name) != name:
        path.write_text(json.dumps({**config, "dtype": name}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
