"""Trainer's log events into the run's `metrics.jsonl`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_fsdp.monitor.metrics import MetricsFile


class MetricsCallback(TrainerCallback):
    """Write one JSON line for each log event of a `Trainer`: step, epoch, seconds since the start, the numbers.

    Args:
        path: the file; ``output_dir/metrics.jsonl`` when None. A resumed run keeps the lines of the steps before
            the checkpoint, any other run begins a new file.
    """

    def __init__(self, path: str | Path | None = None):
        self.path = path
        self._file: MetricsFile | None = None
        self._began = time.monotonic()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Cut the file to the step that training resumes from."""
        if state.is_world_process_zero and (self._file is None or state.global_step):
            self._open(args).start(resume_step=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Append the event."""
        if state.is_world_process_zero and logs:
            seconds = round(time.monotonic() - self._began, 3)
            record = {"step": state.global_step, "epoch": state.epoch, "seconds": seconds}
            self._open(args).write({**record, **{key: value for key, value in logs.items() if key not in record}})

    def _open(self, args: TrainingArguments) -> MetricsFile:
        if self._file is None:
            self._file = MetricsFile(self.path or Path(args.output_dir or ".") / "metrics.jsonl")
        return self._file
