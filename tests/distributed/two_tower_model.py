"""A model with a tower for pictures and one for sound, written as transformers writes its families."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, HIDDEN = 40, 16
IMAGE_TOKEN, AUDIO_TOKEN = 1, 2


class _Block(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.first = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.second = nn.Linear(2 * HIDDEN, HIDDEN)
        self.dropout = dropout

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.norm(hidden.flatten(0, 1)).view(hidden.shape)
        inner = F.dropout(F.gelu(self.first(inner)), self.dropout, self.training)
        return hidden + self.second(inner)


class _LayerNormBlock(_Block):
    def __init__(self) -> None:
        super().__init__(0.0)
        self.norm = nn.LayerNorm(HIDDEN)  # type: ignore[assignment]


class Tower(nn.Module):
    """Some blocks on what comes in, one token for each."""

    def __init__(self, num_inputs: int, dropout: float):
        super().__init__()
        self.embed = nn.Linear(num_inputs, HIDDEN)
        self.blocks = nn.ModuleList(_Block(dropout) for _ in range(3))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(values)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Language(nn.Module):
    """Blocks behind embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(_LayerNormBlock() for _ in range(3))

    def forward(
        self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class TwoTowers(nn.Module):
    """Sound comes first in its forward, though not in its signature."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.image_tower = Tower(6, dropout)
        self.audio_tower = Tower(5, dropout)
        self.language_model = Language()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY)

    def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.image_tower(pixel_values)

    def get_audio_features(self, input_features: torch.Tensor) -> torch.Tensor:
        return self.audio_tower(input_features)

    def forward(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        embeds = self.language_model.embed_tokens(input_ids)
        if input_features is not None:
            features = self.get_audio_features(input_features)
            embeds = embeds.masked_scatter((input_ids == AUDIO_TOKEN)[..., None], features)
        if pixel_values is not None:
            features = self.get_image_features(pixel_values)
            embeds = embeds.masked_scatter((input_ids == IMAGE_TOKEN)[..., None], features)
        logits = self.lm_head(self.language_model(inputs_embeds=embeds))
        loss = {} if labels is None else {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}
        return {**loss, "logits": logits}


def two_tower_batch(kind: str) -> dict[str, torch.Tensor]:
    """Four samples of six tokens, three of them from one tower (`image`, `audio`) or all words (`text`)."""
    generator = torch.Generator().manual_seed(len(kind))
    ids = torch.randint(3, VOCABULARY, (4, 6), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "image":
        ids[:, :3] = IMAGE_TOKEN
        batch["pixel_values"] = torch.randn(4, 3, 6, generator=generator)
    elif kind == "audio":
        ids[:, :3] = AUDIO_TOKEN
        batch["input_features"] = torch.randn(4, 3, 5, generator=generator)
    return batch
