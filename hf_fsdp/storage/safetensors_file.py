"""Safetensors files, written tensor by tensor and read box by box.

The `safetensors` package writes a file from tensors that are all in memory and reads whole tensors or slices along
mapped pages. Here a tensor is written as soon as it exists and forgotten, the hash is taken on the way, and a rank
reads the rows that it needs straight into its shard. Parts of a larger tensor carry their offsets the way torch DCP's
Hugging Face storage writes them, so that its reader understands our files (`tests/unit/test_safetensors_file.py`).

A header is checked before any of it is believed: a wrong length, overlapping or missing bytes, unknown dtypes and
sizes that do not multiply are errors, not crashes.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.direct_file import DirectWriter
from hf_fsdp.storage.files import DAMAGED_FIX, PIECE_BYTES, FileRecord, open_to_read

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# torch.distributed.checkpoint._hf_utils: CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY.
SHARDING_INFO = "DCP_SHARDING_INFO"
SAVED_OFFSETS = "saved_offsets"
WHOLE_SHAPE = "whole_shape"  # ours: without it a missing last part would only make the tensor look smaller
# A quarter of the safetensors package's limit, and room for 100,000 parts: a header is parsed whole, and becomes 30
# times as large in memory.
MAX_HEADER_BYTES = 25_000_000
# A tensor's entry has three brackets in 45 bytes or more. Nested empty lists would need 30 times their text in memory.
MIN_BYTES_A_BRACKET = 8
MAX_DIMS = 16
MAX_OPEN_FILES = 64


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file, or one part of a larger tensor.

    `offsets` says where it begins in the whole tensor, `whole_shape` what the whole one is (None when the file does
    not say); bytes ``begin:end`` of the file hold it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    begin: int
    end: int
    whole_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SafetensorsHeader:
    """What a file holds."""

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor, or a part of one, that `write_safetensors` asks for when its turn comes.

    Args:
        name: its key in the file.
        dtype: of the bytes in the file; what `read` returns is cast to it.
        shape: of this part.
        read: returns it, on any device.
        offsets: where the part begins in the whole tensor; None writes a plain tensor.
        whole_shape: of the whole tensor.
        read_pieces: yields it some rows at a time, in order and in `dtype`, on the CPU; the next piece may lie where
            the last one did. It is asked instead of `read`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    offsets: tuple[int, ...] | None = None
    whole_shape: tuple[int, ...] | None = None
    read_pieces: Callable[[], Iterator[torch.Tensor]] | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path,
    tensors: Sequence[TensorToWrite],
    metadata: Mapping[str, str] | None = None,
    on_bytes: Callable[[int], None] | None = None,
    *,
    direct: bool = False,
) -> FileRecord:
    """Write a new file durably, one tensor in memory at a time.

    Args:
        path: the file; its folder exists.
        tensors: what to write. Larger dtypes come first, so that every tensor is aligned.
        metadata: added to the header.
        on_bytes: called with the number of bytes of every piece.
        direct: past the page cache, for a file that nobody reads again soon.

    Returns:
        The file's size and hash.

    Raises:
        OSError: the disk is full or does not let us write.
    """
    ordered = sorted(tensors, key=lambda item: -item.dtype.itemsize)
    digest, size = xxhash.xxh3_128(), 0
    with DirectWriter(path) if direct else open(path, "wb", buffering=0) as stream:

        def write(data: Any) -> None:
            nonlocal size
            view = memoryview(data)
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                done = 0
                while done < len(piece):  # a raw stream may write less than it was given
                    done += stream.write(piece[done:])
                digest.update(piece)
                size += len(piece)
                if on_bytes is not None:
                    on_bytes(len(piece))

        write(_header_bytes(ordered, metadata or {}))
        for item in ordered:
            if item.read_pieces is not None:
                before = size
                for piece in item.read_pieces():
                    write(tensor_bytes(piece))
                if size - before != item.num_bytes:
                    raise ValueError(f"{item.name} came in {size - before} bytes and not in {item.num_bytes}")
                continue
            tensor = item.read()
            if tuple(tensor.shape) != item.shape:
                raise ValueError(f"{item.name} changed its shape from {item.shape} to {tuple(tensor.shape)}")
            write(tensor_bytes(tensor.detach().to(device="cpu", dtype=item.dtype)))
            del tensor
        if not isinstance(stream, DirectWriter):  # which does it itself
            os.fsync(stream.fileno())
    return FileRecord(size, digest.hexdigest())


def tensor_bytes(tensor: torch.Tensor) -> Any:
    """Return the bytes of a CPU tensor as a buffer, without a copy when it is contiguous."""
    return _as_bytes(tensor.contiguous()) if tensor.numel() else b""


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    # Not `.view(-1)`: a tensor of one element is contiguous with any stride, and its view keeps that stride.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _header_bytes(tensors: Sequence[TensorToWrite], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {}
    sharding: dict[str, Any] = {}
    position = 0
    has_parts = any(item.offsets is not None for item in tensors)
    for item in tensors:
        if item.name in header:
            raise ValueError(f"{item.name} is in one file twice")
        header[item.name] = {
            "dtype": _NAMES[item.dtype],
            "shape": list(item.shape),
            "data_offsets": [position, position + item.num_bytes],
        }
        position += item.num_bytes
        if has_parts:  # torch's reader wants the offsets of all tensors of a file, or of none
            offsets = (0,) * len(item.shape) if item.offsets is None else item.offsets
            whole = item.shape if item.whole_shape is None else item.whole_shape
            sharding[item.name] = {SAVED_OFFSETS: list(offsets), WHOLE_SHAPE: list(whole)}
    extra = {"format": "pt", **metadata, **({SHARDING_INFO: json.dumps(sharding)} if sharding else {})}
    text = json.dumps({"__metadata__": extra, **header}, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes is more than safetensors files can have")
    return struct.pack("<Q", len(text)) + text


# -- reading ----------------------------------------------------------------------------------------------------------


def read_header(path: Path) -> SafetensorsHeader:
    """Return what a file holds, without reading tensors.

    Raises:
        CheckpointError: the file is missing, cut off, or its header does not describe its bytes.
    """
    try:
        with open_to_read(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise _damaged(path, f"it has {size} bytes and says that its header alone has {length}")
            text = stream.read(length)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", fix=DAMAGED_FIX) from error
    try:
        if (text.count(b"[") + text.count(b"{")) * MIN_BYTES_A_BRACKET > len(text) + 100:
            raise ValueError("it has more lists than tensors could have")
        content = json.loads(text, object_pairs_hook=_without_duplicates)
        if not isinstance(content, dict):
            raise ValueError("the header is not a mapping")
        metadata = content.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ is not a mapping to text")
        sharding = json.loads(metadata[SHARDING_INFO]) if SHARDING_INFO in metadata else {}
        entries = {name: _read_entry(name, item, sharding, 8 + length) for name, item in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header cannot be read ({type(error).__name__}: {error})") from error
    position = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            raise _damaged(path, f"the bytes of {entry.name!r} do not follow those before them")
        position = entry.end
    if position != size:
        raise _damaged(path, f"it has {size} bytes and its header describes {position}")
    return SafetensorsHeader(path, entries, metadata)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _read_entry(name: str, item: Mapping[str, Any], sharding: Mapping[str, Any], data: int) -> TensorEntry:
    dtype = DTYPES.get(item["dtype"])
    if dtype is None:
        raise ValueError(f"{name!r} has the unknown dtype {item['dtype']!r}")
    shape = _sizes(item["shape"])
    begin, end = _sizes(item["data_offsets"])
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} has {end - begin} bytes, which is not {list(shape)} {dtype}")
    part = sharding.get(name)
    if part is None:
        return TensorEntry(name, dtype, shape, (0,) * len(shape), data + begin, data + end)
    offsets = _sizes(part[SAVED_OFFSETS])
    whole = _sizes(part[WHOLE_SHAPE]) if WHOLE_SHAPE in part else None
    if len(offsets) != len(shape) or (whole is not None and len(whole) != len(shape)):
        raise ValueError(f"{name!r} has {len(shape)} dimensions and {len(offsets)} offsets")
    if whole is not None and any(o + s > w for o, s, w in zip(offsets, shape, whole, strict=True)):
        raise ValueError(f"{name!r} lies outside of its whole tensor {list(whole)}")
    return TensorEntry(name, dtype, shape, offsets, data + begin, data + end, whole)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        raise ValueError(f"{str(value)[:80]} is not a list of sizes")
    for size in value:
        if type(size) is not int or not 0 <= size < 2**62:
            raise ValueError(f"{str(size)[:80]} is not a size")
    return tuple(value)


@dataclass
class OpenFiles:
    """Descriptors of files that are read often; closed together. A checkpoint of 1,024 ranks has more files than a
    process may have open, so the one that was opened first makes room."""

    descriptors: dict[Path, int] = field(default_factory=dict)

    def descriptor(self, path: Path) -> int:
        if path not in self.descriptors:
            if len(self.descriptors) >= MAX_OPEN_FILES:
                os.close(self.descriptors.pop(next(iter(self.descriptors))))
            with open_to_read(path, buffering=0) as stream:
                self.descriptors[path] = os.dup(stream.fileno())
        return self.descriptors[path]

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])


def read_box(descriptor: int, entry: TensorEntry, offsets: Sequence[int], out: torch.Tensor) -> int:
    """Copy into `out`, which begins at `offsets` of the whole tensor, what this part has of it.

    Rows that lie together in the file and in `out` are read into place; anything else goes through a buffer of a few
    MiB. Values are cast when `out` has another dtype.

    Returns:
        How many elements were copied.
    """
    if not entry.shape:
        _read_flat(descriptor, entry.begin, entry.dtype, out.view(1))
        return 1
    starts = [max(a, b) for a, b in zip(entry.offsets, offsets, strict=True)]
    ends = [min(a + s, b + o) for a, s, b, o in zip(entry.offsets, entry.shape, offsets, out.shape, strict=True)]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return 0
    target = out
    for dim, (start, end, base) in enumerate(zip(starts, ends, offsets, strict=True)):
        target = target.narrow(dim, start - base, end - start)
    row_elements = math.prod(entry.shape[1:])
    first = starts[0] - entry.offsets[0]
    has_whole_rows = all(
        end - start == size for start, end, size in zip(starts[1:], ends[1:], entry.shape[1:], strict=True)
    )
    is_one_piece = has_whole_rows and target.is_contiguous()
    if not is_one_piece and len(entry.shape) > 1 and row_elements * entry.dtype.itemsize > PIECE_BYTES:
        # One row would be too much memory.
        for index in range(target.shape[0]):
            begin = entry.begin + (first + index) * row_elements * entry.dtype.itemsize
            row = replace(entry, shape=entry.shape[1:], offsets=entry.offsets[1:], begin=begin)
            read_box(descriptor, row, starts[1:], target[index])
        return target.numel()
    if has_whole_rows:
        begin = entry.begin + first * row_elements * entry.dtype.itemsize
        _read_flat(descriptor, begin, entry.dtype, target)
        return target.numel()
    rows = max(1, PIECE_BYTES // max(1, row_elements * entry.dtype.itemsize))
    for start in range(0, target.shape[0], rows):
        count = min(rows, target.shape[0] - start)
        piece = _scratch((count, *entry.shape[1:]), entry.dtype)
        begin = entry.begin + (first + start) * row_elements * entry.dtype.itemsize
        _read_flat(descriptor, begin, entry.dtype, piece)
        for dim, (low, high, base) in enumerate(zip(starts[1:], ends[1:], entry.offsets[1:], strict=True), start=1):
            piece = piece.narrow(dim, low - base, high - low)
        target.narrow(0, start, count).copy_(piece)
    return target.numel()


def _read_flat(descriptor: int, begin: int, dtype: torch.dtype, target: torch.Tensor) -> None:
    """Fill `target` with the elements of `dtype` that lie together from byte `begin` on."""
    if target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
        _read_into(descriptor, begin, target)
        return
    count = max(1, PIECE_BYTES // dtype.itemsize)
    if target.is_contiguous():
        flat = target.reshape(-1)
        for start in range(0, flat.numel(), count):
            piece = _scratch((min(count, flat.numel() - start),), dtype)
            _read_into(descriptor, begin + start * dtype.itemsize, piece)
            flat[start : start + piece.numel()].copy_(piece)
        return
    row = math.prod(target.shape[1:])
    rows = max(1, count // max(1, row))
    for start in range(0, target.shape[0], rows):
        part = target.narrow(0, start, min(rows, target.shape[0] - start))
        piece = _scratch(part.shape, dtype)
        _read_into(descriptor, begin + start * row * dtype.itemsize, piece)
        part.copy_(piece)


_thread = threading.local()


def _scratch(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return this thread's buffer in a shape, until the next call.

    One buffer for all: allocated anew for every piece, it would lie between the tensors that stay and leave holes.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    held: torch.Tensor | None = getattr(_thread, "buffer", None)
    if held is None or held.numel() < num_bytes:
        held = _thread.buffer = torch.empty(max(num_bytes, PIECE_BYTES), dtype=torch.uint8)
    return held[:num_bytes].view(dtype).view(shape)


def _read_into(descriptor: int, begin: int, tensor: torch.Tensor) -> None:
    if not tensor.numel():
        return
    view = _as_bytes(tensor)
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done : done + 2**30]], begin + done)
        if count == 0:
            raise CheckpointError("a file ended while it was read", fix=DAMAGED_FIX)
        done += count


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is cut off or damaged: {why}", fix=DAMAGED_FIX)
