"""The demo's tables and the claims that decide its exit code."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from typing import Any

import pytest
from killed_save import Resume
from rich.console import Console
from show_results import Results, samples_markdown, show_results


def build_resume(*, loss_again: float) -> Resume:
    kept = [{"step": 1, "seconds": 1.0, "loss": 3.0}]
    again = [
        {"step": 2, "seconds": seconds, "loss": loss, "grad_norm": 1.5, "learning_rate": 0.001}
        for seconds, loss in ((2.0, 2.000002), (2.5, loss_again))
    ]
    return Resume(killed=[*kept, again[0]], resumed=[*kept, again[1]], resumed_from=1, killed_at=2)


def build_results(**changes: Any) -> Results:
    results = Results(
        single=[{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}],
        sharded=[
            {"step": 0, "eval_loss": 3.5},
            {"step": 1, "loss": 3.0},
            {"step": 2, "loss": 2.000002},
            {"step": 3, "loss": 1.5},
            {"step": 3, "eval_loss": 2.5},
        ],
        resume=build_resume(loss_again=2.000002),
        audit={"num_parameters": 100, "num_sharded": 100},
        stock={
            "stock_sharding": {"num_parameters": 100, "num_sharded": 0, "wrapped_as": "DistributedDataParallel"},
            "lora_dropout": 0.05,
            "gradient_error": {"stock": 0.25, "ours": 0.0},
        },
        samples=[{"question": "def f(x):\n    return x[0][bold]", "true": "First.", "before": "```", "after": "First"}],
    )
    return dataclasses.replace(results, **changes)


def rendered(results: Results) -> str:
    buffer = io.StringIO()
    show_results(results, Console(file=buffer, width=100, highlight=False))
    return buffer.getvalue()


def test_losses_are_compared_at_the_steps_that_both_runs_took():
    results = build_results()
    assert results.losses() == [(1, 3.0, 3.0), (2, 2.0, 2.000002)]
    assert results.largest_loss_difference() == pytest.approx(2e-6)
    assert "largest difference: 2.00e-06" in rendered(results)


def test_tables_show_stock_against_ours_and_the_held_out_loss():
    text = rendered(build_results())
    assert "0.0%" in text and "100.0%" in text
    assert "25.00%" in text and "0.00%" in text
    assert "before 3.500, after 2.500" in text


def test_brackets_in_code_are_shown_and_not_taken_for_markup():
    assert "return x[0][bold]" in rendered(build_results())


def test_samples_file_holds_question_and_both_answers():
    text = samples_markdown(build_results())
    assert "return x[0][bold]" in text
    assert text.index("**before**") < text.index("**after**") < text.index("First.")


def test_a_demo_that_shows_what_it_says_has_no_unmet_claim():
    assert build_results().unmet_claims() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"single": [{"step": 1, "loss": 3.1}]}, r"differ by 1\.0e-01, more than 1e-05"),
        ({"audit": {"num_parameters": 100, "num_sharded": 99}}, "not every parameter is sharded"),
        ({"sharded": [{"step": 0, "eval_loss": 3.0}, {"step": 1, "loss": 3.0}, {"step": 1, "eval_loss": 3.0}]}, "fall"),
    ],
)
def test_each_claim_that_is_not_met_is_named(changes, message):
    [claim] = build_results(**changes).unmet_claims()
    assert re.search(message, claim)


def test_checkpointing_of_ours_that_changes_gradients_is_named():
    stock = build_results().stock
    worse = {**stock, "gradient_error": {"stock": 0.25, "ours": 0.01}}
    assert build_results(stock=worse).unmet_claims() == ["our checkpointing changes gradients"]


def test_steps_computed_twice_are_shown_and_written_down():
    results = build_results()
    text = rendered(results)
    assert "killed in the save of step 2, resumed from checkpoint-1" in text
    assert text.count("2.00000200") == 2
    assert "computed twice: equal to the bit" in text
    assert results.to_mapping()["killed_save"] == {
        "killed_in_the_save_of_step": 2,
        "resumed_from_step": 1,
        "steps": [
            {"step": 2, "loss": [2.000002, 2.000002], "grad_norm": [1.5, 1.5], "learning_rate": [0.001, 0.001]},
        ],
        "equal_to_the_bit": True,
    }


def test_a_resumed_curve_that_differs_by_a_bit_fails_the_demo():
    loss_again = math.nextafter(2.000002, 3.0)
    results = build_results(resume=build_resume(loss_again=loss_again))
    assert results.unmet_claims() == [f"step 2 has loss 2.000002 before the kill and {loss_again!r} after the resume"]
    assert "computed twice: NOT EQUAL" in rendered(results)
