"""The seam around `Trainer.train`: what has to be known before it begins, and what has to be put back after it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from transformers import Trainer

from hf_fsdp.errors import IntegrationError
from hf_fsdp.integrations.accelerate import replace_method
from hf_fsdp.integrations.checkpoint_seams import checkpoints_of
from hf_fsdp.integrations.data_draws import nothing_watched_after
from hf_fsdp.integrations.evaluation import is_ours
from hf_fsdp.integrations.kept_outputs import check_memory_before_training
from hf_fsdp.integrations.plan_link import memory_followed_no_longer
from hf_fsdp.integrations.preemption import preemption_of
from hf_fsdp.integrations.trainer import doubt_class_attribute
from hf_fsdp.monitor.random_state import preserved_random_state


def install_train_seam() -> None:
    """Put the seam in place; calling it again changes nothing."""
    replace_method(Trainer, "train", _train)


def _train(
    original: Callable[..., Any],
    trainer: Trainer,
    resume_from_checkpoint: str | bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Find the checkpoint to go on from, and handle signals while it trains.

    An evaluation that would run out of memory is found out before the first step.
    """
    checkpoints = checkpoints_of(trainer)
    with _lost_process_explained(trainer), nothing_watched_after(), contextlib.ExitStack() as stack:
        stack.enter_context(memory_followed_no_longer(trainer))
        if (preemption := preemption_of(trainer)) is not None:
            stack.enter_context(preemption.watching(trainer))
        if is_ours(trainer) and str(getattr(trainer.args.eval_strategy, "value", trainer.args.eval_strategy)) != "no":
            with preserved_random_state():  # a dataset may draw augmentations when its rows are looked at
                check_memory_before_training(trainer)
        if is_ours(trainer):
            doubt_class_attribute(trainer)
        if checkpoints is None:
            return original(resume_from_checkpoint, *args, **kwargs)
        return original(checkpoints.resume.resolve(trainer, resume_from_checkpoint), *args, **kwargs)


# What gloo and NCCL say in a collective when a process at its other end is gone.
_IS_GONE = re.compile(r"connection (closed|reset) by peer|remote process exited|broken pipe", re.IGNORECASE)


@contextlib.contextmanager
def _lost_process_explained(trainer: Trainer) -> Iterator[None]:
    """Say what it means when a collective of a training fails: its own error names a socket and an address."""
    try:
        yield
    except RuntimeError as error:
        is_distributed = trainer.args.world_size > 1 and checkpoints_of(trainer) is not None
        if not is_distributed or not _IS_GONE.search(str(error)):
            raise
        raise IntegrationError(
            f"another process of the run ended, so this one cannot go on after step {trainer.state.global_step}",
            fix="look at the output of the process that ended first; "
            'resume_from_checkpoint="auto" goes on from the newest committed checkpoint',
        ) from error
