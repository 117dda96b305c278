"""What a model is asked while it trains, and what it answers: prompts out of evaluation rows, tables in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_fsdp.monitor.eval_loss import IGNORED

_WIDTH = 200
_MASKS = ("completion_mask", "assistant_masks")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Tokens to go on from, and what the data has there.

    Args:
        tokens: the prompt, template included.
        reference: the data's own answer; empty when there is none.
    """

    tokens: tuple[int, ...]
    reference: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer, as text."""

    prompt: str
    answer: str
    reference: str


def split_row(row: Mapping[str, Any], *, is_encoder_decoder: bool = False) -> Prompt | None:
    """Return the prompt of a tokenized row: what stands before its first answer, with that answer as reference.

    Args:
        row: ``input_ids`` with ``labels`` (-100 where nothing is learned) or one of TRL's masks. A row that is
            learned from its first token on (plain text) is cut in half. Of packed rows the first text is taken.
        is_encoder_decoder: the whole input is the prompt and the labels are the answer.

    Returns:
        None for a row without ``input_ids`` or without anything to go on from.

    Example:
        >>> split_row({"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, -100]})
        Prompt(tokens=(5, 6), reference=(7, 8))
    """
    if row.get("input_ids") is None:
        return None
    ids = [int(token) for token in row["input_ids"]]
    labels = row.get("labels")
    if is_encoder_decoder:
        kept = tuple(int(token) for token in labels if int(token) != IGNORED) if labels is not None else ()
        return Prompt(tokens=tuple(ids), reference=kept) if ids else None
    counts = _counted(row, ids)
    if row.get("seq_lengths"):
        length = int(row["seq_lengths"][0])
        ids, counts = ids[:length], counts[:length]
    start = counts.index(True) if True in counts else len(ids)
    if start == 0:
        start = len(ids) // 2
    end = next((index for index in range(start, len(ids)) if not counts[index]), len(ids))
    return Prompt(tokens=tuple(ids[:start]), reference=tuple(ids[start:end])) if start else None


def _counted(row: Mapping[str, Any], ids: Sequence[int]) -> list[bool]:
    if row.get("labels") is not None:
        return [int(label) != IGNORED for label in row["labels"]]
    masks = [row[name] for name in _MASKS if row.get(name) is not None]
    return [all(mask[index] for mask in masks) for index in range(len(ids))]


def cut_at(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return the tokens before the first of `ends`."""
    end = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[:end])


def render_samples(samples: Sequence[Sample], step: int) -> str:
    """Return the samples for a terminal: a line for each prompt, answer and reference, long ones cut in the middle."""
    lines = [f"hf-fsdp: samples at step {step}"]
    for index, sample in enumerate(samples, start=1):
        lines.append(f"  {index:>2} prompt     {_one_line(sample.prompt)}")
        lines.append(f"     answer     {_one_line(sample.answer) or '(ends at once)'}")
        if sample.reference:
            lines.append(f"     reference  {_one_line(sample.reference)}")
    return "\n".join(lines)


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    half = (_WIDTH - 5) // 2
    return text if len(text) <= _WIDTH else f"{text[:half]} ... {text[-half:]}"
