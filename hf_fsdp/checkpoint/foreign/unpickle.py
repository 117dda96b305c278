"""Reads the pickle that torch DCP writes as `.metadata`, without running anything that it asks for.

A pickle is a program: `pickle.load` imports any function that the file names and calls it. DCP's own reader does just
that. Here no name is ever imported: the few names that DCP writes stand for plain records, any other is an error that
shows it, and only the instructions that DCP's pickles consist of are followed. Python's own unpickler in C is left out
too: nine bytes of a file can make it ask for 64 GiB.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.files import DAMAGED_FIX, open_to_read
from hf_fsdp.storage.safetensors_file import MAX_DIMS

# DCP describes a chunk in about 300 bytes: this is enough for 3,000 tensors on 256 ranks.
MAX_PICKLE_BYTES = 256 * 1024**2

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    f"{_METADATA}.Metadata",
    f"{_METADATA}.MetadataIndex",
    f"{_METADATA}.StorageMeta",
    f"{_METADATA}.TensorStorageMetadata",
    f"{_METADATA}.BytesStorageMetadata",
    f"{_METADATA}.ChunkStorageMetadata",
    f"{_METADATA}.TensorProperties",
    f"{_METADATA}._MEM_FORMAT_ENCODING",
    # Where torch had two of them before 2.3.
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    # The folder that the checkpoint was written to; of no interest here.
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
}
_ENUMS = {name for name in _RECORDS if name.endswith("MEM_FORMAT_ENCODING")}


_PLAIN_INSTRUCTIONS = frozenset(
    getattr(pickle, name)[0]
    for name in (
        "PROTO FRAME STOP MARK POP POP_MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET "
        "GLOBAL STACK_GLOBAL NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
        "BINUNICODE SHORT_BINUNICODE SHORT_BINBYTES EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
        "EMPTY_LIST APPEND APPENDS EMPTY_DICT"
    ).split()
)


@dataclass(eq=False)
class Record:
    """An object of the pickle as plain data: the name of its class, what it was made from, and its fields."""

    class_name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def get(self, field: str) -> Any:
        """Return a field, or None where the record has no such field."""
        return self.state.get(field) if isinstance(self.state, dict) else None


@dataclass(frozen=True)
class _Name:
    """A name that the pickle asks for, and that may only be used as `build` does."""

    name: str
    build: Callable[[tuple[Any, ...]], Any]


def load_dcp_pickle(path: Path) -> Record:
    """Return the content of a DCP `.metadata` file as a `Record` of plain values.

    Raises:
        CheckpointError: the file asks for anything that DCP's metadata does not consist of (named in the message and
            not run), is damaged, or is too large.
    """
    try:
        with open_to_read(path) as stream:
            if (size := os.fstat(stream.fileno()).st_size) > MAX_PICKLE_BYTES:
                raise CheckpointError(f"{path} has {size} bytes, too many for DCP's metadata", fix=DAMAGED_FIX)
            data = stream.read()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing: torch DCP writes it last, so this save was cut off", fix=DAMAGED_FIX
        ) from error
    # A chunk's 300 bytes make about ten of them; nothing but them would take 80 times the file's size in memory.
    if 4 * sum(data.count(instruction) for instruction in (b"]", b"}", b")", b"(")) > len(data) + 4096:
        raise CheckpointError(f"{path} holds more containers than DCP's metadata can have", fix=DAMAGED_FIX)
    try:
        record = _DcpUnpickler(io.BytesIO(data)).load()
    except _RefusedError as refused:
        raise CheckpointError(
            f"{path} {refused}, which is no part of DCP's metadata; nothing of it was run",
            fix="use a copy of the folder from a source that you trust",
        ) from refused
    except UNREADABLE as error:
        raise CheckpointError(
            f"{path} is cut off or damaged: it cannot be read as DCP's metadata ({type(error).__name__}: {error})",
            fix=DAMAGED_FIX,
        ) from error
    if not isinstance(record, Record) or record.class_name != f"{_METADATA}.Metadata":
        raise CheckpointError(f"{path} holds no DCP metadata", fix=DAMAGED_FIX)
    return record


class _RefusedError(Exception):
    """The pickle asks for something that DCP's metadata does not consist of."""


class _Instructions(dict[int, Callable[[Any], None]]):
    """The instructions that are followed; any other is refused."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise _RefusedError(f"has the pickle instruction {bytes([code])!r}")


class _DcpUnpickler(pickle._Unpickler):
    """Python's unpickler in Python, of which only the harmless instructions are kept."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if full_name in _RECORDS:
            return _Name(full_name, lambda arguments: Record(full_name, arguments))
        if full_name in _BUILDERS:
            return _Name(full_name, _BUILDERS[full_name])
        raise _RefusedError(f"asks for {full_name}")

    def call(self) -> None:
        """What a pickle calls is one of the names above, and gives plain data."""
        arguments, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, _Name) or not isinstance(arguments, tuple):
            raise _RefusedError(f"calls a {type(target).__name__}")
        self.stack[-1] = target.build(arguments)

    def set_state(self) -> None:
        """Fields go into records only, so no class or module can be changed."""
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Record) or target.state is not None:
            raise _RefusedError(f"changes {target.name if isinstance(target, _Name) else type(target).__name__}")
        target.state = state

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(key, value)

    def set_items(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(key, value)

    def _set(self, key: Any, value: Any) -> None:
        """Keys are flat: the hash of nested tuples can take for ever."""
        target = self.stack[-1]
        if not isinstance(target, dict) or not isinstance(key, str | int | Record):
            raise _RefusedError(f"sets a {type(key).__name__} in a {type(target).__name__}")
        target[key] = value

    dispatch = _Instructions({code: pickle._Unpickler.dispatch[code] for code in _PLAIN_INSTRUCTIONS})
    dispatch |= {pickle.REDUCE[0]: call, pickle.NEWOBJ[0]: call, pickle.BUILD[0]: set_state}
    dispatch |= {pickle.SETITEM[0]: set_item, pickle.SETITEMS[0]: set_items}


def _size(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    (sizes,) = arguments
    if not isinstance(sizes, tuple | list) or len(sizes) > MAX_DIMS:
        raise ValueError("a torch.Size that is no list of sizes")
    return tuple(sizes)


def _layout(arguments: tuple[Any, ...]) -> str:
    (name,) = arguments
    if not isinstance(name, str):
        raise ValueError("a layout without a name")
    return name


def _mapping(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if arguments:
        raise ValueError("a mapping that is made from something")
    return {}


def _enum_member(arguments: tuple[Any, ...]) -> Record:
    """Python 3.11.0 to 3.11.3 wrote enum members as ``getattr(enum, name)``."""
    enum, name = arguments
    if not isinstance(enum, _Name) or enum.name not in _ENUMS or not isinstance(name, str):
        raise ValueError("getattr of something that is no enum")
    return Record(enum.name, (name,))


_BUILDERS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "torch.Size": _size,
    "torch.serialization._get_layout": _layout,
    "collections.OrderedDict": _mapping,
    "builtins.getattr": _enum_member,
}

# What a damaged pickle makes the unpickler stumble over.
UNREADABLE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    RecursionError,
    OverflowError,
    struct.error,
)
