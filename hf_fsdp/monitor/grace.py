"""How long a process may go on after it was told to stop, and whether a save fits into that time."""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# torch.distributed.launcher.api.LaunchConfig: what its agent falls back to.
TORCHRUN_SECONDS = 30.0
_TORCHRUN_VARIABLES = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")

# Leaving after the save: the interpreter's end, and the agent's way to notice it.
EXIT_SECONDS = 2.0
# A save that is about as long as the longest of the last ones still counts as one that fits.
_PAST_MARGIN = 1.25
# An estimate knows the speed of one small write only.
_ESTIMATE_MARGIN = 1.5
_NUM_KEPT = 5


@functools.cache
def launcher_can_be_told() -> bool:
    """Return whether this torch's launcher reads a grace from anywhere; torch 2.11's does not."""
    from torch.distributed.launcher.api import LaunchConfig

    return "shutdown_timeout" in LaunchConfig.__dataclass_fields__


def launcher_grace_seconds(environ: Mapping[str, str]) -> float | None:
    """Return the seconds from a launcher's signal to its SIGKILL, or None when no launcher is known to count them.

    torchrun, which `accelerate launch` runs for more than one process, passes the signal it got on to its processes
    and kills what is still there after ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT`` seconds, 30 unless set: one clock for all
    of them, started by the signal to the agent. Its option ``--shutdown-timeout`` cannot be seen from here.

    Args:
        environ: the environment of the process.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    for name in _TORCHRUN_VARIABLES if launcher_can_be_told() else ():
        try:
            return float(environ[name])
        except (KeyError, ValueError):
            continue
    return TORCHRUN_SECONDS


def grace_seconds(configured: float | str, environ: Mapping[str, str]) -> float | None:
    """Return the smaller of the two graces, None when there is neither.

    Args:
        configured: ``checkpoint.grace_seconds``; ``auto`` leaves it to the launcher.
        environ: the environment of the process.

    Example:
        >>> grace_seconds(120, {"TORCHELASTIC_RUN_ID": "none"}), grace_seconds(20, {"TORCHELASTIC_RUN_ID": "none"})
        (30.0, 20.0)
    """
    known = [] if configured == "auto" else [float(configured)]
    launchers = launcher_grace_seconds(environ)
    return min([*known, *([] if launchers is None else [launchers])], default=None)


def check_grace(configured: float | str, environ: Mapping[str, str]) -> list[str]:
    """Return the line for a grace that the launcher will not give, or none."""
    launchers = launcher_grace_seconds(environ)
    if configured == "auto" or launchers is None or launchers >= float(configured):
        return []
    wanted = math.ceil(float(configured))
    repair = (
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={wanted} before the launch"
        if launcher_can_be_told()
        else f"torch {importlib.metadata.version('torch')} cannot be told otherwise, a newer one can"
    )
    return [f"checkpoint.grace_seconds is {wanted}, but the launcher kills {launchers:.0f} s after a signal: {repair}"]


@dataclass
class SaveDurations:
    """What is known of how long a save takes; the save path reports into it.

    Args:
        num_bytes: bytes that all ranks write in a full save.
        num_model_bytes: those of them that are the model, or the adapter.
        bytes_per_second: of all ranks together, from the self-test's write; used until a full save was made.
        seconds: of the last full saves.
    """

    num_bytes: int | None = None
    num_model_bytes: int | None = None
    bytes_per_second: float | None = None
    seconds: list[float] = field(default_factory=list)

    def record(self, seconds: float) -> None:
        """Add a full save that was made, from its first step to its commit."""
        self.seconds = [*self.seconds[1 - _NUM_KEPT :], seconds]

    def expected_seconds(self) -> float | None:
        """Return how long a full save may take, with a margin; None when nothing is known yet."""
        if self.seconds:
            return max(self.seconds) * _PAST_MARGIN
        if self.num_bytes and self.bytes_per_second:
            return self.num_bytes / self.bytes_per_second * _ESTIMATE_MARGIN
        return None

    def expected_model_seconds(self) -> float | None:
        """Return how long a save of the model alone may take, by its share of the bytes; None when not known."""
        whole = self.expected_seconds()
        if whole is None or not self.num_bytes or self.num_model_bytes is None:
            return None
        return whole * self.num_model_bytes / self.num_bytes
