"""Files that `torch.save` wrote, and parts of DCP's, read without running code and without more memory than needed.

`torch.load(weights_only=True)` calls nothing but torch's own functions that rebuild tensors. Around it: the archive is
looked at first (a compressed record of a few KiB can unfold to gigabytes), tensors are mapped from the file instead of
read into memory, and what is wrong is said in one sentence instead of torch's advice to load it unsafely.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hf_fsdp.checkpoint.foreign.storage_sizes import find_short_storage
from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.files import DAMAGED_FIX, open_to_read

# About 150 bytes a tensor.
MAX_PICKLE_BYTES = 32 * 1024**2
_LOCAL_HEADER = struct.Struct("<26xHH")


def load_torch_file(path: Path, *, allowed: Sequence[Any] = ()) -> Any:
    """Return the content of a file that `torch.save` wrote; its tensors stay in the file until they are used.

    Args:
        path: the file.
        allowed: types that are rebuilt besides tensors and plain values.

    Raises:
        CheckpointError: it asks for anything else (named, and not run), is damaged, or is older than torch 1.6.
    """
    try:
        with open_to_read(path) as stream:
            check_archive(stream, str(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", fix=DAMAGED_FIX) from error
    with torch.serialization.safe_globals(list(allowed)):
        return _load(path, str(path), map_location="cpu", mmap=True)


def load_torch_range(path: Path, begin: int, end: int, *, map_location: str = "cpu") -> Any:
    """Return the object that `torch.save` wrote to bytes ``begin:end`` of a file.

    With ``map_location="meta"`` no tensor is read: only dtypes, shapes and strides come back.

    Raises:
        CheckpointError: as `load_torch_file`.
    """
    what = f"the value at byte {begin} of {path}"
    with open_to_read(path) as stream, FileRange(stream, begin, end) as part:
        check_archive(part, what)
        return _load(part, what, map_location=map_location)


def find_tensor_bytes(path: Path, begin: int, end: int) -> tuple[int, int] | None:
    """Return where in a file the bytes of the only tensor lie that ``begin:end`` holds, or None when it has several."""
    with open_to_read(path) as stream, FileRange(stream, begin, end) as part:
        archive = check_archive(part, f"the value at byte {begin} of {path}")
        records = [item for item in archive if "/data/" in item.filename]
        if len(records) != 1:
            return None
        part.seek(records[0].header_offset)
        name_length, extra_length = _LOCAL_HEADER.unpack(part.read(_LOCAL_HEADER.size))
        start = begin + records[0].header_offset + _LOCAL_HEADER.size + name_length + extra_length
        return start, start + records[0].file_size


def check_archive(stream: BinaryIO | FileRange, what: str) -> list[zipfile.ZipInfo]:
    """Return the records of an archive of `torch.save` after a look at their sizes; nothing is unpacked.

    Raises:
        CheckpointError: it is no such archive, cut off, or holds records that torch does not write.
    """
    if stream.read(4) != b"PK\x03\x04":
        raise CheckpointError(
            f"{what} is not of the form that torch.save has written since torch 1.6",
            fix="take another checkpoint, or load it with the torch that wrote it and save it again",
        )
    try:
        with zipfile.ZipFile(stream) as archive:
            records = archive.infolist()
            size = stream.seek(0, io.SEEK_END)
            for item in records:
                if item.compress_type != zipfile.ZIP_STORED or item.file_size != item.compress_size:
                    raise _hostile(what, f"has the compressed record {item.filename!r}")
                if item.header_offset + item.file_size > size:
                    raise _damaged(what, f"{item.filename!r} lies behind its end")
            _check_order_of_bytes(archive, records, what)
            _check_pickle(archive, records, what)
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, struct.error, OSError) as error:
        raise _damaged(what, str(error)) from error
    stream.seek(0)
    return records


def _check_order_of_bytes(archive: zipfile.ZipFile, records: Sequence[zipfile.ZipInfo], what: str) -> None:
    for item in records:
        if item.filename.endswith("/byteorder") and archive.read(item).decode("ascii", "replace") != sys.byteorder:
            raise CheckpointError(
                f"{what} was written on a machine with another order of bytes",
                fix="load it on that machine and save it as safetensors",
            )


def _check_pickle(archive: zipfile.ZipFile, records: Sequence[zipfile.ZipInfo], what: str) -> None:
    """Refuse what `weights_only` lets through: `bytearray(n)`, which takes any amount of memory, and a storage that is
    said to be larger than its record."""
    for item in records:  # torch finds records whatever the case of their names
        if item.filename.lower().endswith("data.pkl"):
            if item.file_size > MAX_PICKLE_BYTES:
                raise _damaged(what, f"its list of tensors has {item.file_size} bytes")
            if b"\nbytearray\n" in (data := archive.read(item)):
                raise _hostile(what, "asks for builtins.bytearray")
            if problem := find_short_storage(data, {record.filename: record.file_size for record in records}):
                raise _damaged(what, problem)


def _load(file: Any, what: str, **options: Any) -> Any:
    try:
        return torch.load(file, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise _hostile(what, _asked_for(str(error))) from error
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError, AssertionError) as error:
        raise _damaged(
            what, f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
        ) from error


def _asked_for(message: str) -> str:
    """Torch's message names what was asked for in the middle of advice to load the file unsafely."""
    for line in message.splitlines():
        for mark in ("Unsupported global: GLOBAL ", "Trying to load unsupported GLOBAL ", "GLOBAL "):
            if mark in line:
                return f"asks for {line.partition(mark)[2].split()[0]}"
    return "asks for more than tensors and plain values"


def _hostile(what: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{what} {why}, which is no part of a checkpoint; nothing of it was run",
        fix="use a copy of the folder from a source that you trust",
    )


def _damaged(what: str, why: str) -> CheckpointError:
    return CheckpointError(f"{what} is cut off or damaged: {why}", fix=DAMAGED_FIX)


class FileRange(io.RawIOBase):
    """Bytes ``begin:end`` of an open file as a file of its own; the file stays open."""

    def __init__(self, stream: BinaryIO, begin: int, end: int):
        super().__init__()
        self._stream, self._begin, self._size = stream, begin, end - begin
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size - self._position))
        self._stream.seek(self._begin + self._position)
        done = self._stream.readinto(view[:count])  # type: ignore[attr-defined]
        self._position += done
        return int(done)
