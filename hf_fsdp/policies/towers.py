"""Which tower a block belongs to: the language model, the vision tower or the audio tower of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

# Parts of a module path, as transformers and its remote-code models name their towers.
_TOWER_PARTS: dict[str, re.Pattern[str]] = {
    "vision": re.compile(r"visual|vision|image|(^|_)vit(_|$)|video"),
    "audio": re.compile(r"audio|speech"),
    "language": re.compile(r"language|(^|_)text(_|$)|(^|_)llm(_|$)|^lm$"),
}
# What a model without named towers takes as its first input says what it is.
_INPUTS = {"pixel_values": "vision", "input_features": "audio", "input_values": "audio"}
OTHER = "other"


def find_towers(model: nn.Module, blocks: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the blocks of every tower by the tower's name, both in the order of the model.

    Args:
        model: any module.
        blocks: paths of its blocks.

    Returns:
        ``language``, ``vision`` and ``audio`` as far as they exist. Blocks of a model that has towers and that lie in
        none of them (a Q-Former) are ``other``. A model without towers is one: what its first input says.
    """
    towers: dict[str, list[str]] = {}
    for name in blocks:
        towers.setdefault(_tower_of(name) or OTHER, []).append(name)
    if set(towers) == {OTHER}:
        towers = {_kind_of(model): towers[OTHER]}
    return {tower: tuple(names) for tower, names in towers.items()}


def tower_of(word: str) -> str | None:
    """Return the tower that one part of a module path names, or None."""
    return next((tower for tower, pattern in _TOWER_PARTS.items() if pattern.search(word.lower())), None)


def _tower_of(block: str) -> str | None:
    """The outermost part of the path that names a tower decides: CLIP's vision tower holds a `vision_model` too."""
    return next((tower for word in block.split(".") if (tower := tower_of(word)) is not None), None)


def _kind_of(model: nn.Module) -> str:
    for module in model.modules():  # PEFT's and other wrappers have no input of their own
        if (name := getattr(module, "main_input_name", None)) is not None:
            return _INPUTS.get(name, "language")
    return "language"
