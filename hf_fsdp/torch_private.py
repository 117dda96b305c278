"""The one place that calls names torch keeps private; `tests/unit/test_seams.py` fails when one of them moves.

Why each is needed:

- composable ``checkpoint``: activation checkpointing that leaves the module tree and the parameter names
  alone and keeps the RNG state, which the public wrapper form does only in part.
- the dispatcher's list of operators: `torch.ops` shows only those that were used already.
- weak references to storages: activation offload must know that two saved tensors are one, without keeping either.
- dynamo's limit of graphs: past it, torch runs a compiled function uncompiled and says so in a log only.
- the running graph task: public torch does not say whether code runs inside a backward (a recompute) or not.
- the store of the process group: a rank whose disk is full tells the others there, between two of their writes.
- the FSDP state of a module: torch has no public way to ask a sharded module which policy and which
  parameters its unit really has, and the audit must not trust what we asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.distributed._composable.checkpoint_activation import checkpoint as _composable_checkpoint
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef

# Before 2.13 a unit of several modules cast inputs and outputs only at its first and last module, so the norms of a
# float32 group handed float32 on to bf16 layers.
GROUPS_CAST_EACH_MODULE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 13)


RecompileLimitHit = FailOnRecompileLimitHit


@dataclass(frozen=True)
class UnitState:
    """What torch itself holds about one FSDP unit (one all-gather)."""

    parameters: tuple[nn.Parameter, ...]
    mixed_precision: MixedPrecisionPolicy
    reshard_after_forward: bool
    is_in_host_memory: bool


def checkpoint_block(module: nn.Module, contexts: Callable[[], Any] | None = None) -> None:
    """Recompute `module`'s activations in backward with the RNG state of its forward; names stay as they are.

    `contexts` returns the two contexts of selective checkpointing: of one forward and of its recompute.
    """
    options = {} if contexts is None else {"context_fn": contexts}
    _composable_checkpoint(module, preserve_rng_state=True, **options)


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether `checkpoint_block` was applied to `module`."""
    return _composable_checkpoint.state(module) is not None


def is_recomputing(module: nn.Module) -> bool:
    """Return whether `module`, checkpointed by `checkpoint_block`, is being run again for its backward."""
    state = _composable_checkpoint.state(module)
    return state is not None and not state.enable_hook


def operator_names() -> list[str]:
    """Return the names of all operators that are registered now, as ``aten::mm`` or ``aten::mm.out``."""
    return sorted(torch._C._dispatch_get_all_op_names())


def is_composite(operator: Any) -> bool:
    """Return whether an operator is only made of others (``aten.linear``), so that autograd never meets it."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


def storage_key(tensor: torch.Tensor) -> tuple[StorageWeakRef, tuple[int, int]]:
    """Return what names the bytes under `tensor` as they are now, and the reference that keeps the name from reuse.

    While the weak reference lives, no other storage gets its address; the version counts writes in place.
    """
    reference = StorageWeakRef(tensor.untyped_storage())
    return reference, (reference.cdata, tensor._version)


@contextmanager
def recompile_limit(limit: int) -> Iterator[None]:
    """Let a compiled function have `limit` graphs; past them, raise `RecompileLimitHit`, not run uncompiled."""
    with torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
        yield


def is_in_backward() -> bool:
    """Return whether this code runs inside a backward pass: a forward is then a recompute."""
    return torch._C._current_graph_task_id() != -1


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
    in_host_memory = any(param.offload_to_cpu for group in groups for param in group.fsdp_params)
    return UnitState(
        parameters=parameters,
        mixed_precision=state._mp_policy,
        reshard_after_forward=reshard,
        is_in_host_memory=in_host_memory,
    )


def process_group_store() -> Any:
    """Return the key-value store that the default process group met at."""
    return _get_default_store()


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a sharded tensor that this rank holds (no copy), or the tensor itself when it is whole.

    ``DTensor.to_local()`` is the public way but records autograd history; looking must not.
    """
    return getattr(tensor, "_local_tensor", tensor)
