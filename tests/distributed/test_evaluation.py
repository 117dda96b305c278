"""Evaluation on 1, 2 and 3 processes: the loss of one model on one dataset is one number."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.distributed.evaluation_cases import ANYWHERE, SIZES
from tests.distributed.harness import Outcome, run_cases
from tests.distributed.samples_cases import CASES

MODULE = "tests.distributed.samples_cases"
NAMES = {
    1: [*ANYWHERE, "answers", "packed_evaluation", "given_prompts"],
    2: list(CASES),
    3: ["sizes", "streams", "other_heads", "uneven_outputs", "answers", "packed_evaluation"],
}
_outcomes: dict[int, dict[str, Outcome]] = {}


def ranks(world_size: int, name: str) -> list[Any]:
    """What every rank gave; the first call for a number of processes runs all of its cases."""
    if world_size not in _outcomes:
        _outcomes[world_size] = run_cases(MODULE, NAMES[world_size], world_size, seconds_per_case=240)
    return _outcomes[world_size][name].get()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_eval_loss_is_the_mean_over_tokens_for_every_size_and_batch(world_size: int) -> None:
    for rank in ranks(world_size, "sizes"):
        assert len(rank["found"]) == len(SIZES)
        for name, (loss, perplexity, expected) in rank["found"].items():
            assert loss == pytest.approx(expected, abs=1e-5), name
            assert perplexity == pytest.approx(math.exp(expected), rel=1e-5), name
        assert rank["is_sharded"] == (world_size > 1)
    shares = [rank["num_local"] for rank in ranks(world_size, "sizes")]
    assert sum(shares) == pytest.approx(1.0), "every parameter is on one rank, in parts"
    assert max(shares) < 1.1 / world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_streams_count_every_sample_once_and_never_hang(world_size: int) -> None:
    for rank in ranks(world_size, "streams"):
        assert len(rank) == 9
        for name, (loss, expected) in rank.items():
            assert loss == pytest.approx(expected, abs=1e-5), name


@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_grouped_by_length_give_the_same_loss(world_size: int) -> None:
    for rank in ranks(world_size, "grouped_by_length"):
        assert rank["loss"] == pytest.approx(rank["expected"], abs=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_best_model_and_early_stopping_go_by_the_right_loss(world_size: int) -> None:
    for rank in ranks(world_size, "several_datasets"):
        for name, expected in rank["expected"].items():
            assert rank["final"][name] == pytest.approx(expected, abs=1e-5)
        twin = ranks(1, "several_datasets")[0]
        assert rank["seen"] == pytest.approx(twin["seen"], abs=1e-5)
        assert rank["best"] in rank["seen"]
        assert rank["steps"] == twin["steps"] == 3  # two evaluations without progress


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["classes", "regression", "t5", "smoothed"])
def test_other_heads_have_the_loss_of_one_process(kind: str, world_size: int) -> None:
    for rank in ranks(world_size, "other_heads"):
        for way in ("loss", "outputs"):
            found = rank[f"{kind}-{way}"]
            assert found["loss"] == pytest.approx(found["expected"], abs=1e-5), way
            assert found["has_perplexity"] == (kind == "t5"), "a smoothed or other loss is no log of a perplexity"
            assert found["rows"] == (7 if way == "outputs" else None)


@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_of_ones_own_are_left_alone(world_size: int) -> None:
    for rank in ranks(world_size, "own_losses"):
        assert rank["func"] == {"loss": pytest.approx(0.5), "has_perplexity": False}
        assert rank["method"] == {"loss": pytest.approx(0.25), "has_perplexity": False}


@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_in_which_nothing_counts_weigh_nothing(world_size: int) -> None:
    for rank in ranks(world_size, "nothing_counts"):
        assert rank["half"] == pytest.approx(rank["expected"], abs=1e-5)
        assert math.isnan(rank["none"])


def test_training_is_the_same_to_the_bit_with_and_without_evaluations() -> None:
    for rank in ranks(2, "training_is_unchanged"):
        assert rank["losses"][0] == rank["losses"][1]
        assert rank["is_equal"] and rank["has_trained"]


def test_logits_that_memory_cannot_hold_are_refused_and_the_advice_works() -> None:
    for rank in ranks(2, "logits_that_do_not_fit"):
        refused = rank["refused"]
        assert refused["steps"] == 0, "found before the first step"
        assert "40.8 KiB (estimated: 13 samples x 12 tokens x 67 words x 4 bytes)" in refused["train"]
        for call in ("evaluate", "stream"):
            assert "compute_metrics keeps the outputs of the whole evaluation on every process" in refused[call]
            assert "preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)" in refused[call]
            assert "batch_eval_metrics=True" in refused[call]
        assert refused["predict"].startswith("predict() keeps the outputs")
        assert rank["argmax"]["log"][0]["eval_shape"] == "(13, 12)"
        for name in ("argmax", "by_batch"):
            assert rank[name]["steps"] == 3
            assert not any(rank[name].get(call) for call in ("train", "evaluate", "predict", "stream")), name
        assert rank["classes"] == {"train": "", "steps": 3}


@pytest.mark.parametrize("world_size", [2, 3])
def test_outputs_of_uneven_streams_are_refused_and_the_advice_works(world_size: int) -> None:
    for rank in ranks(world_size, "uneven_outputs"):
        assert (
            "outputs that are gathered for compute_metrics or predict() need equally many" in rank["refused"]["error"]
        )
        assert rank["dispatched"]["error"] == rank["loss_only"]["error"] == ""
        assert rank["dispatched"]["rows"] == 5
        assert rank["dispatched"]["loss"] == pytest.approx(rank["loss_only"]["loss"], abs=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "tied", "lora", "t5"])
def test_answers_are_the_greedy_ones_however_many_ranks_share_the_prompts(kind: str, world_size: int) -> None:
    for rank in ranks(world_size, "answers"):
        found = rank[kind]
        assert found["all"] == found["expected"]
        assert found["one"] == found["expected"][:1]
        assert found["sharded"] == (world_size > 1)
        assert any(found["expected"])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_packed_and_padded_evaluation_have_one_loss(world_size: int) -> None:
    for rank in ranks(world_size, "packed_evaluation"):
        assert rank["num_packs"] == 5
        assert rank["padded"] == pytest.approx(rank["expected"], abs=1e-5)
        assert rank["packed"] == pytest.approx(rank["expected"], abs=1e-5)


def test_samples_of_a_chat_run_are_printed_kept_and_sent() -> None:
    first, second = ranks(2, "chat_training")
    assert first["loss"] == pytest.approx(first["expected"], abs=1e-5)
    assert [line["step"] for line in first["lines"]] == [0, 0, 0, 2, 2, 2, 4, 4, 4]
    for line in first["lines"][1::3]:
        assert line["prompt"] == "user quick brown fox assistant"
        assert line["reference"] == "fox jumps"
    assert len({line["answer"] for line in first["lines"]}) > 1, "the model learns, so its answers change"
    assert [table["data"][0][0] for table in first["tables"]] == [0, 2, 4]
    assert first["tables"][0]["columns"] == ["step", "prompt", "answer", "reference"]
    assert "hf-fsdp: samples at step 2\n   1 prompt     user the quick assistant\n     answer     " in first["printed"]
    assert "samples at step" not in second["printed"]
    assert second["files"] == [], "each rank has a folder of its own in this test, and only rank 0 writes"


def test_training_is_the_same_to_the_bit_with_and_without_samples() -> None:
    assert all(rank["is_equal"] for rank in ranks(2, "chat_training"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_given_prompts_are_asked_once_a_step_and_conversations_get_the_template(world_size: int) -> None:
    first = ranks(world_size, "given_prompts")[0]
    assert [line["prompt"] for line in first["lines"]] == ["the quick brown", "user fox jumps assistant"]
    assert [line["answer"] for line in first["lines"]] == [
        line["answer"] for line in ranks(1, "given_prompts")[0]["lines"]
    ]
    assert first["printed"].count("hf-fsdp: samples at step 0") == 1
