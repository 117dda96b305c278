"""A run goes on with another number of processes: the same samples in the same order, and the same numbers."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.harness import Outcome, run_cases
from tests.distributed.resume_world_cases import CASES, NUM_STEPS, SAVE_STEP, WORLD_SIZE

# Who goes on: the run without a break, on how many processes the rest runs, and over how many it is sharded.
PAIRS = {
    "1 to 2": ("1", 2, 2),
    "2 to 1": ("2", 1, 1),
    "2 to 4": ("2", 4, 4),
    "4 to 2x2": ("4", 4, 2),
    "2x2 to 3": ("2x2", 3, 3),
    "2 to 4 LoRA": ("2 LoRA", 4, 4),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases("tests.distributed.resume_world_cases", list(CASES), WORLD_SIZE)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_rest_of_a_run_sees_the_samples_that_it_would_have_seen(pair: str, outcomes: dict[str, Outcome]) -> None:
    saved, num_processes, _ = PAIRS[pair]
    unbroken = outcomes[saved].get()[0]["samples"]
    for rank in outcomes[pair].get()[:num_processes]:
        assert sorted(rank["samples"]) == list(range(SAVE_STEP + 1, NUM_STEPS + 1))
        for step, samples in rank["samples"].items():
            assert len(set(samples)) == 12
            assert samples == unbroken[step], f"step {step}"


def test_a_sampler_without_a_generator_has_the_same_order_in_a_later_epoch(outcomes: dict[str, Outcome]) -> None:
    unbroken, rest = (outcomes[name].get()[0]["samples"] for name in ("2 weighted", "2 to 1 weighted"))
    assert sorted(rest) == [6, 7] and all(rest[step] == unbroken[step] for step in rest)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_rest_of_a_run_has_its_losses_and_ends_in_its_weights(pair: str, outcomes: dict[str, Outcome]) -> None:
    saved, num_processes, num_shards = PAIRS[pair]
    unbroken = outcomes[saved].get()[0]
    for rank in outcomes[pair].get()[:num_processes]:
        # The first log covers a step before the cut and one after it.
        assert sorted(rank["logs"]) == [4, 6]
        for step, values in rank["logs"].items():
            assert values == pytest.approx(unbroken["logs"][step], rel=1e-5), f"step {step}"
        assert sorted(rank["weights"]) == sorted(unbroken["weights"])
        for name, weight in rank["weights"].items():
            assert torch.allclose(weight, unbroken["weights"][name], rtol=0, atol=1e-5), name
        assert rank["sharded"] == (num_shards > 1)
        assert rank["num_local"] < 1.2 * rank["num_parameters"] / num_shards


@pytest.mark.parametrize("pair", PAIRS)
def test_nothing_is_warned_of_where_nothing_changes(pair: str, outcomes: dict[str, Outcome]) -> None:
    (line,) = outcomes[pair].get()[0]["lines"]
    assert line.startswith("resume: optimizer state of ") and line.endswith(" tensors restored")


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_same_number_of_processes_goes_on_to_the_bit(world_size: int, outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[f"{world_size} to the bit"].get()[:world_size]:
        assert len(rank["logs"]) == 2 and rank["num_optimizer"] == 90
        assert rank["sharded"] == (world_size > 1)
        different = {key: value for key, value in rank.items() if key.startswith("other_") and value}
        assert not different


def test_everything_that_changes_with_the_number_of_processes_is_said(outcomes: dict[str, Outcome]) -> None:
    lines = "\n".join(outcomes["2 to 4 uneven"].get()[0]["lines"])
    for part in (
        "the global batch was 12 samples and is 24: the first 1 steps count as 24 samples seen",
        "seed is 7 and was 42: the rest of the epoch is shuffled otherwise",
        "2 processes saved and 4 go on; 50 samples are no multiple of the global batch of 24",
        "2 processes saved and 4 go on; grouping by length depends on the number of processes",
        "2 processes saved and 4 go on; dropout draws other masks",
    ):
        assert part in lines
