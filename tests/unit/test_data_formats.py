"""Formats are recognised by their columns and become what TRL trains on; what fits none or several is an error."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from hf_fsdp.data import FORMATS, Examples, read_examples, read_train_and_held_out, rename_columns
from hf_fsdp.errors import DataError
from tests.recipes import tiny

SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello!"},
        {"from": "tool", "value": "42"},
        {"from": "gpt", "value": "It is 42."},
    ]
}
ALPACA = [
    {"instruction": "Add.", "input": "1 and 1", "output": "2"},
    {"instruction": "Say hello.", "input": "", "output": "Hello!"},
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": tiny.conversations(2),
    "sharegpt": [SHAREGPT],
    "alpaca": ALPACA,
    "prompt_completion": tiny.completions(2),
    "text": [{"text": "Once upon a time."}, {"text": "The end."}],
}


def _read(rows: list[dict[str, Any]], **options: Any) -> Examples:
    return read_examples(Dataset.from_list(rows), source="data.jsonl", **options)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_recognised_and_told(name: str) -> None:
    read = _read([{**row, "id": str(index)} for index, row in enumerate(ROWS[name])])
    assert read.format == name
    assert read.kind == (name if name in ("prompt_completion", "text") else "messages")
    assert read.line.startswith(f"{name} columns (") and read.line.endswith("; left out: id")
    assert "id" not in read.dataset.column_names


def test_sharegpt_turns_become_messages_in_their_roles() -> None:
    assert _read([SHAREGPT]).dataset[0] == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "tool", "content": "42"},
            {"role": "assistant", "content": "It is 42."},
        ]
    }


def test_role_and_content_in_a_column_conversations_are_read_too() -> None:
    rows = tiny.conversations(2)
    read = _read([{"conversations": row["messages"]} for row in rows])
    assert read.kind == "messages" and read.dataset[1] == rows[1]


def test_a_system_column_opens_the_conversation() -> None:
    assert _read([{**SHAREGPT, "conversations": SHAREGPT["conversations"][1:], "system": "Be kind."}]).dataset[0][
        "messages"
    ][0] == {"role": "system", "content": "Be kind."}
    assert _read([{**ALPACA[0], "system": "Be kind."}]).dataset[0]["messages"][0]["content"] == "Be kind."


def test_keys_of_turns_that_nobody_reads_are_named() -> None:
    turns = [{"from": "human", "value": "Hi", "weight": 0}, {"from": "gpt", "value": "Hello", "weight": 1}]
    assert "(keys of turns not read: weight)" in _read([{"conversations": turns}]).line


def test_alpaca_rows_become_conversations() -> None:
    first, second = _read(ALPACA).dataset["messages"]
    assert first == [{"role": "user", "content": "Add.\n\n1 and 1"}, {"role": "assistant", "content": "2"}]
    assert second[0] == {"role": "user", "content": "Say hello."}


def test_alpaca_history_comes_first() -> None:
    turns = _read([{**ALPACA[1], "history": [["Hi", "Yes?"]]}]).dataset[0]["messages"]
    assert [turn["content"] for turn in turns] == ["Hi", "Yes?", "Say hello.", "Hello!"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2


def test_alpaca_without_input_column_and_renamed_to_completions() -> None:
    rows = [{"instruction": "Say hello.", "output": "Hello!"}]
    assert _read(rows).dataset[0]["messages"][1]["content"] == "Hello!"
    assert _read(rows, renames=["instruction=prompt", "output=completion"]).kind == "prompt_completion"


def test_conversational_completions_are_told_apart() -> None:
    rows = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in tiny.conversations(2)]
    read = _read(rows)
    assert read.kind == "prompt_completion" and read.is_conversational and "turns to learn" in read.line
    assert not _read(tiny.completions(1)).is_conversational


def test_a_column_that_trl_would_take_for_a_format_is_left_out() -> None:
    read = _read([{**row, "prompt": "What?", "prompt_id": "1"} for row in tiny.conversations(2)])
    assert read.kind == "messages" and read.dataset.column_names == ["messages"]
    assert "left out: prompt, prompt_id" in read.line


def test_tools_stay_beside_the_conversation() -> None:
    assert set(_read([{**SHAREGPT, "tools": "[]"}]).dataset.column_names) == {"messages", "tools"}


def test_a_text_column_of_another_name() -> None:
    read = _read([{"body": "Once upon a time.", "text": "unused"}], text_field="body")
    assert read.kind == "text" and read.dataset.column_names == ["body"]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({**ALPACA[0], "text": "Below is an instruction"}, "fit 2 formats: alpaca, text"),
        ({**tiny.conversations(1)[0], **tiny.completions(1)[0]}, "fit 2 formats: messages, prompt_completion"),
    ],
)
def test_columns_that_fit_several_formats_are_refused_and_the_advice_works(
    columns: dict[str, Any], expected: str
) -> None:
    with pytest.raises(DataError, match=expected) as caught:
        _read([columns])
    name = caught.value.problems[0].fix.removeprefix("dataset_format: ").split()[0]
    assert _read([columns], format=name).format == name


@pytest.mark.parametrize(
    "row",
    [
        {"question": "a", "answer": "b", "id": 1},
        {"instruction": "Add.", "context": "1 and 1", "response": "2"},
        {"dialog": tiny.conversations(1)[0]["messages"]},
        {"conversation": SHAREGPT["conversations"]},
    ],
)
def test_unknown_columns_say_what_was_found_and_the_rename_works(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=f"has the columns {', '.join(row)}, which is no known format") as caught:
        _read([row])
    fix = caught.value.problems[0].fix
    renames = fix.removeprefix("rename_columns: [").removesuffix("]").split(", ")
    read = _read([row], renames=renames)
    if "context" in row:
        assert read.dataset[0]["messages"][0]["content"] == "Add.\n\n1 and 1"


def test_unknown_columns_without_a_guess_name_what_to_fill_in() -> None:
    with pytest.raises(DataError, match="which is no known format") as caught:
        _read([{"a": "x"}])
    assert (
        caught.value.problems[0].fix == "rename_columns: [YOUR_PROMPT_COLUMN=prompt, YOUR_COMPLETION_COLUMN=completion]"
    )


def test_a_format_that_the_columns_lack_is_refused_and_the_advice_works() -> None:
    rows = [{"instruction": "Say hello.", "response": "Hello!"}]
    with pytest.raises(DataError, match="dataset_format=alpaca needs the column 'output'") as caught:
        _read(rows, format="alpaca")
    rename = caught.value.problems[0].fix.rpartition("[")[2].removesuffix("]")
    assert _read(rows, format="alpaca", renames=[rename]).kind == "messages"


def test_an_unknown_format_name_gives_the_near_one() -> None:
    with pytest.raises(DataError, match="dataset_format='share_gpt' is not one of: auto, messages") as caught:
        _read([SHAREGPT], format="share_gpt")
    assert caught.value.problems[0].fix == "dataset_format: sharegpt"


def test_bad_rows_are_found_after_the_conversion_with_their_number() -> None:
    rows = [SHAREGPT, {"conversations": [{"from": "human", "value": "Hi"}]}, {"conversations": None}]
    with pytest.raises(DataError, match="2 problems") as caught:
        _read(rows)
    text = str(caught.value)
    assert "have no assistant message with text, so nothing in them can be learned; first: row 2" in text
    assert "have no 'messages'; first: row 3" in text and "data.jsonl, read as sharegpt" in text
    assert _read(rows[:1]).kind == "messages"  # the advice


def test_an_unknown_speaker_is_an_unknown_role() -> None:
    with pytest.raises(DataError, match="have a role other than system, user, assistant, tool"):
        _read([{"conversations": [{"from": "narrator", "value": "Once"}, {"from": "gpt", "value": "Hello"}]}])


def test_an_alpaca_row_without_answer_is_refused() -> None:
    with pytest.raises(DataError, match="1 of 2 rows have no assistant message with text.*first: row 2"):
        _read([ALPACA[0], {**ALPACA[1], "output": ""}])


def test_empty_texts_and_texts_that_are_none_are_counted() -> None:
    with pytest.raises(DataError, match="2 of 3 rows have no text in 'text'; first: row 2, row 3"):
        _read([{"text": "Once"}, {"text": " "}, {"text": None}])
    with pytest.raises(DataError, match="have a 'text' that is not text"):
        _read([{"text": 1}])


def _both(train: list[dict[str, Any]], held_out: list[dict[str, Any]], **options: Any) -> tuple[Examples, Any]:
    return read_train_and_held_out(
        Dataset.from_list(train), Dataset.from_list(held_out), source="a.jsonl", held_out_source="b.jsonl", **options
    )


def test_a_held_out_file_of_another_format_and_the_same_kind_is_read() -> None:
    read, held_out = _both(ALPACA, [SHAREGPT])
    assert (read.format, held_out.format) == ("alpaca", "sharegpt")
    assert read.kind == held_out.kind == "messages"
    assert _both([{**ALPACA[0], "text": "x"}], [SHAREGPT], format="alpaca")[1].format == "sharegpt"


def test_a_held_out_file_of_another_kind_is_refused_and_the_advice_works() -> None:
    with pytest.raises(DataError, match=r"held-out examples are text \(text columns\) and the training examples mess"):
        _both(ALPACA, ROWS["text"])
    parts = Dataset.from_list(ALPACA).train_test_split(test_size=1, seed=0)  # the advice: a fraction of the same file
    assert read_train_and_held_out(parts["train"], parts["test"], source="a.jsonl")[1] is not None
    turns = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in tiny.conversations(2)]
    with pytest.raises(DataError, match="held-out examples are conversational prompt_completion"):
        _both(tiny.completions(2), turns)


def test_renames_reach_the_held_out_file_where_it_needs_them() -> None:
    rows = [{"question": "a", "answer": "b"}]
    renames = ["question=prompt", "answer=completion"]
    read, held_out = _both(rows, tiny.completions(1), renames=renames)
    assert read.kind == held_out.kind == "prompt_completion"
    assert rename_columns(Dataset.from_list(rows), renames).column_names == ["prompt", "completion"]
