"""The seams of a stop request: the point between two steps at which a run may be left, and the end of a resumed run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Trainer

from hf_fsdp.integrations.accelerate import replace_method
from hf_fsdp.integrations.preemption import preemption_of


def install_preemption_seam() -> None:
    """Put the seam in place; calling it again changes nothing. The one on `Trainer.train` is train.py's."""
    replace_method(Trainer, "_maybe_log_save_evaluate", _maybe_log_save_evaluate)
    replace_method(Trainer, "_run_epoch", _run_epoch)


def _maybe_log_save_evaluate(original: Callable[..., None], trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    preemption = preemption_of(trainer)
    if preemption is None or not preemption.is_watching:
        original(*args, **kwargs)
    else:
        preemption.run_save_point(lambda: original(*args, **kwargs), trainer)


def _run_epoch(original: Callable[..., None], trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    """Take no step beyond the last one: a run that is resumed from its last step, Trainer trains one step more."""
    if preemption_of(trainer) is not None and 0 < trainer.state.max_steps <= trainer.state.global_step:
        trainer.control.should_training_stop = True
    else:
        original(*args, **kwargs)
