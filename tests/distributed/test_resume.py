"""A run that was cut in two by a checkpoint ends as the run without a break: logs, weights, optimizer, to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.harness import Outcome, run_cases
from tests.distributed.resume_cases import KINDS

MODULE = "tests.distributed.resume_cases"
# Tensors of optimizer state: AdamW keeps three for a parameter that is trained and had a gradient, momentum one.
ADAPTERS = ("lora", "lora_checkpointing", "dora", "qlora")
NUM_STATES = {
    "frozen_groups": 60,
    "offload_momentum": 30,
    "t5_no_state": 0,
    "llava": 240,
    "experts": 33,
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(MODULE, list(KINDS), 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_the_uninterrupted_one(kind: str, outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[kind].get():
        assert rank["logs"], "a comparison of nothing"
        assert rank["first_step"] == min(rank["logs"]), "it began somewhere else"
        different = {key: value for key, value in rank.items() if key.startswith("other_") and value}
        assert not different
        assert rank["sharded"] and rank["num_local"] < 0.6 * rank["num_parameters"]
        assert rank["num_weights"] > 0
        assert rank["num_optimizer"] == NUM_STATES.get(kind, rank["num_optimizer"])
        assert rank["num_optimizer"] > 0 or kind == "t5_no_state"


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_the_trained_model_once_and_no_pickle(kind: str, outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[kind].get():
        files = rank["files"]
        assert {"manifest.json", "trainer_state.json", "state/rank-00000.json", "state/rank-00001.json"} <= set(files)
        assert all(name.endswith((".json", ".safetensors")) for name in files)
        holds = {name.split("/")[0] for name in files if name.endswith(".safetensors")} - {"optimizer"}
        if kind == "adapters":
            assert holds == {"adapter_model.safetensors", "other"}
        elif kind in ADAPTERS:
            assert holds == {"adapter_model.safetensors"} and "adapter_config.json" in files
        else:
            assert holds == {"model.safetensors" if kind == "tied_full" else "model"}


def test_a_save_in_the_middle_of_a_logging_interval_is_logged_over_the_whole_interval(
    outcomes: dict[str, Outcome],
) -> None:
    # Step 7 is saved and every third step is logged: the log of step 9 has a loss from before the cut in it.
    for kind in ("fp32", "bf16"):
        assert [sorted(rank["logs"]) for rank in outcomes[kind].get()] == [[9]] * 2


def test_the_loss_scale_and_its_growth_go_on(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["fp16"].get():
        # 1024 grew after steps 2 and 4; step 5 is the first of the next growth.
        assert rank["scalers"] == [(4096.0, 1), (4096.0, 1)]


def test_parameters_without_a_gradient_have_no_state_and_resume(outcomes: dict[str, Outcome]) -> None:
    llava, experts = (set(outcomes[kind].get()[0]["without_state"]) for kind in ("llava", "experts"))
    assert len(llava) == 18
    assert {"model.vision_tower.post_layernorm.weight"} < llava
    assert all("vision_tower.encoder.layers.2." in name or "post_layernorm" in name for name in llava)
    assert experts == {f"layers.{layer}.second.{part}" for layer in (0, 1) for part in ("weight", "bias")}


def test_ranks_on_which_dropout_drew_otherwise_share_one_order_of_the_samples(outcomes: dict[str, Outcome]) -> None:
    assert [rank["num_samples"] for rank in outcomes["grouped"].get()] == [32] * 2


def test_early_stopping_remembers_what_it_saw_before_the_cut(outcomes: dict[str, Outcome]) -> None:
    assert [rank["stopped_at"] for rank in outcomes["early_stopping"].get()] == [[3, 3]] * 2


def test_the_reference_model_of_a_resumed_dpo_run_is_sharded(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["dpo"].get():
        assert rank["reference"]["sharded"]
        assert rank["reference"]["num_local"] < 0.6 * rank["reference"]["num_parameters"]


def test_what_was_asked_of_a_kind_is_what_it_ran_with(outcomes: dict[str, Outcome]) -> None:
    rates: dict[str, list[Any]] = {
        kind: [values[2] for values in outcomes[kind].get()[0]["logs"].values()] for kind in ("tied", "lora", "fp32")
    }
    assert rates["tied"] == pytest.approx([1e-4, 1e-5])  # the plateau lowers it at every evaluation
    assert rates["lora"] == pytest.approx([0.0075, 0.0025])  # the cosine has begun again
    assert rates["fp32"] == pytest.approx([1e-2 * 2 / 10])
