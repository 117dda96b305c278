"""Which part of a tensor this rank holds, and whether this rank is the one that writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate

from hf_fsdp.sharding.mesh import rank
from hf_fsdp.sharding.shards import Box, local_box, local_tensor
from hf_fsdp.storage.safetensors_file import TensorEntry, TensorToWrite
from hf_fsdp.storage.tensor_source import TensorInfo


@dataclass(frozen=True)
class LocalPart:
    """This rank's part of the tensor `name`, ready to be written."""

    name: str
    box: Box
    tensor: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def to_write(self) -> TensorToWrite:
        return TensorToWrite(
            name=self.name,
            dtype=self.tensor.dtype,
            shape=self.box.shape,
            read=lambda: self.tensor,
            offsets=self.box.offsets,
            whole_shape=self.box.whole_shape,
        )


def is_writer(tensor: torch.Tensor, index: int) -> bool:
    """Return whether this rank writes its part of the `index`-th tensor: of equal copies one is written.

    Copies take turns by `index`, so that all of them write in parallel. Plain tensors are the same on every rank
    and small, and rank 0 writes them.
    """
    if not isinstance(tensor, DTensor):
        return rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    mine = math.prod(local_box(tensor).shape)
    if tensor.numel() == 0:  # nobody has values; one rank writes the name
        return rank() == 0
    return mine > 0 and all(
        coordinate[axis] == index % tensor.device_mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Replicate)
    )


def local_parts(tensors: Mapping[str, torch.Tensor]) -> list[LocalPart]:
    """Return the parts that this rank writes of `tensors`, which are the same on all ranks and in the same order."""
    return [
        LocalPart(name, local_box(tensor), local_tensor(tensor))
        for index, (name, tensor) in enumerate(tensors.items())
        if is_writer(tensor, index)
    ]


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """Return the whole tensors' dtypes and shapes."""
    return {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def to_entry(name: str, dtype: str, shape: tuple[int, ...], offsets: tuple[int, ...]) -> TensorEntry:
    """Return a part that another rank described; which bytes of its file hold it is of no interest."""
    return TensorEntry(name, getattr(torch, dtype), tuple(shape), tuple(offsets), 0, 0)
