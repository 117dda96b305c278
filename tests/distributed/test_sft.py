"""SFTTrainer with nothing but the callback: its fused head, its defaults, LoRA under dropout, packing."""

from __future__ import annotations

import pytest

from tests.distributed.harness import Outcome, run_cases
from tests.distributed.sft_cases import CASES, TWINS
from tests.distributed.test_parity import compare_gradients

MODULE = "tests.distributed.sft_cases"


@pytest.fixture(scope="module")
def two() -> dict[str, Outcome]:
    return run_cases(MODULE, list(CASES), world_size=2)


@pytest.fixture(scope="module")
def single() -> dict[str, Outcome]:
    return run_cases(MODULE, TWINS, world_size=1)


@pytest.mark.parametrize("name", TWINS)
def test_sft_equals_a_single_process(name: str, two: dict[str, Outcome], single: dict[str, Outcome]) -> None:
    twin = single[name].get()[0]
    assert not twin["sharded"]
    for rank in two[name].get():
        assert rank["sharded"]
        assert rank["losses"] == pytest.approx(twin["losses"], abs=1e-5)
        compare_gradients(twin["gradients"], rank["gradients"])


def test_the_head_stays_in_the_root_because_trl_reads_its_weight(two: dict[str, Outcome]) -> None:
    for rank in two["full"].get():
        assert "head" not in rank["kinds"] and "embedding" in rank["kinds"]
    assert "lm_head stays in the root unit" in two["full"].get()[0]["printed"]


def test_lora_dropout_under_checkpointing_changes_no_bit(two: dict[str, Outcome]) -> None:
    for rank in two["lora_dropout"].get():
        assert rank["checkpointed"] == [0, 3]
        assert rank["equal"] and rank["gradients_equal"]


def test_trls_defaults_are_followed_and_its_checkpointing_is_done_by_us_with_one_line(two: dict[str, Outcome]) -> None:
    rank = two["defaults"].get()[0]
    assert rank["sharded"] and rank["checkpointed"] == 3
    assert "on 2 processes (dp_shard 2), bf16-mixed" in rank["printed"]
    assert rank["printed"].count("gradient checkpointing: done by hf-fsdp") == 1


def test_packed_and_padded_text_give_the_same_loss_per_sample(two: dict[str, Outcome]) -> None:
    for rank in two["packed_equals_padded"].get():
        assert rank["packed"] == pytest.approx(rank["padded"], abs=1e-5)
        # The comparison can fail: without positions of its own, a sample sees the ones before it.
        assert rank["leaky"][1:] != pytest.approx(rank["padded"][1:], abs=1e-3)


def test_packing_through_trl_gives_the_loss_of_padding(two: dict[str, Outcome]) -> None:
    for rank in two["packing_through_trl"].get():
        assert rank["num_rows"] == [24, 4] and rank["sharded"]
        assert rank["packed"] == pytest.approx(rank["padded"], abs=1e-5)
