"""`MemoryMeter`: the real peak memory of a training, step by step and phase by phase; measured, not simulated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hf_fsdp.errors import HfFsdpError, nearest_names
from hf_fsdp.monitor.heap import HeapCount
from hf_fsdp.monitor.storage_count import LiveStorage, StorageCount, training_tensors

KINDS = ("auto", "count", "cuda", "heap")
FORWARD_BACKWARD = "forward and backward"
OPTIMIZER = "optimizer"
# Between steps: logging, evaluation, saving.
BETWEEN = "between steps"


@dataclass
class StepPeaks:
    """The most that was held in each phase of one optimizer step.

    Args:
        number: from 1, in the order measured.
        by_phase: bytes.
        at_rest_bytes: held when the step ended.
    """

    number: int
    by_phase: dict[str, int] = field(default_factory=dict)
    at_rest_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most of the step."""
        return max(self.by_phase.values(), default=0)


class _CudaReader:
    """torch's own count of its CUDA allocator, of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def current(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    @property
    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class MemoryMeter:
    """Measures the peak memory of this process while it trains.

    | kind | counts | does not see |
    |---|---|---|
    | ``cuda`` | `torch.cuda.max_memory_allocated`: blocks of torch's allocator, rounded to 512 bytes | context, NCCL, libraries' workspaces, fragmentation; host memory |
    | ``count`` | storages of tensors that operators return, and what model and optimizer held at the start | scratch inside operators, gloo's copies, whatever is no tensor |
    | ``heap`` | every block of glibc's malloc in use, between operators, minus a baseline | scratch that an operator frees itself; small Python objects |

    ``count`` and ``heap`` follow the operators by a dispatch mode from `start` to `stop`. It changes no value, costs
    about 15 (``heap``: 90) microseconds an operator, and autograd adds gradients out of place under any dispatch mode:
    where those of a residual stream meet, one more is held for a moment. ``torch.compile`` compiles nothing below a
    dispatch mode, so do not measure compiled blocks by them. ``cuda`` costs nothing, and resets torch's peak counter at
    every phase.

    Args:
        kind: ``auto``: ``cuda`` for a model on CUDA, else ``count``.
        baseline_bytes: of ``heap``, subtracted: read `HeapCount().in_use()` before the model is built.
        keep_storages: of ``count``: keep which storages were alive at the peak (`storages_at_peak`).

    Raises:
        HfFsdpError: an unknown kind, or one that this machine has not.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(256, 256, bias=False)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> meter = MemoryMeter()
        >>> meter.start(model, [optimizer])
        >>> meter.begin_step()
        >>> model(torch.randn(1, 256)).sum().backward()
        >>> meter.begin_optimizer()
        >>> optimizer.step()
        >>> meter.end_step()
        >>> meter.stop()
        >>> meter.steps[0].by_phase["optimizer"] >= 4 * 4 * 256 * 256
        True
    """  # noqa: E501

    def __init__(self, kind: str = "auto", *, baseline_bytes: int = 0, keep_storages: bool = False):
        if kind not in KINDS:
            near = nearest_names(kind, KINDS)
            raise HfFsdpError(
                f"MemoryMeter(kind={kind!r}) is none of {', '.join(KINDS)}",
                near=", ".join(near) or None,
                fix=f"MemoryMeter(kind={(near or ['auto'])[0]!r})",
            )
        if kind == "cuda" and not torch.cuda.is_available():
            raise HfFsdpError(
                'MemoryMeter(kind="cuda") reads the CUDA allocator, and there is no CUDA device',
                fix='MemoryMeter(kind="auto"): counts tensors where there is none',
            )
        self.kind = kind
        self.steps: list[StepPeaks] = []
        self.storages_at_peak: list[LiveStorage] = []
        self._baseline = baseline_bytes
        self._keep_storages = keep_storages
        self._reader: Any = None
        self._phase = BETWEEN
        self._between = 0
        self._kept_peak = 0

    # -- what was measured --------------------------------------------------------------------------------------------

    @property
    def peak_bytes(self) -> int:
        """The most of all phases, between steps included."""
        return max(max((step.peak_bytes for step in self.steps), default=0), self._between)

    @property
    def steady_peak_bytes(self) -> int:
        """The most of the steps after the first: in the first, the optimizer's state is only made at its end."""
        return max((step.peak_bytes for step in self.steps[1:]), default=0)

    @property
    def by_phase(self) -> dict[str, int]:
        """The most of each phase over all steps."""
        most: dict[str, int] = {BETWEEN: self._between}
        for step in self.steps:
            for phase, num_bytes in step.by_phase.items():
                most[phase] = max(most.get(phase, 0), num_bytes)
        return most

    @property
    def current_bytes(self) -> int:
        """What is held now; 0 when nothing is measured."""
        return self._reader.current if self._reader is not None else 0

    # -- from a training ----------------------------------------------------------------------------------------------

    def start(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Begin: what model and optimizers hold already is counted from here. Between two steps, not within one."""
        if self._reader is not None:
            self.stop()
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        kind = self.kind
        if kind == "auto":
            kind = "cuda" if device.type == "cuda" else "count"
        if kind == "cuda":
            self._reader = _CudaReader(device if device.type == "cuda" else torch.device("cuda"))
        elif kind == "heap":
            self._reader = HeapCount(self._baseline)
            self._reader.__enter__()
        else:
            self._reader = StorageCount(device.type, keep_storages=self._keep_storages)
            for made_by, tensor in training_tensors(model, optimizers):
                self._reader.count([tensor], made_by)
            self._reader.__enter__()
        self.kind = kind
        self._phase = BETWEEN
        self._reader.restart_peak()

    def begin_step(self) -> None:
        """An optimizer step begins, with its first forward."""
        self._end_phase(FORWARD_BACKWARD)
        self.steps.append(StepPeaks(len(self.steps) + 1))

    def begin_optimizer(self) -> None:
        """The last backward is over; from here it is the optimizer's phase."""
        self._end_phase(OPTIMIZER)

    def end_step(self) -> None:
        """The step is over, and its gradients are gone or will be."""
        self._end_phase(BETWEEN)
        if self.steps:
            self.steps[-1].at_rest_bytes = self.current_bytes

    def stop(self) -> None:
        """End. What was measured stays; without a `start` before it does nothing."""
        if self._reader is None:
            return
        self._end_phase(BETWEEN)
        if self.kind != "cuda":
            # Leaving pops whichever mode is on top, so one that was entered since and not left would go instead.
            if _get_current_dispatch_mode() is not self._reader:
                raise HfFsdpError(
                    "MemoryMeter.stop() within another dispatch mode that was entered after start()",
                    fix="leave that mode first, or call start() and stop() at the same depth",
                )
            reader: Any = self._reader
            reader.__exit__(None, None, None)
        self._reader = None

    def _end_phase(self, following: str) -> None:
        if self._reader is None:
            return
        peak = self._reader.peak
        if self._phase == BETWEEN:
            self._between = max(self._between, peak)
        else:
            phases = self.steps[-1].by_phase
            phases[self._phase] = max(phases.get(self._phase, 0), peak)
        if self._keep_storages and self.kind == "count" and peak > self._kept_peak:
            self._kept_peak, self.storages_at_peak = peak, self._reader.at_peak
        self._phase = following
        self._reader.restart_peak()
