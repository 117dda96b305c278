"""The demo's tables and the claims that decide its exit code."""

from __future__ import annotations

import dataclasses
import io
import re
from typing import Any

import pytest
from rich.console import Console
from show_results import Results, samples_markdown, show_results


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
