"""Every storage that a step makes and frees, in order: the log from which peaks, categories and work are read.

A storage and not a tensor is what takes memory: views share one, and FSDP frees gathered weights by resizing theirs to
nothing while their tensors live on. What a storage is for is often known only later (an output that autograd keeps, a
gradient that a reduction reads), so the log is read after the step, when every storage has its last word.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from hf_fsdp.torch_private import FakeTensor, fake_device, watch_shape_propagation

# CUDA's allocator hands out blocks of this size.
ROUNDING_BYTES = 512


@dataclass(slots=True, eq=False)
class Held:
    """One storage.

    Args:
        num_bytes: now.
        on_device: on the device that is simulated, not in host memory.
        made_in: phase it was made in.
        category: what it is for; empty: told by when it was made and freed.
        recomputed: made by a forward that was run again inside a backward.
        freed_at: index of the event that freed it; None while it lives.
    """

    num_bytes: int
    on_device: bool
    made_in: str
    category: str = ""
    recomputed: bool = False
    made_at: int = 0
    freed_at: int | None = None


@dataclass(slots=True)
class Event:
    """A change of `held` by `delta` bytes, in a phase of a micro-batch."""

    held: Held
    delta: int
    phase: str
    micro_batch: int


class Tracker(TorchDispatchMode):
    """Logs the storages of one process while it is entered; tensors that were there before are given to `hold`.

    Args:
        device: type of the device that is simulated.
        rounding_bytes: sizes are rounded up to a multiple of it.

    `phase`, `micro_batch` and `recomputes` are set from outside. `events` is the log; `work` counts floating-point
    operations, and bytes and collectives on links, of each micro-batch by the names of `simulation.Work`.
    """

    def __init__(self, device: str, rounding_bytes: int = ROUNDING_BYTES):
        super().__init__()
        self._device = device
        self._rounding = rounding_bytes
        self._held: Any = WeakIdKeyDictionary()
        self._paused = 0
        self._stack = ExitStack()
        self.phase = "start"
        self.events: list[Event] = []
        self.micro_batch = 0
        self.recomputes = False
        self.work: list[Counter[str]] = []
        self.num_operators = 0

    # -- the log ------------------------------------------------------------------------------------------------------

    def hold(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Count tensors under `category`, whatever they counted as before."""
        for tensor in tensors:
            for part in _plain_tensors(tensor):
                self._see(part, category)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors as if they had never been there."""
        parts = [part for tensor in tensors for part in _plain_tensors(tensor)]
        gone = {id(held) for part in parts if (held := self._held.get(part.untyped_storage())) is not None}
        for event in self.events:
            if id(event.held) in gone:
                event.delta = event.held.num_bytes = 0

    def _see(self, tensor: torch.Tensor, category: str = "") -> None:
        storage = tensor.untyped_storage()
        held = self._held.get(storage)
        num_bytes = self._rounded(storage.nbytes())
        if held is None:
            device = tensor.device.type
            if device == "meta":
                return
            on_device = device == self._device
            held = Held(0, on_device, self.phase, category, self._is_recompute(), len(self.events))
            self._held[storage] = held
            weakref.finalize(storage, self._free, held)
            self._change(held, num_bytes)
            return
        if held.num_bytes != num_bytes:
            self._change(held, num_bytes)
        if category:
            held.category = category

    def _change(self, held: Held, num_bytes: int) -> None:
        if num_bytes != held.num_bytes:
            self.events.append(Event(held, num_bytes - held.num_bytes, self.phase, self.micro_batch))
            held.num_bytes = num_bytes

    def _free(self, held: Held) -> None:
        held.freed_at = len(self.events)
        self._change(held, 0)

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._rounding) * self._rounding

    def count(self, name: str, amount: float) -> None:
        """Add to the work of the micro-batch."""
        while len(self.work) <= self.micro_batch:
            self.work.append(Counter())
        self.work[self.micro_batch][name] += amount  # type: ignore[assignment]

    # -- the mode -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Tracker:
        self._stack.enter_context(watch_shape_propagation(self._pause, self._resume))
        original = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            held = self._held.get(storage)
            if held is not None:
                self._change(held, self._rounded(storage.nbytes()))
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        self._stack.callback(setattr, torch.UntypedStorage, "resize_", original)
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._stack.close()

    def _pause(self) -> None:
        self._paused += 1

    def _resume(self) -> None:
        self._paused -= 1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would switch its compiler off around every call; nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return fake_device(args[0])
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # of a fake group there is nothing to wait for, and the operator would copy
        result = func(*args, **kwargs)
        if self._paused:
            return result
        self.num_operators += 1
        self._read_operator(func, args, kwargs, result)
        if isinstance(result, torch.Tensor):
            self._see(result)
        else:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._see(leaf)
        return result

    def _read_operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        formula = _formula(func._overloadpacket)
        if formula is not None:
            self.count(self._kind_of_computing(), _flops(func, formula, args, kwargs, result))
            return
        reader = _READERS.get(func._schema.name)
        if reader is not None:
            reader(self, args, kwargs, result)

    def _kind_of_computing(self) -> str:
        if self.phase.startswith("forward"):
            return "forward_flops"
        return "recompute_flops" if self._is_recompute() else "backward_flops"

    def _is_recompute(self) -> bool:
        """Whether a backward runs a forward again: one of its blocks was entered, or gradients are recorded."""
        return self.phase.startswith("backward") and (self.recomputes or torch.is_grad_enabled())


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the bytes of `tensor`: the local part of a sharded one, the parts of a subclass."""
    if isinstance(tensor, DTensor):
        return _plain_tensors(tensor._local_tensor)
    if is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, FakeTensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _plain_tensors(getattr(tensor, name))]
    return [tensor]


