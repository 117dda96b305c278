"""The one place that calls names torch keeps private; `tests/unit/test_seams.py` fails when one of them moves.

Why each is needed:

- composable ``checkpoint``: activation checkpointing that leaves the module tree and the parameter names
  alone and keeps the RNG state, which the public wrapper form does only in part.
- the dispatcher's list of operators: `torch.ops` shows only those that were used already.
- weak references to storages: activation offload must know that two saved tensors are one, without keeping either.
- dynamo's limit of graphs: past it, torch runs a compiled function uncompiled and says so in a log only.
- the running graph task: public torch does not say whether code runs inside a backward (a recompute) or not.
- the store of the process group: a rank whose disk is full tells the others there, between two of their writes.
- fake tensors, their process group and a device registered from Python: the planner runs a step without values.
- how `fully_shard` cuts a parameter: it makes a view for every rank, which a thousand simulated ranks need not have.
- the sharding propagator: under fake tensors it makes tensors of whole, global size to ask operators for shapes, which
  a count of memory has to leave out.
- the FSDP state of a module: torch has no public way to ask a sharded module which policy and which
  parameters its unit really has, and the audit must not trust what we asked for.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.distributed._composable.checkpoint_activation import checkpoint as _composable_checkpoint
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

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


def start_fake_group(world_size: int) -> None:
    """Make this process rank 0 of a default group of `world_size` ranks that do not exist; collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore  # slow, and for the planner alone

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


def fake_values() -> FakeTensorMode:
    """Return a mode in which tensors have shapes and storages and no values; constants keep theirs."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def known_values(limit: int) -> Iterator[None]:
    """Let fake tensors of up to `limit` elements that are made of numbers keep them, so that they can be read."""
    from torch._subclasses import fake_tensor

    original = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = max(limit, original)
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = original


def real_values() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which tensors are real within `fake_values`; none of the fake ones may be used in it."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def register_python_device(name: str, members: type) -> None:
    """Make ``torch.device(name)`` known, with `members` in front of torch's own stub for such devices; not undone."""
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    module = type(members.__name__, (members, _DummyBackendModule), {})
    _setup_privateuseone_for_python_backend(name, backend_module=module())


def cut_for_first_rank_only() -> None:
    """Let `fully_shard` make the shard of rank 0 only, where it makes all and takes one of them; not undone."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def first_chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
        return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]

    _fsdp_param._chunk_with_empty = first_chunk


def fake_device(tensor: FakeTensor) -> torch.device:
    """Return what ``tensor.device`` does, without the dispatch; that is most of what a step asks of fake tensors."""
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def make_fake(
    mode: FakeTensorMode, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """Return a new fake tensor of `mode` with a storage of its own, past the dispatch of an operator."""
    with in_kernel_invocation_manager(mode):
        element = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, element, device)


def view_fake(base: FakeTensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> FakeTensor:
    """Return a fake tensor over the storage of `base`, past the dispatch of an operator."""
    with in_kernel_invocation_manager(base.fake_mode):
        element = torch.empty((0,), dtype=base.dtype, device="meta")
        element.set_(base.untyped_storage(), offset, shape, stride)
    return FakeTensor(base.fake_mode, element, base.fake_device)


def storage_address(tensor: torch.Tensor) -> int:
    """Return what tells the storage under `tensor` from others while it lives; also of one without memory."""
    return StorageWeakRef(tensor.untyped_storage()).cdata


@contextmanager
def watch_shape_propagation(enter: Callable[[], None], leave: Callable[[], None]) -> Iterator[None]:
    """Call `enter` and `leave` around DTensor's asking for the shapes of an operator's whole, global result."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def watched(*args: Any, **kwargs: Any) -> Any:
        enter()
        try:
            return original(*args, **kwargs)
        finally:
            leave()

    ShardingPropagator._propagate_tensor_meta_non_cached = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = original  # type: ignore[method-assign]


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


_numbers = itertools.count()
_fake_storages: Any = WeakIdKeyDictionary()


def storage_key(tensor: torch.Tensor) -> tuple[StorageWeakRef | None, tuple[int, int]]:
    """Return what names the bytes under `tensor` as they are now, and the reference that keeps the name from reuse.

    While the weak reference lives, no other storage gets its address; the version counts writes in place. A storage
    without memory has no address; it gets a number, since a weak reference would keep its Python object, by whose end
    the planner sees that it was freed.
    """
    if isinstance(tensor, FakeTensor):
        storage = tensor.untyped_storage()
        number = _fake_storages.setdefault(storage, next(_numbers))
        return None, (number, tensor._version)
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
