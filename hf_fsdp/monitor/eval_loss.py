"""The mean loss over all tokens that count, whatever batches and processes they were spread over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hf_fsdp.sharding.mesh import agree_all

IGNORED = -100
_TARGETS = ("labels", "shift_labels")


class WeightedMean:
    """Collects each batch's mean loss with the number of targets behind it; the sum is taken once, in float64.

    Example:
        >>> mean = WeightedMean()
        >>> mean.add(torch.tensor(2.0), torch.tensor(3))
        >>> mean.add(torch.tensor(float("nan")), torch.tensor(0))  # nothing counted, so there is nothing to average
        >>> mean.add(torch.tensor(6.0), torch.tensor(1))
        >>> mean.over_all_ranks()
        3.0
    """

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor, count: torch.Tensor) -> None:
        """Add a batch. Both stay where they are: reading them here would wait for the device at every step."""
        self._losses.append(loss.detach().float().mean())
        self._counts.append(count.detach())

    def over_all_ranks(self) -> float | None:
        """Return the mean over all batches of all ranks; None when nothing counted. Collective."""
        total, count = 0.0, 0
        if self._losses:
            losses = torch.stack(self._losses).cpu().double()
            counts = torch.stack([item.to(self._losses[0].device) for item in self._counts]).cpu()
            counted = counts > 0
            total, count = float((losses[counted] * counts[counted]).sum()), int(counts.sum())
        everyone = agree_all((total, count))
        num_targets = sum(item[1] for item in everyone)
        return sum(item[0] for item in everyone) / num_targets if num_targets else None


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 or math.isnan(loss) else math.inf


def count_targets(batch: Mapping[str, Any], *, is_shifted: bool) -> torch.Tensor | None:
    """Return how many targets a mean over this batch has, or None without ``labels``.

    Args:
        batch: what the collator made.
        is_shifted: the loss compares each token with the next one, so the first label of a row predicts nothing.
    """
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor):
        return None
    if labels.is_floating_point():  # regression, several classes at once: the mean is over all elements
        return torch.tensor(labels.numel())
    if isinstance(batch.get("shift_labels"), torch.Tensor):
        labels = batch["shift_labels"]
    elif is_shifted and labels.ndim > 1:
        labels = labels[..., 1:]
    return labels.ne(IGNORED).sum()


def count_rows(batch: Any) -> int:
    """Return the rows of a batch: the first dimension of its first tensor, labels first; 0 when there is none."""
    if not isinstance(batch, Mapping):
        return 0
    tensors = [value for value in (batch.get("labels"), *batch.values()) if isinstance(value, torch.Tensor)]
    return next((len(tensor) for tensor in tensors if tensor.ndim), 0)


def has_class_labels(batch: Mapping[str, Any]) -> bool:
    """Return whether rows can be taken out of the loss by their labels: integers, of which -100 is ignored."""
    labels = batch.get("labels")
    return isinstance(labels, torch.Tensor) and not labels.is_floating_point()


def mask_rows(batch: Mapping[str, Any], num_real: int) -> dict[str, Any]:
    """Return the batch with the labels of all rows from `num_real` on ignored; inputs stay as they are."""
    masked = dict(batch)
    for name in _TARGETS:
        if isinstance(labels := batch.get(name), torch.Tensor) and not labels.is_floating_point():
            masked[name] = labels.clone()
            masked[name][num_real:] = IGNORED
    return masked


def take_rows(batch: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """Return the first `num_rows` rows of a batch of equally long tensors."""
    return {name: value[:num_rows] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def num_real_rows(remainder: int, rank: int, num_rows: int) -> int:
    """Return how many rows of the last batch are no repetition.

    Args:
        remainder: samples of the last step over all ranks; 0 or less when it is full.
        rank: which slice of that step this rank has.
        num_rows: rows of the slice.
    """
    if remainder <= 0:
        return num_rows
    return min(max(remainder - rank * num_rows, 0), num_rows)