@cache
def _formula(packet: Any) -> Any:
    found = flop_registry.get(packet)
    if found is None and "_for_cpu" in str(packet):  # torch counts the kernels of GPUs only
        return flop_registry.get(getattr(torch.ops.aten, str(packet).split(".")[-1].removesuffix("_for_cpu"), None))
    return found


# -- operators that say what a tensor is for, or what travels ---------------------------------------------------------


def _flops(func: Any, formula: Any, args: Any, kwargs: Any, result: Any) -> float:
    flops = formula(*args, **kwargs, out_val=result)
    # The kernels skip what a causal mask would throw away, and torch's count does not.
    return flops / 2 if "scaled_dot_product" in str(func) and _is_causal(func, args, kwargs) else flops


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(kwargs.get("is_causal", args[index] if index < len(args) else argument.default_value))
    return False


def _gather_buffer(tracker: Tracker, args: Any, kwargs: Any, result: Any) -> None:
    tracker.hold([args[1]], "unsharded")


def _gathered_weights(tracker: Tracker, args: Any, kwargs: Any, result: Any) -> None:
    tracker.hold(kwargs["out"], "unsharded")


def _reduce_input(tracker: Tracker, args: Any, kwargs: Any, result: Any) -> None:
    tracker.hold(args[0], "gradients")  # whole gradients of a unit, on their way
    tracker.hold([kwargs["out"]], "reduce_buffers")


def _reduce_scatter(tracker: Tracker, args: Any, kwargs: Any, result: Any) -> None:
    output, whole = args[0], args[1]
    tracker.hold([output], "gradients")
    tracker.count("reduce_scatter_bytes", whole.nbytes - output.nbytes)
    tracker.count("num_reduce_scatters", 1)


def _all_gather(tracker: Tracker, args: Any, kwargs: Any, result: Any) -> None:
    tracker.count("all_gather_bytes", args[0].nbytes - args[1].nbytes)
    tracker.count("num_all_gathers", 1)


def _all_reduce(tracker: Tracker, args: Any, kwargs: Any, result: Any) -> None:
    tracker.count("all_reduce_bytes", sum(tensor.nbytes for tensor in tree_leaves(args[0])))
    tracker.count("num_all_reduces", 1)


def _copy(tracker: Tracker, args: Any, kwargs: Any, result: Any) -> None:
    target, source = (result, args[0]) if result is not args[0] else (args[0], args[1])
    if isinstance(source, torch.Tensor) and target.device.type != source.device.type:
        to_host = target.device.type == "cpu"
        tracker.count("device_to_host_bytes" if to_host else "host_to_device_bytes", target.nbytes)


_READERS = {
    "fsdp::all_gather_copy_in": _gather_buffer,
    "fsdp::split_with_sizes_copy": _gathered_weights,
    "fsdp::chunk_cat": _reduce_input,
    "c10d::_reduce_scatter_base_": _reduce_scatter,
    "c10d::_allgather_base_": _all_gather,
    "c10d::allreduce_": _all_reduce,
    "aten::_to_copy": _copy,
    "aten::copy_": _copy,
}
