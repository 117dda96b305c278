"""The pairwise array of parity: every pair of values of any two of these settings occurs in at least one case."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from tests.distributed.tiny_models import CONFIGS
from tests.distributed.training import Run, train

SETTINGS: dict[str, tuple[Any, ...]] = {
    "family": tuple(CONFIGS),
    "checkpointing": ("none", "full", {"every": 2}, {"selective": ["attention"]}),
    "wrap": ("transformer_layers", {"granularity": "attention_and_mlp"}, {"min_num_params": 3000}),
    "offload": ("none", "parameters", "activations"),
    "method": ("full", "lora"),
    "accumulation": (1, 2),
    "clip": (0.0, 0.05),
    "reshard": (True, False),
    "tied": (False, True),
}


def pairwise(settings: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """A small covering array: each row starts from a pair that no row has yet and takes in as many more as it can."""
    names = list(settings)
    uncovered = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(settings[a]))
        for j in range(len(settings[b]))
    }
    rows = []
    while uncovered:
        row = dict(min(uncovered))
        for name in names:
            if name not in row:
                row[name] = max(
                    range(len(settings[name])),
                    key=lambda index, name=name: _gain(names, {**row, name: index}, uncovered),
                )
        uncovered -= set(_pairs(names, row))
        rows.append({name: settings[name][row[name]] for name in names})
    return rows


def _pairs(names: list[str], row: dict[str, int]) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    return itertools.combinations([(name, row[name]) for name in names if name in row], 2)


def _gain(names: list[str], row: dict[str, int], uncovered: set[Any]) -> int:
    return sum(pair in uncovered for pair in _pairs(names, row))


def case_name(row: dict[str, Any]) -> str:
    """A name that says the settings."""
    return "-".join(
        [
            row["family"],
            row["method"],
            f"ckpt_{short(row['checkpointing'])}",
            f"wrap_{short(row['wrap'])}",
            f"offload_{short(row['offload'])}",
            f"accum{row['accumulation']}",
            "clip" if row["clip"] else "noclip",
            "reshard" if row["reshard"] else "keep",
            "tied" if row["tied"] else "untied",
        ]
    )


def short(value: Any) -> str:
    """A value of a setting as one word."""
    return "_".join(value) if isinstance(value, dict) else str(value)


def both_optimizers(row: dict[str, Any], sharding: dict[str, Any]) -> Callable[[int, int], dict[str, Any]]:
    """A case that trains a row under SGD with momentum and under AdamW."""

    def case(rank: int, world_size: int) -> dict[str, Any]:
        sgd = train(Run(**row, sharding=sharding), world_size)
        adamw = train(Run(**row, sharding=sharding, optimizer="adamw", learning_rate=1e-3), world_size)
        return {"sgd": sgd, "adamw": adamw}

    return case


PAIRS = {case_name(row): row for row in pairwise(SETTINGS)}
# 3 and 4 processes and 2x2 hybrid sharding run a few rows that differ in everything.
FEW = [list(PAIRS)[index] for index in (1, 3, 7, 10, 13)]
HYBRID = {f"hybrid-{name}": PAIRS[name] for name in FEW[:3]}

CASES = {name: both_optimizers(row, {}) for name, row in PAIRS.items()}
CASES |= {name: both_optimizers(row, {"dp_replicate_size": 2}) for name, row in HYBRID.items()}
