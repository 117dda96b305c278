"""The shapes of rows that are known: by which columns each is recognised, and how it becomes what TRL trains on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_fsdp.errors import DataError, Problem, nearest_names

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = ("messages", "sharegpt", "alpaca", "prompt_completion", "text")
# ShareGPT's names; TRL's own conversion renames the keys of a turn and leaves who speaks as it is.
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_LIKELY = {
    "messages": ("conversation", "dialog", "dialogue", "chat", "turns"),
    "prompt": ("instruction", "question", "input", "query", "source"),
    "completion": ("output", "response", "answer", "target", "chosen"),
    "input": ("context",),
    "output": ("response", "answer", "target"),
}


@dataclass(frozen=True, kw_only=True)
class Format:
    """A known shape of rows: the columns it must and may have, what it becomes, and how that is told."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    kind: str
    reading: str
    convert: Callable[[dict[str, Any]], list[dict[str, Any]] | None] | None = None


# -- the formats ------------------------------------------------------------------------------------------------------


def list_formats(text_field: str) -> dict[str, Format]:
    """Return every known format by its name."""
    return {
        "messages": Format(required=("messages",), kind="messages", reading="conversations"),
        "sharegpt": Format(
            required=("conversations",),
            optional=("system",),
            kind="messages",
            reading="conversations, human -> user and gpt -> assistant",
            convert=_from_sharegpt,
        ),
        "alpaca": Format(
            required=("instruction", "output"),
            optional=("input", "system", "history"),
            kind="messages",
            reading="conversations: the user gives instruction and input, the assistant answers with output",
            convert=_from_alpaca,
        ),
        "prompt_completion": Format(
            required=("prompt", "completion"), kind="prompt_completion", reading="a text to read and a text to learn"
        ),
        "text": Format(
            required=(text_field,), kind="text", reading="plain text, every token learned, the end token added"
        ),
    }


def convert_row(row: dict[str, Any], convert: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return a row of conversations, for `Dataset.map`."""
    return {"messages": convert(row)}


def _from_sharegpt(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    from trl import maybe_convert_to_chatml

    if not isinstance(row["conversations"], list):
        return None  # the check of the rows names it
    turns = [dict(turn) if isinstance(turn, dict) else {} for turn in row["conversations"]]
    turns = maybe_convert_to_chatml({"conversations": turns})["messages"]
    turns = [{"role": _ROLES.get(turn.get("role"), turn.get("role")), "content": turn.get("content")} for turn in turns]
    return [*_system_turn(row), *turns]


def _from_alpaca(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    instruction, more, answer = row["instruction"], row.get("input"), row["output"]
    asked = "\n\n".join(part for part in (instruction, more) if part and part.strip())
    if not asked:
        return None
    turns = _system_turn(row)
    for question, reply in row.get("history") or ():
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return [*turns, {"role": "user", "content": asked}, {"role": "assistant", "content": answer or ""}]


def _system_turn(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def find_extra_keys(dataset: Dataset, column: str) -> list[str]:
    """Return the keys of turns that no conversion reads, such as `weight`: a person may count on them."""
    turns = dataset[0][column]
    keys = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], dict) else ()
    return [key for key in keys if key not in ("from", "value", "role", "content")]


# -- which one --------------------------------------------------------------------------------------------------------


def recognise_format(dataset: Dataset, formats: dict[str, Format], asked: str, source: str) -> str:
    """Return the name of the one format that the columns fit, or `asked` when they have what it needs.

    Raises:
        DataError: none fits, several do, or a column of `asked` is missing.
    """
    columns = set(dataset.column_names)
    if asked != "auto":
        if asked not in formats:
            near = nearest_names(asked, formats)
            raise DataError(
                f"dataset_format={asked!r} is not one of: auto, {', '.join(formats)}",
                near=", ".join(near) or None,
                fix=f"dataset_format: {near[0] if near else 'auto'}",
            )
        missing = [column for column in formats[asked].required if column not in columns]
        if missing:
            raise DataError(
                f"dataset_format={asked} needs the column {missing[0]!r}; the dataset has: "
                f"{', '.join(dataset.column_names)}",
                fix="dataset_format: auto   or   " + _missing_advice(dataset, missing[0]),
                source=source,
            )
        return asked
    fitting = [name for name, item in formats.items() if columns >= set(item.required)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise DataError(_unknown_columns(dataset, formats, source))
    shown = ", ".join(dataset.column_names)
    raise DataError(
        f"the columns ({shown}) fit {len(fitting)} formats: {', '.join(fitting)}; a row is read in one",
        fix=f"dataset_format: {fitting[0]}   (or {' or '.join(fitting[1:])})",
        source=source,
    )


def _missing_advice(dataset: Dataset, new: str) -> str:
    likely = _likely(new, dataset.column_names)
    return f"rename_columns: [{likely or dataset.column_names[0]}={new}]"


def _likely(new: str, columns: Collection[str]) -> str | None:
    return next((column for column in _LIKELY.get(new, ()) if column in columns), None)


def _unknown_columns(dataset: Dataset, formats: dict[str, Format], source: str) -> Problem:
    found = dataset.column_names
    known = "; ".join(f"{name}: {', '.join(item.required)}" for name, item in formats.items())
    message = f"the dataset has the columns {', '.join(found)}, which is no known format ({known})"
    first = dataset[0]
    for column in found:
        turns = first[column]
        if column in _LIKELY["messages"] and isinstance(turns, list) and turns and isinstance(turns[0], dict):
            new = "conversations" if "from" in turns[0] else "messages"
            return Problem(message=message, fix=f"rename_columns: [{column}={new}]", source=source)
    if "instruction" in found and (answer := _likely("output", found)):
        more = _likely("input", found)
        renames = [f"{answer}=output", *([f"{more}=input"] if more else [])]
        return Problem(message=message, fix=f"rename_columns: [{', '.join(renames)}]", source=source)
    renames = []
    for new in ("prompt", "completion"):
        if new not in found:
            renames.append(f"{_likely(new, found) or f'YOUR_{new.upper()}_COLUMN'}={new}")
    return Problem(message=message, fix=f"rename_columns: [{', '.join(renames)}]", source=source)
