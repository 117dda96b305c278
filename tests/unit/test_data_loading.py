"""Datasets from files, folders and the hub: what is wrong is named with its file, line and repair."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp.data import load_splits, pick_split, read_examples, select_eval_examples
from hf_fsdp.errors import DataError
from tests.recipes import tiny


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def _rows(name: str) -> int:
    return len(load_splits(name)["train"])


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_a_file_of_each_kind_is_one_training_split(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data.{suffix}"
    if suffix == "parquet":
        from datasets import Dataset

        Dataset.from_list(tiny.conversations(3)).to_parquet(str(path))
    elif suffix == "json":
        path.write_text(json.dumps(tiny.conversations(3), indent=1))
    else:
        tiny.write_jsonl(path, tiny.conversations(3))
    splits = load_splits(str(path))
    assert {name: len(split) for name, split in splits.items()} == {"train": 3}
    assert splits["train"][2]["messages"][1]["content"] == "It is 4."


def test_a_folder_splits_by_file_name(tmp_path: Path) -> None:
    tiny.write_jsonl(tmp_path / "train-0001.jsonl", tiny.conversations(2))
    tiny.write_jsonl(tmp_path / "train-0002.jsonl", tiny.conversations(3))
    tiny.write_jsonl(tmp_path / "my_test.jsonl", tiny.conversations(1))
    assert {name: len(split) for name, split in load_splits(str(tmp_path)).items()} == {"test": 1, "train": 5}


def test_a_folder_of_save_to_disk_loads(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(tiny.completions(4)).save_to_disk(str(tmp_path / "saved"))
    assert _rows(str(tmp_path / "saved")) == 4


def test_a_misspelt_file_names_the_nearest_and_following_it_works(tmp_path: Path) -> None:
    tiny.write_jsonl(tmp_path / "train.jsonl", tiny.conversations(2))
    with pytest.raises(DataError, match="there is no such file or folder") as caught:
        load_splits(str(tmp_path / "trian.jsonl"))
    assert _rows(caught.value.problems[0].fix.removeprefix("dataset_name: ")) == 2


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_an_empty_file_is_refused_with_an_example(tmp_path: Path, content: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="is empty") as caught:
        load_splits(str(path))
    example = caught.value.problems[0].fix.partition("e.g. ")[2]
    path.write_text(example + "\n")
    assert _rows(str(path)) == 1


def test_an_empty_list_has_no_examples(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text("[]")
    with pytest.raises(DataError, match="has no examples"):
        load_splits(str(path))


def test_a_broken_line_is_named_and_the_repair_works(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [json.dumps(row) for row in tiny.conversations(4)]
    lines[2] = lines[2][:-9]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match="line 3 is not valid JSON") as caught:
        load_splits(str(path))
    subprocess.run(caught.value.problems[0].fix.partition(": ")[2], shell=True, check=True)
    assert path.read_text().count("\n") == 4, "a person's data is not touched"
    assert _rows(str(tmp_path / "data.repaired.jsonl")) == 3


def test_a_binary_file_is_not_repaired_by_the_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe\x00\x01" * 20)
    with pytest.raises(DataError, match="is not UTF-8 text") as caught:
        load_splits(str(path))
    assert "sed" not in str(caught.value) and "data.parquet" in caught.value.problems[0].fix
    path.write_bytes(b"\x00\x01\x02\n" * 20)
    with pytest.raises(DataError, match="is a binary file, not JSON") as caught:
        load_splits(str(path))
    assert "sed" not in str(caught.value)


def test_text_of_another_encoding_is_converted_by_the_advice(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes('{"prompt": "caf\u00e9", "completion": "b"}\n'.encode("cp1252"))
    with pytest.raises(DataError, match=r"is not UTF-8 text \(line 1\)") as caught:
        load_splits(str(path))
    subprocess.run(caught.value.problems[0].fix.partition("Windows: ")[2], shell=True, check=True)
    assert load_splits(str(tmp_path / "data.repaired.jsonl"))["train"]["prompt"][0] == "caf\u00e9"


def test_a_parquet_file_under_another_name_is_renamed_by_the_advice(tmp_path: Path) -> None:
    from datasets import Dataset

    path = tmp_path / "data.jsonl"
    Dataset.from_list(tiny.completions(2)).to_parquet(str(path))
    with pytest.raises(DataError, match="is not UTF-8 text|is a binary file") as caught:
        load_splits(str(path))
    subprocess.run(caught.value.problems[0].fix.partition("file: ")[2], shell=True, check=True)
    assert _rows(str(tmp_path / "data.parquet")) == 2


def test_a_broken_json_list_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('[\n{"prompt": "a", "completion": "b"},\n{"prompt": oops}\n]')
    with pytest.raises(DataError, match="not valid JSON at line 3"):
        load_splits(str(path))


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n["a", "b"]\n')
    with pytest.raises(DataError, match="line 2 is a list, not an object with columns"):
        load_splits(str(path))


def test_a_column_of_two_types_is_found_by_the_row_check(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows: list[dict[str, Any]] = tiny.completions(3)
    rows[1]["completion"] = {"text": "4"}
    tiny.write_jsonl(path, rows)
    with pytest.raises(DataError, match="of different kinds .one text, one list of turns.; first: row 2"):
        read_examples(load_splits(str(path))["train"], source=str(path))
    rows[1]["completion"] = "4"
    tiny.write_jsonl(path, rows)
    assert read_examples(load_splits(str(path))["train"], source=str(path)).kind == "prompt_completion"


def test_rows_wrapped_in_an_object_are_unwrapped_by_the_advice(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"data": tiny.completions(3)}))
    with pytest.raises(DataError, match="is one object whose 'data' holds the rows") as caught:
        load_splits(str(path))
    subprocess.run(caught.value.problems[0].fix.partition("a line: ")[2], shell=True, check=True, cwd=tmp_path)
    assert _rows(str(tmp_path / "data.jsonl")) == 3


def test_mixed_kinds_in_a_folder_are_refused(tmp_path: Path) -> None:
    from datasets import Dataset

    tiny.write_jsonl(tmp_path / "a.jsonl", tiny.completions(2))
    Dataset.from_list(tiny.completions(2)).to_parquet(str(tmp_path / "b.parquet"))
    with pytest.raises(DataError, match="mixes JSON and Parquet files") as caught:
        load_splits(str(tmp_path))
    assert _rows(caught.value.problems[0].fix.partition("dataset_name: ")[2]) == 2


def test_a_folder_without_data_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hi")
    with pytest.raises(DataError, match=r"holds no .json, .jsonl, .parquet file and no pictures \(found: .txt\)"):
        load_splits(str(tmp_path))


def test_another_file_kind_and_a_false_parquet_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("prompt,completion\na,b\n")
    with pytest.raises(DataError, match="is not a .json, .jsonl, .parquet file"):
        load_splits(str(tmp_path / "data.csv"))
    (tmp_path / "data.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="is not a Parquet file"):
        load_splits(str(tmp_path / "data.parquet"))


def test_a_hub_dataset_out_of_reach_says_how_to_get_it() -> None:
    with pytest.raises(DataError, match="is not in the local cache") as caught:
        load_splits("nobody/no-such-dataset")
    assert "hf download --repo-type dataset nobody/no-such-dataset" in str(caught.value)


@pytest.mark.parametrize(
    ("message", "expected"), [("is a gated dataset on the Hub", "is gated"), ("doesn't exist", "knows no such dataset")]
)
def test_hub_refusals_are_told_apart(monkeypatch: pytest.MonkeyPatch, message: str, expected: str) -> None:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise DatasetNotFoundError(message)

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match=expected) as caught:
        load_splits("a/b")
    assert "https://huggingface.co/datasets/a/b" in str(caught.value)
    assert "hf auth login" in str(caught.value)


def test_held_out_examples_come_from_a_fraction_a_file_or_a_split(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = Dataset.from_list(tiny.completions(20))
    train, held_out = select_eval_examples({"train": rows}, "train", "test", eval_fraction=0.2)
    assert (len(train), len(held_out)) == (16, 4)
    assert not set(train["prompt"]) & set(held_out["prompt"])

    path = tiny.write_jsonl(tmp_path / "eval.jsonl", tiny.completions(3))
    train, held_out = select_eval_examples({"train": rows}, "train", "test", eval_file=path)
    assert (len(train), len(held_out)) == (20, 3)

    train, held_out = select_eval_examples({"train": rows, "test": rows.select([0])}, "train", "test")
    assert (len(train), len(held_out)) == (20, 1)


def test_impossible_held_out_choices_are_refused_and_the_advice_works() -> None:
    from datasets import Dataset

    splits = {"train": Dataset.from_list(tiny.completions(20))}
    with pytest.raises(DataError, match="dataset_test_split='test' does not exist; the dataset has: train"):
        select_eval_examples(splits, "train", "test")
    with pytest.raises(DataError, match="two ways to hold examples out"):
        select_eval_examples(splits, "train", "test", eval_file="x.jsonl", eval_fraction=0.1)
    with pytest.raises(DataError, match="is the training split"):
        select_eval_examples(splits, "train", "train")
    with pytest.raises(DataError, match="eval_fraction=0.001 of 20 training examples holds out 0") as caught:
        select_eval_examples(splits, "train", "test", eval_fraction=0.001)
    fraction = float(caught.value.problems[0].fix.removeprefix("eval_fraction: "))
    assert len(select_eval_examples(splits, "train", "test", eval_fraction=fraction)[1]) == 1


def test_a_wrong_training_split_names_the_right_one() -> None:
    with pytest.raises(DataError, match="dataset_train_split='train' does not exist") as caught:
        pick_split({"train_sft": [1]}, "train", "dataset_train_split")  # type: ignore[dict-item]
    assert caught.value.problems[0].fix == "dataset_train_split: train_sft"
