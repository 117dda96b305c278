"""Rows that are asked: what the prompt is, which answers count as right, and rows that cannot be scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_fsdp.errors import Problem

Row = Mapping[str, Any]
IMAGE_MARK = "<image>"
_SHOWN = 5


def has_images(row: Row) -> bool:
    """Return whether the row has any picture."""
    return bool(row.get("images"))


def row_id(row: Row, index: int) -> str:
    """Return the data's own id of a row, else its position."""
    found = row.get("id")
    return str(index) if found is None else str(found)


def references_of(row: Row) -> list[str]:
    """Return the answers that count as right: the row's ``answers``, else what the assistant says last."""
    answers = row.get("answers")
    if isinstance(answers, str):
        return [answers]
    if answers:
        return [str(answer) for answer in answers]
    messages = row.get("messages") or []
    if messages and messages[-1]["role"] == "assistant":
        return [_text_of(messages[-1]["content"])]
    return []


def prompt_text(row: Row) -> str:
    """Return what the model is asked, for a person: no template; roles only where there are several turns."""
    messages = list(row.get("messages") or [])
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    texts = [_text_of(message["content"]) for message in messages]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True))


def check_references(rows: Sequence[Row], metrics: Sequence[str], *, first_index: int = 0) -> list[Problem]:
    """Return a problem when rows have nothing that an answer could be compared with.

    Args:
        rows: those that are asked.
        metrics: names of what is computed; without any nothing needs a reference.
        first_index: the position of ``rows[0]`` in the dataset, for the message.
    """
    if not metrics:
        return []
    without = [first_index + index for index, row in enumerate(rows) if not references_of(row)]
    if not without:
        return []
    shown = ", ".join(map(str, without[:_SHOWN])) + (", ..." if len(without) > _SHOWN else "")
    return [
        Problem(
            message=f"metrics={tuple(metrics)} need a right answer, and {len(without)} of {len(rows)} rows have none: "
            f"row {shown}",
            fix="give rows `answers` (a list of accepted answers) or an assistant turn at the end, leave those rows "
            "out, or ask without scores: metrics=()",
        )
    ]


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content.strip()
    parts = [IMAGE_MARK if part["type"] == "image" else str(part.get("text") or "") for part in content]
    return " ".join(part.strip() for part in parts if part.strip())
