"""Resuming a Trainer's run, and loading its best checkpoint: what its seams call."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments

from hf_fsdp.checkpoint.documents import ARGUMENTS_FILE, DATA_FILE, EXTRA_STATE_FILE, rank_file
from hf_fsdp.checkpoint.find import (
    AUTO,
    TRAINER_STATE_FILE,
    FoundCheckpoint,
    checkpoint_folder,
    find_checkpoints,
    lack_of_mark,
    may_start_anew,
    newest_usable,
    read_wish,
)
from hf_fsdp.checkpoint.foreign import open_foreign
from hf_fsdp.checkpoint.json_state import decode_state
from hf_fsdp.checkpoint.load import (
    OpenCheckpoint,
    compare_base,
    load_extra_state,
    load_model,
    load_optimizer,
    open_checkpoint,
)
from hf_fsdp.checkpoint.manifest import MANIFEST_FILE, Manifest
from hf_fsdp.checkpoint.model_state import precision_of
from hf_fsdp.checkpoint.optimizer_state import FRESH_FIX, changed_settings
from hf_fsdp.checkpoint.random_state import set_random_state, shift_random_state
from hf_fsdp.checkpoint.verify import verify_together
from hf_fsdp.config.schema import CheckpointConfig
from hf_fsdp.errors import CheckpointError
from hf_fsdp.integrations.best import best_score
from hf_fsdp.integrations.checkpoint_files import restore_running_loss, restore_schedule
from hf_fsdp.integrations.data_draws import BatchToRebuild, await_batch
from hf_fsdp.integrations.data_position import compare_data_position
from hf_fsdp.integrations.optimizers import raw_optimizer
from hf_fsdp.sharding.mesh import agree_all, rank
from hf_fsdp.sharding.outcome import agreed
from hf_fsdp.storage.files import hash_file


class Resume:
    """Finds the checkpoint to go on from, and gives a Trainer what it holds; every method is collective."""

    def __init__(self, say: Callable[..., None]):
        self.config = CheckpointConfig()
        self._say = say
        self._opened: OpenCheckpoint | None = None
        self._trainer: weakref.ref[Trainer] | None = None
        self._batch: BatchToRebuild | None = None

    # -- which one ----------------------------------------------------------------------------------------------------

    def resolve(self, trainer: Trainer, asked: str | bool | None) -> str | None:
        """Return the folder to resume from, checked to the last byte by all ranks together.

        Args:
            trainer: about to train.
            asked: ``True`` takes the newest committed checkpoint, skips those that are incomplete or damaged with a
                line that says why, and never touches them; ``"auto"`` does so where there is one, and is a fresh start
                where nothing was ever saved; a path must be whole.

        Raises:
            CheckpointError: on all ranks alike: there is none, the one that was asked for is damaged, or ranks were
                asked for different ones.
        """
        self._forget()
        wish = read_wish(asked)
        wishes = agree_all(str(wish))
        if len(set(wishes)) > 1:
            raise CheckpointError(
                "ranks were given different resume_from_checkpoint: "
                + ", ".join(f"rank {index}: {wish}" for index, wish in enumerate(wishes[:8])),
                fix="the same on all ranks; True takes the newest committed checkpoint, chosen by all together",
            )
        output_dir = Path(trainer.args.output_dir)
        if wish is None:
            self._say_what_is_there(trainer, output_dir)
            return None
        self._trainer = weakref.ref(trainer)
        if isinstance(wish, str) and wish != AUTO:
            return self._resolve_path(Path(wish))
        skipped: list[str] = []

        def say(line: str) -> None:
            skipped.append(line)
            self._say(line)

        items = agree_all(
            agreed("look for checkpoints", lambda: find_checkpoints(output_dir) if rank() == 0 else None)
        )[0]
        found = newest_usable(items, self._look_closer, say, optimizer_is_fresh=self.config.optimizer == "fresh")
        if found is None and wish == AUTO and may_start_anew(items):
            self._say(f"resume: nothing to go on from in {output_dir}, so this is a fresh start")
            return None
        if found is None:
            raise CheckpointError(
                f"resume_from_checkpoint={asked}: {output_dir} holds no checkpoint that can be resumed from"
                + "".join(f"\n  {line}" for line in skipped),
                fix="leave resume_from_checkpoint out to start anew, or set output_dir to that of the earlier run",
            )
        step = found.step if found.manifest is None else found.manifest.step
        self._say(f"resume: {found.path} (step {step})")
        return str(found.path)

    def _say_what_is_there(self, trainer: Trainer, output_dir: Path) -> None:
        """A fresh start among the checkpoints of an earlier run replaces them one by one: say so."""
        if rank() == 0 and str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) != "no":
            with contextlib.suppress(OSError):
                there = [item for item in find_checkpoints(output_dir) if item.problem is None]
                if there:
                    self._say(
                        f"{output_dir} holds {there[-1].path.name} of an earlier run; this is a fresh start, which "
                        'will replace what has the same step (resume_from_checkpoint="auto" goes on from it)'
                    )

    def _resolve_path(self, folder: Path) -> str:
        seen = agree_all(folder.is_dir())
        if any(seen) and not all(seen):
            raise CheckpointError(
                f"resume_from_checkpoint={str(folder)!r} is not there for rank {seen.index(False)}",
                fix="a folder on a file system that all machines share",
            )
        if not seen[0]:
            what = "is a file, not the folder of a checkpoint" if folder.exists() else "does not exist"
            usable = [str(item.path) for item in find_checkpoints(folder.parent) if item.problem is None]
            raise CheckpointError(
                f"resume_from_checkpoint={str(folder)!r} {what}",
                near=", ".join(usable[-3:]) or None,
                fix="give the folder of a checkpoint, or True for the newest one in output_dir",
            )
        action = f"resume from {folder.name}"
        here = agreed(action, lambda: [str(item.path) for item in find_checkpoints(folder) if item.problem is None])
        inside, has_manifest = agree_all((here, (folder / MANIFEST_FILE).exists()))[0]
        if inside and not has_manifest:
            raise CheckpointError(
                f"resume_from_checkpoint={str(folder)!r} is the folder of a run, with checkpoints in it",
                near=", ".join(inside[-3:]),
                fix=f"resume_from_checkpoint={inside[-1]!r}",
            )
        if has_manifest:
            manifest = agreed(action, lambda: Manifest.read(folder))
            if len(set(agree_all(hash_file(folder / MANIFEST_FILE)))) > 1:
                raise CheckpointError(
                    f"resume_from_checkpoint={str(folder)!r} is another checkpoint on another rank",
                    fix="a folder on a file system that all machines share",
                )
            if problems := verify_together(folder, manifest):
                raise CheckpointError([replace(item, message=f"{folder}: {item.message}") for item in problems[:5]])
        elif (problem := agree_all(lack_of_mark(folder))[0] or self._look_at_foreign(folder)) is not None:
            raise CheckpointError(
                f"resume_from_checkpoint={str(folder)!r} cannot be resumed from: {problem}",
                fix="take another checkpoint, or start anew with its weights as model_name_or_path",
            )
        return str(folder)

    def _look_closer(self, item: FoundCheckpoint) -> str | None:
        if not all(seen := agree_all(item.path.is_dir())):
            return f"rank {seen.index(False)} does not see it: output_dir must be one folder for all machines"
        if item.manifest is None:
            return self._look_at_foreign(item.path)
        problems = verify_together(item.path, item.manifest)
        return f"damaged: {problems[0].message}" if problems else None

    def _look_at_foreign(self, folder: Path) -> str | None:
        """Return why a checkpoint of Trainer or Accelerate cannot be resumed from; rank 0 looks for all."""
        problem = None
        if rank() == 0:
            try:
                with contextlib.closing(open_foreign(folder)) as foreign:
                    if foreign.model is None:
                        problem = "; ".join(foreign.missing) or "it holds no weights"
                    elif foreign.trainer_state is None:
                        problem = f"it has no {TRAINER_STATE_FILE}, so its step is not known"
            except Exception as error:  # also what a hostile folder makes Python stumble over; the others wait
                problem = str(error).splitlines()[0]
        found: str | None = agree_all(problem)[0]
        return found

    # -- what it holds ------------------------------------------------------------------------------------------------

    def load_model(self, trainer: Trainer, folder: Path) -> None:
        """Fill the Trainer's model, each rank its own part."""
        opened = self._open(trainer, folder)
        lines = agreed(f"resume from {folder.name}", lambda: _load_model(trainer, opened))
        self._say(*lines, *compare_base(trainer.model, opened.manifest), *_changed_precision(trainer, opened))
        self._batch = _batch_to_rebuild(opened, trainer.args)
        await_batch(self._batch)
        if getattr(trainer.args, "sync_ref_model", False):
            self._say("resume: sync_ref_model: checkpoints hold no reference model, so it starts from ref_model again")
        if opened.foreign is not None:
            self._say(f"resume: {folder.name} is one of {opened.foreign.kind}, so nothing says whether it is whole")
            self._say(*(f"resume: {folder.name} lacks {line}" for line in opened.foreign.missing))

    def load_optimizer(self, trainer: Trainer, folder: Path) -> None:
        """Restore optimizer and schedule; with ``checkpoint.optimizer: fresh`` the schedule alone."""
        opened = self._open(trainer, folder)
        optimizer, is_fresh = raw_optimizer(trainer.optimizer), self.config.optimizer == "fresh"
        if is_fresh:
            self._say("resume: checkpoint.optimizer: fresh, so the optimizer's state is not loaded")
        else:
            changed = changed_settings(optimizer, opened.groups) if opened.groups is not None else []
            count = agreed(f"resume from {folder.name}", lambda: load_optimizer(trainer.model, optimizer, opened))
            self._say(f"resume: optimizer state of {count} tensors restored")
            if changed:
                self._say(f"resume: the checkpoint's settings of the optimizer are kept: {', '.join(changed)}")
        if opened.scheduler is not None:
            state = opened.scheduler
            lines = agreed(
                f"resume from {folder.name}",
                lambda: restore_schedule(trainer.lr_scheduler, optimizer, state, is_fresh=is_fresh),
            )
            self._say(*(lines or _changed_schedule(opened, trainer.args)))
        elif not is_fresh:
            raise CheckpointError(f"{folder} holds no state of the learning rate schedule", fix=FRESH_FIX)
        if (data := opened.document(DATA_FILE)) is not None:
            self._say(*compare_data_position(data, trainer))

    def load_scaler(self, trainer: Trainer, folder: Path) -> None:
        """Restore the loss scale of fp16."""
        scaler, saved = trainer.accelerator.scaler, self._open(trainer, folder).scaler
        if scaler is None:
            return
        if saved is None:
            self._say("resume: the checkpoint has no loss scale, so fp16 starts with the default one")
        else:
            scaler.load_state_dict(saved)

    def load_random_state(self, trainer: Trainer, folder: Path) -> None:
        """Restore this rank's random generators; a rank that the run before did not have draws from rank 0's."""
        opened, index = self._open(trainer, folder), trainer.args.process_index
        batch = self._batch
        if batch is not None and batch.is_done:
            pass  # they were restored right after the first batch was built
        elif (mine := opened.random_state(index)) is not None:
            set_random_state(mine)
        elif (first := opened.random_state(0)) is not None:
            shift_random_state(first, index)
        self._forget()

    def _forget(self) -> None:
        """Let go of the checkpoint: nothing more is taken from it, and a later training is not to."""
        if self._opened is not None:
            self._opened.close()
        self._opened = self._trainer = self._batch = None
        await_batch(None)

    def restore_running_loss(self) -> None:
        """After Trainer has set its counters: go on with those of the run before.

        On another number of processes every rank takes the mean: a log shows the mean over ranks.
        """
        trainer = self._trainer() if self._trainer is not None else None
        opened, self._opened = self._opened, None
        if trainer is None or opened is None:
            return
        opened.close()
        if opened.manifest is None or opened.document(rank_file(0)) is None:
            return
        num_saved = opened.manifest.world_size
        if num_saved == trainer.args.world_size:
            saved = opened.document(rank_file(trainer.args.process_index))["running_loss"]
        else:
            theirs = [opened.document(rank_file(index))["running_loss"] for index in range(num_saved * (rank() == 0))]
            total = sum(loss["since_last_log"] for loss in theirs)
            saved = agree_all({**theirs[0], "since_last_log": total / num_saved} if theirs else None)[0]
        restore_running_loss(trainer, saved)

    def load_best(self, trainer: Trainer) -> None:
        """Load the best checkpoint's model, adapters too."""
        folder = Path(str(trainer.state.best_model_checkpoint))
        if not all(agree_all(folder.is_dir())):
            usable = [str(item.path) for item in find_checkpoints(folder.parent) if item.problem is None]
            raise CheckpointError(
                f"load_best_model_at_end: {folder}, the best checkpoint, is not there any more",
                near=", ".join(usable[-3:]) or None,
                fix="training has ended and its last step is the model in memory; load another checkpoint by hand",
            )
        action = f"load the best model from {folder.name}"
        opened = agreed(action, lambda: open_checkpoint(folder, trainer.model))
        with contextlib.closing(opened):
            if opened.manifest is not None and (problems := verify_together(folder, opened.manifest)):
                raise CheckpointError(problems[:5])
            agreed(action, lambda: _load_model(trainer, opened))
        state, score = trainer.state, best_score(trainer, folder)
        said = "" if score is None else f" (score {score})"
        if state.best_global_step and folder.name != checkpoint_folder(folder.parent, state.best_global_step).name:
            said += f"; step {state.best_global_step} was better, {state.best_metric}, and has no checkpoint"
        self._say(f"best model: loaded from {folder.name}{said}")

    def _open(self, trainer: Trainer, folder: Path) -> OpenCheckpoint:
        """Return the checkpoint, opened once; another program's once more when there is an optimizer to name."""
        optimizer: Any = raw_optimizer(trainer.optimizer)
        known = self._opened
        if known is not None and known.folder == folder and (known.foreign is None or optimizer is None):
            return known
        self._opened = agreed(f"resume from {folder.name}", lambda: open_checkpoint(folder, trainer.model, optimizer))
        return self._opened


