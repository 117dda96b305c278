"""The preview of samples with pictures: which row and pictures it is, and image tokens counted, not repeated."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset
from make_digits import build_processor, write_digits

from hf_fsdp.data import ImageTextCollator, format_collated_examples, load_splits, read_image_splits
from hf_fsdp.errors import DataError


@pytest.fixture
def splits(tmp_path: Path) -> dict[str, Dataset]:
    train_file, _ = write_digits(tmp_path)
    return {"train": load_splits(str(train_file))["train"].select(range(20))}


def test_a_row_is_named_and_its_image_tokens_are_counted(tmp_path: Path, splits: dict[str, Dataset]) -> None:
    examples, _ = read_image_splits(splits, "train", None, source=str(tmp_path / "train.json"))
    processor = build_processor()
    first = examples.dataset[0]
    text = format_collated_examples(examples.dataset, ImageTextCollator(processor), processor.tokenizer, 1)
    assert text.splitlines()[0].startswith(
        f"training example 1 ({first['id']}, {first['images'][0]['path']}): 27 tokens"
    )
    assert "  -    | USER: <image> x 17 Which digit is written here ? ASSISTANT:" in text
    assert text.count("<image>") == 1


def test_rows_that_are_held_out_are_named_as_the_file_has_them(tmp_path: Path, splits: dict[str, Dataset]) -> None:
    rows = splits["train"].to_list()
    rows[6]["image"], rows[11]["conversations"] = "images/gone.png", rows[11]["conversations"][:1]
    with pytest.raises(DataError) as refused:
        read_image_splits(
            {"train": Dataset.from_list(rows)}, "train", None, source=str(tmp_path / "train.json"), eval_fraction=0.5
        )
    text = str(refused.value)  # both kinds at once
    assert f"row 7 (id {rows[6]['id']})" in text and "gone.png" in text
    assert f"row 12 (id {rows[11]['id']})" in text and "have no answer" in text


def test_a_fraction_is_held_out_whole_and_once(tmp_path: Path, splits: dict[str, Dataset]) -> None:
    source = str(tmp_path / "train.json")
    examples, held_out = read_image_splits(splits, "train", None, source=source, eval_fraction=0.25, seed=3)
    assert held_out is not None
    names = [set(part.dataset["id"]) for part in (examples, held_out)]
    assert [len(part) for part in names] == [15, 5] and not names[0] & names[1]
    assert examples.num_images + examples.num_text_only == 15
