"""Every kind of Trainer that was run: two sharded processes give what one process gives, reference models included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.harness import Outcome, run_cases
from tests.distributed.test_parity import CURVE_BAR, compare_gradients, compare_weights
from tests.distributed.trl_cases import CASES

MODULE = "tests.distributed.trl_cases"
# bf16 has no bar of equality; it is looked at by itself below.
PARITY = [name for name in CASES if name != "dpo_in_bf16"]
# Cases with models beside the trained one, by the attribute that holds them.
BESIDE = {
    "kto": ["ref_model"],
    "gkd": ["teacher_model"],
    "grpo": ["ref_model"],
    "grpo_with_a_reward_model": ["ref_model", "reward_funcs"],
    "rloo": ["ref_model"],
    "gmpo": ["ref_model"],
    "sdft": ["teacher_model"],
}


@pytest.fixture(scope="module")
def two() -> dict[str, Outcome]:
    return run_cases(MODULE, list(CASES), world_size=2)


@pytest.fixture(scope="module")
def single() -> dict[str, Outcome]:
    return run_cases(MODULE, PARITY, world_size=1)


def check_held(ranks: list[dict[str, Any]]) -> None:
    """Every parameter a DTensor, every value on one rank only, and more units than the root."""
    assert all(rank["sharded"] for rank in ranks)
    assert sum(rank["num_local"] for rank in ranks) == ranks[0]["num_parameters"]
    assert all(rank["num_units"] >= 4 for rank in ranks)


@pytest.mark.parametrize("name", PARITY)
def test_two_processes_equal_one(name: str, two: dict[str, Outcome], single: dict[str, Outcome]) -> None:
    ranks, twin = two[name].get(), single[name].get()[0]
    assert not twin["sharded"]
    check_held(ranks)
    for rank in ranks:
        compare_gradients(twin["gradients"], rank["gradients"])
        assert rank["losses"] == pytest.approx(twin["losses"], abs=CURVE_BAR)
        assert rank["norms"] == pytest.approx(twin["norms"], abs=CURVE_BAR)
        compare_weights(twin["weights"], rank["weights"])


@pytest.mark.parametrize("name", ["dpo_full", "dpo_synced_reference", "dpo_in_bf16"])
def test_a_reference_model_is_sharded_layer_by_layer_frozen_and_in_eval(name: str, two: dict[str, Outcome]) -> None:
    ranks = [rank["reference"] for rank in two[name].get()]
    check_held(ranks)
    for rank, trained in zip(ranks, two[name].get(), strict=True):
        assert rank["is_frozen"] and not rank["is_training"]
        assert rank["num_units"] == trained["num_units"]
        assert rank["audits"] == ["LlamaForCausalLM"]
    assert "is only run (reference, teacher or reward): frozen" in two[name].get()[0]["printed"]


def test_a_reference_that_follows_the_policy_follows_it_shard_by_shard(
    two: dict[str, Outcome], single: dict[str, Outcome]
) -> None:
    twin = single["dpo_synced_reference"].get()[0]["reference"]["weights"]
    for rank in two["dpo_synced_reference"].get():
        compare_weights(twin, rank["reference"]["weights"])
    still = two["dpo_full"].get()[0]["reference"]["weights"]
    assert any(not torch.equal(twin[name], still[name]) for name in twin), "the synchronisation moved nothing"


def test_a_bf16_reference_stays_bf16_and_computes_like_the_policy(two: dict[str, Outcome]) -> None:
    for rank in two["dpo_in_bf16"].get():
        assert rank["reference"]["dtypes"] == ["torch.bfloat16"]
        assert rank["losses"] == pytest.approx(two["dpo_full"].get()[0]["losses"], abs=5e-3)


def test_log_probabilities_ahead_of_training_come_from_a_policy_that_is_sharded_once(two: dict[str, Outcome]) -> None:
    ahead, during = two["dpo_lora_precomputed"].get()[0], two["dpo_lora"].get()[0]
    assert ahead["sharded_before_training"] and not during["sharded_before_training"]
    assert ahead["losses"] == pytest.approx(during["losses"], abs=1e-6)
    assert ahead["rewards"] == pytest.approx(during["rewards"], abs=1e-5)
    assert ahead["printed"].count("FSDP audit") == 1


@pytest.mark.parametrize("name", BESIDE)
def test_models_beside_the_trained_one_are_sharded_too(name: str, two: dict[str, Outcome]) -> None:
    for attribute in BESIDE[name]:
        check_held([rank["beside"][attribute] for rank in two[name].get()])
    for rank in two[name].get():
        assert rank["frozen"] and rank["num_frozen_audits"] == len(BESIDE[name])


@pytest.mark.parametrize("name", ["sequence_classes", "sequence_classes_lora", "token_classes"])
def test_a_fresh_head_is_saved_whole_and_is_rank_0s_from_the_start(name: str, two: dict[str, Outcome]) -> None:
    first, second = two[name].get()
    assert any("score" in taken or "classifier" in taken for taken in first["taken"])
    heads = [name for name in first["saved"] if "score" in name or "classifier" in name]
    assert heads
    for head in heads:
        kept = next(value for key, value in second["weights"].items() if _same(key, head))
        assert torch.equal(first["saved"][head], kept)


def _same(parameter: str, saved: str) -> bool:
    return parameter.replace(".modules_to_save.default", "") == saved


def test_generation_in_the_middle_of_training_keeps_uneven_ranks_in_step(
    two: dict[str, Outcome], single: dict[str, Outcome]
) -> None:
    twin = single["seq2seq"].get()[0]["predictions"]
    assert len(twin) == 3 and len(twin[0]) == 5
    widths = {sum(token != 0 for token in row) for step in twin for row in step}
    assert len(widths) > 1, "all rows have one length, so ranks could not get out of step"
    for rank in two["seq2seq"].get():
        assert [_answers(step[:5]) for step in rank["predictions"]] == [_answers(step) for step in twin]


def _answers(rows: list[list[int]]) -> list[list[int]]:
    return [[token for token in row if token not in (0, -100)] for row in rows]


def test_a_second_kind_of_trainer_in_one_process_is_sharded_by_its_own_config(two: dict[str, Outcome]) -> None:
    for after, alone in zip(two["reward_then_dpo"].get(), two["dpo_full"].get(), strict=True):
        assert after["losses"] == alone["losses"]
        assert after["first"] == two["reward_full"].get()[0]["losses"]
    assert "3 of 3 blocks recomputed" in two["reward_then_dpo"].get()[0]["printed"]
