"""Image classifiers that are no transformers: ResNets of transformers and of plain torch, and data to learn from."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

NUM_CLASSES = 4
IMAGE_SIZE = 16
RESNET_152 = [3, 8, 36, 3]


def build_resnet(depths: list[int], *, width: int = 8, norm: str = "batch") -> Any:
    """A bottleneck ResNet of transformers with the given depths, seeded; `norm`: batch, frozen or group."""
    torch.manual_seed(0)
    config = ResNetConfig(
        num_channels=3,
        embedding_size=width,
        hidden_sizes=[width * factor for factor in (4, 8, 16, 32)],
        depths=depths,
        layer_type="bottleneck",
        num_labels=NUM_CLASSES,
    )
    return prepare_norms(ResNetForImageClassification(config), norm)


class PlainResNet(nn.Module):
    """A ResNet of plain torch modules that Trainer can train: it takes labels and returns the loss."""

    def __init__(self, depth: int = 4, width: int = 16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*(_Residual(width) for _ in range(depth)))
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.body(F.relu(self.stem(pixel_values)))
        logits = self.head(hidden.mean((2, 3)))
        loss = {} if labels is None else {"loss": F.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


class _Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm1(self.conv1(hidden)))
        return F.relu(hidden + self.norm2(self.conv2(inner)))


def build_plain(norm: str = "batch") -> nn.Module:
    """The plain ResNet, seeded."""
    torch.manual_seed(0)
    return prepare_norms(PlainResNet(), norm)


def prepare_norms(model: nn.Module, norm: str) -> Any:
    """Leave batch norms as they are, hold them in evaluation (`frozen`), or replace them (`group`)."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, nn.BatchNorm2d):
                continue
            if norm == "frozen":
                child.eval()
                child.train = lambda mode=True, child=child: child  # type: ignore[method-assign,misc,assignment]
            elif norm == "group":
                setattr(module, name, nn.GroupNorm(4, child.num_features))
    return model


def build_images(num_rows: int = 24) -> Dataset:
    """Noise with a brighter quadrant, which is the class."""
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn(num_rows, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator) * 0.3
    labels = [index % NUM_CLASSES for index in range(num_rows)]
    half = IMAGE_SIZE // 2
    for row, label in enumerate(labels):
        top, left = half * (label // 2), half * (label % 2)
        pixels[row, :, top : top + half, left : left + half] += 1.5
    return Dataset.from_dict({"pixel_values": pixels.tolist(), "labels": labels}).with_format("torch")
