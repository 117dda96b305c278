"""Signals that ask a training to end: noted at once whatever the main thread does, acted on where it is safe.

Python runs a signal handler only between two bytecodes of the main thread, and inside a collective, a gather or a long
write that can be minutes away. So the handlers here do nothing. The interpreter's own C handler also writes the number
of the signal to a file descriptor (`signal.set_wakeup_fd`), which a thread reads: it keeps the first signal, and ends
the process at the second.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Sent by launchers and schedulers; by a person at the terminal; by `sbatch --signal=USR1@…`."""

SAME_REQUEST_SECONDS = 1.0
"""The same signal again within this time is the same request: Slurm sends one to every process of a step, and torchrun,
which gets it too, passes it on to its workers."""

_END = b"\0"
_watches: list[SignalWatch] = []


@dataclass(frozen=True)
class StopRequest:
    """The first signal that came: which, and when by `time.monotonic`."""

    signum: int
    at: float

    @property
    def name(self) -> str:
        """The signal's name, ``SIGTERM``."""
        return signal.Signals(self.signum).name

    @property
    def age_seconds(self) -> float:
        """Seconds since the signal came."""
        return time.monotonic() - self.at


class SignalWatch:
    """Keeps the first of `SIGNALS` as a request; the second ends the process at once with 128 + its number.

    Use it as a context manager on the main thread, the only one on which Python lets handlers be set; on any other it
    watches nothing and says why in `problem`. Leaving it puts the earlier handlers back.

    Args:
        name: of this process in what it prints, e.g. ``rank 1``.

    Example:
        >>> with SignalWatch("rank 0") as watch:
        ...     watch.request is None
        True
    """

    def __init__(self, name: str):
        self.request: StopRequest | None = None
        self.problem: str | None = None
        self._name = name
        self._before: dict[int, Any] = {}
        self._earlier_wakeup = -1
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is not threading.main_thread():
            self.problem = "train() runs outside the main thread, so signals are not handled: they end the process"
            return self
        _register_at_fork()
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._earlier_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._read, args=(self._pipe[0],), name="hf-fsdp-signals", daemon=True)
        self._thread.start()
        _watches.append(self)
        for signum in SIGNALS:
            # None: the handler is another library's C code (faulthandler) and could not be put back.
            if signal.getsignal(signum) is not None and not (signum == signal.SIGINT and _is_interactive()):
                self._before[signum] = signal.signal(signum, _do_nothing)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pipe is None or self._thread is None:
            return
        self._put_back()
        os.write(self._pipe[1], _END)  # closing would not wake the thread while a forked process holds the other end
        self._thread.join()
        for end in self._pipe:
            os.close(end)
        self._pipe = self._thread = None

    def _put_back(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._earlier_wakeup)
        _watches.remove(self)

    def _read(self, end: int) -> None:
        while (data := os.read(end, 64)) and _END not in data:
            for signum in data:
                if signum in self._before:
                    self._note(signum)
                elif self._earlier_wakeup >= 0:  # asyncio's loop, in a notebook
                    with contextlib.suppress(OSError):
                        os.write(self._earlier_wakeup, bytes([signum]))

    def _note(self, signum: int) -> None:
        if self.request is None:
            self.request = StopRequest(signum, time.monotonic())
            self._print(f"{self.request.name}: stopping after a save, on all ranks; a second signal ends it at once")
        elif signum != self.request.signum or self.request.age_seconds > SAME_REQUEST_SECONDS:
            self._print(f"{signal.Signals(signum).name}, the second signal: ended at once, nothing more is saved")
            os._exit(128 + signum)

    def _print(self, text: str) -> None:
        # Not print(): the main thread may hold the lock of sys.stderr.
        with contextlib.suppress(OSError):
            os.write(2, f"hf-fsdp: {self._name} got {text}\n".encode())


def _do_nothing(signum: int, frame: Any) -> None:
    """Python's side of a handler; the reading thread has the signal already."""


def _is_interactive() -> bool:
    """Whether a person at a prompt or in a notebook expects KeyboardInterrupt."""
    return hasattr(sys, "ps1")


@functools.cache
def _register_at_fork() -> None:
    os.register_at_fork(after_in_child=_release_in_child)


def _release_in_child() -> None:
    """Give a forked process the earlier handlers: it could not be terminated else, and would write to our pipe."""
    for watch in reversed(_watches.copy()):
        watch._put_back()


# -- the processes of a DataLoader ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShieldedInit:
    """A DataLoader's `worker_init_fn` that also keeps the signals of a stop request off the process.

    torchrun passes a signal on to the whole process group of a rank, and Slurm to every process of a step. A process
    that loads data would die of it, and the rank with it, by "DataLoader worker is killed by signal", before anything
    is saved.

    Args:
        original: the function that was there.
        owner: process id of the rank. Its SIGTERM, by which a DataLoader ends its processes, still counts.
    """

    original: Callable[[int], None] | None
    owner: int

    def __call__(self, worker_id: int) -> None:
        """Run in the new process."""
        for signum in (signal.SIGINT, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_IGN)
        if hasattr(signal, "sigwaitinfo"):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=self._wait_for_owner, name="hf-fsdp-signals", daemon=True).start()
        if self.original is not None:
            self.original(worker_id)

    def _wait_for_owner(self) -> None:
        while True:
            if signal.sigwaitinfo({signal.SIGTERM}).si_pid == self.owner:
                os._exit(0)


def shield_data_workers(dataloader: Any) -> None:
    """Let the processes that `dataloader` will start outlive a stop request, so that there is a save.

    Args:
        dataloader: torch's, or one that Accelerate prepared; processes that run already are left alone.
    """
    inner = getattr(dataloader, "base_dataloader", dataloader)
    if getattr(inner, "num_workers", 0) > 0 and not isinstance(inner.worker_init_fn, ShieldedInit):
        inner.worker_init_fn = ShieldedInit(inner.worker_init_fn, os.getpid())
