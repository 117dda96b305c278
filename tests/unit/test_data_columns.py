"""Columns and rows are checked before training, all problems at once."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from hf_fsdp.data import read_examples, rename_columns
from hf_fsdp.errors import DataError
from tests.recipes import tiny


def _check(rows: list[dict[str, Any]]) -> str:
    return read_examples(Dataset.from_list(rows), source="data.jsonl").kind


def test_both_formats_are_recognised() -> None:
    assert _check(tiny.conversations(2)) == "messages"
    assert _check(tiny.completions(2)) == "prompt_completion"
    turns = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in tiny.conversations(2)]
    assert _check(turns) == "prompt_completion"


def test_all_problems_of_the_rows_are_told_at_once_with_the_first_row() -> None:
    rows = tiny.conversations(5)
    rows[1]["messages"] = []
    rows[2]["messages"] = rows[2]["messages"][:1]
    rows[4]["messages"] = [{"role": "human", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    with pytest.raises(DataError, match="3 problems") as caught:
        _check(rows)
    text = str(caught.value)
    assert "1 of 5 rows have no 'messages'; first: row 2" in text
    assert "1 of 5 rows have no assistant message with text, so nothing in them can be learned; first: row 3" in text
    assert "1 of 5 rows have a role other than system, user, assistant, tool; first: row 5" in text
    assert text.count("data.jsonl") == 3
    assert _check([rows[0], rows[3]]) == "messages"  # the advice: remove these rows


def test_content_that_is_not_text_is_refused() -> None:
    rows = [{"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}]
    with pytest.raises(DataError, match="have a turn whose 'content' is not text"):
        _check(rows)


def test_an_assistant_that_only_calls_a_tool_counts_as_an_answer() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert _check([{"messages": [call]}]) == "messages"


def test_missing_completions_are_counted() -> None:
    rows: list[dict[str, Any]] = tiny.completions(4)
    rows[1]["completion"] = None
    rows[3]["completion"] = ""
    with pytest.raises(DataError, match="2 of 4 rows have no 'prompt' or no 'completion'; first: row 2, row 4"):
        _check(rows)


def test_a_bad_rename_lists_the_columns() -> None:
    with pytest.raises(DataError, match="is not OLD=NEW with OLD one of: prompt, completion"):
        rename_columns(Dataset.from_list(tiny.completions(1)), ["question=prompt2"])


def test_a_rename_that_is_done_already_changes_nothing() -> None:
    dataset = Dataset.from_list(tiny.completions(1))
    assert rename_columns(dataset, ["instruction=prompt"]).column_names == dataset.column_names


def test_a_wrong_rename_never_advises_a_column_its_own_name() -> None:
    dataset = Dataset.from_list(tiny.conversations(1))
    with pytest.raises(DataError, match="rename_columns='chat' is not OLD=NEW") as caught:
        rename_columns(dataset, ["chat"])
    assert caught.value.problems[0].fix == "remove rename_columns: the columns have the right names"
    dataset = Dataset.from_list([{"instruction": "a", "output": "b"}])
    with pytest.raises(DataError, match="is not OLD=NEW") as caught:
        rename_columns(dataset, ["instructon=prompt"])
    fix = caught.value.problems[0].fix.removeprefix("rename_columns: [").removesuffix("]")
    assert rename_columns(dataset, [fix]).column_names == ["prompt", "output"]


def test_renaming_a_column_to_its_own_name_changes_nothing() -> None:
    dataset = Dataset.from_list(tiny.conversations(1))
    assert rename_columns(dataset, ["messages=messages"]).column_names == ["messages"]
