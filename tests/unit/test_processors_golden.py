"""Processors without torchvision against the official ones with it: golden tensors of `tests/golden/processors`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.processing_utils import ProcessorMixin

from hf_fsdp.data.processors import load_processor
from tests.golden.processors import cases

FAMILIES_AND_CASES = [(family, name) for family in cases.FAMILIES for name in cases.CASES]
# What transformers' two forms of an image processor, PIL and torchvision, may differ by where one pixel is rounded to
# another step of 1/255 (1/127.5 or 1/68 after normalisation), and where a picture is enlarged to several tiles.
ROUNDING, ENLARGED = 0.016, 0.12
# Without it transformers marks the wrong tokens of conversations with pictures; the golden data has the right ones.
MARKS_ANSWERS = hasattr(ProcessorMixin, "_adjust_assistant_masks_indices")


def source_of(family: str) -> Path:
    return cases.HERE / family / "source"


def compare(family: str, name: str, batch: Any) -> None:
    expected, facts = load_file(cases.HERE / family / "expected.safetensors"), cases.read_expected(family)[name]
    kept, found = cases.summarise(cases.as_tensors(batch))
    names = {key.split(".", 1)[1] for key in expected if key.startswith(f"{name}.")}
    assert set(kept) == {key for key in names if not key.endswith(".torchvision")}
    for key, value in kept.items():
        wanted = expected[f"{name}.{key}"]
        if key == "assistant_masks" and not MARKS_ANSWERS:
            continue
        if key not in cases.PIXELS:
            assert torch.equal(value, wanted), f"{key} differs"
            continue
        assert found[key]["shape"] == facts[key]["shape"]
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-6)
        for total in ("sum", "sum_of_squares"):
            assert found[key][total] == pytest.approx(facts[key][total], rel=1e-6, abs=1e-3)
        gap = (value[::4] - expected[f"{name}.{key}.torchvision"]).abs().max().item()
        assert gap <= facts[key]["max_gap_to_torchvision"] + 1e-6


@pytest.mark.parametrize(("family", "name"), FAMILIES_AND_CASES)
def test_a_batch_is_the_official_one(family: str, name: str) -> None:
    compare(family, name, cases.CASES[name](family, load_processor(str(source_of(family)))))


@pytest.mark.parametrize("family", cases.LIMITS)
def test_a_batch_with_pixel_limits_is_the_official_one(family: str) -> None:
    least, most = cases.LIMITS[family]
    limited = load_processor(str(source_of(family)), min_pixels=least, max_pixels=most)
    compare(family, "limits", cases.mixed(family, limited))


@pytest.mark.skipif(not MARKS_ANSWERS, reason="this transformers marks the wrong tokens beside pictures")
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_pictures_bring_image_tokens_and_answers_are_marked(family: str) -> None:
    """Golden data in which nothing is a picture or an answer would prove nothing."""
    processor = load_processor(str(source_of(family)))
    batch = cases.chat(family, processor)
    num_image_tokens = (batch["input_ids"] == processor.image_token_id).sum(-1).tolist()
    assert min(num_image_tokens[:2]) > 0 and num_image_tokens[2] == 0
    answers = [
        processor.tokenizer.decode(ids[torch.as_tensor(mask).bool()])
        for ids, mask in zip(batch["input_ids"], batch["assistant_masks"], strict=True)
    ]
    assert answers == ["A seven.<|im_end|>Yes.<|im_end|>", "The second is wider.<|im_end|>", "Only text.<|im_end|>"]


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_what_is_saved_is_what_the_official_processor_saved(family: str, tmp_path: Path) -> None:
    load_processor(str(source_of(family))).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in source_of(family).iterdir()}
    for name in ("processor_config.json", "chat_template.jinja"):
        saved, source = (folder / name for folder in (tmp_path, source_of(family)))
        if name.endswith(".json"):
            assert json.loads(saved.read_text()) == json.loads(source.read_text())
        else:
            assert saved.read_text() == source.read_text()
    again = load_processor(str(tmp_path))
    compare(family, "mixed", cases.mixed(family, again))


def test_the_difference_to_torchvision_is_rounding() -> None:
    gaps = json.loads((cases.HERE / "versions.json").read_text())["largest_gap_pil_to_torchvision"]
    for family, of_cases in gaps.items():
        limit = ENLARGED if family in ("internvl", "smolvlm") else ROUNDING
        assert 0 < max(of_cases.values()) <= limit, family


def test_the_golden_data_stays_small() -> None:
    sizes = [path.stat().st_size for path in cases.HERE.rglob("*") if path.is_file() and "__pycache__" not in str(path)]
    assert sum(sizes) < 300_000
