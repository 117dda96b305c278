"""The one place that calls names torch keeps private; `tests/unit/test_seams.py` fails when one of them moves.

Why each is needed:

- composable ``checkpoint``: activation checkpointing that leaves the module tree and the parameter names
  alone and keeps the RNG state, which the public wrapper form does only in part.
- the FSDP state of a module: torch has no public way to ask a sharded module which policy and which
  parameters its unit really has, and the audit must not trust what we asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint as _composable_checkpoint
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

# Before 2.13 a unit of several modules cast inputs and outputs only at its first and last module, so the norms of a
# float32 group handed float32 on to bf16 layers.
GROUPS_CAST_EACH_MODULE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 13)


@dataclass(frozen=True)
class UnitState:
    """What torch itself holds about one FSDP unit (one all-gather)."""

    parameters: tuple[nn.Parameter, ...]
    mixed_precision: MixedPrecisionPolicy
    reshard_after_forward: bool


def checkpoint_block(module: nn.Module) -> None:
    """Recompute `module`'s activations in backward with the RNG state of its forward; names stay as they are."""
    _composable_checkpoint(module, preserve_rng_state=True)


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether `checkpoint_block` was applied to `module`."""
    return _composable_checkpoint.state(module) is not None


def read_unit_state(module: nn.Module) -> UnitState | None:
    """Return what torch holds about the unit that `module` leads, or None when it leads none.

    For a unit of several modules (``fully_shard([a, b])``) every one of them returns the same state.
    """
    if not isinstance(module, FSDPModule):
        return None
    state: Any = module._get_fsdp_state()
    # torch >= 2.12 keeps a list of groups, earlier ones a single group.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    parameters = tuple(param.sharded_param for group in groups for param in group.fsdp_params)
    # The root's unit is told at its first forward not to reshard; `post_forward_mesh_info` is then None.
    reshard = any(group.post_forward_mesh_info is not None for group in groups)
    return UnitState(parameters=parameters, mixed_precision=state._mp_policy, reshard_after_forward=reshard)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a sharded tensor that this rank holds (no copy), or the tensor itself when it is whole.

    ``DTensor.to_local()`` is the public way but records autograd history; looking must not.
    """
    return getattr(tensor, "_local_tensor", tensor)
