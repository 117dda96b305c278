"""The best checkpoint of a Trainer: the one with the best evaluation among those that were saved.

Trainer takes the best evaluation, and with evaluations more often than saves it may then have no checkpoint at all, or
an earlier, worse one than another that is there.
"""

from __future__ import annotations

from pathlib import Path

from transformers import Trainer

from hf_fsdp.checkpoint.find import CHECKPOINT


def best_score(trainer: Trainer, folder: Path) -> float | None:
    """Return the evaluation of the step that a checkpoint is of; None where there was none."""
    match = CHECKPOINT.fullmatch(folder.name)
    return _scores(trainer).get(int(match[1])) if match else None


def choose_best(trainer: Trainer, steps: list[int]) -> int | None:
    """Return which of some steps has the best evaluation, the earliest of equal ones; None where none was evaluated."""
    scores = _scores(trainer)
    evaluated = sorted(step for step in steps if step in scores)
    if not evaluated:
        return None
    sign = 1 if trainer.args.greater_is_better else -1
    return max(evaluated, key=lambda step: sign * scores[step])


def _scores(trainer: Trainer) -> dict[int, float]:
    name = str(trainer.args.metric_for_best_model or "")
    name = name if name.startswith("eval_") else f"eval_{name}"
    return {entry["step"]: float(entry[name]) for entry in trainer.state.log_history if name in entry}
