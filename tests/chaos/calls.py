"""Sees every call of this process that changes files: open, write, fsync, rename, unlink, mkdir; and can break one.

A kill cannot show that bytes were synced before a name was given, since the page cache survives the process. So the
calls themselves are recorded, with the machine's monotonic clock, and the logs of all ranks become one.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Call:
    """One call: what was done to which path, and between which moments of the machine's clock.

    `path` is None on rename's target side only where there is none; `size` counts the bytes of a write.
    """

    operation: str
    path: str
    begin: int
    end: int
    rank: int = 0
    size: int = 0
    target: str = ""


class Calls:
    """Records, within a ``with`` block, all calls of this process under `root`.

    Args:
        root: paths outside of it are left alone.
        rank: noted in every call.
        before: called before each call with its operation and path; may raise OSError or end the process.
        half: called with operation and path before a write; True writes half of the bytes before `before` is called.
        without: operation and path; True leaves the call out, as if the line were not in the program.
    """

    def __init__(
        self,
        root: str | Path,
        rank: int = 0,
        before: Callable[[str, str], None] | None = None,
        half: Callable[[str, str], bool] | None = None,
        without: Callable[[str, str], bool] | None = None,
    ):
        self.root, self.rank = os.path.realpath(root), rank
        self.log: list[Call] = []
        self._before, self._half, self._without = before, half, without
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Calls:
        for owner in (builtins, io):
            self._replace(owner, "open", self._open)
        for name in ("fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir"):
            self._replace(os, name, getattr(self, f"_{'rename' if name == 'replace' else name}"))
        self._replace(shutil, "rmtree", self._rmtree)
        return self

    def __exit__(self, *error: object) -> None:
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        self._originals.append((owner, name, original))
        setattr(owner, name, lambda *args, **kwargs: new(original, *args, **kwargs))

    def watches(self, path: str) -> bool:
        return path == self.root or path.startswith(self.root + os.sep)

    def run(self, operation: str, path: str, do: Callable[[], Any], size: int = 0, target: str = "") -> Any:
        """Do it, unless it is to be left out, and note when."""
        if self._before is not None:
            self._before(operation, path)
        if self._without is not None and self._without(operation, path):
            return None
        begin = time.monotonic_ns()
        result = do()
        self.log.append(Call(operation, path, begin, time.monotonic_ns(), self.rank, size, target))
        return result

    def wants_half(self, path: str) -> bool:
        return self._half is not None and self._half("write", path)

    # -- the calls ----------------------------------------------------------------------------------------------------

    def _open(self, original: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        path = _absolute(file)
        if path is None or not self.watches(path) or not set(mode) & set("wax+"):
            return original(file, mode, *args, **kwargs)
        stream = self.run("open", path, lambda: original(file, mode, *args, **kwargs))
        return _Stream(stream, path, self)

    def _fsync(self, original: Callable[..., Any], descriptor: Any) -> Any:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        path = os.readlink(f"/proc/self/fd/{number}")
        if not self.watches(path) and not self.root.startswith(path):
            return original(descriptor)
        return self.run("fsync", path, lambda: original(descriptor))

    def _rename(self, original: Callable[..., Any], source: Any, target: Any, **kwargs: Any) -> Any:
        path = _absolute(source)
        if path is None or not self.watches(path):
            return original(source, target, **kwargs)
        return self.run("rename", path, lambda: original(source, target, **kwargs), target=_absolute(target) or "")

    def _one(self, operation: str, original: Callable[..., Any], name: Any, *args: Any, **kwargs: Any) -> Any:
        folder = kwargs.get("dir_fd")
        path = _absolute(name) if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), str(name))
        if path is None or not self.watches(path):
            return original(name, *args, **kwargs)
        return self.run(operation, path, lambda: original(name, *args, **kwargs))

    def _unlink(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._one("unlink", original, *args, **kwargs)

    _remove = _unlink

    def _rmdir(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._one("rmdir", original, *args, **kwargs)

    def _mkdir(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._one("mkdir", original, *args, **kwargs)

    def _rmtree(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        path = _absolute(args[0])
        if path is None or not self.watches(path) or not os.path.exists(path):
            return original(*args, **kwargs)
        return self.run("rmtree", path, lambda: original(*args, **kwargs))


class _Stream:
    """An open file. What lies in a buffer counts as written when the buffer is emptied."""

    def __init__(self, stream: Any, path: str, calls: Calls):
        self._stream, self._path, self._calls, self._pending = stream, path, calls, 0

    def write(self, data: Any) -> int:
        if isinstance(self._stream, io.RawIOBase):
            if self._calls.wants_half(self._path) and len(data) > 1:
                self._stream.write(data[: len(data) // 2])
            size = memoryview(data).nbytes
            return int(self._calls.run("write", self._path, lambda: self._stream.write(data), size))
        self._pending += (
            len(data.encode(getattr(self._stream, "encoding", None) or "utf-8")) if isinstance(data, str) else len(data)
        )
        return int(self._stream.write(data))

    def flush(self) -> None:
        size, self._pending = self._pending, 0
        if size:
            self._calls.run("write", self._path, self._stream.flush, size)
        else:
            self._stream.flush()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._stream.close()

    def __enter__(self) -> _Stream:
        self._stream.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _absolute(path: Any) -> str | None:
    if isinstance(path, int):
        return None
    text = os.fsdecode(path)
    folder, name = os.path.split(os.path.abspath(text))
    return os.path.join(os.path.realpath(folder), name)  # a link in the last place is itself what is meant


def in_order(logs: Iterable[Iterable[Call]]) -> list[Call]:
    """Return the calls of all ranks by when they began."""
    return sorted((call for log in logs for call in log), key=lambda call: call.begin)
