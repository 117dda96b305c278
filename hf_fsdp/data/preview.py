"""Show which tokens of a sample count in the loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

IGNORED = -100
_MAX_CHARS = 600


def format_examples(examples: Iterable[dict[str, Any]], tokenizer: Any) -> str:
    """Return samples as text, each run of tokens marked `loss` or `-`.

    Call it with rows of the dataset that the trainer trains on, so that what is shown is what is trained.

    Args:
        examples: rows with ``input_ids`` and ``labels`` (−100 where a token does not count).
        tokenizer: decodes the tokens.
    """
    return "\n".join(_format_example(number, row, tokenizer) for number, row in enumerate(examples, start=1))


def _format_example(number: int, row: dict[str, Any], tokenizer: Any) -> str:
    ids: Sequence[int] = row["input_ids"]
    labels: Sequence[int] = row.get("labels", ids)
    num_learned = sum(label != IGNORED for label in labels)
    lines = [f"training example {number}: {len(ids)} tokens, {num_learned} count in the loss"]
    for learned, run in groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] != IGNORED):
        text = _shorten(tokenizer.decode([token for token, _ in run], skip_special_tokens=False))
        # A newline is shown by its sign too: whether the one after an answer counts is what people get wrong.
        body = text.replace("\n", "\\n\n")
        for index, line in enumerate(body.removesuffix("\n").split("\n")):
            lines.append(f"  {('loss' if learned else '-') if index == 0 else '':<5}| {line}")
    return "\n".join(lines)


def _shorten(text: str) -> str:
    if len(text) <= _MAX_CHARS:
        return text
    half = _MAX_CHARS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
