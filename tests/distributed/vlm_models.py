"""Tiny vision-language models of every family, and samples for them with and without pictures.

The models are those of `tests/unit/test_model_parts.py`. How many placeholder tokens a picture takes is asked of the
model itself, so a family needs here only what its processor would add: grids, sizes, token types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from hf_fsdp.sharding.stand_in_inputs import tensors_in
from tests.unit.small_models import IMAGE_TOKEN, VOCABULARY
from tests.unit.test_model_parts import FAMILIES

SEQUENCE_TOKENS = 48
FIRST_WORD = 8
QWEN_GRID = (1, 4, 4)
_QWEN = {"qwen2-vl": 14, "qwen2.5-vl": 14, "qwen3-vl": 16}  # the side of a patch
_ANYRES = ("llava-next", "llava-onevision")
PARITY_FAMILIES = ("llava", "qwen2.5-vl", "smolvlm", "paligemma", "gemma3")
MORE_FAMILIES = ("llava-next", "llava-onevision", "qwen2-vl", "qwen3-vl", "idefics3", "internvl")


def build_vlm(family: str) -> Any:
    """The model of a family, seeded, without dropout."""
    torch.manual_seed(0)
    model: Any = FAMILIES[family]()
    if family in _ANYRES:  # of the size of the tiny tower's pictures, where the default has 336 pixels
        model.config.image_grid_pinpoints = [[16, 32], [32, 16], [32, 32]]
    if family == "gemma3":  # starts at zero, behind a norm: a gradient of its size divided by nothing
        with torch.no_grad():
            model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.1)
    return model


def picture(family: str, generator: torch.Generator, size: int = 0) -> dict[str, torch.Tensor]:
    """One picture as the family's processor gives it; `size` makes some larger than others where the family may."""
    if family in _QWEN:
        frames, height, width = QWEN_GRID
        grid = torch.tensor([[frames, height, width * (1 + size % 2)]])
        pixels = torch.randn(int(grid.prod()), 3 * 2 * _QWEN[family] ** 2, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": grid}
    if family in _ANYRES:
        sizes = torch.tensor([[16, 32] if size % 2 else [32, 16]])
        return {"pixel_values": torch.randn(1, 3, 3, 16, 16, generator=generator), "image_sizes": sizes}
    if family in ("idefics3", "smolvlm"):
        return {"pixel_values": torch.randn(1, 1, 3, 16, 16, generator=generator)}
    return {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}


def num_image_tokens(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    """How many tokens the features of a picture take the place of."""
    with torch.no_grad():
        output = model.model.get_image_features(**inputs)
    return sum(feature.numel() // feature.shape[-1] for feature in tensors_in(output.pooler_output))


@dataclass
class ImageTextRows(Dataset):
    """Samples of random words, those of `has_image` behind a picture; the last words are learned."""

    rows: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def build_rows(family: str, has_image: Sequence[bool | int], seed: int = 3) -> ImageTextRows:
    """Samples with as many pictures each as `has_image` says."""
    generator = torch.Generator().manual_seed(seed)
    model = build_vlm(family).eval()
    rows = []
    for index, count in enumerate(has_image):
        pictures = [picture(family, generator, index) for _ in range(int(count))]
        spans = [num_image_tokens(model, one) for one in pictures]
        prompt = 1 + sum(spans) + len(spans)  # a word before each picture: Qwen-VL takes two that touch for one
        assert prompt <= SEQUENCE_TOKENS - 4
        words = torch.randint(FIRST_WORD, VOCABULARY, (SEQUENCE_TOKENS,), generator=generator)
        length = int(torch.randint(prompt + 3, SEQUENCE_TOKENS + 1, (1,), generator=generator))
        ids = words.clone()
        start = 1
        for span in spans:
            ids[start : start + span] = IMAGE_TOKEN
            start += span + 1
        labels = ids.clone()
        labels[:prompt] = -100
        rows.append({"input_ids": ids[:length], "labels": labels[:length], "pictures": pictures})
    return ImageTextRows(rows)


def collate(family: str) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """What puts samples of a family in a batch: without pictures nothing is said about pictures."""

    def call(rows: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.zeros(len(rows), SEQUENCE_TOKENS, dtype=torch.long)
        labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
        for index, row in enumerate(rows):
            length = len(row["input_ids"])
            ids[index, :length], labels[index, :length], mask[index, :length] = row["input_ids"], row["labels"], 1
        batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        if family in _QWEN:
            batch["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
        elif family == "gemma3":
            batch["token_type_ids"] = (ids == IMAGE_TOKEN).long()
        elif family == "paligemma":
            batch["token_type_ids"] = (labels != -100).long()
        return {**batch, **_pictures(family, rows)}

    return call


def _pictures(family: str, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    found = [one for row in rows for one in row["pictures"]]
    if not found:
        return {}
    if family not in ("idefics3", "smolvlm"):
        return {name: torch.cat([one[name] for one in found]) for name in found[0]}
    most = max(len(row["pictures"]) for row in rows)
    pixels = torch.zeros(len(rows), most, 3, 16, 16)  # pictures that are all zero are padding
    for index, row in enumerate(rows):
        for place, one in enumerate(row["pictures"]):
            pixels[index, place] = one["pixel_values"][0, 0]
    return {"pixel_values": pixels}
