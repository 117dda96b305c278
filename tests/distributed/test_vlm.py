"""Vision-language models where some ranks' batches have no picture: the numbers of one process, and never a hang.

Bars as in `test_parity.py`: every tensor's gradient within 1e-6 of the global norm, here at each step: in
their batches pictures are on the first rank, on the last, on rows between, on all rows and on none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed import vlm_behaviour_cases as behaviours
from tests.distributed.harness import Outcome, run_cases
from tests.distributed.test_parity import CURVE_BAR, compare_gradients, compare_weights
from tests.distributed.vlm_cases import PARITY, THREE

PARITY_MODULE = "tests.distributed.vlm_cases"
BEHAVIOURS = "tests.distributed.vlm_behaviour_cases"
WITH_TWIN = ["evaluates", "generates_llava", "generates_qwen", "image_beside_video", "two_towers"]


@pytest.fixture(scope="module")
def single() -> dict[str, Outcome]:
    return run_cases(PARITY_MODULE, list(PARITY), world_size=1)


@pytest.fixture(scope="module")
def sharded() -> Callable[[int], dict[str, Outcome]]:
    done: dict[int, dict[str, Outcome]] = {}
    cases = {2: list(PARITY), 3: list(THREE)}

    def get(world_size: int) -> dict[str, Outcome]:
        if world_size not in done:
            done[world_size] = run_cases(PARITY_MODULE, cases[world_size], world_size=world_size)
        return done[world_size]

    return get


@pytest.mark.parametrize("name", PARITY)
def test_two_processes_equal_one(name: str, single: dict[str, Outcome], sharded: Any) -> None:
    compare(single[name].get()[0], sharded(2)[name].get(), PARITY[name].num_steps)


@pytest.mark.parametrize("name", THREE)
def test_three_processes_equal_one(name: str, single: dict[str, Outcome], sharded: Any) -> None:
    compare(single[name].get()[0], sharded(3)[name].get(), PARITY[name].num_steps)


def compare(twin: dict[str, Any], ranks: list[dict[str, Any]], num_steps: int) -> None:
    assert not any(twin["is_sharded"].values())
    for run in ranks:
        assert all(run["is_sharded"].values()), "a parameter is not a DTensor: this would be DDP"
        assert run["losses"] == pytest.approx(twin["losses"], abs=CURVE_BAR)
        assert run["norms"] == pytest.approx(twin["norms"], abs=CURVE_BAR)
    assert len(twin["gradients"]) == len(ranks[0]["gradients"]) == num_steps
    for expected, actual in zip(twin["gradients"], ranks[0]["gradients"], strict=True):
        compare_gradients(expected, actual)
    compare_weights(twin["weights"], ranks[0]["weights"])


# -- besides training -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    return run_cases(BEHAVIOURS, WITH_TWIN, world_size=1)


@pytest.fixture(scope="module")
def together() -> dict[str, Outcome]:
    return run_cases(BEHAVIOURS, list(behaviours.CASES), world_size=2, seconds_per_case=45)


def test_evaluation_before_and_behind_training_gives_the_losses_of_one_process(
    alone: dict[str, Outcome], together: dict[str, Outcome]
) -> None:
    expected = alone["evaluates"].get()[0]
    assert set(expected) == {f"eval_{name}_loss" for name in behaviours.EVALUATED}
    for losses in together["evaluates"].get():
        for name, values in expected.items():
            assert losses[name] == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize("case", ["generates_llava", "generates_qwen"])
def test_answers_are_those_of_one_process(case: str, alone: dict[str, Outcome], together: dict[str, Outcome]) -> None:
    expected = alone[case].get()[0]["answers"]
    first, second = (outcome["answers"] for outcome in together[case].get())
    assert first[:3] + second[:3] + first[3:] + second[3:] == expected


@pytest.mark.parametrize("case", ["image_beside_video", "two_towers"])
def test_each_rank_lacks_what_the_other_has(case: str, alone: dict[str, Outcome], together: dict[str, Outcome]) -> None:
    for outcome in together[case].get():
        compare_gradients(alone[case].get()[0]["gradients"], outcome["gradients"])


def test_a_stand_in_draws_no_random_numbers_and_moves_no_running_statistics(together: dict[str, Outcome]) -> None:
    with_picture, without = together["leaves_no_trace"].get()
    assert not with_picture["same_random_state"] and not with_picture["same_statistics"]  # the tower would
    assert without["same_random_state"] and without["same_statistics"]
    assert with_picture["shadowed"] == without["shadowed"] == []


def test_a_model_whose_tower_cannot_run_alone_is_refused_on_all_ranks_and_the_advice_trains(
    together: dict[str, Outcome],
) -> None:
    for outcome in together["mllama_is_refused"].get():
        assert "MllamaModel has no tower that can be run alone" in outcome["error"]
        assert "give every rank's batch pixel_values" in outcome["error"]
        assert torch.tensor(outcome["losses"]).isfinite().all() and len(outcome["losses"]) == 2


@pytest.mark.parametrize("family", behaviours.BF16_FAMILIES)
def test_mixed_ranks_train_and_answer_in_bf16_with_norms_in_fp32(family: str, together: dict[str, Outcome]) -> None:
    for outcome in together[f"bf16_{family}"].get():
        assert outcome["finite"] and outcome["num"] > 0
        assert 1 <= outcome["num_new"] <= 2 and outcome["same_dtype"]
