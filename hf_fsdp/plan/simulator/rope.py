"""Rotary tables that follow the length of the sequence, held as they are while no position has a value."""

from __future__ import annotations

from torch import nn

_FOLLOWING = ("dynamic", "longrope")


def hold_frequencies(model: nn.Module) -> None:
    """Let no rotary table of `model` ask for the largest position; other frequencies have the same sizes.

    Args:
        model: of transformers; changed in place, and fit for a step without values only.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):  # one for each kind of layer
            module.rope_type = {name: _held(value) for name, value in kind.items()}  # type: ignore[assignment]
        elif isinstance(kind, str):
            module.rope_type = _held(kind)  # type: ignore[assignment]


def _held(kind: str) -> str:
    return "default" if any(name in kind for name in _FOLLOWING) else kind