def _changed_precision(trainer: Trainer, opened: OpenCheckpoint) -> list[str]:
    args, before = trainer.args, opened.manifest.precision if opened.manifest is not None else ""
    unsharded = "bf16-mixed" if args.bf16 else "fp16-mixed" if args.fp16 else "fp32"
    now = precision_of(trainer.model) or unsharded
    if before in ("", "auto", now) or now == "auto":
        return []
    return [f"resume: the run before computed in {before} and this one computes in {now}: its losses will differ"]


def _changed_schedule(opened: OpenCheckpoint, args: TrainingArguments) -> list[str]:
    before = (opened.document(ARGUMENTS_FILE) or {}).get("lr_scheduler_type")
    now = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if before in (None, now):
        return []
    return [f"resume: lr_scheduler_type is {now} and was {before}: it goes on from its place in the new curve"]


def _batch_to_rebuild(opened: OpenCheckpoint, args: TrainingArguments) -> BatchToRebuild | None:
    """Return what the next batch was built with; None when it was not yet, or is another one on other processes."""
    if opened.manifest is None or opened.manifest.world_size != args.world_size:
        return None
    saved = opened.document(rank_file(args.process_index)) or {}
    before = decode_state(saved.get("random_before_next_batch"))
    return None if before is None else BatchToRebuild(before, decode_state(saved["random"]))


def _load_model(trainer: Trainer, opened: OpenCheckpoint) -> list[str]:
    lines = load_model(trainer.model, opened.model, opened.folder, may_hold_base=opened.foreign is not None)
    load_extra_state(trainer.model, opened.document(EXTRA_STATE_FILE) or {})
    return lines
