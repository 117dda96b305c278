"""Files that are on the disk when we say so, names that stay inside their folder, and hashes.

`os.fsync` of a file makes its bytes durable, of a folder the names in it; a rename is durable only when both folders
are synced. All of it goes through here, so that a test can record the order.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from hf_fsdp.errors import CheckpointError

DAMAGED_FIX = "take another checkpoint, or a copy of this one from before it was damaged"
PIECE_BYTES = 16 * 1024**2
# A JSON file of a checkpoint is read whole; the largest, a manifest of a model with 100,000 tensors, has 30 MiB.
MAX_JSON_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes and the XXH3-128 of its bytes, in hex."""

    size: int
    xxh3_128: str


def hash_file(path: Path, on_bytes: Any = None) -> FileRecord:
    """Return the size and hash of a file, read a piece at a time.

    Args:
        path: the file.
        on_bytes: called with the number of bytes of every piece, for a progress bar.
    """
    digest, size = xxhash.xxh3_128(), 0
    with open_to_read(path, buffering=0) as stream:
        buffer = bytearray(PIECE_BYTES)
        view = memoryview(buffer)
        while count := stream.readinto(buffer):
            digest.update(view[:count])
            size += count
            if on_bytes is not None:
                on_bytes(count)
    return FileRecord(size, digest.hexdigest())


def open_to_read(path: Path, buffering: int = -1) -> Any:
    """Open a file of a checkpoint, binary.

    A pipe would be waited for and a device may have no end, so only regular files are opened.

    Raises:
        FileNotFoundError: it is not there.
        CheckpointError: it is no regular file, or may not be read.
    """

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(f"{path} is no regular file", fix=DAMAGED_FIX)
        return descriptor

    try:
        return open(path, "rb", buffering=buffering, opener=opener)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}", fix="let this user read the whole folder"
        ) from error


def safe_join(root: Path, relative: str, trusted: Path | None = None) -> Path:
    """Return ``root/relative`` for a name read from a file, which must stay inside `root`.

    Args:
        root: the folder that names the file.
        relative: the name as it was read.
        trusted: a folder that links may lead to.

    Raises:
        CheckpointError: an absolute name, one with ``..``, or a symbolic link that leads out of `root`.
    """
    name = PurePosixPath(relative)
    if not relative or name.is_absolute() or ".." in name.parts or "\\" in relative or "\0" in relative:
        raise _outside(root, relative)
    path = root / name
    real = path.resolve()
    if not any(real.is_relative_to(place.resolve()) for place in (root, trusted) if place is not None):
        raise _outside(root, relative)
    return path


def _outside(root: Path, relative: str) -> CheckpointError:
    return CheckpointError(
        f"{relative!r} is named in {root} and lies outside of it, so it is not read",
        fix="use a copy of the folder from a source that you trust",
    )


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # some network file systems have no such call
            raise
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the bytes of `path` durable, whoever wrote them."""
    with open(path, "rb+") as stream:
        os.fsync(stream.fileno())


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Write a new file durably and return its record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))


def write_json(path: Path, value: Any) -> FileRecord:
    """Write `value` as JSON, durably. Floats come back to the bit; NaN and infinities are kept."""
    return write_bytes(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Return `value` as indented JSON with a newline at the end; numbers of NumPy and torch become plain ones.

    Raises:
        CheckpointError: it holds what JSON has no word for.
    """
    return (json.dumps(value, indent=1, default=_plain_number) + "\n").encode("utf-8")


def _plain_number(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise CheckpointError(
        f"a {type(value).__name__} ({str(value)[:80]}) cannot be saved: a checkpoint keeps no pickle",
        fix="put only numbers, text, lists and mappings into logs and into the state of callbacks",
    )


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        CheckpointError: it is not there, is not JSON, or is larger than any such file of a checkpoint.
    """
    try:
        with open_to_read(path) as stream:
            if (size := os.fstat(stream.fileno()).st_size) > MAX_JSON_BYTES:
                raise CheckpointError(f"{path} has {size} bytes, too many for a file of this kind", fix=DAMAGED_FIX)
            return json.loads(stream.read().decode("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", fix=DAMAGED_FIX) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})", fix=DAMAGED_FIX) from error


def files_under(folder: Path) -> Iterator[str]:
    """Yield the relative names of all regular files under `folder`, sorted; links are not followed."""
    for root, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        for name in sorted(names):
            path = Path(root, name)
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(folder).as_posix()
