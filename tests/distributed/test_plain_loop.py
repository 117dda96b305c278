"""Loops of a person's own under Accelerate: `build_accelerator`, one process and two, launched and in a notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.harness import REPOSITORY, Outcome, run_cases
from tests.distributed.plain_loop_cases import CASES, TWINS
from tests.distributed.test_launch import ACCELERATE_EXAMPLE, accelerate_launch, free_port
from tests.distributed.test_parity import CURVE_BAR, compare_gradients, compare_weights
from tests.distributed.tiny_models import build_model

MODULE = "tests.distributed.plain_loop_cases"


@pytest.fixture(scope="module")
def two() -> dict[str, Outcome]:
    return run_cases(MODULE, list(CASES), world_size=2)


@pytest.fixture(scope="module")
def single() -> dict[str, Outcome]:
    return run_cases(MODULE, TWINS, world_size=1)


def check(ranks: list[dict[str, Any]], twin: dict[str, Any]) -> None:
    """Sharded on every rank, and equal to one process."""
    assert all(rank["sharded"] for rank in ranks) and not twin["sharded"]
    assert sum(rank["num_local"] for rank in ranks) == twin["num_parameters"]
    for rank in ranks:
        compare_gradients(twin["gradients"], rank["gradients"])
        assert rank["losses"] == pytest.approx(twin["losses"], abs=CURVE_BAR)
        assert rank["norms"] == pytest.approx(twin["norms"], abs=CURVE_BAR)
        compare_weights(twin["weights"], rank["weights"])


@pytest.mark.parametrize("name", ["loop", "loop_sharded_before", "loop_that_defers"])
def test_a_plain_loop_equals_one_process(name: str, two: dict[str, Outcome], single: dict[str, Outcome]) -> None:
    """Accumulation, clipping, a schedule, and metrics over 5 rows on 2 processes."""
    ranks, twin = two[name].get(), single["loop"].get()[0]
    check(ranks, twin)
    for rank in ranks:
        assert rank["logits"].shape == twin["logits"].shape == (5, 67)
        assert torch.allclose(rank["logits"], twin["logits"], atol=1e-5)
        assert rank["rate"] == pytest.approx(twin["rate"])
    assert ranks[0]["saved_names"] == twin["saved_names"]
    assert ranks[0]["printed"].count("FSDP audit: LlamaForCausalLM on 2 processes") == 1
    assert "one process, so the model is trained unsharded" in twin["printed"]


def test_several_models_are_sharded_each_with_its_own_optimizer(
    two: dict[str, Outcome], single: dict[str, Outcome]
) -> None:
    ranks, twin = two["two_models"].get(), single["two_models"].get()[0]
    for name in ("first", "second"):
        check([rank[name] for rank in ranks], twin[name])
    assert all(rank["teacher"]["sharded"] and rank["teacher_is_frozen"] for rank in ranks)


def test_saved_state_goes_back_to_the_model_and_the_optimizer_it_came_from(two: dict[str, Outcome]) -> None:
    for rank in two["two_models"].get():
        assert rank["changed"] and rank["back"] and rank["momenta_back"]


@pytest.mark.parametrize("name", ["resumed_full", "resumed_sharded"])
def test_a_loaded_state_goes_on_as_if_it_had_never_stopped(name: str, two: dict[str, Outcome]) -> None:
    for rank in two[name].get():
        assert rank["equal"] and rank["sharded"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one optimizer", "one SGD holds parameters of 2 models (LlamaForCausalLM and LlamaForCausalLM)"),
        ("plugin", "build_accelerator was given fsdp_plugin"),
        ("precision", "fp32 in FSDPConfig(...) and bf16-mixed by build_accelerator(mixed_precision='bf16')"),
        ("fp8", "mixed_precision='fp8' is not a precision of sharded training here"),
        ("other precision", "was sharded by apply_fsdp in bf16-mixed, and this accelerator was built for fp32"),
        ("not finite", "step 1: the loss is not finite on rank 0, 1"),
    ],
)
def test_what_cannot_work_in_a_loop_is_refused_by_name(name: str, message: str, two: dict[str, Outcome]) -> None:
    for rank in two["refusals"].get():
        assert message in rank["refused"][name]


def test_a_refusal_changes_nothing_and_its_advice_works(two: dict[str, Outcome]) -> None:
    for rank in two["refusals"].get():
        assert rank["untouched"] and rank["sharded"]


# -- started for real -------------------------------------------------------------------------------------------------


def start(command: list[str], output: Path) -> tuple[dict[str, Any], str]:
    finished = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert finished.returncode == 0, finished.stdout[-1500:] + finished.stderr[-4000:]
    return json.loads((output / "result.json").read_text()), finished.stdout


def test_a_loop_under_accelerate_launch_is_sharded_by_the_launch_file(tmp_path: Path) -> None:
    model = tmp_path / "model"
    build_model("llama", tied=True).save_pretrained(model)
    command = accelerate_launch(ACCELERATE_EXAMPLE, tmp_path)
    arguments = ["-m", "tests.distributed.plain_loop_script", str(model), str(tmp_path)]
    result, printed = start([*command, *arguments], tmp_path)
    assert result["sharded"] and result["processes"] == 2 and result["stored"] == ["torch.float32"]
    assert len(result["losses"]) == 4 and result["losses"][-1] < result["losses"][0]
    assert "on 2 processes (dp_shard 2), fp32" in printed
    assert (tmp_path / "final" / "model.safetensors").is_file()


def test_a_notebook_trains_on_two_processes_and_goes_on(tmp_path: Path) -> None:
    script = [sys.executable, "-m", "tests.distributed.notebook_script", str(tmp_path), str(free_port())]
    result, printed = start(script, tmp_path)
    assert result == {"sharded": True, "steps": 2, "processes": 2}
    assert "the notebook goes on" in printed
