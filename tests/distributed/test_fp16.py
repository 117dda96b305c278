"""fp16-mixed: the scale changes no result, and an overflow on one rank skips the step on all of them."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.fp16_cases import CASES, FIRST_SCALE
from tests.distributed.harness import Outcome, run_cases

# fp16 has 11 bits of mantissa: a loss of ~4 of a few hundred operations agrees with fp32 to three digits.
FP16_RELATIVE = 2e-3


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases("tests.distributed.fp16_cases", list(CASES), world_size=2)


@pytest.mark.parametrize("clip", ["", "_clip"])
def test_scaling_changes_neither_losses_nor_gradient_norms_nor_clipping(
    clip: str, outcomes: dict[str, Outcome]
) -> None:
    for fp16, fp32 in zip(outcomes[f"fp16{clip}"].get(), outcomes[f"fp32{clip}"].get(), strict=True):
        assert fp16["losses"] == pytest.approx(fp32["losses"], rel=FP16_RELATIVE)
        assert fp16["norms"] == pytest.approx(fp32["norms"], rel=10 * FP16_RELATIVE)
        assert fp16["losses"] != fp32["losses"]
        moved = torch.stack([(fp16["weights"][n] - fp32["weights"][n]).norm() for n in fp32["weights"]]).norm()
        assert moved < 0.01 * torch.stack([w.norm() for w in fp32["weights"].values()]).norm()
        assert all(fp16["is_sharded"].values()) and fp16["num_local"] < fp16["num_parameters"]


@pytest.mark.parametrize("name", ["overflow_adamw", "overflow_fused", "overflow_offloaded"])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_is_said(name: str, outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes[name].get()
    for rank in (first, second):
        assert rank["sharded"] and rank["fp16"]
        assert rank["moved"] == [False, True, False, True, True]
        assert rank["finite"]
        assert rank["scales"] == [FIRST_SCALE / 2, FIRST_SCALE / 2] + [FIRST_SCALE / 4] * 3
        # A skipped step keeps its learning rate: the schedule counts the steps that were taken.
        assert rank["rates"][0] == pytest.approx(1e-2) and rank["rates"][1] == rank["rates"][2] < 1e-2
    assert torch.equal(first["weights"], second["weights"])
    assert "step 1 skipped on all ranks: gradients overflowed fp16; loss scale is now 32768" in first["printed"]
    assert "step 3 skipped on all ranks: gradients overflowed fp16; loss scale is now 16384" in first["printed"]
    assert "every trained parameter got a gradient" in first["printed"]  # looked at in step 2, the first that was taken
    assert "skipped" not in second["printed"]


def test_overflow_that_no_scale_can_help_ends_the_run(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["no_way_out"].get():
        assert "gradients are not finite at a loss scale of 1" in rank["error"]
        assert "precision: bf16-mixed" in rank["error"]
        assert rank["scales"][0] == 2.0


def test_a_loop_with_its_own_scaler_skips_on_all_ranks(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["own_loop"].get():
        assert rank["moved"] == [False, True] and rank["finite"]
        assert rank["scale"] == FIRST_SCALE / 2


def test_fp16_typed_in_training_arguments_trains_fp32_weights_with_a_scaler(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["typed"].get():
        assert rank["stored"] == ["torch.float32"] and rank["saved"] == ["torch.float16"]
        assert rank["scale"] == FIRST_SCALE
        assert len(rank["losses"]) == 2 and rank["losses"][1] != rank["losses"][0]


def test_a_loop_on_values_that_no_scale_helps_ends(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["loop_on_nan"].get():
        assert "gradients are not finite at a loss scale of 1" in rank["error"]
        assert rank["steps"] < 20


def test_another_precision_takes_accelerates_scaler_away(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["scaler_goes"].get():
        assert rank == {"gone": True, "back": True}
