"""A run that stock Trainer saved goes on under this package as if it had not been broken off."""

from __future__ import annotations

import pytest

from tests.distributed.foreign_resume_cases import CASES, NUM_STEPS, SAVE_STEP
from tests.distributed.harness import Outcome, run_cases


@pytest.fixture(scope="module")
def two() -> dict[str, Outcome]:
    return run_cases("tests.distributed.foreign_resume_cases", list(CASES), world_size=2)


@pytest.mark.parametrize("name", ["full_full", "sharded_lora"])
def test_a_checkpoint_of_stock_trainer_resumes_to_the_bit(name: str, two: dict[str, Outcome]) -> None:
    for rank in two[name].get():
        assert rank["stock"]
        assert sorted(rank["resumed"]) == list(range(SAVE_STEP + 1, NUM_STEPS + 1))
        assert rank["resumed"] == rank["unbroken"]
    assert "so nothing says whether it is whole" in two[name].get()[0]["printed"]


def test_without_an_optimizer_it_is_an_error_whose_advice_works(two: dict[str, Outcome]) -> None:
    for rank in two["without_an_optimizer"].get():
        assert "holds the model only, no optimizer state" in rank["error"]
        assert "checkpoint: {optimizer: fresh}" in rank["error"]
        assert rank["resumed"] == list(range(SAVE_STEP + 1, NUM_STEPS + 1))
