"""Examples as TRL trains on them: their format recognised, converted, checked, and told in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_fsdp.data.columns import check_rows, rename_columns
from hf_fsdp.data.formats import FORMATS, convert_row, find_extra_keys, list_formats, recognise_format
from hf_fsdp.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

# Read by TRL beside the text itself; every other column is left out, because TRL takes some names for a format.
_KEPT = ("tools", "chat_template_kwargs")


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Checked examples in the columns that TRL trains on.

    Args:
        dataset: ``messages``, ``prompt`` and ``completion``, or the text column, with ``tools`` where there are any.
        kind: ``messages``, ``prompt_completion`` or ``text``.
        format: the name under which the columns were recognised, as `dataset_format` takes it.
        is_conversational: whether the rows are turns, which a chat template renders.
        line: what was recognised and how it is read, for a person.
    """

    dataset: Dataset
    kind: str
    format: str
    is_conversational: bool
    line: str


def read_examples(
    dataset: Dataset,
    *,
    source: str,
    renames: Sequence[str] = (),
    format: str = "auto",
    text_field: str = "text",
) -> Examples:
    """Recognise the format of `dataset` by its columns, convert it to what TRL trains on, and check the rows.

    Args:
        dataset: one split, as loaded.
        source: file or hub id, named in errors.
        renames: ``OLD=NEW`` for columns to rename first.
        format: one of `FORMATS` where the columns fit more than one; ``auto`` recognises it.
        text_field: the name of the text column.

    Raises:
        DataError: columns of no format or of several, or rows that cannot be trained on; all problems found.
    """
    dataset = rename_columns(dataset, renames)
    formats = list_formats(text_field)
    name = recognise_format(dataset, formats, format, source)
    chosen = formats[name]
    left_out = [c for c in dataset.column_names if c not in (*chosen.required, *chosen.optional, *_KEPT)]
    found = [c for c in (*chosen.required, *chosen.optional) if c in dataset.column_names]
    reading, kind = chosen.reading, chosen.kind
    if chosen.convert is not None:
        extra = find_extra_keys(dataset, chosen.required[0])
        reading += f" (keys of turns not read: {', '.join(extra)})" if extra else ""
        kept = [c for c in _KEPT if c in dataset.column_names]
        remove = [c for c in dataset.column_names if c not in kept]
        # A fresh column: Arrow would otherwise hold every turn to the keys of the old one.
        dataset = dataset.map(
            convert_row, fn_kwargs={"convert": chosen.convert}, remove_columns=remove, desc=f"Reading {name}"
        )
    else:
        dataset = dataset.select_columns([c for c in dataset.column_names if c not in left_out])
    check_rows(dataset, kind, source=source if chosen.convert is None else f"{source}, read as {name}", text=text_field)
    conversational = kind == "messages" or (kind == "prompt_completion" and isinstance(dataset[0]["prompt"], list))
    if conversational and kind == "prompt_completion":
        reading = "turns to read and turns to learn"
    line = f"{name} columns ({', '.join(found)}) read as {reading}"
    line += f"; left out: {', '.join(left_out)}" if left_out else ""
    return Examples(dataset=dataset, kind=kind, format=name, is_conversational=conversational, line=line)


def read_train_and_held_out(
    train: Dataset,
    held_out: Dataset | None,
    *,
    source: str,
    held_out_source: str | None = None,
    renames: Sequence[str] = (),
    format: str = "auto",
    text_field: str = "text",
) -> tuple[Examples, Examples | None]:
    """Read both as `read_examples` does; a held-out file may have another format of the same kind.

    Args:
        train: training examples, as loaded.
        held_out: held-out examples, or None.
        source: where the training examples come from.
        held_out_source: the file of the held-out ones, where it is another.
        renames: ``OLD=NEW`` for columns to rename first, in both.
        format: as for `read_examples`; a held-out file that lacks its columns is recognised by itself.
        text_field: the name of the text column.

    Raises:
        DataError: as `read_examples`, or held-out examples whose loss would count other tokens.
    """
    read = read_examples(train, source=source, renames=renames, format=format, text_field=text_field)
    if held_out is None:
        return read, None
    if held_out_source is not None and format in FORMATS:
        columns = rename_columns(held_out, renames).column_names
        if not set(list_formats(text_field)[format].required) <= set(columns):
            format = "auto"
    other = read_examples(
        held_out, source=held_out_source or source, renames=renames, format=format, text_field=text_field
    )
    _check_same_kind(read, other, held_out_source or source)
    return read, other


def _check_same_kind(train: Examples, held_out: Examples, source: str) -> None:
    if train.kind == held_out.kind and train.is_conversational == held_out.is_conversational:
        return
    raise DataError(
        f"the held-out examples are {_kind_in_words(held_out)} and the training examples {_kind_in_words(train)}: "
        "their losses count different tokens and cannot be compared",
        fix="eval_fraction: 0.05   (in place of eval_file)   or   write the held-out file in the format of the "
        "training file",
        source=source,
    )


def _kind_in_words(examples: Examples) -> str:
    turns = "conversational " if examples.is_conversational and examples.kind == "prompt_completion" else ""
    return f"{turns}{examples.kind} ({examples.format} columns)"
