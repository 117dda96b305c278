"""A tiny LLaVA with data to train it on, the same in every process, for what is frozen and what is trained."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t
from datasets import Dataset

from tests.unit.small_models import IMAGE_TOKEN, TEXT, VISION

NUM_IMAGE_TOKENS = 4
SEQUENCE_TOKENS = 12


def build_llava(dtype: torch.dtype = torch.float32, **vision: Any) -> Any:
    """CLIP of three layers (features from the last but one, as LLaVA-1.5), projector, Llama of two layers."""
    torch.manual_seed(0)
    config = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**{**VISION, **vision}),
        text_config=t.LlamaConfig(**{**TEXT, "num_hidden_layers": 2}),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=NUM_IMAGE_TOKENS,
    )
    return t.LlavaForConditionalGeneration(config).to(dtype)


def build_rows(num_rows: int = 24) -> Dataset:
    """Random tokens behind one image each."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, TEXT["vocab_size"], (num_rows, SEQUENCE_TOKENS), generator=generator)
    ids[:, 1 : 1 + NUM_IMAGE_TOKENS] = IMAGE_TOKEN
    labels = ids.clone()
    labels[:, : 1 + NUM_IMAGE_TOKENS] = -100
    pixels = torch.randn(num_rows, 3, VISION["image_size"], VISION["image_size"], generator=generator)
    rows = {"input_ids": ids.tolist(), "labels": labels.tolist(), "pixel_values": pixels.tolist()}
    return Dataset.from_dict(rows).with_format("torch")
