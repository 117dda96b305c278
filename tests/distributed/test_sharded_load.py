"""Every rank reads its own slices, and has what it would have had from the whole model: weights, loss and gradients."""

from __future__ import annotations

import re

import pytest

from tests.distributed.harness import Outcome, run_cases
from tests.distributed.load_cases import CASES, CASES_OF_FOUR, FAMILIES

MODULE = "tests.distributed.load_cases"
# Loaded beside another model, and compared by `compare`.
EQUAL = [
    *FAMILIES,
    *("bf16-as-fp32", "bf16-true", "rounded", "frozen", "halves", "by-size", "offloaded"),
    *("missing-head", "other-sizes", "ram-efficient", "resized", "looked-at", "both-equal", "both-differ"),
    *("lora", "lora-dora", "lora-pissa", "lora-and-head", "saved-adapter", "adapter-folder"),
    *("sharded-index", "hub-snapshot", "mixtral", "qwen3-moe", "llava"),
]
# Parameters that are real before sharding, because they are in no file or because somebody needed their values.
READ_EARLY = {
    "missing-head": 1,
    "other-sizes": 1,
    "ram-efficient": 1,
    "resized": 2,
    "both-equal": 0,
    "lora": 42,
    "lora-dora": 9 + 3,
    "lora-pissa": 6 + 3,
    "lora-and-head": 12,
    "saved-adapter": 12,
    "adapter-folder": 12,
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(MODULE, [name for name in CASES if name not in CASES_OF_FOUR], world_size=2)


@pytest.fixture(scope="module")
def outcomes_of_four() -> dict[str, Outcome]:
    # Four processes import at once, on two cores.
    return run_cases(MODULE, list(CASES_OF_FOUR), world_size=4, seconds_per_case=240)


@pytest.mark.parametrize("name", EQUAL)
def test_weights_loss_and_gradients_are_those_of_the_whole_model(name: str, outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[name].get():
        assert rank["differing"] == [] and rank["same_buffers"]
        assert 0 < rank["num_local"] < 0.6 * rank["num_whole"] and rank["num_gradients"] > 0
        if name != "looked-at":
            assert rank["num_unread"] == rank["num_parameters"] - READ_EARLY.get(name, 0)


@pytest.mark.parametrize("name", CASES_OF_FOUR)
def test_copies_of_shards_and_uneven_shards_are_read(name: str, outcomes_of_four: dict[str, Outcome]) -> None:
    for rank in outcomes_of_four[name].get():
        assert rank["differing"] == [] and rank["num_unread"] == rank["num_parameters"]
        assert rank["num_local"] < 0.6 * rank["num_whole"] / (1 if name == "two-by-two" else 2)


def test_what_is_looked_at_or_changed_before_sharding_is_read_by_every_rank(outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes["looked-at"].get()
    assert first["num_unread"] == first["num_parameters"] - 2  # what both ranks changed
    assert second["num_unread"] == second["num_parameters"] - 3  # and what this one printed


def test_missing_and_unexpected_weights_are_reported_as_from_pretrained_does(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["missing-head"].get():
        assert rank["missing"] == ["score.weight"] and rank["unexpected"] == ["lm_head.weight"]
    for rank in outcomes["other-sizes"].get():
        assert len(set(rank["messages"])) == 1 and "ignore_mismatched_sizes" in rank["messages"][0]


def test_a_tie_whose_two_weights_differ_is_not_tied(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["both-differ"].get():
        assert "lm_head.weight" in rank["names"]
    for rank in outcomes["both-equal"].get():
        assert "lm_head.weight" not in rank["names"]


@pytest.mark.parametrize("name", ["trainer", "sft-lora"])
def test_trainers_take_the_model_as_it_is(name: str, outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[name].get():
        expected, found = rank["losses"]
        assert len(expected) == 2 and found == expected and rank["differing"] == []
        assert rank["num_unread"] == rank["num_parameters"] - rank["num_adapters"]
        assert (rank["num_adapters"] > 0) == (name == "sft-lora")


@pytest.mark.parametrize("name", ["our-checkpoint", "our-checkpoint-of-experts"])
def test_a_run_starts_from_a_checkpoint_of_another(name: str, outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[name].get():
        assert rank["differing"] == [] and rank["saved_differing"] == []
        assert rank["num_unread"] == rank["num_parameters"]


def test_damage_is_one_error_on_all_ranks(outcomes: dict[str, Outcome]) -> None:
    expected = {
        "cut": "is cut off or damaged: it has",
        "outside": "lies outside of it, so it is not read",
        "gone": r"could not read the weights: model\..* could not be read from its file",
        "other": r"different files: the first values of model\.layers\.1\.mlp\.up_proj\.weight are not the same",
    }
    ranks = outcomes["damaged"].get()
    for name, pattern in expected.items():
        assert ranks[0][name] == ranks[1][name] and re.search(pattern, ranks[0][name]), name
    assert ranks[0]["gone untouched"] == "True"  # to be tried again once the files are back


def test_a_disk_that_fails_for_one_rank_is_an_error_on_all(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["one-rank-fails"].get():
        assert "could not read the weights on rank 1: model.norm.weight could not be read" in rank["error"]


def test_what_cannot_be_left_in_its_files_is_loaded_whole_with_a_line(outcomes: dict[str, Outcome]) -> None:
    reasons = {"old": "pytorch_model.bin is not a safetensors file", "new": "its weights are quantized (bitsandbytes)"}
    for index, rank in enumerate(outcomes["ordinary-ways"].get()):
        for name, reason in reasons.items():
            line = f"hf-fsdp: LlamaForCausalLM is loaded whole by every process: {reason}\n"
            assert rank[name] == {"printed": line if index == 0 else "", "unread": 0, "equal": True}
