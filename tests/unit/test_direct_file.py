"""Files past the page cache: the same bytes on every file system, in pieces of any size."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp.storage import direct_file
from hf_fsdp.storage.direct_file import BLOCK_BYTES, BUFFER_BYTES, DirectWriter, read_pieces

SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BUFFER_BYTES, BUFFER_BYTES + 1, 2 * BUFFER_BYTES + 3 * BLOCK_BYTES + 7]


@pytest.fixture(params=["as it is", "refused when opened", "refused when written"])
def refusing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file system here, or one that knows no direct access and says so early or late."""
    if request.param == "refused when opened":
        original = os.open

        def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return original(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
    if request.param == "refused when written":
        call = direct_file._call

        def refuse_once(stream: Any, do: Any, data: Any) -> int:
            def refusing_call(data: Any) -> int:
                if direct_file.fcntl.fcntl(stream.fileno(), direct_file.fcntl.F_GETFL) & os.O_DIRECT:
                    raise OSError(errno.EINVAL, "Invalid argument")
                return do(data)

            return call(stream, refusing_call, data)

        monkeypatch.setattr(direct_file, "_call", refuse_once)
    return request.param


@pytest.mark.parametrize("size", SIZES)
def test_the_bytes_that_are_written_are_in_the_file_and_are_read(tmp_path: Path, refusing: str, size: int) -> None:
    data = random.Random(size).randbytes(size)
    with DirectWriter(tmp_path / "file") as stream:
        start = 0
        for length in [1, 0, 100, BLOCK_BYTES, BUFFER_BYTES + 5, size]:
            start += stream.write(data[start : start + length])
    assert (tmp_path / "file").read_bytes() == data
    assert b"".join(bytes(piece) for piece in read_pieces(tmp_path / "file")) == data


def test_a_large_file_goes_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = []
    original = os.open
    monkeypatch.setattr(os, "open", lambda path, given, *rest: flags.append(given) or original(path, given, *rest))
    with DirectWriter(tmp_path / "file") as stream:
        stream.write(b"x")
    assert list(read_pieces(tmp_path / "file")) == [b"x"]
    assert all(flag & os.O_DIRECT for flag in flags) and len(flags) == 2


def test_an_error_of_the_disk_comes_through(tmp_path: Path) -> None:
    full = Path("/dev/full")  # every write to it finds no space
    with pytest.raises(OSError, match="No space left"), DirectWriter(full) as stream:
        stream.write(b"x" * (BUFFER_BYTES + 1))


def test_nothing_is_synced_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stop"), DirectWriter(tmp_path / "file") as stream:
        stream.write(b"x")
        raise ValueError("stop")
    assert (tmp_path / "file").read_bytes() == b""
