"""The best checkpoint of a Trainer: the one with the best evaluation among those that were saved.

Trainer takes the best evaluation, and with evaluations more often than saves it may then have no checkpoint at all, or
an earlier, worse one than another that is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from transformers import Trainer

from hf_fsdp.checkpoint.find import CHECKPOINT, TRAINER_STATE_FILE
from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.files import read_json


def best_score(trainer: Trainer, folder: Path) -> float | None:
    """Return the evaluation of the step that a checkpoint is of; None where there was none."""
    match = CHECKPOINT.fullmatch(folder.name)
    return _scores(trainer).get(int(match[1])) if match else None


def choose_best(trainer: Trainer, saved: Mapping[int, Path]) -> int | None:
    """Return which step has the best evaluation, the earliest of equal ones; None where none was evaluated.

    Args:
        trainer: at a step that is about to be saved, which counts too.
        saved: step -> its checkpoint. One that another run left says something else of its step, and does not count.
    """
    scores, now = _scores(trainer), trainer.state.global_step
    sign = 1 if trainer.args.greater_is_better else -1
    for step in sorted({*saved, now} & scores.keys(), key=lambda step: (-sign * scores[step], step)):
        if step == now or _says(saved[step], step, _metric(trainer), scores[step]):
            return step
    return None


def _says(folder: Path, step: int, metric: str, score: float) -> bool:
    with contextlib.suppress(CheckpointError, FileNotFoundError, KeyError, TypeError):
        history = read_json(folder / TRAINER_STATE_FILE)["log_history"]
        return any(entry.get("step") == step and entry.get(metric) == score for entry in history)
    return False


def _scores(trainer: Trainer) -> dict[int, float]:
    metric = _metric(trainer)
    return {entry["step"]: float(entry[metric]) for entry in trainer.state.log_history if metric in entry}


def _metric(trainer: Trainer) -> str:
    name = str(trainer.args.metric_for_best_model or "")
    return name if name.startswith("eval_") else f"eval_{name}"
