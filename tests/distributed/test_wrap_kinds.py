"""Units by size and by half blocks train as one process does; batch norms behave as under DDP."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.distributed.harness import Outcome, run_cases
from tests.distributed.test_parity import compare
from tests.distributed.wrap_cases import CASES, IMAGE_RUNS, NUM_RESNET_STEPS, PARITY, TEXT_RUNS

MODULE = "tests.distributed.wrap_cases"
# Running statistics of one step in float32: sums in another order.
STATISTICS_BAR = 1e-6


@pytest.fixture(scope="module")
def two() -> dict[str, Outcome]:
    return run_cases(MODULE, list(CASES), world_size=2, seconds_per_case=300)


@pytest.fixture(scope="module")
def single() -> dict[str, Outcome]:
    return run_cases(MODULE, list(PARITY), world_size=1, seconds_per_case=300)


@pytest.mark.parametrize("name", PARITY)
def test_two_processes_equal_one(name: str, two: dict[str, Outcome], single: dict[str, Outcome]) -> None:
    ranks = two[name].get()
    for rank in ranks:
        for optimizer in ("sgd", "adamw"):  # as the parity tests name it
            assert rank[optimizer]["is_sharded"] is True
            rank[optimizer]["is_sharded"] = {"all": True}
    twin = single[name].get()[0]
    for optimizer in ("sgd", "adamw"):
        twin[optimizer]["is_sharded"] = {"all": False}
    compare(twin, ranks)


@pytest.mark.parametrize("name", [name for name in TEXT_RUNS if name.startswith("halves")])
def test_the_audit_shows_attention_and_mlp_as_units(name: str, two: dict[str, Outcome]) -> None:
    for rank in two[name].get():
        audit = rank["sgd"]["audit"]
        units = audit["units"]
        attention = [unit for unit in units if re.search(r"Attention$", unit)]
        mlp = [unit for unit in units if re.search(r"MLP$|LayerFF$", unit)]
        assert attention and mlp
        assert len(mlp) == audit["num_blocks"]
        assert len(units) > 2 * audit["num_blocks"]


def test_half_blocks_are_recomputed_as_whole_blocks(two: dict[str, Outcome]) -> None:
    for rank in two["halves-llama-full"].get():
        assert (rank["sgd"]["audit"]["num_checkpointed"], rank["sgd"]["audit"]["num_blocks"]) == (3, 3)


@pytest.mark.parametrize("name", ["halves-t5-every2", "size-t5-full"])
def test_the_shared_embedding_of_t5_is_in_the_root(name: str, two: dict[str, Outcome]) -> None:
    for rank in two[name].get():
        audit = rank["sgd"]["audit"]
        assert "shared.weight" in audit["root"]
        assert {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"} <= set(audit["ties"]["shared.weight"])


def test_half_blocks_are_gathered_in_the_order_in_which_they_run(two: dict[str, Outcome]) -> None:
    parts = [f"{index}{part}" for index in range(3) for part in ("", ".self_attn", ".mlp")]
    back = [f"{index}{part}" for index in (2, 1, 0) for part in ("", ".mlp", ".self_attn")]
    for rank in two["gathers"].get():
        assert rank["forward"][: len(parts)] == parts
        # Recomputed inside backward: attention, whose own backward comes later.
        assert rank["forward"][len(parts) :] == ["2.self_attn", "1.self_attn", "0.self_attn"]
        assert rank["backward"] == back


# -- images ------------------------------------------------------------------------------------------------------------


def test_a_resnet_152_learns_through_trainer(two: dict[str, Outcome]) -> None:
    for rank in two["resnet_152"].get():
        losses = rank["losses"]
        assert len(losses) == NUM_RESNET_STEPS
        assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
        assert rank["is_sharded"]
        assert rank["audit"]["kinds"]["block"] > 40


def test_a_saved_resnet_is_the_one_that_was_evaluated(two: dict[str, Outcome]) -> None:
    """Ranks have statistics of their own in training; evaluation and the saved model have rank 0's."""
    ranks = two["resnet_152"].get()
    for rank in ranks:
        assert rank["differed_in_training"]
        assert not rank["differ_after_evaluation"]
        assert rank["saved_equal"]
        assert rank["num_batches"] == NUM_RESNET_STEPS
        assert rank["eval_loss"] == pytest.approx(rank["loaded_loss"], abs=1e-5)
    assert ranks[0]["eval_loss"] == ranks[1]["eval_loss"]


@pytest.mark.parametrize("kind", ["none", "full"])
def test_batch_norms_train_as_under_ddp(kind: str, two: dict[str, Outcome]) -> None:
    """Recomputation runs them twice, and the batch counts once."""
    for index, rank in enumerate(two["batch_norm_as_under_ddp"].get()):
        ddp, ours = rank["ddp"], rank[kind]
        assert ours["losses"] == pytest.approx(ddp["losses"], abs=1e-5)
        _close(ddp["weights"], ours["weights"], 1e-5)
        if index == 0:  # DDP sends rank 0's to the others before each step; nothing reads theirs
            _close(ddp["buffers"], ours["buffers"], STATISTICS_BAR)
            counts = [value.item() for name, value in ours["buffers"].items() if name.endswith("num_batches_tracked")]
            assert set(counts) == {3}


def _close(expected: dict[str, Any], actual: dict[str, Any], bar: float) -> None:
    assert expected.keys() == actual.keys()
    errors = {name: (actual[name].double() - expected[name].double()).norm().item() for name in expected}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= bar, f"{worst}: {errors[worst]:.1e}"


def test_batch_norm_in_bf16_is_refused_and_the_advice_trains(two: dict[str, Outcome]) -> None:
    for rank in two["batch_norm_in_bf16"].get():
        assert "which torch does not compute with" in rank["refused"]
        assert "precision: {preset: bf16-mixed, keep_norms_fp32: true}" in rank["refused"]
        assert rank["audit"]["kinds"] == {"norms": 1, "block": 4, "root": 1}
        assert rank["losses"][-1] < rank["losses"][0]


def test_recomputing_single_layers_is_refused_before_anything_is_sharded(two: dict[str, Outcome]) -> None:
    for rank in two["checkpointing_by_size"].get():
        assert "has nothing to recompute" in rank["single"]
        assert rank["layers"] == "3 of 3"


def test_units_of_an_image_model_are_recomputed_where_they_are_more_than_a_layer(two: dict[str, Outcome]) -> None:
    assert "size-plain-group-norm" in IMAGE_RUNS
    for rank in two["size-plain-group-norm"].get():
        assert (rank["sgd"]["audit"]["num_checkpointed"], rank["sgd"]["audit"]["num_blocks"]) == (4, 4)


def test_gradients_of_every_parameter_were_compared(two: dict[str, Outcome]) -> None:
    for name in PARITY:
        for rank in two[name].get():
            gradients = rank["sgd"]["gradients"]
            assert gradients.keys() == rank["sgd"]["weights"].keys()
            assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
