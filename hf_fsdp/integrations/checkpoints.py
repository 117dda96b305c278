"""Saving a Trainer's checkpoints: what its seams call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer
from transformers.trainer_utils import SaveStrategy

from hf_fsdp.checkpoint.background import BackgroundSave
from hf_fsdp.checkpoint.commit import Rotation
from hf_fsdp.checkpoint.find import CHECKPOINT, checkpoint_folder, find_checkpoints
from hf_fsdp.checkpoint.manifest import MODEL_ONLY
from hf_fsdp.checkpoint.optimizer_state import read_optimizer_state
from hf_fsdp.checkpoint.save import SaveRequest, begin_save
from hf_fsdp.checkpoint.self_test import test_saving
from hf_fsdp.checkpoint.staged import SavedCheckpoint
from hf_fsdp.checkpoint.write import finish_save
from hf_fsdp.config.schema import CheckpointConfig
from hf_fsdp.integrations.best import choose_best
from hf_fsdp.integrations.checkpoint_files import build_documents, write_model_files
from hf_fsdp.integrations.optimizers import raw_optimizer
from hf_fsdp.integrations.preemption import Preemption
from hf_fsdp.integrations.resume import Resume
from hf_fsdp.sharding.mesh import agree_all, rank
from hf_fsdp.sharding.outcome import agreed, wait_for_all_ranks
from hf_fsdp.units import format_bytes

# What AdamW keeps for a trained parameter, in its dtype; other optimizers keep less.
ADAM_STATES = 2


class Checkpoints:
    """Saves one Trainer's run; `FSDPCallback` has one as `checkpoints`, where the seams find it."""

    def __init__(self, say: Callable[..., None], preemption: Preemption):
        self.config = CheckpointConfig()
        self.resume = Resume(say)
        self._say = say
        self._preemption = preemption
        self._background = BackgroundSave()
        self._after_commit: Callable[[Path], None] | None = None
        self._tested: weakref.ref[Any] | None = None
        self._is_optimizer_tested = True
        preemption.before_leaving.append(self.finish)

    def use(self, config: CheckpointConfig) -> None:
        """Take the settings in force."""
        self.config = self.resume.config = config

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, trainer: Trainer, trial: Any, after_commit: Callable[[Path], None] | None = None) -> None:
        """Save the step that a Trainer is at; collective.

        Args:
            trainer: between two steps.
            trial: of a hyperparameter search, which has a folder of its own.
            after_commit: called on all ranks with the folder of the checkpoint, once it is committed.

        Raises:
            CheckpointError: on all ranks alike: this save, or the one before it behind training, failed.
        """
        wait_for_all_ranks(f"save checkpoint-{trainer.state.global_step}")
        self.finish()
        args, state = trainer.args, trainer.state
        output_dir, step = Path(trainer._get_output_dir(trial=trial)), state.global_step
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        best = self._update_best(trainer, output_dir)
        whole = not args.save_only_model
        action = f"save checkpoint-{step}"
        staged = begin_save(
            SaveRequest(
                output_dir=output_dir,
                step=step,
                model=trainer.model,
                optimizer=raw_optimizer(trainer.optimizer) if whole else None,
                documents=agreed(action, lambda: build_documents(trainer)),
                write_extras=lambda folder: write_model_files(trainer, folder),
                format=self.config.format,
                keep=Rotation(args.save_total_limit, best),
            )
        )
        if self.config.async_save:
            self._after_commit = after_commit
            self._background.start(staged)
            if hasattr(raw_optimizer(trainer.optimizer), "train"):
                self.let_weights_change()  # schedule-free: Trainer calls it before the next forward, and weights move
            return
        self._committed(finish_save(staged))
        if after_commit is not None:
            after_commit(checkpoint_folder(output_dir, step))

    def _update_best(self, trainer: Trainer, output_dir: Path) -> Path | None:
        """Keep Trainer's record of the best checkpoint: the best of those that are there, the one that is saved too."""
        state, strategy = trainer.state, trainer.args.save_strategy
        if strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST) and state.best_global_step:
            action = f"save checkpoint-{state.global_step}"
            best = agree_all(agreed(action, lambda: self._choose_best(trainer, output_dir) if rank() == 0 else None))[0]
            if best is not None:
                state.best_model_checkpoint = str(checkpoint_folder(output_dir, best))
        return Path(state.best_model_checkpoint) if state.best_model_checkpoint is not None else None

    def _choose_best(self, trainer: Trainer, output_dir: Path) -> int | None:
        found = [item for item in find_checkpoints(output_dir) if item.problem is None]
        return choose_best(trainer, {item.step: item.path for item in found if CHECKPOINT.fullmatch(item.path.name)})

    def _committed(self, saved: SavedCheckpoint | None) -> None:
        if saved is None:
            return
        if saved.manifest.content != MODEL_ONLY:
            self._preemption.record_save(saved.seconds)
        what = "the model only" if saved.manifest.content == MODEL_ONLY else "whole"
        self._say(
            f"{saved.path.name} is committed ({what}): {format_bytes(saved.manifest.num_bytes)} "
            f"in {saved.seconds:.1f} s",
            *saved.lines,
        )

    def poll(self) -> None:
        """Look at the save behind training, at every step; raises what it failed with, at one step on all ranks."""
        if (saved := self._background.poll()) is not None:
            self._behind_training_ended(saved)

    def let_weights_change(self) -> None:
        """Wait until the save behind training, if any, has copied this rank's weights; not collective."""
        self._background.let_weights_change()

    def finish(self) -> None:
        """Wait for the save behind training, if any; collective."""
        if self._background.is_in_flight and (saved := self._background.wait()) is not None:
            self._behind_training_ended(saved)

    def _behind_training_ended(self, saved: SavedCheckpoint) -> None:
        self._committed(saved)
        if self._after_commit is not None:
            self._after_commit(saved.path)
            self._after_commit = None

    def say_no_best(self) -> None:
        """Trainer says nothing then, and loads nothing."""
        self._say("load_best_model_at_end: no step was both evaluated and saved, so the model is that of the last step")

    def test(self, model: nn.Module, output_dir: Path | None) -> None:
        """Before the first step: plan the whole save, and write a small part of it for real; once for a model.

        Args:
            model: about to be trained.
            output_dir: where checkpoints go; None for a run that saves none.
        """
        if not self.config.self_test or (self._tested is not None and self._tested() is model):
            return
        result = test_saving(model, output_dir)
        self._tested = weakref.ref(model)
        durations = self._preemption.durations
        durations.num_model_bytes = result.num_bytes
        durations.num_bytes = result.num_bytes + ADAM_STATES * result.num_trained_bytes
        durations.bytes_per_second = result.bytes_per_second
        self._is_optimizer_tested = False
        if result.was_written:
            self._say(
                f"checkpoint self-test: {result.num_tensors} tensors, {format_bytes(result.num_bytes)} of weights "
                "planned; the smallest part was written and read back"
            )

    def test_optimizer(self, model: nn.Module, optimizer: Optimizer) -> None:
        """After the first step, when the optimizer has made its state: could a checkpoint hold it? Collective."""
        if not self._is_optimizer_tested:
            self._is_optimizer_tested = True
            agreed("test a checkpoint of the optimizer", lambda: read_optimizer_state(model, optimizer))
