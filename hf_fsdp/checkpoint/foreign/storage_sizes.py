"""How large the tensors of a `torch.save` file are said to be, found without making anything that the file asks for.

Torch maps as many bytes as the pickle says, also when the record of a storage holds fewer: what lies behind it in the
file would become weights.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from hf_fsdp.checkpoint.foreign.unpickle import UNREADABLE


def find_short_storage(data: bytes, sizes: Mapping[str, int]) -> str | None:
    """Return what is wrong with the storages of a file, or None.

    Args:
        data: the file's ``data.pkl``.
        sizes: name of each record of the archive -> its bytes.
    """
    scan = _StorageScan(io.BytesIO(data))
    try:
        scan.load()
    except UNREADABLE as error:
        return f"its list of tensors cannot be read ({type(error).__name__}: {error})"
    held_by_key = {name.rpartition("/data/")[2]: size for name, size in sizes.items()}
    for key, wanted in scan.num_bytes.items():
        if (held := held_by_key.get(key, 0)) < wanted:
            return f"its record data/{key} has {held} bytes, and {wanted} are described"
    return None


class _Nothing:
    """Stands for whatever a pickle asks for or makes."""

    def __init__(self, name: str = ""):
        self.name = name


class _StorageScan(pickle._Unpickler):
    """Follows a pickle of `torch.save` and makes nothing: it only notes how large each storage is said to be."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, stream: io.BytesIO):
        super().__init__(stream)
        self.num_bytes: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        return _Nothing(name)

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) == 5 and isinstance(pid[1], _Nothing) and isinstance(pid[4], int):
            dtype = _STORAGES.get(pid[1].name)
            if dtype is not None:
                key = str(pid[2])
                self.num_bytes[key] = max(self.num_bytes.get(key, 0), pid[4] * dtype.itemsize)
        return _Nothing()

    def _make(self) -> None:
        self.stack.pop()
        self.stack[-1] = _Nothing()

    def _make_with_keywords(self) -> None:
        self.stack.pop()
        self._make()

    def _drop_one(self) -> None:
        self.stack.pop()

    def _drop_two(self) -> None:
        self.stack.pop()
        self.stack.pop()

    def _drop_many(self) -> None:
        self.pop_mark()

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.REDUCE[0]: _make,
        pickle.NEWOBJ[0]: _make,
        pickle.NEWOBJ_EX[0]: _make_with_keywords,
        pickle.BUILD[0]: _drop_one,
        pickle.SETITEM[0]: _drop_two,
        pickle.SETITEMS[0]: _drop_many,
        pickle.APPEND[0]: _drop_one,
        pickle.APPENDS[0]: _drop_many,
    }


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
