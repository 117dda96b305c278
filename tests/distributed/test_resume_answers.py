"""Resuming from what does not fit is one clear error on all ranks; the best checkpoint; a fresh optimizer."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from tests.distributed.harness import Outcome, run_cases
from tests.distributed.resume_answers_cases import CASES

LAYER = "base_model.model.model.layers.0"
FRESH = "checkpoint: {optimizer: fresh} to go on with these weights and a fresh optimizer"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases("tests.distributed.resume_answers_cases", list(CASES), 2)


def on_all_ranks(outcome: Outcome, name: str) -> str:
    """The one error that every rank raised."""
    first, second = (rank[name] for rank in outcome.get())
    assert first.startswith("CheckpointError: ") and first == second
    return str(first)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rank", rf"{LAYER}\.self_attn\.q_proj\.lora_A\.default\.weight is \[4, 32\] in checkpoint-1 and \[2, 32\]"),
        ("targets", rf"lacks 6 tensors of this run's model, among them {LAYER}\.self_attn\.v_proj\.lora_A"),
        ("targets", rf"holds 12 tensors that this run's model has no place for, among them {LAYER}\.self_attn\.q_proj"),
        ("size", r"model\.layers\.0\.mlp\.gate_proj\.weight is \[48, 32\] in checkpoint-1 and \[64, 32\] in this run"),
        ("full_into_adapter", rf"lacks 12 tensors of this run's model, among them {LAYER}\.self_attn\.q_proj\.lora_A"),
        ("adapter_into_full", r"lacks 30 tensors of this run's model, among them model\.embed_tokens\.weight"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_the_tensor(
    name: str, expected: str, outcomes: dict[str, Outcome]
) -> None:
    assert re.search(expected, on_all_ranks(outcomes["other_models"], name))
    # Its advice: build the model as in the run that saved.
    assert [rank["same"] for rank in outcomes["other_models"].get()] == ["", ""]


def test_another_optimizer_is_refused_and_the_advice_works(outcomes: dict[str, Outcome]) -> None:
    found = outcomes["other_optimizers"]
    assert "holds the state of AdamW and this run uses SGD" in on_all_ranks(found, "class")
    assert "the optimizer has 3 groups and that of the checkpoint 2" in on_all_ranks(found, "groups")
    for name in ("class", "groups"):
        assert FRESH in on_all_ranks(found, name)
    for rank in outcomes["fresh_optimizer"].get():
        # Half of the steps are done: this run's rate goes on at its place in the schedule.
        assert rank["other_class"] == pytest.approx([0.05, 0.025])
        assert rank["other_groups"] == ""


def test_optimizer_state_that_was_lost_is_no_fresh_start(outcomes: dict[str, Outcome]) -> None:
    error = on_all_ranks(outcomes["other_optimizers"], "lost")
    assert "no optimizer state for 30 trained parameters, the first model.embed_tokens.weight" in error
    assert FRESH in error


def test_the_settings_of_the_optimizer_are_the_saved_ones_and_it_is_said(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["other_optimizers"].get():
        assert rank["settings"] == [(0.01, (0.9, 0.999))] * 2
    (line,) = (line for line in outcomes["other_optimizers"].get()[0]["lines"] if "settings" in line)
    assert "lr 0.01 (this run: 0.5), betas (0.9, 0.999) (this run: (0.9, 0.5))" in line


def test_another_base_under_an_adapter_is_said(outcomes: dict[str, Outcome]) -> None:
    rank_0 = outcomes["other_base"].get()[0]
    said = "the frozen weights are not those that the adapter was trained on"
    assert not any(said in line for line in rank_0["same"])
    assert sum(said in line for line in rank_0["other"]) == 1


def test_a_path_that_is_no_checkpoint_names_one(outcomes: dict[str, Outcome]) -> None:
    found = outcomes["paths"]
    checkpoint = found.get()[0]["checkpoint"]
    run = on_all_ranks(found, "run")
    assert "is the folder of a run, with checkpoints in it" in run
    assert ast.literal_eval(run.rpartition("resume_from_checkpoint=")[2]) == checkpoint
    missing = on_all_ranks(found, "missing")
    assert "does not exist" in missing and f"near  {checkpoint}" in missing
    assert "is a file, not the folder of a checkpoint" in on_all_ranks(found, "file")
    assert "killed/checkpoint-1' cannot be resumed from" in on_all_ranks(found, "killed")
    none = on_all_ranks(found, "none")
    assert "holds no checkpoint that can be resumed from" in none
    assert "checkpoint-1 is skipped: incomplete: it has no manifest.json" in none


def test_a_checkpoint_of_the_model_only_needs_a_fresh_optimizer(outcomes: dict[str, Outcome]) -> None:
    found = outcomes["model_only"]
    assert FRESH in on_all_ranks(found, "path")
    newest = on_all_ranks(found, "newest")
    for step in (2, 4):
        assert f"checkpoint-{step} is skipped: it holds the model only (checkpoint: {{optimizer: fresh}}" in newest
    for rank in found.get():
        assert rank["optimizer_files"] == []


@pytest.mark.parametrize(
    ("case", "name"), [("model_only", "fresh_path"), ("model_only", "fresh_newest"), ("fresh_optimizer", None)]
)
def test_a_fresh_optimizer_goes_on_with_weights_samples_and_schedule(
    case: str, name: str | None, outcomes: dict[str, Outcome]
) -> None:
    for index, values in enumerate(outcomes[case].get()):
        rank: dict[str, Any] = values if name is None else values[name]
        assert rank["loss"][0] == rank["loss"][1]
        assert rank["rate"][0] == rank["rate"][1] == 0.005
        assert rank["steps"] == [2.0], "the optimizer counts from the resume on"
        if index == 0:
            assert "resume: checkpoint.optimizer: fresh, so the optimizer's state is not loaded" in rank["lines"]


@pytest.mark.parametrize("case", ["best", "best_adapter"])
def test_the_best_checkpoint_is_loaded_and_kept(case: str, outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[case].get():
        assert rank["best_steps"] == [2, 2]
        assert rank["equal"] == [True, True]
        assert rank["last_differs"] and rank["num_trained"] == (12 if case == "best_adapter" else 30)
        assert rank["kept"][0] == rank["kept"][1] == ["checkpoint-2"]
        assert rank["steps"] == [[1, 2, 3], [3, 4]]
