"""Answers of sharded vision-language models on 1, 2 and 3 processes are those of one unsharded model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.answers_cases import CASES, MODELS, NUM_ROWS
from tests.distributed.harness import Outcome, run_cases

MODULE = "tests.distributed.answers_cases"
NAMES = {1: ["several_sets", "training", "pictures"], 2: list(CASES), 3: ["answers", "predictions"]}
_outcomes: dict[int, dict[str, Outcome]] = {}


def ranks(world_size: int, name: str) -> list[Any]:
    """What every rank gave; the first call for a number of processes runs all of its cases."""
    if world_size not in _outcomes:
        _outcomes[world_size] = run_cases(MODULE, NAMES[world_size], world_size, seconds_per_case=240)
    return _outcomes[world_size][name].get()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_has_the_answers_of_an_unsharded_model(world_size: int, kind: str) -> None:
    for rank in ranks(world_size, "answers"):
        found = rank[kind]
        assert found["sharded"]
        expected = found["expected"]
        lengths = {len(answer.split()) for answer in expected}
        assert len(set(expected)) > 4 and len(lengths) > 1, "answers differ, and end at different steps"
        for number in NUM_ROWS:
            assert found["answers"][str(number)] == expected[:number]
        assert found["modes"] == [True, False], "a tower in evaluation mode stays in it"
        assert found["random"], "training draws what it would have drawn"
        assert found["most"] <= 3, "no batch is larger than asked for"


@pytest.mark.parametrize("world_size", [1, 2])
def test_scores_are_part_of_the_evaluation_and_training_is_the_same_to_the_bit(world_size: int) -> None:
    for index, rank in enumerate(ranks(world_size, "training")):
        assert rank["equal"] == [True, True] and rank["num_weights"] > 50
        at_evaluations, at_steps = rank["evaluations"], rank["steps"]
        history = at_evaluations["history"]
        assert [step for step, *_ in history] == [0, 1, 2, 3, 4]
        assert len({score for _, score, _ in history}) == 5, "another model, other answers"
        best = max(history[1:], key=lambda entry: entry[1])
        assert at_evaluations["best"] == [best[1], best[0]]
        assert at_evaluations["again"] == best[1] == pytest.approx(at_evaluations["by_hand"]), "the best is loaded"
        assert at_evaluations["num_lines"] == 25, "an evaluation at the same step adds no second lines"
        assert at_evaluations["losses"] == at_steps["losses"] == [1, 2, 3, 4]
        assert at_steps["history"] == [entry for entry in history if entry[0] in (2, 4)]
        if index == 0:
            _check_files(at_evaluations, history)


def _check_files(found: dict[str, Any], history: list[Any]) -> None:
    lines = found["lines"]
    assert [(line["step"], line["index"]) for line in lines] == [(step, at) for step in range(5) for at in range(5)]
    for step, score, _ in history:
        of_step = [line["scores"]["checksum"] for line in lines if line["step"] == step]
        assert sum(of_step) / 5 == pytest.approx(score)
    logged = [line for line in found["metrics"] if "eval_checksum" in line]
    assert [(line["step"], line["eval_checksum"]) for line in logged] == [entry[:2] for entry in history]
    assert all("eval_loss" in line and "eval_anls" in line for line in logged), "one line an evaluation"
    assert found["wandb"] == {"eval/checksum": found["again"]}


@pytest.mark.parametrize("world_size", [1, 2])
def test_several_evaluation_sets_are_asked_once(world_size: int) -> None:
    for rank in ranks(world_size, "several_sets"):
        assert rank["named"] == [["eval_exact_match"], ["eval_exact_match"], []]
        first, both = rank["asked"]
        assert both == 2 * first > 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_predictions_are_whole_in_order_and_gone_on_with(world_size: int) -> None:
    everyone = ranks(world_size, "predictions")
    for rank in everyone:
        lines = rank["lines"]
        assert [line["index"] for line in lines] == list(range(13))
        assert [line["answer"] for line in lines] == rank["expected"]
        assert rank["means"]["checksum"] == pytest.approx(sum(line["scores"]["checksum"] for line in lines) / 13)
        assert rank["files"] == ["a.jsonl", "a_images"], "no draft is left"
        assert rank["stored"] == sum(len(line["images"]) for line in lines)
        assert rank["refused"].startswith("row q9 cannot be made into a prompt: OSError"), "on every rank"
        assert not rank["is_named"], "what is broken off has no name yet"
        assert "its line 3 is of row 'q2'" in rank["other"]
        assert rank["equal"] and rank["resumed"] == rank["once_more"]
        assert rank["resumed"] == pytest.approx(rank["means"])
        assert rank["num_asked"] < 13, "rows before the break are not asked again"
        assert rank["asked_once_more"] == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_pictures_through_the_real_processor_are_scored_written_and_drawn(world_size: int) -> None:
    everyone = ranks(world_size, "pictures")
    for rank in everyone:
        assert rank["answers"] == rank["expected"] and len(set(rank["expected"])) > 3
        share = sum(rank["right"]) / 7
        assert 0 < share < 1
        assert rank["scores"] == [pytest.approx(share), pytest.approx(share / 2)]
    found = everyone[0]
    assert [line["answer"] for line in found["lines"]] == found["expected"]
    assert [line["scores"]["exact_match"] for line in found["lines"]] == found["right"]
    stored = [name for line in found["lines"] for name in line["images"]]
    assert len(stored) == 6 and all(name.endswith(".png") for name in stored)
    assert found["files"] == sorted(["answers_grid/step-000000.png", *stored])
    assert len(found["logged"]) == 1 and found["logged"][0].endswith(".png"), "the grid is in W&B"
