"""Which tensors an export writes, under which names and in which dtype; nothing is read before its turn comes."""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hf_fsdp.checkpoint.export.base_weights import piece_offsets
from hf_fsdp.checkpoint.export.blueprint import Blueprint, NameGroup, name_groups, to_file_layout
from hf_fsdp.errors import CheckpointError, Problem, nearest_names
from hf_fsdp.storage.safetensors_file import TensorToWrite
from hf_fsdp.storage.tensor_source import TensorSource

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
AUTO, SAVED = "auto", "saved"
_MAX_PROBLEMS = 5
# Read, hashed and written while it is in the processor's cache: pieces of 16 MiB take twice the time to write.
PIECE_BYTES = 2 * 1024**2


@dataclass(frozen=True, kw_only=True)
class DtypeRule:
    """The dtype that each tensor is written in.

    Args:
        asked: ``auto``, ``saved`` or one of `DTYPES`.
        defaults: with ``auto``: name -> dtype.
        fallback: with ``auto``: for parameters that `defaults` does not name.
    """

    asked: str = AUTO
    defaults: Mapping[str, torch.dtype] = field(default_factory=dict)
    fallback: torch.dtype | None = None

    def choose(self, name: str, saved: torch.dtype, *, is_parameter: bool = True) -> torch.dtype:
        """Return the dtype of tensor `name`; integers stay what they are, and buffers too but for ``auto``."""
        if not saved.is_floating_point or self.asked == SAVED:
            return saved
        if self.asked != AUTO:
            return DTYPES[self.asked] if is_parameter else saved
        return self.defaults.get(name, self.fallback if self.fallback is not None and is_parameter else saved)


def plan_model(
    source: TensorSource,
    blueprint: Blueprint,
    ties: Mapping[str, Sequence[str]],
    rule: DtypeRule,
    *,
    spare: Iterable[str] = (),
) -> list[TensorToWrite]:
    """Return a model's tensors as files for `from_pretrained` hold them, in the model's order.

    Args:
        source: by live name, or where a group of tensors is converted, also by the names of files.
        blueprint: of the model; every one of its tensors must be in `source`, with its shape.
        ties: first name -> all names of the tensors that were shared when they were saved.
        rule: which dtype.
        spare: names in `source` that need not have a place in the model.

    Raises:
        CheckpointError: tensors are missing, have other shapes, or have no place in the model.
    """
    places = _Places(source, blueprint, ties)
    planned: list[TensorToWrite] = []
    problems: list[Problem] = []
    used: set[str] = set()
    for group in name_groups(blueprint):
        found = {name: places.find(name) for name in group.live}
        if all(place is not None for place in found.values()):
            names = {name: place for name, place in found.items() if place is not None}
            used.update(names.values())
            problems += _shape_problems(source, blueprint, names)
            planned += _from_live(source, blueprint, group, names, rule)
        elif all(name in source.tensors for name in group.outputs):
            used.update(group.outputs)
            planned += [_plain(source, name, name, rule) for name in group.outputs]
        else:
            problems += [_missing(name, source, blueprint) for name, place in found.items() if place is None]
    extra = set(source.tensors) - used - set(spare) - places.aliases
    if extra:
        what = type(blueprint.model).__name__
        problems.append(
            Problem(
                message=f"{len(extra)} tensors have no place in {what}, among them {min(extra)}",
                near=", ".join(nearest_names(min(extra), blueprint.shapes)) or None,
                fix=f"give config.json the sizes and the class of the model that was trained (here {what})",
            )
        )
    if problems:
        raise CheckpointError(problems[:_MAX_PROBLEMS])
    return planned


def plan_as_it_is(source: TensorSource, names: Mapping[str, str], rule: DtypeRule) -> list[TensorToWrite]:
    """Return tensors for key -> name in `source`, each under its key."""
    return [_plain(source, key, name, rule) for key, name in names.items()]


def main_dtype(planned: Iterable[TensorToWrite]) -> torch.dtype:
    """Return the dtype of most tensors with a fraction: the one that `config.json` should name."""
    counts = Counter(item.dtype for item in planned if item.dtype.is_floating_point)
    return counts.most_common(1)[0][0] if counts else torch.float32


class _Places:
    """Where a tensor of the model lies in the source, which may know it by another of its names."""

    def __init__(self, source: TensorSource, blueprint: Blueprint, ties: Mapping[str, Sequence[str]]):
        self._source = source
        self._others: dict[str, list[str]] = {}
        self.aliases: set[str] = set()
        for names in [*ties.values(), *blueprint.ties.values()]:
            for name in names:
                self._others.setdefault(name, []).extend(names)
        for names in blueprint.ties.values():
            self.aliases.update(names)

    def find(self, name: str) -> str | None:
        return next((other for other in (name, *self._others.get(name, ())) if other in self._source.tensors), None)


