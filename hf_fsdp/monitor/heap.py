"""Bytes that glibc's heap has in use, read between operators: every malloc of the process, tensors or not."""

from __future__ import annotations

import ctypes
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_fsdp.errors import HfFsdpError

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def _load_mallinfo2() -> Any:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        raise HfFsdpError(
            "the heap cannot be counted here: the C library has no mallinfo2 (glibc 2.33 or later on Linux has)",
            fix='MemoryMeter(kind="count"): counts tensors, on any system',
        ) from None
    function.restype = _Mallinfo2
    return function


class HeapCount(TorchDispatchMode):
    """Reads the heap after every operator while it is entered.

    Counts all blocks of malloc in use: tensors, autograd's nodes, libraries' buffers, blocks of Python above 512 bytes
    (smaller ones lie in arenas that are mapped, not malloced). Scratch that an operator frees before it returns is not
    seen. For counts that can be repeated start the process with ``MALLOC_ARENA_MAX=1`` and a fixed
    ``MALLOC_MMAP_THRESHOLD_=65536``.

    Args:
        baseline: subtracted: what `in_use()` gave before the model was built.
    """

    def __init__(self, baseline: int = 0) -> None:
        super().__init__()
        self._mallinfo2 = _load_mallinfo2()
        self._baseline = baseline
        self.current = 0
        self.peak = 0
        self.restart_peak()

    def in_use(self) -> tuple[int, int]:
        """Return the bytes in use now: in small blocks, and in blocks that are maps of their own."""
        info = self._mallinfo2()
        return int(info.uordblks), int(info.hblkhd)

    def restart_peak(self) -> None:
        """Forget the peak so far."""
        self._read()
        self.peak = self.current

    def _read(self) -> None:
        self.current = sum(self.in_use()) - self._baseline
        self.peak = max(self.peak, self.current)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(item, DTensor) for item in types):
            return NotImplemented  # seen on its local tensors
        result = func(*args, **(kwargs or {}))
        self._read()
        return result
