"""A signal at any one rank: all ranks save the same step, and leave so that a scheduler can start them again.

While `Trainer.train` runs, `Preemption` is one of Trainer's callbacks. Each rank has a flag. It is agreed on by an
all-reduce of one integer, started before a micro-batch and read after it, on the gloo group that nothing on the device
waits for. So a signal in step k is acted on at the end of step k or k + 1, by all ranks at the same one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_fsdp.checkpoint.find import AUTO
from hf_fsdp.integrations.wandb import mark_preempting
from hf_fsdp.monitor.grace import EXIT_SECONDS, SaveDurations, check_grace, grace_seconds
from hf_fsdp.monitor.signals import SignalWatch, shield_data_workers
from hf_fsdp.sharding.eventual import EventualFlag
from hf_fsdp.sharding.mesh import agree_all, rank

EXIT_CODE = 75
"""What `train()` leaves with after a stop request: EX_TEMPFAIL of sysexits.h, "try again later". Not 0, which a
scheduler takes for done; not 1 or 2, which are errors that come again; not 128 and more, which is a process that was
killed and may have saved nothing. A launcher in between (torchrun, `accelerate launch`) makes 1 of it."""

_ATTRIBUTE = "preemption"
_NOTHING_NEW = "no step was taken in this run, so there is nothing new to save"


class LeaveEvaluation(SystemExit):
    """Leaves an evaluation on all ranks. Not an `Exception`, so that nobody's `except Exception` keeps it."""


