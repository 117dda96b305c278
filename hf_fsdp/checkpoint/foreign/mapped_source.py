"""Tensors of a `.bin` file that `torch.save` wrote, read from the mapped file box by box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.tensor_source import TensorInfo


class MappedSource:
    """Tensors that are mapped from a file by name; a page is read when a box of it is.

    Args:
        tensors: name -> tensor, as `load_torch_file` returns them.
        where: the file, for messages.

    Raises:
        CheckpointError: one of them is no plain tensor (a shard of another program, a quantized or sparse one).
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], where: str):
        for name, tensor in tensors.items():
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not is_plain(tensor):
                raise CheckpointError(
                    f"{name} of {where} is a {type(tensor).__name__} on {tensor.device} with layout {tensor.layout}, "
                    "not the values of a tensor",
                    fix="save it again under SHARDED_STATE_DICT with the program that wrote it",
                )
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.tensors: dict[str, TensorInfo] = {
            name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
        }

    def read(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill `out` with the box of tensor `name` that begins at `offsets`."""
        if not out.numel():
            return
        source = self._tensors[name]
        if any(base + size > whole for base, size, whole in zip(offsets, out.shape, source.shape, strict=True)):
            raise CheckpointError(
                f"{name} is {list(source.shape)} in the file and {list(out.shape)} at {list(offsets)} is asked for",
                fix="give the model the shapes that were saved",
            )
        for dim, (base, size) in enumerate(zip(offsets, out.shape, strict=True)):
            source = source.narrow(dim, base, size)
        out.copy_(source)

    def close(self) -> None:
        """Let go of the mapped file."""
        self._tensors.clear()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has values of its own on the CPU."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
