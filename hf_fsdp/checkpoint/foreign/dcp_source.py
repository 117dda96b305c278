"""Tensors of a torch DCP folder, of which a rank reads only the bytes that its own shard needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_fsdp.checkpoint.foreign.dcp_metadata import DcpFolder, StoredPart
from hf_fsdp.checkpoint.foreign.torch_file import find_tensor_bytes, load_torch_range
from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.files import DAMAGED_FIX
from hf_fsdp.storage.safetensors_file import OpenFiles, TensorEntry, read_box
from hf_fsdp.storage.tensor_source import TensorInfo


class DcpSource:
    """The tensors of a `DcpFolder` by the names that they have in a model or an optimizer.

    Args:
        folder: what `read_dcp_folder` returned, which has checked that every tensor is whole.
        keys: name -> key in the folder; other tensors of the folder are left out.
    """

    def __init__(self, folder: DcpFolder, keys: Mapping[str, str]):
        self.tensors: dict[str, TensorInfo] = {name: folder.tensors[key] for name, key in keys.items()}
        self._folder = folder
        self._keys = dict(keys)
        self._files = OpenFiles()
        self._entries: dict[StoredPart, TensorEntry | None] = {}
        # The last part that had to be read whole: an export asks for some rows at a time.
        self._held: tuple[StoredPart, torch.Tensor] | None = None

    def read(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill `out` with the box of tensor `name` that begins at `offsets`; only parts that overlap it are opened."""
        if not out.numel():
            return
        info, copied = self.tensors[name], 0
        for part in self._folder.parts[self._keys[name]]:
            if not _overlaps(part, offsets, out):
                continue
            if part not in self._entries:
                self._entries[part] = _locate(name, info, part)
            entry = self._entries[part]
            if entry is not None:
                copied += read_box(self._files.descriptor(part.stored.path), entry, offsets, out)
            else:
                if self._held is None or self._held[0] != part:
                    self._held = None  # its memory is free before the next is read
                    stored = part.stored
                    self._held = (part, load_torch_range(stored.path, stored.begin, stored.end))
                copied += _copy_overlap(part, self._held[1], offsets, out)
        if copied != out.numel():
            raise CheckpointError(
                f"{name}: {copied} of {out.numel()} values at {list(offsets)} are in {self._folder.path}",
                fix="give the model the shapes that were saved",
            )

    def close(self) -> None:
        """Close the files."""
        self._held = None
        self._files.close()


def read_value(folder: DcpFolder, key: str) -> Any:
    """Return a value of the folder that is no tensor.

    Raises:
        CheckpointError: it is more than numbers, text and containers of them.
    """
    stored = folder.values[key]
    return load_torch_range(stored.path, stored.begin, stored.end)


def _locate(name: str, info: TensorInfo, part: StoredPart) -> TensorEntry | None:
    """Return where the values of `part` lie in its file, or None when they do not lie there in order.

    Raises:
        CheckpointError: what is stored there is not the part that the metadata describes.
    """
    stored = part.stored
    tensor = load_torch_range(stored.path, stored.begin, stored.end, map_location="meta")
    if type(tensor) is not torch.Tensor or tensor.dtype != info.dtype or tuple(tensor.shape) != part.shape:
        found = f"{list(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise CheckpointError(
            f"{stored.path} holds {found} where {list(part.shape)} {info.dtype} of {name} should be", fix=DAMAGED_FIX
        )
    num_bytes = math.prod(part.shape) * info.dtype.itemsize
    place = find_tensor_bytes(stored.path, stored.begin, stored.end)
    if place is None or not tensor.is_contiguous() or tensor.storage_offset() or place[1] - place[0] != num_bytes:
        return None
    return TensorEntry(name, info.dtype, part.shape, part.offsets, *place)


def _copy_overlap(part: StoredPart, source: torch.Tensor, offsets: Sequence[int], out: torch.Tensor) -> int:
    """Copy what `out` has of a part whose values are transposed or sparse in its storage."""
    target = out
    for dim, (begin, size, base) in enumerate(zip(part.offsets, part.shape, offsets, strict=True)):
        low, high = max(begin, base), min(begin + size, base + out.shape[dim])
        source = source.narrow(dim, low - begin, high - low)
        target = target.narrow(dim, low - base, high - low)
    target.copy_(source)
    return target.numel()


def _overlaps(part: StoredPart, offsets: Sequence[int], out: torch.Tensor) -> bool:
    return all(
        max(begin, base) < min(begin + size, base + wanted)
        for begin, size, base, wanted in zip(part.offsets, part.shape, offsets, out.shape, strict=True)
    )
