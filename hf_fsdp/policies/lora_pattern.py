"""One pattern for many module paths, as PEFT matches it: against the whole path."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

_INDEX = r"\d+"


def pattern_of(paths: Sequence[str], model: nn.Module) -> str:
    """Return a pattern that matches `paths` and no other module: indexes become ``\\d+`` where that is the same."""
    folded = _fold(paths)
    others = {name for name, _ in model.named_modules()} - set(paths)
    if any(re.fullmatch(folded, name) for name in others):  # adapters in some layers of a list only
        return "|".join(re.escape(path) for path in paths)
    return folded


def _fold(paths: Sequence[str]) -> str:
    groups: dict[str, list[str]] = {}
    for path in paths:
        words = [_INDEX if word.isdigit() else re.escape(word) for word in path.split(".")]
        last = max((place for place, word in enumerate(words) if word == _INDEX), default=-1)
        ends = groups.setdefault(r"\.".join(words[: last + 1]), [])
        if (end := r"\.".join(words[last + 1 :])) not in ends:
            ends.append(end)
    return "|".join(_join(start, ends) for start, ends in groups.items())


def _join(start: str, ends: list[str]) -> str:
    """`layers\\.\\d+` and [`attn.q`, `attn.k`, `mlp.up`] -> one pattern, the layers' own names once."""
    lead = start + r"\." if start else ""
    owners: dict[str, list[str]] = {}
    for end in ends:
        owner, dot, name = end.rpartition(r"\.")
        owners.setdefault(owner + dot, []).append(name)
    inner = [
        owner + (names[0] if len(names) == 1 else f"(?:{'|'.join(names)})") if names != [""] else ""
        for owner, names in owners.items()
    ]
    if inner == [""]:
        return start
    return lead + (inner[0] if len(inner) == 1 else f"(?:{'|'.join(inner)})")
