"""`MemoryPlanCallback`: the simulated memory of a training beside its real one."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_fsdp.integrations.memory_record import MemoryRecord
from hf_fsdp.integrations.memory_watch import MEMORY_FILE, MemoryWatch, in_words
from hf_fsdp.integrations.optimizers import raw_optimizer
from hf_fsdp.integrations.wandb import log_memory
from hf_fsdp.monitor.metrics import MetricsFile

METRICS_FILE = "metrics.jsonl"


def _harmless(handler: Callable[..., None]) -> Callable[..., None]:
    """A forecast that fails is a line, and never the end of a training."""

    @functools.wraps(handler)
    def wrapped(callback: MemoryPlanCallback, *args: Any, **kwargs: Any) -> None:
        try:
            handler(callback, *args, **kwargs)
        except Exception as error:
            callback.say(f"memory: no longer followed: {in_words(error)}")
            callback.stop()

    return wrapped


class MemoryPlanCallback(TrainerCallback):
    """Predict the memory of the training at hand, measure it, and put both side by side.

    After the first step, when it is known what a batch is like, process 0 has the planner simulate one step of this
    very training, in a process beside it that no step waits for (about 10 seconds of imports and 3 to 5 of simulating,
    on one CPU core). At the end both figures are printed, and kept in ``memory.json`` in the run's folder, in
    ``metrics.jsonl`` where `MetricsCallback` writes it, and in the summary of the W&B run. A run that goes on in the
    same folder reads the prediction there.

    On CUDA `torch.cuda.max_memory_allocated` is measured, from the second step to the end (torch's peak counter is
    reset within each step). On a CPU tensors are counted in the second and third step, which are slower by some
    10 microseconds an operator.

    What the planner has no word for (a loss or an optimizer of one's own, DoRA, …) is said in a line, and only the
    measurement is made. Nothing here can stop a training.

    Args:
        wait_seconds: at the end of a training, how long to wait for a prediction that is still being made.

    Example:
        >>> from hf_fsdp import FSDPCallback, MemoryPlanCallback
        >>> callbacks = [FSDPCallback(), MemoryPlanCallback()]  # Trainer(..., callbacks=callbacks)
    """

    def __init__(self, *, wait_seconds: float = 180.0):
        self.record: MemoryRecord | None = None
        self._wait_seconds = wait_seconds
        self._watch: MemoryWatch | None = None

    def say(self, *lines: str) -> None:
        """Print lines, on the process that follows the memory."""
        for line in lines:
            print(f"hf-fsdp: {line}", flush=True)

    def stop(self) -> None:
        """End measuring and predicting; also after a training that failed."""
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.close()

    # -- Trainer's events ---------------------------------------------------------------------------------------------

    @_harmless
    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Begin to look at batches, on the first process."""
        self.stop()
        if state.is_world_process_zero and model is not None:
            self._watch = MemoryWatch(model, args, state)
            self.record = self._watch.record

    @_harmless
    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Measure from the second step on."""
        if self._watch is not None:
            self._watch.begin_step(state.global_step + 1, raw_optimizer(optimizer))

    @_harmless
    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The last backward of the step is over."""
        if self._watch is not None:
            self._watch.begin_optimizer()

    @_harmless
    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Ask for the prediction when a batch was seen, and print it when it is there."""
        if self._watch is not None:
            self._watch.end_step(state.global_step)
            self.say(*self._watch.follow_prediction(optimizer))

    @_harmless
    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Put predicted and measured side by side."""
        if self._watch is None:
            return
        watch, record = self._watch, self._watch.record
        watch.end_measuring()
        until = time.monotonic() + self._wait_seconds  # for all together: other processes may wait for this one
        for _ in range(3):  # what is pending, and what a batch of the measured steps still asks for
            watch.prediction.wait(max(0.0, until - time.monotonic()))
            self.say(*watch.follow_prediction(optimizer))
        self.say(*record.closing_lines())
        if not record.numbers() and record.failure is None:  # no step ran: what an earlier part of the run wrote stays
            self.stop()
            return
        folder = Path(args.output_dir)
        record.write(folder / MEMORY_FILE)
        log_memory(record.numbers())
        if (folder / METRICS_FILE).is_file():
            metrics = MetricsFile(folder / METRICS_FILE)
            metrics.start(resume_step=state.global_step)
            metrics.write({"step": state.global_step, "epoch": state.epoch, **record.numbers()})
        self.stop()


@contextlib.contextmanager
def memory_followed_no_longer(trainer: Any) -> Iterator[None]:
    """End measuring when a training ends, also by an error: it would go on counting what runs after it."""
    try:
        yield
    finally:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, MemoryPlanCallback):
                callback.stop()
