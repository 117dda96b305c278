"""Activations in host memory: what autograd keeps of a block's forward is moved there and comes back for its backward.

One mechanism serves both kinds. Hooks on saved tensors surround a block's whole forward; of a checkpointed block
autograd keeps its inputs only, of another one everything that its backward needs.

Why not `torch.autograd.graph.save_on_cpu`: it copies the gathered weights too, which FSDP frees and gathers again
anyway, it copies one tensor as often as it was saved (an input of q, k and v three times), and on a CPU it does
nothing, so no test there could fail.

Copies run on the stream that computes. From and to page-locked memory they do not make the host wait, and the stream's
order keeps them right; they do not overlap with computing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from hf_fsdp.torch_private import FakeTensor, is_recomputing, storage_address, storage_key

# Below this a copy costs more than the memory is worth: row statistics, random states, sizes.
MIN_BYTES = 1024


class _HostCopy:
    """The bytes of one storage in host memory; alive as long as some backward needs it."""

    def __init__(self, data: torch.Tensor, device: torch.device, key: Any):
        self.data = data
        self.device = device
        self.key = key  # holds the weak reference: while it lives, no other storage gets the same address


@dataclass(frozen=True)
class _Packed:
    """A saved tensor as a view of a host copy."""

    copy: _HostCopy
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class ActivationStore:
    """Takes saved tensors of blocks to host memory and back.

    Args:
        pin_memory: page-locked host memory where the tensors are on an accelerator; never on the CPU.

    `bytes_moved` counts the bytes copied to the host so far, `bytes_returned` those copied back.
    """

    def __init__(self, pin_memory: bool):
        self._pin_memory = pin_memory
        self._copies: weakref.WeakValueDictionary[Any, _HostCopy] = weakref.WeakValueDictionary()
        self.bytes_moved = 0
        self.bytes_returned = 0

    @property
    def bytes_held(self) -> int:
        """Bytes in host memory now."""
        return sum(copy.data.numel() for copy in self._copies.values())

    def attach(self, block: nn.Module) -> None:
        """Move what autograd saves in `block`'s forwards; before it is checkpointed, so that its inputs are seen."""
        open_scopes: list[saved_tensors_hooks] = []

        def enter(module: nn.Module, args: Any) -> None:
            # A recompute has hooks of its own, and what it saves is used at once.
            if torch.is_grad_enabled() and not is_recomputing(module):
                scope = saved_tensors_hooks(lambda tensor: self._pack(tensor, module), self._unpack)
                scope.__enter__()
                open_scopes.append(scope)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if open_scopes and not is_recomputing(module):
                open_scopes.pop().__exit__(None, None, None)

        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave, always_call=True)

    @torch.no_grad()
    def _pack(self, tensor: torch.Tensor, block: nn.Module) -> _Packed | torch.Tensor:
        if not _is_movable(tensor) or _is_parameter_of(block, tensor):
            return tensor.detach()
        reference, name = storage_key(tensor)
        copy = self._copies.get(name)
        if copy is None:
            copy = self._copies[name] = _HostCopy(self._to_host(tensor), tensor.device, reference)
        return _Packed(copy, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    @torch.no_grad()
    def _unpack(self, packed: _Packed | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        copy = packed.copy
        # A new copy each time: a compiled backward may write into what it was given.
        data = torch.empty(copy.data.shape, dtype=torch.uint8, device=copy.device)
        data.copy_(copy.data, non_blocking=copy.data.is_pinned())
        self.bytes_returned += data.numel()
        whole = data.numel() // packed.dtype.itemsize * packed.dtype.itemsize
        return data[:whole].view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the whole storage: views of one buffer share a copy, and every stride comes back as it was."""
        data = _bytes_of(tensor)
        pinned = self._pin_memory and tensor.device.type != "cpu"
        host = torch.empty(data.shape, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        host.copy_(data, non_blocking=pinned)
        self.bytes_moved += host.numel()
        return host


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage under `tensor`, as bytes and without a copy."""
    storage = tensor.untyped_storage()
    count, rest = divmod(storage.nbytes(), tensor.element_size())
    if rest:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    # Not by `set_` where it can be helped: under fake tensors that keeps the storage for ever.
    return tensor.as_strided((count,), (1,), 0).view(torch.uint8)


def _is_movable(tensor: torch.Tensor) -> bool:
    """Plain strided tensors that are worth a copy; subclasses (quantized ones) stay where they are."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter, FakeTensor) and tensor.layout is torch.strided
    return plain and not tensor.is_conj() and not tensor.is_neg() and tensor.nbytes >= MIN_BYTES


def _is_parameter_of(block: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a gathered weight of `block` or a view of one (``weight.t()``).

    FSDP frees its bytes after the forward and fills the same storage again before the backward, so the saved tensor
    must go on pointing there. Asked anew each time: gathering and freeing swap the parameters of a module.
    """
    address = storage_address(tensor)
    return any(address == held for held in _parameter_addresses(block))


def _parameter_addresses(block: nn.Module) -> Iterator[int]:
    for module in block.modules():
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(parameter, DTensor):
                yield storage_address(parameter)
