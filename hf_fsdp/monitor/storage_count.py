"""Bytes of the tensors that are alive, counted operator by operator: an allocator's count where there is none."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from hf_fsdp.torch_private import FakeTensor, is_in_backward


@dataclass
class LiveStorage:
    """One storage that was alive, and what is known of it.

    Args:
        num_bytes: now; FSDP empties and refills the storages of gathered weights.
        made_by: the operator that returned it first, or ``parameters``, ``gradients``, ``optimizer``, ``buffers`` for
            what was there when counting began; ``(resized)`` for storages that were empty then.
        shape: of the tensor it was first seen under.
        dtype: of that tensor.
        in_backward: it was made inside a backward, by a gradient or by a recomputed forward.
    """

    num_bytes: int
    made_by: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    in_backward: bool = False


class StorageCount(TorchDispatchMode):
    """Counts the storages of one device while it is entered.

    A storage is counted from the operator that returns it first until torch frees it, once however many tensors look at
    it, in bytes that were asked for (no rounding). It knows nothing of scratch inside operators (a kernel's packed
    weights, gloo's copies) and nothing of memory that is not a tensor's.

    Args:
        device_type: storages of other devices are not counted.
        keep_storages: also keep the list of storages alive at the largest count, in `at_peak`.
    """

    def __init__(self, device_type: str = "cpu", *, keep_storages: bool = False):
        super().__init__()
        self.current = 0
        self.peak = 0
        self.num_operators = 0
        self.at_peak: list[LiveStorage] = []
        self._device_type = device_type
        self._keep_storages = keep_storages
        self._live: dict[int, tuple[weakref.ref[Any], LiveStorage]] = {}
        # Storages are freed wherever their last tensor dies: also in gloo's threads, and within a garbage collection
        # that runs while this thread counts, so the lock must be one that its holder may take again.
        self._lock = threading.RLock()

    def restart_peak(self) -> None:
        """Forget the peak so far: from now on it is what is counted from here."""
        with self._lock:
            self.peak, self.at_peak = self.current, self._listed()

    def storages(self) -> list[LiveStorage]:
        """Return what is alive now."""
        with self._lock:
            return [LiveStorage(**vars(item)) for _, item in self._live.values()]

    def count(self, tensors: Iterable[torch.Tensor], made_by: str) -> None:
        """Count tensors that were there before this mode was entered."""
        for tensor in tensors:
            self._see(tensor, made_by, may_be_view=False)

    # -- as a dispatch mode -------------------------------------------------------------------------------------------

    def __enter__(self) -> StorageCount:
        # FSDP frees and refills the storages of gathered weights in place, which is no operator.
        storage_class: Any = torch.UntypedStorage
        original = self._original_resize = storage_class.resize_

        def resize_(storage: Any, size: int) -> Any:
            result = original(storage, size)
            self._resized(storage)
            return result

        storage_class.resize_ = resize_
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        storage_class: Any = torch.UntypedStorage
        storage_class.resize_ = self._original_resize
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(item, DTensor) for item in types):
            return NotImplemented  # DTensor runs the same operator on its local tensors, and that is seen here
        result = func(*args, **(kwargs or {}))
        if active_fake_mode() is not None:
            return result  # DTensor asks for the shape of a result by whole tensors without values
        self.num_operators += 1
        # A tensor that may share its input's storage was there before: if it is unknown, so it was to `count`, and is
        # none of the training (a row of a data set's tensor would add the whole set).
        may_be_view = any(item.alias_info is not None for item in func._schema.returns)
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, func, may_be_view=may_be_view)
        return result

    # -- accounts -----------------------------------------------------------------------------------------------------

    def _see(self, tensor: torch.Tensor, made_by: Any, *, may_be_view: bool) -> None:
        for plain in _plain_tensors(tensor):
            if plain.device.type != self._device_type:
                continue
            storage = plain.untyped_storage()
            if self._entry(storage) is not None:
                self._resized(storage)
            elif not may_be_view:
                name = made_by if isinstance(made_by, str) else made_by._schema.name
                item = LiveStorage(0, name, tuple(plain.shape), plain.dtype, is_in_backward())
                self._add(storage, item)

    def _entry(self, storage: Any) -> LiveStorage | None:
        """An object's id is used again after its death, so an entry counts only while its reference is this storage."""
        found = self._live.get(id(storage))
        return found[1] if found is not None and found[0]() is storage else None

    def _resized(self, storage: Any) -> None:
        if storage.device.type != self._device_type:
            return
        with self._lock:
            item = self._entry(storage)
            if item is None:
                return self._add(storage, LiveStorage(0, "(resized)"))
            self._change(item, storage.nbytes())

    def _add(self, storage: Any, item: LiveStorage) -> None:
        key = id(storage)

        def forget(reference: Any) -> None:
            with self._lock:
                self._change(item, 0)
                if (found := self._live.get(key)) is not None and found[0] is reference:
                    del self._live[key]

        with self._lock:
            self._live[key] = (weakref.ref(storage, forget), item)
            self._change(item, storage.nbytes())

    def _change(self, item: LiveStorage, num_bytes: int) -> None:
        self.current += num_bytes - item.num_bytes
        item.num_bytes = num_bytes
        if self.current > self.peak:
            self.peak = self.current
            self.at_peak = self._listed()

    def _listed(self) -> list[LiveStorage]:
        return self.storages() if self._keep_storages else []


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with storages of their own behind a wrapper: a DTensor's local one, a quantized one's parts."""
    if isinstance(tensor, DTensor):
        yield from _plain_tensors(tensor._local_tensor)
    elif is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(tensor, name))
    elif tensor.layout is torch.strided and tensor.device.type != "meta" and not isinstance(tensor, FakeTensor):
        yield tensor


def training_tensors(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a training holds between steps, with its kind: parameters, gradients, buffers, optimizer state."""
    for parameter in model.parameters():
        yield "parameters", parameter.detach()
        if parameter.grad is not None:
            yield "gradients", parameter.grad
    for buffer in model.buffers():
        yield "buffers", buffer
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in tree_leaves(state):
                if isinstance(value, torch.Tensor):
                    yield "optimizer", value
