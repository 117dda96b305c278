"""The models whose runs are cut in two and resumed, seeded, and the data that only they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from torch import nn

from tests.distributed.tiny_models import VOCABULARY, build_model
from tests.unit.small_models import IMAGE_TOKEN, vision_language_models


def llama(*, tied: bool = False, dropout: float = 0.0) -> Callable[[], nn.Module]:
    return lambda: build_model("llama", tied=tied, dropout=dropout)


def lora(*, adapters: tuple[str, ...] = ("default",), dropout: float = 0.1, **settings: Any) -> Callable[[], nn.Module]:
    """A Llama with adapters, whose B does not start at zero; the last adapter is the one that is trained."""

    def build() -> nn.Module:
        from peft import LoraConfig, get_peft_model

        given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **settings}
        config = LoraConfig(lora_dropout=dropout, init_lora_weights="gaussian", task_type="CAUSAL_LM", **given)
        torch.manual_seed(1)
        model: Any = get_peft_model(build_model("llama", tied=False, dropout=dropout), config, adapters[0])
        for name in adapters[1:]:
            model.add_adapter(name, config)
        model.set_adapter(adapters[-1])
        torch.manual_seed(2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        return model

    return build


def partly_frozen() -> nn.Module:
    model = build_model("llama", tied=False)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor, both: bool) -> torch.Tensor:
        hidden = hidden + torch.tanh(self.first(hidden))
        return hidden + torch.tanh(self.second(hidden)) if both else hidden


class Experts(nn.Module):
    """Blocks with two experts each; the second is asked from the fourth step on, and has no gradient before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)
        self.num_calls: torch.Tensor
        self.register_buffer("num_calls", torch.tensor(0))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, both=int(self.num_calls) >= 3)
        self.num_calls += int(self.training)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)}


def experts() -> nn.Module:
    torch.manual_seed(0)
    return Experts()


def llava() -> nn.Module:
    """Image features come from the layer before the last, so that the last one and its norm never get a gradient."""
    torch.manual_seed(0)
    return vision_language_models()["llava"]()


def image_rows() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 60, (16, 10), generator=generator)
    ids[:, 1:5] = IMAGE_TOKEN
    labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
    pixels = torch.randn(16, 3, 16, 16, generator=generator)
    rows = {"input_ids": ids.tolist(), "labels": labels.tolist(), "pixel_values": pixels.tolist()}
    return Dataset.from_dict(rows).with_format("torch")
