"""The pairwise array of parity: every pair of values of any two of these settings occurs in at least one case."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tests.distributed.tiny_models import CONFIGS
from tests.distributed.training import Run, train

SETTINGS: dict[str, tuple[Any, ...]] = {
    "family": tuple(CONFIGS),
    "checkpointing": ("none", "full", {"every": 2}),
    "method": ("full", "lora"),
    "accumulation": (1, 2),
    "clip": (0.0, 0.05),
    "reshard": (True, False),
    "tied": (False, True),
}


def pairwise(settings: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """A small covering array, greedily: each new row covers as many uncovered pairs as a row can."""
    names = list(settings)
    indices = {name: range(len(values)) for name, values in settings.items()}
    uncovered = {((a, i), (b, j)) for a, b in itertools.combinations(names, 2) for i in indices[a] for j in indices[b]}
    rows = []
    everything = list(itertools.product(*indices.values()))
    while uncovered:
        best = max(everything, key=lambda row: _num_covered(names, row, uncovered))
        rows.append({name: settings[name][index] for name, index in zip(names, best, strict=True)})
        uncovered -= set(itertools.combinations(zip(names, best, strict=True), 2))
    return rows


def _num_covered(names: list[str], row: tuple[int, ...], uncovered: set[Any]) -> int:
    return sum(pair in uncovered for pair in itertools.combinations(zip(names, row, strict=True), 2))


def case_name(row: dict[str, Any]) -> str:
    """A name that says the settings."""
    checkpointing = "every2" if isinstance(row["checkpointing"], dict) else row["checkpointing"]
    return "-".join(
        [
            row["family"],
            row["method"],
            f"ckpt_{checkpointing}",
            f"accum{row['accumulation']}",
            "clip" if row["clip"] else "noclip",
            "reshard" if row["reshard"] else "keep",
            "tied" if row["tied"] else "untied",
        ]
    )


def _both_optimizers(row: dict[str, Any], sharding: dict[str, Any]) -> Callable[[int, int], dict[str, Any]]:
    def case(rank: int, world_size: int) -> dict[str, Any]:
        sgd = train(Run(**row, sharding=sharding), world_size)
        adamw = train(Run(**row, sharding=sharding, optimizer="adamw", learning_rate=1e-3), world_size)
        return {"sgd": sgd, "adamw": adamw}

    return case


PAIRS = {case_name(row): row for row in pairwise(SETTINGS)}
# 3 and 4 processes and 2x2 hybrid sharding run a few rows that differ in everything.
FEW = [list(PAIRS)[index] for index in (1, 3, 7, 10, 13)]
HYBRID = {f"hybrid-{name}": PAIRS[name] for name in FEW[:3]}

CASES = {name: _both_optimizers(row, {}) for name, row in PAIRS.items()}
CASES |= {name: _both_optimizers(row, {"dp_replicate_size": 2}) for name, row in HYBRID.items()}