class Preemption(TrainerCallback):
    """Watches for signals while a Trainer trains, agrees on them, saves one step on all ranks, and leaves.

    `FSDPCallback` has one as `preemption`; the seams on `Trainer` find it there. It works in a single process too.

    Attributes:
        durations: what is known of how long a save takes.
        saves_only_model: during the last save, when a full one would not fit into what is left of the grace.
        before_leaving: called on every rank after the last save, before the process leaves: an asynchronous save
            waits here for its commit.
    """

    def __init__(self) -> None:
        self.durations = SaveDurations()
        self.saves_only_model = False
        self.before_leaving: list[Callable[[], None]] = []
        self.configured_grace: float | str = "auto"
        self._watch: SignalWatch | None = None
        self._flag = EventualFlag()
        self._is_agreed = False
        self._may_leave_evaluation = False
        self._num_steps = 0
        self._saved_step: int | None = None

    @property
    def is_watching(self) -> bool:
        """Whether a training is running under it."""
        return self._watch is not None

    @property
    def is_leaving(self) -> bool:
        """Whether all ranks have agreed to save and leave: nothing is begun any more that takes long."""
        return self._is_agreed

    def record_save(self, seconds: float) -> None:
        """Learn how long a full save took, from its beginning to its commit."""
        self.durations.record(seconds)

    # -- around Trainer.train -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self, trainer: Trainer) -> Iterator[None]:
        """Handle signals until the block ends; then the earlier handlers are back, also after an exception."""
        if self.is_watching:  # train() called by something that train() calls
            yield
            return
        self._flag = EventualFlag()
        self._is_agreed = self._may_leave_evaluation = False
        self._num_steps, self._saved_step = 0, None
        callbacks = trainer.callback_handler.callbacks
        with SignalWatch(f"rank {rank()}") as self._watch:
            # First, so that who looks at `control.should_save` at the end of a step sees what is decided here.
            callbacks.insert(0, self)
            try:
                for line in self._notes(trainer):
                    print(f"hf-fsdp: {line}", flush=True)
                yield
                request = self._watch.request
            finally:
                callbacks.remove(self)
                self._watch = None
        if request is not None:  # after the last step that could be agreed on: who handled it before handles it now
            os.kill(os.getpid(), request.signum)

    def _notes(self, trainer: Trainer) -> list[str]:
        notes = [self._watch.problem] if self._watch is not None and self._watch.problem is not None else []
        if getattr(trainer.args, "enable_jit_checkpoint", False):
            notes.append("enable_jit_checkpoint is not needed: on SIGTERM hf-fsdp saves, the same step on all ranks")
        notes += check_grace(self.configured_grace, os.environ)
        return notes if rank() == 0 else []

    # -- Trainer's events ---------------------------------------------------------------------------------------------

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Stop here after a signal during set-up."""
        shield_data_workers(kw.get("train_dataloader"))
        self._flag = EventualFlag()
        self._may_leave_evaluation = True  # `eval_on_start` comes next
        self._leave_unsaved_when_agreed()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Start an agreement; before the first step, wait for it: the first batch may have taken minutes."""
        self._may_leave_evaluation = False
        if self._num_steps == 0:
            self._leave_unsaved_when_agreed()
        self._launch()

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Agree before each micro-batch: a step of many may be longer than the grace."""
        self._read()
        self._launch()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Ask for the save that `run_save_point` sees through."""
        self._num_steps += 1
        if self._read():
            control.should_save = control.should_training_stop = True

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Agree during an evaluation too, and leave it where the step that it follows can be saved."""
        if not self.is_watching:
            return
        if self._read() and self._may_leave_evaluation:
            if self._num_steps == 0:
                self._leave(_NOTHING_NEW, AUTO)
            raise LeaveEvaluation(EXIT_CODE)
        self._launch()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remember the step, so that it is not saved twice."""
        self._saved_step = state.global_step

    # -- between two steps --------------------------------------------------------------------------------------------

    def run_save_point(self, run: Callable[[], None], trainer: Trainer) -> None:
        """Let Trainer log, evaluate and save; after an agreed stop request, save this step and leave.

        Args:
            run: `Trainer._maybe_log_save_evaluate` with its arguments.
            trainer: the one that trains.

        Raises:
            SystemExit: with `EXIT_CODE`, on all ranks.
        """
        if not self._is_agreed:
            self._may_leave_evaluation = True
            with contextlib.suppress(LeaveEvaluation):
                run()
            self._may_leave_evaluation = False
            self._read()  # the last prediction step's
            if trainer.control.should_training_stop:  # no later step could read it
                self._agree_now()
        if not self._is_agreed:
            return
        control, step = trainer.control, trainer.state.global_step
        control.should_evaluate = False
        # Under `save_only_model` what is there of this step could not be resumed from, which is what this save is for.
        control.should_save = self._saved_step != step or trainer.args.save_only_model
        if control.should_save:
            with self._what_fits(trainer):
                run()
        self._leave(f"step {step} is saved")

    @contextlib.contextmanager
    def _what_fits(self, trainer: Trainer) -> Iterator[None]:
        """Let the save be the model alone when a full one would not end in time; all ranks decide alike."""
        durations = self.durations
        mine = (self._seconds_left(), durations.expected_seconds(), durations.expected_model_seconds())
        lefts, wholes, models = (
            [value for value in column if value is not None] for column in zip(*agree_all(mine), strict=True)
        )
        self.saves_only_model = bool(lefts and wholes) and max(wholes) > min(lefts)
        if self.saves_only_model and rank() == 0:
            is_short_for_it = bool(models) and max(models) > min(lefts)
            print(
                f"hf-fsdp: a full save may take {max(wholes):.0f} s and {max(min(lefts), 0):.0f} s of the grace are "
                "left: only the model is saved, without the optimizer's state"
                + (", and even that may not end in time" if is_short_for_it else ""),
                flush=True,
            )
        args = trainer.args
        before = args.save_only_model, args.save_total_limit
        args.save_only_model = self.saves_only_model
        if self.saves_only_model:  # nothing is deleted for it: a resumed run goes on from the last whole checkpoint
            args.save_total_limit = None
        try:
            yield
        finally:
            args.save_only_model, args.save_total_limit = before

    def _seconds_left(self) -> float | None:
        grace = grace_seconds(self.configured_grace, os.environ)
        request = self._watch.request if self._watch is not None else None
        if grace is None or request is None:
            return grace
        return grace - request.age_seconds - EXIT_SECONDS

    def _leave_unsaved_when_agreed(self) -> None:
        self._agree_now()
        if self._is_agreed:
            self._leave(_NOTHING_NEW, AUTO)

    def _leave(self, what: str, resume: str | bool = True) -> None:
        for wait in self.before_leaving:
            wait()
        request = self._watch.request if self._watch is not None else None
        # Also a barrier: a launcher that sees one process end tells the others to end, also those that still save.
        names = agree_all(None if request is None else request.name)
        if rank() == 0:
            where = [f"{name} at rank {index}" for index, name in enumerate(names) if name]
            mark_preempting()
            print(
                f"hf-fsdp: {', '.join(where)}: {what}; leaving with exit code {EXIT_CODE}, "
                f"start it again with resume_from_checkpoint={resume!r}",
                flush=True,
            )
        raise SystemExit(EXIT_CODE)

    # -- the agreement ------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Start to agree on the flags as they are now; nothing waits."""
        if not self._is_agreed and not self._flag.is_in_flight and self._watch is not None:
            self._flag.launch(self._watch.request is not None)

    def _read(self) -> bool:
        """Return whether any rank was asked to stop, as of the last agreement that was started."""
        self._is_agreed |= bool(self._flag.read())
        return self._is_agreed

    def _agree_now(self) -> bool:
        self._read()
        self._launch()
        return self._read()


def preemption_of(trainer: Trainer) -> Preemption | None:
    """Return the `Preemption` of the Trainer's `FSDPCallback`, or None without one."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(found := getattr(callback, _ATTRIBUTE, None), Preemption):
            return found
    return None
