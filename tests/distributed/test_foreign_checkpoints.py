"""What Accelerate and Trainer wrote is read back to the bit, and what it does not hold is said."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.foreign_cases import CASES
from tests.distributed.harness import Outcome, run_cases

FSDP2 = ["fsdp2_full", "fsdp2_full_lora", "fsdp2_sharded", "fsdp2_sharded_lora"]
FSDP1 = ["fsdp1_full", "fsdp1_full_flat", "fsdp1_sharded", "fsdp1_sharded_flat"]
TRAINER_FILES = {"scheduler", "step and log history", "random states"}


@pytest.fixture(scope="module")
def two() -> dict[str, Outcome]:
    return run_cases("tests.distributed.foreign_cases", list(CASES), world_size=2)


def assert_equal_to_the_bit(rank: dict[str, Any], num_weights: int, *, state_keys: int = 3) -> None:
    assert rank["wrong weights"] == []
    assert rank["wrong state"] == []
    assert rank["num_weights"] == num_weights
    assert rank["num_state"] == state_keys * num_weights  # Adam's step and two moments


@pytest.mark.parametrize("case", FSDP2)
def test_fsdp2_of_accelerate_is_read_to_the_bit_and_training_goes_on_from_it(
    case: str, two: dict[str, Outcome]
) -> None:
    ranks = two[case].get()
    for rank in ranks:
        assert_equal_to_the_bit(rank, 12 if "lora" in case else 29)
        assert rank["decays"] == ([0.1] if "lora" in case else [0.1, 0.0])
        assert rank["without_state"] == []
        assert {line.partition(":")[0] for line in rank["missing"]} == TRAINER_FILES
        assert ("FULL" if "_full" in case else "SHARDED") in rank["kind"]
        assert rank["resumed"] == rank["losses"]
        assert len(set(rank["losses"])) == 3
        num_local, smallest, num_parameters = rank["local"]
        assert smallest >= 0 and num_local < num_parameters  # every parameter is a DTensor, and a part of it is here
    assert sum(rank["local"][0] for rank in ranks) == ranks[0]["local"][2]


def test_names_with_wrappers_in_them_are_those_of_the_live_model(two: dict[str, Outcome]) -> None:
    for rank in two["fsdp2_sharded_lora_with_wrappers_in_names"].get():
        assert rank["keys"][0].startswith("_orig_mod.")
        assert_equal_to_the_bit(rank, 12)


@pytest.mark.parametrize("part", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_a_rank_file_that_is_missing_or_cut_off_is_found_when_the_folder_is_opened(
    part: str, two: dict[str, Outcome]
) -> None:
    said = two["damaged_shards"].get()[0]
    assert "__1_0.distcp is missing; it holds parts of" in said[f"{part} missing"]
    assert "__1_0.distcp is cut off: it has" in said[f"{part} cut off"]
    assert said[f"{part} back"] == ""


@pytest.mark.parametrize("case", FSDP1)
def test_fsdp1_is_read_to_the_bit_and_goes_on_under_fsdp2(case: str, two: dict[str, Outcome]) -> None:
    for rank in two[case].get():
        assert_equal_to_the_bit(rank, 30)
        assert rank["resumed"] == pytest.approx(rank["losses"], rel=1e-6)
        assert len(set(rank["losses"])) == 2


def test_fsdp1_without_optimizer_state_says_so(two: dict[str, Outcome]) -> None:
    for rank in two["fsdp1_sharded_without_state"].get():
        assert rank["optimizer"] is False
        assert any("optimizer_0 holds none, so it starts fresh" in line for line in rank["missing"])


@pytest.mark.parametrize("case", ["ddp_full", "ddp_lora"])
def test_trainer_without_fsdp_is_read_to_the_bit_with_everything_beside(case: str, two: dict[str, Outcome]) -> None:
    for rank in two[case].get():
        assert_equal_to_the_bit(rank, 12 if "lora" in case else 29)
        assert rank["decays"] == [0.1, 0.0]
        assert rank["missing"] == []
        assert rank["scheduler"] and rank["scaler"] and rank["random"]
        assert rank["ranks"] == [0, 1]
        assert rank["trainer_state"] == "trainer_state.json"


@pytest.mark.parametrize("case", ["ddp_full", "ddp_lora"])
def test_an_optimizer_that_numbers_its_parameters_needs_the_same_groups(case: str, two: dict[str, Outcome]) -> None:
    for rank in two[case].get():
        assert any("optimizer.pt numbers its parameters" in line for line in rank["numbers"])
        assert "this run's optimizer has groups of" in rank["other groups"]


def test_weights_from_before_safetensors_are_read(two: dict[str, Outcome]) -> None:
    for rank in two["ddp_pytorch_model_bin"].get():
        assert_equal_to_the_bit(rank, 29)


def test_save_state_of_a_loop_without_trainer_is_read(two: dict[str, Outcome]) -> None:
    for rank in two["accelerate_save_state"].get():
        assert_equal_to_the_bit(rank, 29)
        assert rank["scheduler"] and rank["random"]
        assert [line.partition(":")[0] for line in rank["missing"]] == ["step and log history"]


def test_a_run_without_fsdp_goes_on_under_fsdp_with_the_same_losses(two: dict[str, Outcome]) -> None:
    for rank in two["ddp_resumed_under_fsdp"].get():
        assert rank["sharded"]
        assert len(rank["plain"]) == len(rank["resumed"]) == 6
        assert rank["resumed"][3:] == pytest.approx(rank["plain"][3:], rel=1e-5)
        assert rank["rates"][0] == rank["rates"][1]
    printed = two["ddp_resumed_under_fsdp"].get()[0]["printed"]
    assert "checkpoint-3 is one of Trainer without FSDP" in printed
