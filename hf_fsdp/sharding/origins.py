"""Where a weight's values are before they are read: in a file, or made of weights in files by joining and cutting.

transformers joins and cuts some weights when it loads them (the experts of a layer become one tensor, a fused
projection becomes three). An origin does the same to boxes, so that a rank reads only what it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from hf_fsdp.storage.tensor_source import TensorSource


class Origin(Protocol):
    """A tensor whose boxes can be read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the values; `out` may have another."""

    @property
    def name(self) -> str:
        """What a person can find it by."""

    def read(self, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill `out` with the box that begins at `offsets`."""

    def sources(self) -> Iterator[TensorSource]:
        """Yield what is read from."""


@dataclass(frozen=True)
class InFile:
    """Tensor `name` of `source`."""

    source: TensorSource
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.tensors[self.name].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.tensors[self.name].dtype

    def read(self, offsets: Sequence[int], out: torch.Tensor) -> None:
        self.source.read(self.name, offsets, out)

    def sources(self) -> Iterator[TensorSource]:
        yield self.source


@dataclass(frozen=True)
class Cast:
    """A tensor in another dtype. Values are rounded to it even when `out` could hold more, as a whole copy would be."""

    part: Origin
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape

    @property
    def name(self) -> str:
        return self.part.name

    def read(self, offsets: Sequence[int], out: torch.Tensor) -> None:
        if self.dtype in (self.part.dtype, out.dtype):
            self.part.read(offsets, out)
            return
        rounded = torch.empty(out.shape, dtype=self.dtype, device=out.device)
        self.part.read(offsets, rounded)
        out.copy_(rounded)

    def sources(self) -> Iterator[TensorSource]:
        return self.part.sources()


@dataclass(frozen=True)
class Joined:
    """Tensors one after the other along `dim`, as `torch.cat` joins them."""

    parts: tuple[Origin, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return *first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def name(self) -> str:
        return f"{self.parts[0].name} and {len(self.parts) - 1} more"

    def read(self, offsets: Sequence[int], out: torch.Tensor) -> None:
        begin, end = offsets[self.dim], offsets[self.dim] + out.shape[self.dim]
        starts = accumulate((part.shape[self.dim] for part in self.parts), initial=0)
        for part, start in zip(self.parts, starts, strict=False):
            low, high = max(begin, start), min(end, start + part.shape[self.dim])
            if low < high:
                inside = [*offsets[: self.dim], low - start, *offsets[self.dim + 1 :]]
                part.read(inside, out.narrow(self.dim, low - begin, high - low))

    def sources(self) -> Iterator[TensorSource]:
        return (source for part in self.parts for source in part.sources())


@dataclass(frozen=True)
class Stacked:
    """Tensors of one shape along a new dimension `dim`, as `torch.stack` joins them."""

    parts: tuple[Origin, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return *first[: self.dim], len(self.parts), *first[self.dim :]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def name(self) -> str:
        return f"{self.parts[0].name} and {len(self.parts) - 1} more"

    def read(self, offsets: Sequence[int], out: torch.Tensor) -> None:
        inside = [*offsets[: self.dim], *offsets[self.dim + 1 :]]
        for index in range(out.shape[self.dim]):
            self.parts[offsets[self.dim] + index].read(inside, out.select(self.dim, index))

    def sources(self) -> Iterator[TensorSource]:
        return (source for part in self.parts for source in part.sources())


@dataclass(frozen=True)
class Cut:
    """`length` rows from `start` on along `dim`, as `torch.narrow` cuts them."""

    part: Origin
    dim: int
    start: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.part.shape[: self.dim], self.length, *self.part.shape[self.dim + 1 :]

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype

    @property
    def name(self) -> str:
        return f"a part of {self.part.name}"

    def read(self, offsets: Sequence[int], out: torch.Tensor) -> None:
        inside = [*offsets[: self.dim], offsets[self.dim] + self.start, *offsets[self.dim + 1 :]]
        self.part.read(inside, out)

    def sources(self) -> Iterator[TensorSource]:
        return self.part.sources()


def join(parts: Sequence[Origin], dim: int) -> Origin | None:
    """Return `parts` as `torch.cat` would join them; None where it would promote dtypes, broadcast or fail."""
    first = parts[0]
    dim %= len(first.shape)
    fits = all(
        part.dtype == first.dtype
        and len(part.shape) == len(first.shape)
        and all(a == b for axis, (a, b) in enumerate(zip(part.shape, first.shape, strict=True)) if axis != dim)
        for part in parts
    )
    return Joined(tuple(parts), dim) if fits else None


def stack(parts: Sequence[Origin], dim: int) -> Origin | None:
    """Return `parts` as `torch.stack` would join them; None where it would promote dtypes or fail."""
    first = parts[0]
    if any((part.dtype, part.shape) != (first.dtype, first.shape) for part in parts):
        return None
    return Stacked(tuple(parts), dim % (len(first.shape) + 1))


def cut(part: Origin, sizes: Sequence[int], dim: int) -> list[Origin] | None:
    """Return the pieces of `sizes` rows along `dim`; None where they are not all of it."""
    dim %= len(part.shape)
    if sum(sizes) != part.shape[dim]:
        return None
    starts = accumulate(sizes, initial=0)
    return [Cut(part, dim, start, size) for start, size in zip(starts, sizes, strict=False)]


def are_equal(one: Origin, other: Origin, piece_elements: int = 2**22) -> bool:
    """Return whether two tensors hold the same values, a few rows in memory at a time."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    rows = max(1, piece_elements // max(1, torch.Size(one.shape[1:]).numel()))
    boxes = [(start, min(rows, one.shape[0] - start)) for start in range(0, one.shape[0], rows)] if one.shape else [()]
    for box in boxes:
        offsets = (box[0], *[0] * (len(one.shape) - 1)) if box else ()
        shape = (box[1], *one.shape[1:]) if box else ()
        first, second = torch.empty(shape, dtype=one.dtype), torch.empty(shape, dtype=one.dtype)
        one.read(offsets, first)
        other.read(offsets, second)
        if not torch.equal(first, second):
            return False
    return True
