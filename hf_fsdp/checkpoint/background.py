"""One save behind training: copied, written, verified and committed in a thread, on a process group of its own."""

from __future__ import annotations

import atexit
import threading

from hf_fsdp.checkpoint.host_copy import HostCopy, HostMemory
from hf_fsdp.checkpoint.staged import SavedCheckpoint, StagedSave, cleaned_up
from hf_fsdp.checkpoint.write import finish_save
from hf_fsdp.sharding.eventual import EventualFlag
from hf_fsdp.sharding.mesh import background_group, world_size
from hf_fsdp.sharding.outcome import agreed

# A process that ends by an error gives a save that is in flight this long: the others write their parts of it too.
EXIT_SECONDS = 30.0
_exit_threads: list[threading.Thread] = []


class BackgroundSave:
    """At most one save that is in flight; all methods are collective.

    Its end is agreed on without a wait: `poll` at every step returns a committed save, or raises its error, at the
    same step on all ranks.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._saved: SavedCheckpoint | None = None
        self._error: BaseException | None = None
        self._flag = EventualFlag()
        self._copy: HostCopy | None = None
        self._memory: HostMemory = {}  # that saves are copied into, kept from one to the next

    @property
    def is_in_flight(self) -> bool:
        return self._thread is not None

    def start(self, staged: StagedSave) -> None:
        """Copy and write `staged` behind training. The one before must have ended: see `wait`.

        One of another Trainer, which an error has ended, is waited for: threads that agree at the same time on the one
        group would take each other's answers.
        """
        assert self._thread is None
        for thread in _exit_threads:
            thread.join()
        group = background_group() if world_size() > 1 else None
        self._saved = self._error = None
        with cleaned_up(staged):
            copy = agreed(staged.action, lambda: HostCopy(staged, self._memory))
        self._copy = copy
        copy.hold_weights()

        def run() -> None:
            try:
                with cleaned_up(staged):
                    agreed(staged.action, copy.run, group)
                self._saved = finish_save(staged, group)
            except BaseException as error:
                self._error = error

        # A daemon: a process that ends must not wait for the other ranks without a limit.
        self._thread = threading.Thread(target=run, name="hf-fsdp-save", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # this process gets no more threads, and the other ranks' saves count on it
            run()
        else:
            _wait_at_exit(self._thread)

    def let_weights_change(self) -> None:
        """Wait until this rank's weights are copied; not collective. Every optimizer waits by itself."""
        if self._copy is not None:
            self._copy.wait()
            self._copy = None

    def poll(self) -> SavedCheckpoint | None:
        """Return the save once all ranks know that it is committed, or None; raises what it failed with.

        Raises:
            CheckpointError: the save failed; on all ranks at the same call.
        """
        if self._thread is None:
            return None
        # Nobody waits for a rank that is not done: rank 0 may still be deleting older checkpoints.
        if self._flag.is_in_flight and not self._flag.read():
            return self.wait()
        self._flag.launch(int(self._thread.is_alive()))
        return None

    def wait(self) -> SavedCheckpoint | None:
        """Wait for the save that is in flight, if any; return it, or raise what it failed with."""
        if self._thread is None:
            return None
        if self._flag.is_in_flight:
            self._flag.read()
        if self._thread.ident is not None:  # it was started
            self._thread.join()
        self.let_weights_change()
        self._thread = None
        saved, error = self._saved, self._error
        self._saved = self._error = None
        if error is not None:
            raise error
        return saved


def _wait_at_exit(thread: threading.Thread) -> None:
    atexit.unregister(_join_threads)
    atexit.register(_join_threads)
    _exit_threads[:] = [*(other for other in _exit_threads if other.is_alive()), thread]


def _join_threads() -> None:
    for thread in _exit_threads:
        thread.join(EXIT_SECONDS)
