"""The seams of a Trainer's checkpoints: saving, resuming and loading the best are `Checkpoints`' where there is one.

Pinned by `tests/unit/test_checkpoint_seams.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer_utils import has_length

from hf_fsdp.config.io import TRAINER_BLOCK
from hf_fsdp.integrations.accelerate import replace_method
from hf_fsdp.integrations.checkpoint_files import processor_to_save
from hf_fsdp.integrations.checkpoints import Checkpoints
from hf_fsdp.integrations.data_draws import install_data_draws_seams
from hf_fsdp.integrations.data_position import place_in_stream

_ATTRIBUTE = "checkpoints"


def install_checkpoint_seams() -> None:
    """Put the seams in place; calling it again changes nothing."""
    replace_method(Trainer, "create_accelerator_and_postprocess", _create_accelerator)
    replace_method(Trainer, "_init_training_state", _init_training_state)
    replace_method(Trainer, "_save", _save)
    replace_method(Trainer, "_save_checkpoint", _save_checkpoint)
    replace_method(Trainer, "_load_from_checkpoint", _load_from_checkpoint)
    replace_method(Trainer, "_load_optimizer_and_scheduler", _load_optimizer_and_scheduler)
    replace_method(Trainer, "_load_scaler", _load_scaler)
    replace_method(Trainer, "_load_rng_state", _load_rng_state)
    replace_method(Trainer, "_load_best_model", _load_best_model)
    replace_method(Trainer, "_finalize_training", _finalize_training)
    install_data_draws_seams()


def checkpoints_of(trainer: Trainer) -> Checkpoints | None:
    """Return the `Checkpoints` of the Trainer's `FSDPCallback`, or None without one."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(found := getattr(callback, _ATTRIBUTE, None), Checkpoints):
            return found
    return None


def _create_accelerator(original: Callable[..., None], trainer: Trainer) -> None:
    """Let `save_only_model` be: Trainer refuses it beside sharded checkpoints and the best one, which it cannot load.

    It is asked before callbacks are known, so only where the arguments carry our config.
    """
    args = trainer.args
    asked = args.save_only_model
    if TRAINER_BLOCK in (args.fsdp_config or {}):
        args.save_only_model = False
    try:
        original()
    finally:
        args.save_only_model = asked


def _init_training_state(
    original: Callable[..., tuple[int, int]],
    trainer: Trainer,
    max_steps: int,
    num_update_steps_per_epoch: int,
    *args: Any,
    **kwargs: Any,
) -> tuple[int, int]:
    """Find the place in a dataset without a length, which Trainer takes for one that is as long as the run."""
    place = original(max_steps, num_update_steps_per_epoch, *args, **kwargs)
    is_stream = num_update_steps_per_epoch == max_steps and not has_length(trainer.train_dataset)
    if checkpoints_of(trainer) is None or trainer.args.ignore_data_skip or not is_stream:
        return place
    return place_in_stream(trainer.state, max_steps * trainer.args.gradient_accumulation_steps)


def _save_checkpoint(original: Callable[..., None], trainer: Trainer, model: nn.Module, trial: Any) -> None:
    if (checkpoints := checkpoints_of(trainer)) is None:
        return original(model, trial)

    def push(folder: Path) -> None:
        if trainer.args.push_to_hub:
            trainer._push_from_checkpoint(str(folder))

    checkpoints.save(trainer, trial, push)


def _save(
    original: Callable[..., None], trainer: Trainer, output_dir: str | None = None, state_dict: Any = None
) -> None:
    """Save the collator's processor too, where Trainer knows of its tokenizer only."""
    original(output_dir, state_dict)
    processor = processor_to_save(trainer)
    is_more = processor is not None and processor is not trainer.processing_class
    if is_more and trainer.args.should_save and checkpoints_of(trainer) is not None:
        processor.save_pretrained(output_dir or trainer.args.output_dir)


def _load_from_checkpoint(
    original: Callable[..., None], trainer: Trainer, resume_from_checkpoint: str, model: nn.Module | None = None
) -> None:
    if (checkpoints := checkpoints_of(trainer)) is None:
        return original(resume_from_checkpoint, model)
    checkpoints.let_weights_change()
    checkpoints.resume.load_model(trainer, Path(resume_from_checkpoint))


def _load_optimizer_and_scheduler(original: Callable[..., None], trainer: Trainer, checkpoint: str | None) -> None:
    if (checkpoints := checkpoints_of(trainer)) is None or checkpoint is None:
        return original(checkpoint)
    checkpoints.resume.load_optimizer(trainer, Path(checkpoint))


def _load_scaler(original: Callable[..., None], trainer: Trainer, checkpoint: str | None) -> None:
    if (checkpoints := checkpoints_of(trainer)) is None or checkpoint is None:
        return original(checkpoint)
    checkpoints.resume.load_scaler(trainer, Path(checkpoint))


def _load_rng_state(original: Callable[..., None], trainer: Trainer, checkpoint: str | None) -> None:
    if (checkpoints := checkpoints_of(trainer)) is None or checkpoint is None:
        return original(checkpoint)
    checkpoints.resume.load_random_state(trainer, Path(checkpoint))


def _load_best_model(original: Callable[..., None], trainer: Trainer) -> None:
    if (checkpoints := checkpoints_of(trainer)) is None:
        return original()
    checkpoints.finish()
    checkpoints.resume.load_best(trainer)


def _finalize_training(original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Wait for the save behind training before Trainer looks for the best checkpoint and deletes others."""
    if (checkpoints := checkpoints_of(trainer)) is not None:
        checkpoints.finish()
        if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is None:
            checkpoints.say_no_best()
    return original(*args, **kwargs)