def _shape_problems(source: TensorSource, blueprint: Blueprint, names: Mapping[str, str]) -> list[Problem]:
    return [
        Problem(
            message=f"{place} is {list(source.tensors[place].shape)} in the checkpoint and "
            f"{list(blueprint.shapes[name])} in the model that config.json describes",
            fix="give config.json the sizes of the model that was trained, such as vocab_size",
        )
        for name, place in names.items()
        if source.tensors[place].shape != blueprint.shapes[name]
    ]


def _missing(name: str, source: TensorSource, blueprint: Blueprint) -> Problem:
    return Problem(
        message=f"{name} of {type(blueprint.model).__name__} is not in the checkpoint",
        near=", ".join(nearest_names(name, source.tensors)) or None,
        fix="give config.json the class and the sizes of the model that was trained",
    )


def _from_live(
    source: TensorSource, blueprint: Blueprint, group: NameGroup, names: Mapping[str, str], rule: DtypeRule
) -> list[TensorToWrite]:
    dtypes = {
        name: rule.choose(place, source.tensors[place].dtype, is_parameter=name in blueprint.parameters)
        for name, place in names.items()
    }
    if not group.is_converted:
        name, output = group.live[0], next(iter(group.outputs))
        return [_to_write(source, output, names[name], dtypes[name])]

    @functools.lru_cache(maxsize=1)
    def read_group() -> dict[str, torch.Tensor]:
        return to_file_layout(blueprint, {name: _read(source, names[name], dtypes[name]) for name in names})

    left = set(group.outputs)

    def read(output: str) -> torch.Tensor:
        tensor = read_group()[output]
        left.discard(output)
        if not left:  # all were written: the next group needs the memory
            read_group.cache_clear()
            left.update(group.outputs)
        return tensor

    dtype = dtypes[group.live[0]]
    return [
        TensorToWrite(output, dtype, shape, functools.partial(read, output)) for output, shape in group.outputs.items()
    ]


def _plain(source: TensorSource, key: str, name: str, rule: DtypeRule) -> TensorToWrite:
    return _to_write(source, key, name, rule.choose(name, source.tensors[name].dtype))


def _to_write(source: TensorSource, key: str, name: str, dtype: torch.dtype) -> TensorToWrite:
    shape = source.tensors[name].shape
    if name in getattr(source, "whole_only", ()) or not shape:
        return TensorToWrite(key, dtype, shape, lambda: _read(source, name, dtype))

    def read_pieces() -> Iterator[torch.Tensor]:
        row = math.prod(shape[1:])
        buffer = _piece_buffer(max(PIECE_BYTES, row * dtype.itemsize)).view(dtype)
        for start, count in piece_offsets(shape, PIECE_BYTES, dtype.itemsize):
            piece = buffer[: count * row].view(count, *shape[1:])
            if piece.numel():
                source.read(name, (start, *(0 for _ in shape[1:])), piece)
            _refuse_overflow(source, name, piece)
            yield piece

    return TensorToWrite(key, dtype, shape, lambda: _read(source, name, dtype), read_pieces=read_pieces)


_buffers = threading.local()


def _piece_buffer(num_bytes: int) -> torch.Tensor:
    """Return this thread's buffer: memory that was touched before costs no page faults, and stays in the cache."""
    num_bytes += -num_bytes % 16  # so that it can be seen in any dtype
    buffer: torch.Tensor | None = getattr(_buffers, "buffer", None)
    if buffer is None or buffer.numel() < num_bytes:
        _buffers.buffer = buffer = torch.empty(num_bytes, dtype=torch.uint8)
    return buffer[:num_bytes]


def _read(source: TensorSource, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a whole tensor in `dtype`; values are cast piece by piece, so that no second copy of it is in memory."""
    info = source.tensors[name]
    out = torch.empty(info.shape, dtype=dtype)
    if out.numel():
        source.read(name, (0,) * len(info.shape), out)
    _refuse_overflow(source, name, out)
    return out


def _refuse_overflow(source: TensorSource, name: str, values: torch.Tensor) -> None:
    is_cast = values.dtype == torch.float16 and source.tensors[name].dtype != torch.float16
    if is_cast and not torch.isfinite(values).all():
        raise CheckpointError(
            f"{name} holds values that float16 cannot: they are over 65504, or not finite",
            fix="--dtype bf16",
        )


def same_values(source: TensorSource, first: str, second: str) -> bool:
    """Return whether two tensors are equal, compared some rows at a time."""
    info = source.tensors[first]
    if info != source.tensors[second]:
        return False
    for start, count in piece_offsets(info.shape, PIECE_BYTES, info.dtype.itemsize):
        shape = (count, *info.shape[1:]) if info.shape else ()
        offsets = (start, *(0 for _ in info.shape[1:])) if info.shape else ()
        pieces = [torch.empty(shape, dtype=info.dtype), torch.empty(shape, dtype=info.dtype)]
        for piece, name in zip(pieces, (first, second), strict=True):
            source.read(name, offsets, piece)
        if not torch.equal(*pieces):
            return False
    return True
