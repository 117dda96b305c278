"""The seams of `AnswersCallback`: its scores become part of Trainer's evaluation, and it learns whose steps it sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Trainer

from hf_fsdp.integrations.accelerate import replace_method

MARK = "hf_fsdp_answers"
"""An attribute of the callback whose presence lets these seams act on a Trainer."""

_SHADOW = "log"


def install_answer_seams() -> None:
    """Put the seams in place; calling it again changes nothing."""
    replace_method(Trainer, "evaluate", _evaluate)
    replace_method(Trainer, "_inner_training_loop", _training_loop)


def _callbacks_of(trainer: Trainer) -> list[Any]:
    return [callback for callback in trainer.callback_handler.callbacks if hasattr(callback, MARK)]


def _training_loop(original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    for callback in _callbacks_of(trainer):
        callback.follow(trainer)
    return original(*args, **kwargs)


def _evaluate(
    original: Callable[..., dict[str, float]],
    trainer: Trainer,
    eval_dataset: Any = None,
    ignore_keys: list[str] | None = None,
    metric_key_prefix: str = "eval",
) -> dict[str, float]:
    """Add the scores to the metrics of an evaluation between its last measurement and its log.

    Trainer logs and returns the same mapping, so whatever reads either has them; the evaluation's own time and rates
    are taken before, so answers do not count as its time.
    """
    chosen = trainer.eval_dataset if eval_dataset is None else eval_dataset
    callbacks = _callbacks_of(trainer)
    if isinstance(chosen, dict) or not callbacks:  # each set of several comes here by itself
        return original(eval_dataset, ignore_keys, metric_key_prefix)
    due = [callback for callback in callbacks if callback.is_due(metric_key_prefix)]
    before = vars(trainer).get(_SHADOW)
    log = trainer.log

    def log_with_answers(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if f"{metric_key_prefix}_runtime" not in logs:  # somebody logs in the middle of the loop
            return log(logs, *args, **kwargs)
        _restore(trainer, before)
        prefix = "eval" if metric_key_prefix.startswith("eval_") else metric_key_prefix
        for callback in due:
            logs.update(callback.answer(trainer.model, trainer.args, trainer.state, prefix))
        log(logs, *args, **kwargs)

    if due:
        vars(trainer)[_SHADOW] = log_with_answers
    try:
        return original(eval_dataset, ignore_keys, metric_key_prefix)
    finally:
        _restore(trainer, before)


def _restore(trainer: Trainer, before: Any) -> None:
    if before is None:
        vars(trainer).pop(_SHADOW, None)
    else:
        vars(trainer)[_SHADOW] = before
