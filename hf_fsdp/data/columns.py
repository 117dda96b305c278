"""Are the columns and the rows what the loss needs? Every problem of a dataset at once, with its first row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hf_fsdp.errors import DataError, Problem, nearest_names

if TYPE_CHECKING:
    from datasets import Dataset

MAX_ROWS_CHECKED = 20_000
_ROLES = ("system", "user", "assistant", "tool")


def rename_columns(dataset: Dataset, renames: Sequence[str]) -> Dataset:
    """Rename columns given as ``old=new``.

    Raises:
        DataError: a rename that is not ``old=new``, or a column that does not exist or already does.
    """
    for rename in renames:
        old, _, new = rename.partition("=")
        if old == new and old in dataset.column_names:
            continue
        if old and old not in dataset.column_names and new in dataset.column_names:
            continue  # done already, as in a held-out file that has the right names
        if not old or not new or old not in dataset.column_names:
            raise DataError(
                f"rename_columns={rename!r} is not OLD=NEW with OLD one of: {', '.join(dataset.column_names)}",
                fix=_rename_advice(dataset, old, new),
            )
        if new in dataset.column_names:
            # Replaced on purpose: a person who renames onto a column wants the new one there.
            dataset = dataset.remove_columns(new)
        dataset = dataset.rename_column(old, new)
    return dataset


def _rename_advice(dataset: Dataset, old: str, new: str) -> str:
    """Return a rename that works; a column never gets the name it has."""
    columns = dataset.column_names
    near = [column for column in nearest_names(old, columns) if column != new]
    if near and new:
        return f"rename_columns: [{near[0]}={new}]"
    if "messages" in columns or {"prompt", "completion"} <= set(columns):
        return "remove rename_columns: the columns have the right names"
    return f"rename_columns: [{columns[0]}={new or 'messages'}]"


def check_rows(dataset: Dataset, kind: str, *, source: str, text: str = "text") -> None:
    """Check the rows (up to 20,000, evenly spread) of a dataset whose columns are known.

    Args:
        dataset: one split, in the columns of `kind`.
        kind: ``messages``, ``prompt_completion`` or ``text``.
        source: file or hub id, named in errors.
        text: the text column of ``text``.

    Raises:
        DataError: all problems found.
    """
    checks = {"messages": _MESSAGE_CHECKS, "prompt_completion": _PROMPT_CHECKS, "text": _text_checks(text)}[kind]
    problems = _check_rows(dataset, checks, source)
    if problems:
        raise DataError(problems)


RowCheck = tuple[str, str, Callable[[dict[str, Any]], bool]]


def _check_rows(dataset: Dataset, checks: Sequence[RowCheck], source: str) -> list[Problem]:
    step = max(1, -(-len(dataset) // MAX_ROWS_CHECKED))
    bad: dict[str, list[int]] = {}
    num_checked = 0
    for index, row in _spread(dataset, step):
        num_checked += 1
        # The first check that a row fails is its problem: those after it would only repeat it.
        failed = next((message for message, _, is_bad in checks if is_bad(row)), None)
        if failed is not None:
            bad.setdefault(failed, []).append(index + 1)
    fixes = {message: fix for message, fix, _ in checks}
    checked = f"{num_checked} rows" + (f" (every {step}th of {len(dataset)})" if step > 1 else "")
    return [
        Problem(
            message=f"{len(rows)} of {checked} {message}; first: row {', row '.join(str(row) for row in rows[:3])}",
            fix=fixes[message],
            source=source,
        )
        for message, rows in bad.items()
    ]


def _spread(dataset: Dataset, step: int) -> Iterable[tuple[int, dict[str, Any]]]:
    picked = dataset if step == 1 else dataset.select(range(0, len(dataset), step))
    for number, row in enumerate(picked):
        yield number * step, row


def _turns_are_broken(turns: Any) -> bool:
    return not isinstance(turns, list) or any(
        not isinstance(turn, dict) or not isinstance(turn.get("role"), str) for turn in turns
    )


def _content_is_not_text(turns: list[dict[str, Any]]) -> bool:
    return any(not isinstance(turn.get("content"), str) and not turn.get("tool_calls") for turn in turns)


def _has_unknown_role(turns: list[dict[str, Any]]) -> bool:
    return any(turn["role"] not in _ROLES for turn in turns)


def _has_no_answer(turns: list[dict[str, Any]]) -> bool:
    return not any(
        turn["role"] == "assistant" and ((turn.get("content") or "").strip() or turn.get("tool_calls"))
        for turn in turns
    )


_MESSAGE_CHECKS: tuple[RowCheck, ...] = (
    ("have no 'messages'", "remove these rows, or fill them", lambda row: not row["messages"]),
    (
        "have 'messages' that are not a list of {role, content}",
        'write each turn as {"role": "user", "content": "..."}',
        lambda row: _turns_are_broken(row["messages"]),
    ),
    (
        "have a turn whose 'content' is not text",
        "write 'content' as a string; images need the vision recipe",
        lambda row: _content_is_not_text(row["messages"]),
    ),
    (
        f"have a role other than {', '.join(_ROLES)}",
        "rename the roles, e.g. human -> user, gpt -> assistant",
        lambda row: _has_unknown_role(row["messages"]),
    ),
    (
        "have no assistant message with text, so nothing in them can be learned",
        "remove these rows, or end them with an assistant message",
        lambda row: _has_no_answer(row["messages"]),
    ),
)
_PROMPT_CHECKS: tuple[RowCheck, ...] = (
    (
        "have no 'prompt' or no 'completion'",
        "fill both in every row, or remove these rows",
        lambda row: row["prompt"] is None or not row["completion"],
    ),
    (
        "have a 'prompt' and a 'completion' of different kinds (one text, one list of turns)",
        "write both as text, or both as lists of {role, content}",
        lambda row: isinstance(row["prompt"], str) != isinstance(row["completion"], str),
    ),
    (
        "have a 'prompt' or 'completion' that is neither text nor a list of {role, content}",
        "write both as text, or both as lists of {role, content}",
        lambda row: (
            not isinstance(row["prompt"], str)
            and (_turns_are_broken(row["prompt"]) or _turns_are_broken(row["completion"]))
        ),
    ),
)


def _text_checks(column: str) -> tuple[RowCheck, ...]:
    return (
        (
            f"have no text in {column!r}",
            "remove these rows, or fill them",
            lambda row: row[column] is None or (isinstance(row[column], str) and not row[column].strip()),
        ),
        (
            f"have a {column!r} that is not text",
            f"write {column!r} as a string; conversations go into a column 'messages'",
            lambda row: not isinstance(row[column], str),
        ),
    )
