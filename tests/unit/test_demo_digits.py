"""The vision demo: its data, its untrained model, and the claims that decide its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from make_digits import WORDS, build_processor, tower_config, write_digits, write_model
from PIL import Image
from run_vlm import accuracies, tower_is_unchanged, unmet_claims
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from train_tower import shifted
from transformers import AutoModelForImageTextToText, CLIPVisionModel

GOOD: dict[str, Any] = {
    "accuracy": 0.97,
    "training_seconds": 60.0,
    "reload": {"num_rows": 297, "num_equal": 297, "accuracy": 0.97},
    "tower_accuracy": 0.96,
    "two_parts": {"saved": 0.96, "resumed": 0.96, "end": 0.96, "tower_unchanged": True},
}


def test_every_digit_is_asked_once_and_training_never_sees_a_test_digit(tmp_path: Path) -> None:
    files = [json.loads(path.read_text()) for path in write_digits(tmp_path)]
    pictures = [[row["image"] for row in rows if "image" in row] for rows in files]
    assert [len(names) for names in pictures] == [1500, 297] and not set(pictures[0]) & set(pictures[1])
    digits = load_digits()
    for row in files[1][:20]:
        number = int(row["id"].removeprefix("digit-"))
        assert row["conversations"][1]["value"] == WORDS[digits.target[number]]
        picture = Image.open(tmp_path / row["image"])
        assert picture.size == (8, 8) and picture.getpixel((3, 4)) == int(digits.images[number][4][3] * 255 / 16)
    assert all(("<image>" in row["conversations"][0]["value"]) == ("image" in row) for row in files[0])
    assert sum("image" not in row for row in files[0]) > 100


def test_every_word_of_the_data_is_in_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = build_processor().tokenizer
    for path in write_digits(tmp_path):
        words = {word for row in json.loads(path.read_text()) for turn in row["conversations"] for word in
                 turn["value"].replace("<image>", " ").split()}  # fmt: skip
        assert tokenizer.unk_token_id not in tokenizer.convert_tokens_to_ids(sorted(words))


def test_a_model_begins_with_the_tower_it_is_given(tmp_path: Path) -> None:
    torch.manual_seed(7)
    CLIPVisionModel(tower_config()).save_pretrained(tmp_path / "tower")
    write_model(tmp_path / "model", tmp_path / "tower")
    assert tower_is_unchanged(tmp_path / "tower", tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    assert model.config.image_token_index == build_processor().tokenizer.convert_tokens_to_ids("<image>")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("layers.1.mlp.fc2.bias") and "vision" in name)
    weights[name][0] += 1
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    assert not tower_is_unchanged(tmp_path / "tower", tmp_path / "model")


def test_shifted_pictures_keep_their_values_and_labels() -> None:
    torch.manual_seed(0)
    pictures = [torch.arange(3 * 32 * 32.0).view(3, 32, 32) for _ in range(8)]
    batch = shifted({"pixel_values": torch.stack(pictures), "labels": list(range(8))})
    assert batch["labels"].tolist() == list(range(8))
    assert any(not torch.equal(one, pictures[0]) for one in batch["pixel_values"])
    assert all(torch.equal(one.sort(dim=-1).values.sum(), pictures[0].sum()) for one in batch["pixel_values"])


def test_accuracies_are_those_of_the_evaluations() -> None:
    records = [{"step": 3, "loss": 1.0}, {"step": 3, "eval_exact_match": 0.5}, {"step": 6, "eval_exact_match": 1}]
    assert accuracies(records) == {3: 0.5, 6: 1}


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"accuracy": 0.94}, "95% of the test digits"),
        ({"training_seconds": 200.0}, "training in 180 s"),
        ({"reload": {"num_rows": 297, "num_equal": 296}}, "the export answers as the sharded run did"),
        ({"two_parts": {**GOOD["two_parts"], "resumed": 0.95}}, "the resumed run answers as the saved one"),
        ({"two_parts": {**GOOD["two_parts"], "end": 0.89}}, "90% with a frozen tower"),
        ({"two_parts": {**GOOD["two_parts"], "tower_unchanged": False}}, "a frozen tower keeps its bits"),
    ],
)
def test_the_demo_fails_by_the_claim_that_does_not_hold(change: dict[str, Any], claim: str) -> None:
    assert unmet_claims(GOOD) == []
    assert unmet_claims({**GOOD, **change}) == [claim]
