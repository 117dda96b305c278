"""State of unusual kinds is saved and comes back, or is refused by name before there is much to lose."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.harness import Outcome, run_cases
from tests.distributed.resume_odd_cases import CASES


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases("tests.distributed.resume_odd_cases", list(CASES), 2)


def same_on_all_ranks(outcome: Outcome) -> Any:
    first, second = outcome.get()
    assert first == second
    return first


@pytest.mark.parametrize("case", ["dotted", "local", "extra_state", "vera"])
def test_a_resumed_run_equals_the_uninterrupted_one(case: str, outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[case].get():
        assert rank["logs"] and rank["num_optimizer"] > 0 and rank["num_local"] < 0.6 * rank["num_parameters"]
        assert not {key: value for key, value in rank.items() if key.startswith("other_") and value}


@pytest.mark.parametrize(
    ("name", "words", "step"),
    [
        ("NestedMomentum", "keeps tensors inside a dict in held of", 1),
        ("GlobalCount", "GlobalCount keeps state['all'], which belongs to no parameter", 1),
        ("OwnStateDict", "OwnStateDict keeps state_dict()['count'], which belongs to no parameter", 1),
        ("CountByRank", "its state that is no tensor, differ between the ranks", 1),
    ],
)
def test_state_of_an_optimizer_that_would_be_lost_is_refused_after_the_first_step(
    name: str, words: str, step: int, outcomes: dict[str, Outcome]
) -> None:
    error, at = same_on_all_ranks(outcomes["refused_optimizers"])[name]
    assert error.startswith("CheckpointError: ") and words in error and at == step


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adapter", "the adapter is named 'optimizer', which is a folder of every checkpoint"),
        ("opaque", "the extra state of lm_head holds a object, which a checkpoint without pickle cannot hold"),
    ],
)
def test_a_model_that_cannot_be_saved_is_refused_before_the_first_step(
    name: str, words: str, outcomes: dict[str, Outcome]
) -> None:
    error, step = same_on_all_ranks(outcomes["refused_models"])[name]
    assert words in error and step == 0


def test_buffers_that_differ_between_ranks_are_said(outcomes: dict[str, Outcome]) -> None:
    assert "1 buffers have other values on each rank (seen)" in outcomes["differing_buffers"].get()[0]["printed"]


@pytest.mark.parametrize("name", ["paths", "some", "kinds"])
def test_ranks_that_are_told_different_checkpoints_say_so(name: str, outcomes: dict[str, Outcome]) -> None:
    error = same_on_all_ranks(outcomes["different_wishes"])[name]
    assert "ranks were given different resume_from_checkpoint: rank 0: " in error and ", rank 1: " in error


def test_a_schedule_of_another_kind_is_refused_and_the_advice_works(outcomes: dict[str, Outcome]) -> None:
    first = outcomes["other_schedules"].get()[0]
    for kinds, now in (("linear plateau", "ReduceLROnPlateau"), ("plateau linear", "LambdaLR")):
        assert f"this run's schedule is {now} and the checkpoint's is of another kind" in first[kinds]
        assert "checkpoint: {optimizer: fresh}" in first[kinds] and "Error" not in first[f"{kinds} fresh"]
    assert "starts anew" in first["linear plateau fresh"] and "another kind" in first["linear plateau fresh"]
    assert "lr_scheduler_type is cosine and was linear" in first["linear cosine"]


def test_the_state_of_the_optimizer_follows_its_parameters_into_another_dtype(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["other_precisions"].get():
        assert {name: states for name, (states, _) in rank.items()} == {
            "bf16-mixed bf16-true": ["torch.bfloat16"],
            "bf16-true bf16-mixed": ["torch.float32"],
            "fp32 bf16-true": ["torch.bfloat16"],
        }


def test_a_change_of_precision_is_said(outcomes: dict[str, Outcome]) -> None:
    for kinds, (_, lines) in outcomes["other_precisions"].get()[0].items():
        before, after = kinds.split()
        assert f"resume: the run before computed in {before} and this one computes in {after}" in "\n".join(lines)


def test_auto_goes_on_where_there_is_something_and_words_are_understood(outcomes: dict[str, Outcome]) -> None:
    found = outcomes["words"].get()[0]
    assert {name: found[name][0] for name in ("empty", "later", "word", "fresh")} == {
        "empty": 1,
        "later": 2,
        "word": 2,
        "fresh": 1,
    }
    assert "nothing to go on from" in found["empty"][1] and "fresh start" in found["unfinished"]
    assert "checkpoint-1 (step 1)" in found["later"][1]
    assert "holds checkpoint-1 of an earlier run; this is a fresh start" in found["fresh"][1]
    assert "holds no checkpoint that can be resumed from" in found["damaged"] and "config.json" in found["damaged"]


def test_the_best_checkpoint_is_the_best_of_those_that_were_saved(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["best_of_saved"].get():
        assert (rank["second"]["best"], rank["second"]["left"]) == ("checkpoint-4", ["checkpoint-4"])
        assert rank["others"]["best"] == "checkpoint-4" and "checkpoint-3" in rank["others"]["left"]
    found = outcomes["best_of_saved"].get()[0]
    assert (
        "best model: loaded from checkpoint-4 (score 6.0); step 1 was better, 9.0, and has no checkpoint"
        in found["second"]["printed"]
    )
    assert "no step was both evaluated and saved" in found["none"]["printed"]


def test_a_plain_training_after_a_resumed_one_logs_every_step(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["trained_again"].get()[0]["steps"] == [[1, 2, 3, 4]] * 2


def test_a_best_checkpoint_that_was_deleted_is_named(outcomes: dict[str, Outcome]) -> None:
    found = outcomes["lost_best"].get()[0]
    assert "checkpoint-1, the best checkpoint, is not there any more" in found["error"]
    assert found["left"] == ["checkpoint-2"] and "checkpoint-2" in found["error"]


def test_numbers_of_numpy_and_torch_in_the_log_are_saved(outcomes: dict[str, Outcome]) -> None:
    found = same_on_all_ranks(outcomes["numbers_in_logs"])
    assert (found["number"], found["tensor"]) == ("", "") and "a set ({1}) cannot be saved" in found["set"]
