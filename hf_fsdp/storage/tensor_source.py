"""Whole tensors by name, wherever their parts lie: what resuming, loading and exporting read from.

Every source checks when it is opened that the parts of each tensor cover it, each element once: torch DCP's own
Hugging Face reader loads without an error, and with wrong weights, when a rank's file is missing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from hf_fsdp.errors import CheckpointError, Problem
from hf_fsdp.storage.files import DAMAGED_FIX, read_json, safe_join
from hf_fsdp.storage.safetensors_file import OpenFiles, TensorEntry, read_box, read_header

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """A whole tensor's dtype in the file and its shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """Whole tensors by name, of which any box can be read."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor that can be read."""

    def read(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill `out` with the box of tensor `name` that begins at `offsets`; values are cast to `out`'s dtype."""

    def close(self) -> None:
        """Close the files."""


@dataclass(frozen=True)
class Part:
    """A part of a tensor and the file that holds it."""

    path: Path
    entry: TensorEntry


class SafetensorsSource:
    """Tensors in one or many safetensors files, whole or in parts.

    Args:
        files: all of them are opened and their headers read.
        renames: file -> its keys -> names of the tensors, where they differ. Other keys keep their name.
        expected: the tensors that must be there, e.g. a manifest's; others are an error too.

    Raises:
        CheckpointError: a file is missing or damaged, or parts leave gaps or overlap.
    """

    def __init__(
        self,
        files: Iterable[Path],
        renames: Mapping[Path, Mapping[str, str]] | None = None,
        expected: Mapping[str, TensorInfo] | None = None,
    ):
        self.parts: dict[str, list[Part]] = {}
        for path in files:
            names = (renames or {}).get(path, {})
            for key, entry in read_header(path).entries.items():
                self.parts.setdefault(names.get(key, key), []).append(Part(path, entry))
        self.tensors: dict[str, TensorInfo] = {}
        problems = []
        for name, parts in self.parts.items():
            self.tensors[name] = info = _whole(name, parts, (expected or {}).get(name))
            if (problem := check_coverage(name, info, [part.entry for part in parts])) is not None:
                problems.append(problem)
        if expected is not None:
            problems += [
                Problem(message=f"{name} is in the manifest and in no file", fix=DAMAGED_FIX)
                for name in expected
                if name not in self.parts
            ]
            problems += [
                Problem(message=f"{name} is in a file and not in the manifest", fix=DAMAGED_FIX)
                for name in self.parts
                if name not in expected
            ]
        if problems:
            raise CheckpointError(problems[:5] if len(problems) > 5 else problems)
        self._files = OpenFiles()

    def read(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        if len(offsets) != len(self.tensors[name].shape) or len(offsets) != out.dim():
            raise CheckpointError(
                f"{name} {list(self.tensors[name].shape)} was asked for as {list(out.shape)} at {list(offsets)}",
                fix="give the model the shapes that were saved",
            )
        copied = 0
        for part in self.parts[name]:
            copied += read_box(self._files.descriptor(part.path), part.entry, offsets, out)
        if copied != out.numel():
            raise CheckpointError(
                f"{name}: {copied} of {out.numel()} values at {list(offsets)} are in the files",
                fix="give the model the shapes that were saved",
            )

    def close(self) -> None:
        self._files.close()


class EmptySource:
    """A source of nothing."""

    tensors: Mapping[str, TensorInfo] = {}

    def read(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        raise KeyError(name)

    def close(self) -> None:
        pass


class JoinedSource:
    """Several sources as one; a name belongs to the first that has it."""

    def __init__(self, sources: Sequence[TensorSource]):
        self._owner = {name: source for source in reversed(sources) for name in source.tensors}
        self._sources = tuple(sources)
        self.tensors = {name: source.tensors[name] for name, source in self._owner.items()}

    def read(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        self._owner[name].read(name, offsets, out)

    def close(self) -> None:
        for source in self._sources:
            source.close()


def read_whole(source: TensorSource, name: str) -> torch.Tensor:
    """Return tensor `name` whole, on the CPU, in the dtype of the file."""
    info = source.tensors[name]
    out = torch.empty(info.shape, dtype=info.dtype)
    source.read(name, (0,) * len(info.shape), out)
    return out


def hf_folder_source(folder: Path) -> SafetensorsSource:
    """Return the weights of a Hugging Face folder: one `model.safetensors`, or the files that its index names.

    Raises:
        CheckpointError: there are none, or a name in the index leads out of the folder.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / WEIGHTS_FILE).is_file():
            raise CheckpointError(
                f"{folder} holds no {WEIGHTS_FILE} and no {INDEX_FILE}",
                fix="convert older weights with: model.save_pretrained(FOLDER)",
            )
        return SafetensorsSource([folder / WEIGHTS_FILE])
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from names to files", fix=DAMAGED_FIX)
    files = [safe_join(folder, name, trusted=hub_blobs(folder)) for name in sorted(set(weight_map.values()))]
    source = SafetensorsSource(files)
    if missing := sorted(set(weight_map) - set(source.tensors)):
        raise CheckpointError(f"{index} names {missing[0]!r}, which is in none of its files", fix=DAMAGED_FIX)
    return source


def hub_blobs(folder: Path) -> Path | None:
    """Return where the files of a snapshot in the hub's cache really lie; None for any other folder.

    A snapshot is a folder of links: `models--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH`.
    """
    if folder.absolute().parent.name != "snapshots":
        return None
    blobs = folder.absolute().parent.parent / "blobs"
    return blobs if blobs.is_dir() else None


def check_coverage(name: str, info: TensorInfo, parts: Sequence[TensorEntry]) -> Problem | None:
    """Return what is wrong when `parts` do not make up the whole tensor, each element once; None when they do."""
    if any(part.dtype != info.dtype for part in parts):
        return Problem(message=f"the parts of {name} have different dtypes", fix=DAMAGED_FIX)
    num_wanted = math.prod(info.shape)
    num_held = sum(math.prod(part.shape) for part in parts)
    overlap = _overlaps(parts)
    outside = any(
        offset + size > whole
        for part in parts
        for offset, size, whole in zip(part.offsets, part.shape, info.shape, strict=True)
    )
    if num_held == num_wanted and not overlap and not outside:
        return None
    return Problem(
        message=f"{name} {list(info.shape)} is not whole: its {len(parts)} parts hold {num_held} of {num_wanted} "
        f"values{' and overlap' if overlap else ''}",
        fix=DAMAGED_FIX,
    )


def _overlaps(parts: Sequence[TensorEntry]) -> bool:
    """Return whether two parts hold the same element; of 1,024 row shards without half a million comparisons."""
    filled = sorted((part for part in parts if math.prod(part.shape)), key=lambda part: part.offsets)
    if len({(part.offsets[1:], part.shape[1:]) for part in filled}) == 1 and filled[0].shape:
        return any(a.offsets[0] + a.shape[0] > b.offsets[0] for a, b in itertools.pairwise(filled))
    return any(_overlap(a, b) for a, b in itertools.combinations(filled, 2))


def _overlap(a: TensorEntry, b: TensorEntry) -> bool:
    if not a.shape:
        return True
    return all(max(x, y) < min(x + s, y + t) for x, s, y, t in zip(a.offsets, a.shape, b.offsets, b.shape, strict=True))


def _whole(name: str, parts: Sequence[Part], expected: TensorInfo | None) -> TensorInfo:
    first = parts[0].entry
    shapes = {part.entry.whole_shape for part in parts if part.entry.whole_shape is not None}
    if len({len(part.entry.shape) for part in parts}) > 1 or len(shapes) > 1:
        raise CheckpointError(f"the parts of {name} do not belong to one tensor", fix=DAMAGED_FIX)
    shape = next(iter(shapes)) if shapes else None
    if shape is None:
        ends = zip(*([o + s for o, s in zip(p.entry.offsets, p.entry.shape, strict=True)] for p in parts), strict=True)
        shape = tuple(max(end) for end in ends)
    if expected is not None and (expected.shape != shape or expected.dtype != first.dtype):
        raise CheckpointError(
            f"{name} is {list(shape)} {first.dtype} in the files and {list(expected.shape)} {expected.dtype} "
            "in the manifest",
            fix=DAMAGED_FIX,
        )
    return TensorInfo(first.dtype, shape)
