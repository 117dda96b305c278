"""Refuses an evaluation whose outputs memory cannot hold, before training where that can be known, else at once.

With `compute_metrics` and no `preprocess_logits_for_metrics`, Trainer keeps the logits of every sample, gathered on
every process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer

from hf_fsdp.errors import IntegrationError
from hf_fsdp.monitor import eval_memory
from hf_fsdp.monitor.eval_memory import KeptOutputs, count_bytes, estimate_kept_logits, find_memory_problem
from hf_fsdp.sharding.mesh import agree_all
from hf_fsdp.units import format_bytes

_NUM_SAMPLED_ROWS = 200


@dataclass
class MemoryWatch:
    """Refuses an evaluation that keeps more outputs than memory holds, at its first step; collective."""

    keeper: str
    num_free: int
    num_steps: int | None
    on_device: bool
    num_bytes: int = 0
    num_done: int = 0

    @classmethod
    def of(cls, trainer: Trainer, description: str, batches: Sized) -> MemoryWatch | None:
        """Return the watch, or None when outputs are reduced or thrown away batch by batch."""
        keeper = "predict()" if description == "Prediction" else "compute_metrics"
        if trainer.preprocess_logits_for_metrics is not None:
            return None
        if trainer.args.batch_eval_metrics and description != "Prediction":
            return None
        on_device = _stays_on_device(trainer)
        num_steps: int | None = None
        with contextlib.suppress(TypeError):  # a stream
            num_steps = len(batches)
        return cls(keeper, _free_on_all_ranks(on_device), num_steps, on_device)

    def add(self, outputs: Any) -> None:
        """Look at the outputs of a step on this rank: of the first, or of each while their number is unknown.

        Raises:
            IntegrationError: on all ranks alike.
        """
        if self.num_done and self.num_steps is not None:
            return
        self.num_done += 1
        gathered = sum(agree_all(count_bytes(outputs)))
        self.num_bytes += gathered
        steps = self.num_steps or self.num_done
        words = f"{steps} steps x {format_bytes(gathered)} of outputs over all ranks"
        kept = KeptOutputs(num_bytes=max(gathered * steps, self.num_bytes), made_of=words, keeper=self.keeper)
        if problem := find_memory_problem(kept, self.num_free, on_device=self.on_device):
            raise IntegrationError(problem)


def check_memory_before_training(trainer: Trainer) -> None:
    """Refuse a language model's logits that an evaluation during training could not keep; collective.

    Raises:
        IntegrationError: on all ranks alike, with the size and what to write instead.
    """
    args = trainer.args
    if trainer.compute_metrics is None or args.prediction_loss_only or args.batch_eval_metrics:
        return
    if trainer.preprocess_logits_for_metrics is not None or getattr(args, "predict_with_generate", False):
        return
    vocabulary_size = _vocabulary_size(trainer.model)
    if not vocabulary_size:
        return
    datasets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"eval": trainer.eval_dataset}
    on_device = _stays_on_device(trainer)
    num_free = _free_on_all_ranks(on_device)
    problems = []
    for dataset in datasets.values():
        num_tokens = _longest_row(dataset)
        if num_tokens:
            kept = estimate_kept_logits(len(dataset), num_tokens, vocabulary_size)
            problems.append(find_memory_problem(kept, num_free, on_device=on_device))
    if found := [problem for problem in problems if problem is not None]:
        raise IntegrationError(found)


def _vocabulary_size(model: Any) -> int:
    """Return the width of a language model's head; 0 for other heads."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    weight = getattr(head, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) and weight.ndim == 2 else 0


def _longest_row(dataset: Any) -> int:
    """Return the tokens of the longest of some rows; 0 when the dataset does not say."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        return 0
    every = max(1, len(dataset) // _NUM_SAMPLED_ROWS)
    rows = (dataset[index] for index in range(0, len(dataset), every))
    return max((len(row["input_ids"]) for row in rows if isinstance(row, Mapping) and "input_ids" in row), default=0)


def _stays_on_device(trainer: Trainer) -> bool:
    return trainer.args.eval_accumulation_steps is None and trainer.args.device.type != "cpu"


def _free_on_all_ranks(on_device: bool) -> int:
    return min(agree_all(eval_memory.free_bytes(on_device)))
