"""What an evaluation with `compute_metrics` keeps: the outputs of every sample, gathered on every process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from hf_fsdp.errors import Problem
from hf_fsdp.units import format_bytes

# Joining the batches at the end holds everything twice, so half of what is free is all that can be kept.
_SHARE = 0.5

ARGMAX = "preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)"


@dataclass(frozen=True, kw_only=True)
class KeptOutputs:
    """An estimate of the outputs that are kept until the metrics are computed.

    Args:
        num_bytes: on every process.
        made_of: the factors in words, e.g. ``100 samples x 512 tokens x 32000 words x 4 bytes``.
        keeper: who keeps them: ``compute_metrics`` or ``predict()``.
    """

    num_bytes: int
    made_of: str
    keeper: str


def estimate_kept_logits(num_samples: int, num_tokens: int, vocabulary_size: int) -> KeptOutputs:
    """Return what the logits of a language model take: float32, every row padded to the longest."""
    return KeptOutputs(
        num_bytes=num_samples * num_tokens * vocabulary_size * 4,
        made_of=f"{num_samples} samples x {num_tokens} tokens x {vocabulary_size} words x 4 bytes",
        keeper="compute_metrics",
    )


def free_bytes(on_device: bool) -> int:
    """Return the memory that is free for one process: the accelerator's, or its part of the machine's."""
    if on_device and torch.accelerator.is_available():
        return int(torch.accelerator.get_memory_info()[0])
    processes_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return int(psutil.virtual_memory().available // processes_here)


def find_memory_problem(kept: KeptOutputs, num_free: int, *, on_device: bool) -> Problem | None:
    """Return why `kept` cannot be kept in `num_free` bytes, or None.

    Args:
        kept: the estimate.
        num_free: free bytes of one process, the smallest of all ranks.
        on_device: the outputs stay on the accelerator (no `eval_accumulation_steps`).
    """
    limit = int(_SHARE * num_free)
    if kept.num_bytes <= limit:
        return None
    where = "accelerator's" if on_device else "host's"
    fix = f"Trainer(..., {ARGMAX}): a token id a position instead of a number a word"
    if kept.keeper == "compute_metrics":
        fix += (
            "\nor TrainingArguments(batch_eval_metrics=True) with a compute_metrics(predictions, compute_result) "
            "that adds up batch by batch"
        )
    if on_device:
        fix += "\nor TrainingArguments(eval_accumulation_steps=1), if the host has the memory"
    return Problem(
        message=f"{kept.keeper} keeps the outputs of the whole evaluation on every process: "
        f"{format_bytes(kept.num_bytes)} (estimated: {kept.made_of}); "
        f"the limit is {format_bytes(limit)}, half of the {where} free memory, because joining them holds them twice",
        fix=fix,
    )


def count_bytes(outputs: Any) -> int:
    """Return the bytes of all tensors in nested outputs."""
    if isinstance(outputs, torch.Tensor):
        return outputs.numel() * outputs.element_size()
    if isinstance(outputs, dict):
        return sum(count_bytes(item) for item in outputs.values())
    if isinstance(outputs, Iterable) and not isinstance(outputs, str):
        return sum(count_bytes(item) for item in outputs)
    return 0
