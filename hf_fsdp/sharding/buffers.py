"""The buffers that a state dict holds; others are computed by the model itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def named_persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a state dict holds, by name; a shared one under every name."""
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, buffer in module.named_buffers(recurse=False):
            if attribute not in module._non_persistent_buffers_set:
                yield (f"{path}.{attribute}" if path else attribute), buffer


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return them by name; a shared one under its first name only."""
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, buffer in named_persistent_buffers(model):
        first.setdefault(id(buffer), (name, buffer))
    return dict(first.values())
