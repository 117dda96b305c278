"""Sharded training gives the numbers of a single process: gradients, weights, losses, norms.

Bars, for fp32: every tensor's gradient error is at most 1e-6 of the global gradient norm (a gradient that is truly
zero is noise relative to itself); weights after 5 steps of SGD with momentum within 1e-5 (L2, per tensor); under AdamW
losses and gradient norms within 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.harness import Outcome, run_cases
from tests.distributed.parity_cases import FEW, HYBRID, PAIRS

MODULE = "tests.distributed.parity_cases"
GRADIENT_BAR = 1e-6
WEIGHT_BAR = 1e-5
CURVE_BAR = 1e-5


@pytest.fixture(scope="module")
def single() -> dict[str, Outcome]:
    """The twin: the same descriptions in one process, unsharded."""
    return run_cases(MODULE, list(PAIRS), world_size=1)


@pytest.fixture(scope="module")
def sharded() -> Callable[[int], dict[str, Outcome]]:
    """Runs on N processes, each N started once."""
    done: dict[int, dict[str, Outcome]] = {}
    cases = {2: list(PAIRS), 3: FEW, 4: [*FEW[:2], *HYBRID]}

    def get(world_size: int) -> dict[str, Outcome]:
        if world_size not in done:
            done[world_size] = run_cases(MODULE, cases[world_size], world_size=world_size)
        return done[world_size]

    return get


@pytest.mark.parametrize("name", PAIRS)
def test_two_processes_equal_one(name: str, single: dict[str, Outcome], sharded: Any) -> None:
    compare(single[name].get()[0], sharded(2)[name].get())


@pytest.mark.parametrize("name", FEW)
def test_three_processes_with_uneven_shards_equal_one(name: str, single: dict[str, Outcome], sharded: Any) -> None:
    compare(single[name].get()[0], sharded(3)[name].get())


@pytest.mark.parametrize("name", FEW[:2])
def test_four_processes_equal_one(name: str, single: dict[str, Outcome], sharded: Any) -> None:
    compare(single[name].get()[0], sharded(4)[name].get())


@pytest.mark.parametrize("name", HYBRID)
def test_two_by_two_hybrid_sharding_equals_one(name: str, single: dict[str, Outcome], sharded: Any) -> None:
    ranks = sharded(4)[name].get()
    compare(single[name.removeprefix("hybrid-")].get()[0], ranks, shard_size=2)


def test_the_array_covers_every_pair() -> None:
    from itertools import combinations

    from tests.distributed.parity_cases import SETTINGS

    for a, b in combinations(SETTINGS, 2):
        seen = {(str(row[a]), str(row[b])) for row in PAIRS.values()}
        assert len(seen) == len(SETTINGS[a]) * len(SETTINGS[b]), (a, b)


def compare(twin: dict[str, Any], ranks: list[dict[str, Any]], shard_size: int | None = None) -> None:
    """Hold a sharded run against its twin, and make sure that it was sharded."""
    shard_size = shard_size or len(ranks)
    for optimizer in ("sgd", "adamw"):
        single, runs = twin[optimizer], [rank[optimizer] for rank in ranks]
        for run in runs:
            assert all(run["is_sharded"].values()), "a parameter is not a DTensor: this would be DDP"
        assert not any(single["is_sharded"].values())
        # Every value is on exactly one rank of a shard group, so the local parts add up to the model.
        assert sum(run["num_local"] for run in runs) == single["num_parameters"] * len(runs) // shard_size
        assert max(run["num_local"] for run in runs) < single["num_parameters"] * 0.75
        for run in runs:
            compare_gradients(single["gradients"], run["gradients"])
            assert run["losses"] == pytest.approx(single["losses"], abs=CURVE_BAR)
            assert run["norms"] == pytest.approx(single["norms"], abs=CURVE_BAR)
            if optimizer == "sgd":
                compare_weights(single["weights"], run["weights"])


def compare_gradients(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == actual.keys()
    norm = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
    assert norm > 0
    errors = {name: ((actual[name] - expected[name]).double().norm() / norm).item() for name in expected}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= GRADIENT_BAR, f"{worst}: {errors[worst]:.2e} of the global gradient norm"


def compare_weights(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == actual.keys()
    errors = {name: (actual[name] - expected[name]).double().norm().item() for name in expected}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= WEIGHT_BAR, f"{worst}: {errors[worst]:.2e} after the last step"
