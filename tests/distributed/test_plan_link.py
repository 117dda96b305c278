"""At the end of a training predicted and measured memory stand side by side, close to each other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.harness import run_cases

pytestmark = pytest.mark.timeout(300)
BAR = 0.05


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    cases = run_cases("tests.distributed.plan_link_cases", ["side_by_side"], world_size=2, seconds_per_case=200)
    return cases["side_by_side"].get()


def test_the_prediction_of_a_running_training_is_close_to_its_memory(ranks: list[dict[str, Any]]) -> None:
    run = ranks[0]["runs"][0]
    assert run["doubts"] == []
    assert (run["rows"], run["num_micro_batches"], run["steps"]) == (2, 2, [2, 3])
    assert set(run["by_phase"]) == {"forward and backward", "optimizer"}
    assert abs(run["predicted"] / run["measured"] - 1) <= BAR, run


def test_both_figures_are_printed_and_logged_by_the_first_process_alone(ranks: list[dict[str, Any]]) -> None:
    run = ranks[0]["runs"][0]
    assert "predicted" in run["lines"][0] and "(simulated; 2 rows of 192 tokens)" in run["lines"][0]
    assert "(simulated), measured" in run["lines"][-1] and "(allocator count, steps 2 to 3)" in run["lines"][-1]
    assert [(line["step"], line["memory_measured_bytes"]) for line in run["metrics"]] == [(4, run["measured"])]
    assert run["num_logged"] > len(run["metrics"])
    other = ranks[1]["runs"][0]
    assert not other["lines"] and not other["has_file"] and not other["followed"]


def test_a_run_that_goes_on_in_its_folder_reads_the_prediction(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks[0]["runs"]
    assert "read from this folder" in second["lines"][0]
    assert second["predicted"] == first["predicted"]


def test_following_the_memory_changes_no_weight(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["same_weights"] for rank in ranks)
