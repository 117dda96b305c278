"""The memory of one training while it runs: batches looked at, steps measured, a prediction asked for and taken."""

from __future__ import annotations

import contextlib
from pathlib import Path

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerState, TrainingArguments

from hf_fsdp.data.packing import packs_samples
from hf_fsdp.errors import HfFsdpError
from hf_fsdp.integrations.memory_record import Measured, MemoryRecord
from hf_fsdp.integrations.prediction import Prediction
from hf_fsdp.integrations.running_job import build_running_job, count_parameters
from hf_fsdp.integrations.seen_batches import SeenBatches, describe_batch, num_tokens
from hf_fsdp.monitor.memory import MemoryMeter
from hf_fsdp.plan.job import Batch, Job
from hf_fsdp.sharding.apply import get_applied_sharding

MEMORY_FILE = "memory.json"
# Operators are counted while they run on a CPU, at a cost, so only for so many steps. On CUDA the allocator counts.
COUNTED_STEPS = 2


class MemoryWatch:
    """Follows the memory of one training: its batches, its measured steps, its prediction.

    Args:
        model: that is trained.
        args: Trainer's.
        state: when the training begins.
    """

    def __init__(self, model: nn.Module, args: TrainingArguments, state: TrainerState):
        self._model, self._args = model, args
        # Not by where parameters are: offloaded ones lie on the CPU, and the card is what counts.
        self._meter = MemoryMeter("cuda" if args.device.type == "cuda" else "count")
        self._is_measuring = False
        self._seen = SeenBatches(model, packed=packs_samples(args))
        self.record = MemoryRecord()
        self.prediction = Prediction(Path(args.output_dir) / MEMORY_FILE)
        # In the first step the optimizer's state is only made at its end, so the steps after it are measured.
        self._first = state.global_step + (2 if state.max_steps > state.global_step + 1 else 1)
        self._last = state.max_steps
        if args.device.type != "cuda":
            self._last = min(self._first + COUNTED_STEPS - 1, state.max_steps)

    def close(self) -> None:
        """End everything that was begun."""
        self._seen.close()
        self.prediction.close()
        self._is_measuring = False
        with contextlib.suppress(HfFsdpError):  # a training that failed within another dispatch mode
            self._meter.stop()

    # -- measured -----------------------------------------------------------------------------------------------------

    def begin_step(self, step: int, optimizer: Optimizer | None) -> None:
        """An optimizer step begins, by its number in the training."""
        if step == self._first:
            self._meter.start(self._model, [optimizer] if optimizer is not None else [])
            self._is_measuring = True
            self._seen.restart()
        if self._is_measuring:
            self._meter.begin_step()

    def begin_optimizer(self) -> None:
        """The last backward of the step is over."""
        if self._is_measuring:
            self._meter.begin_optimizer()

    def end_step(self, step: int) -> None:
        """The step is over."""
        self._seen.end_step()
        if not self._is_measuring:
            return
        self._meter.end_step()
        by_phase = self._meter.steps.pop().by_phase
        if (earlier := self.record.measured) is not None:
            by_phase = {name: max(value, earlier.by_phase.get(name, 0)) for name, value in by_phase.items()}
        self.record.measured = Measured(
            kind=self._meter.kind, first_step=self._first, last_step=step, by_phase=by_phase, batch=self._seen.largest
        )
        if step >= self._last:
            self.end_measuring()

    def end_measuring(self) -> None:
        """Stop measuring, if that has begun."""
        if self._is_measuring:
            self._is_measuring = False
            self._meter.stop()

    # -- predicted ----------------------------------------------------------------------------------------------------

    def follow_prediction(self, optimizer: Optimizer | None) -> list[str]:
        """Take what was answered, ask for what is still wanted; return what to tell a person."""
        record, lines = self.record, []
        if (answer := self.prediction.take()) is not None:
            if answer.simulation is None:
                record.failure = answer.problem
                lines.append(f"memory: no prediction: {answer.problem}")
            else:
                before = record.job.batch if record.job is not None else None
                record.job, record.simulation, record.was_read = answer.job, answer.simulation, answer.was_read
                record.compare_model(*count_parameters(self._model))
                lines.append(record.predicted_line(describe_batch(answer.job.batch), before))
                record.write(Path(self._args.output_dir) / MEMORY_FILE)
        if record.failure is None and not self.prediction.is_pending and self._wants_another():
            try:
                self.prediction.ask(self._job(optimizer))
            except HfFsdpError as error:
                record.failure = in_words(error)
                lines.append(f"memory: no prediction: {record.failure}")
        return lines

    def _wants_another(self) -> bool:
        """Whether what was asked is not about the largest batch: of the measured steps, once these are over."""
        asked = self.prediction.asked
        if asked is None:
            return self._seen.most_forwards > 0 or self._seen.failure is not None
        if self._is_measuring or self.record.measured is None:
            return self._seen.largest is not None and num_tokens(self._seen.largest) > num_tokens(asked.batch)
        return self.record.measured.batch not in (None, asked.batch)

    def _job(self, optimizer: Optimizer | None) -> Job:
        seen, args = self._seen, self._args
        if seen.failure is not None:
            raise HfFsdpError(seen.failure, fix="plan_memory: false")
        batch = self._batch()
        if batch is None or not seen.has_tokens:
            raise HfFsdpError("the model is given no input_ids", fix="plan_memory: false")
        if seen.most_forwards > args.gradient_accumulation_steps:
            raise HfFsdpError(
                f"{seen.most_forwards} training forwards in the {args.gradient_accumulation_steps} micro-batches of a "
                "step, so its loss is not one that is simulated",
                fix="plan_memory: false",
            )
        applied = get_applied_sharding(self._model)
        return build_running_job(
            self._model,
            args=args,
            optimizer=optimizer,
            batch=batch,
            config=applied.config if applied is not None else None,
            world_size=args.world_size,
            chunked_loss=seen.is_chunked,
            load_dtypes=applied.load_dtypes if applied is not None else None,
        )

    def _batch(self) -> Batch | None:
        measured = self.record.measured
        return self._seen.largest if self._is_measuring or measured is None else measured.batch


def in_words(error: Exception) -> str:
    """Return an error in one line."""
    if isinstance(error, HfFsdpError):
        return "; ".join(problem.message for problem in error.problems)
    return f"{type(error).__name__}: {error}"
