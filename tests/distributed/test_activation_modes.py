"""Recomputing, keeping, offloading and compiling change what a step costs, and none of its numbers."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.activation_cases import DROPOUT, GATHERS, NESTED, OTHERS, PARITY, TWINS
from tests.distributed.harness import Outcome, run_cases
from tests.distributed.test_parity import CURVE_BAR, GRADIENT_BAR, compare_gradients, compare_weights

# One fixture runs all cases of a world size; the default limit is that of a single test.
pytestmark = pytest.mark.timeout(900)
MODULE = "tests.distributed.activation_cases"


@pytest.fixture(scope="module")
def single() -> dict[str, Outcome]:
    return run_cases(MODULE, [*TWINS, "gathers"], world_size=1)


@pytest.fixture(scope="module")
def sharded() -> dict[str, Outcome]:
    return run_cases(MODULE, [*PARITY, *OTHERS], world_size=2, seconds_per_case=200)


def relative_error(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> float:
    assert expected.keys() == actual.keys() and expected
    norm = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
    assert norm > 0
    return max(((actual[name] - expected[name]).double().norm() / norm).item() for name in expected)


@pytest.mark.parametrize("name", PARITY)
def test_two_processes_equal_one_that_keeps_everything(
    name: str, single: dict[str, Outcome], sharded: dict[str, Outcome]
) -> None:
    twin, ranks = single[name].get()[0], sharded[name].get()
    for run in ranks:
        assert all(run["is_sharded"].values()) and not any(twin["is_sharded"].values())
        compare_gradients(twin["gradients"], run["gradients"])
        compare_weights(twin["weights"], run["weights"])
        assert run["losses"] == pytest.approx(twin["losses"], abs=CURVE_BAR)
        assert run["norms"] == pytest.approx(twin["norms"], abs=CURVE_BAR)
    assert sum(run["num_local"] for run in ranks) == twin["num_parameters"]
    assert max(run["num_local"] for run in ranks) < twin["num_parameters"] * 0.75


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_masks_are_those_of_the_forward(name: str, sharded: dict[str, Outcome]) -> None:
    for rank in sharded["dropout"].get():
        kept, run = rank[f"{name.partition('-')[0]}-none"], rank[name]
        assert relative_error(kept["gradients"], run["gradients"]) <= GRADIENT_BAR
        assert run["losses"] == pytest.approx(kept["losses"], abs=CURVE_BAR)


@pytest.mark.parametrize("name", GATHERS)
def test_no_mode_gathers_more_often_and_gradients_are_a_single_processs(
    name: str, single: dict[str, Outcome], sharded: dict[str, Outcome]
) -> None:
    expected = single["gathers"].get()[0]["none"]["gradients"]
    for rank in sharded["gathers"].get():
        assert rank[name]["sharded"]
        assert rank[name]["count"] == rank["none"]["count"] > 0
        assert rank[name]["graphs"] == ("compiled" in name), "all blocks share one graph"
        assert relative_error(expected, rank[name]["gradients"]) <= GRADIENT_BAR


@pytest.mark.parametrize("name", NESTED)
def test_blocks_with_gathers_inside_give_the_same_gradients(name: str, sharded: dict[str, Outcome]) -> None:
    for rank in sharded["nested_units"].get():
        for mode in ("selective", "inputs_offloaded"):
            assert relative_error(rank[f"{name}-none"], rank[f"{name}-{mode}"]) == 0, mode
        # Another order of the same operations, in bf16.
        bar = 5e-3 if name == "norms_fp32" else GRADIENT_BAR
        assert relative_error(rank[f"{name}-uncompiled"], rank[f"{name}-compiled"]) <= bar


def test_inputs_of_blocks_leave_the_device_and_weights_do_not_move(sharded: dict[str, Outcome]) -> None:
    for rank in sharded["held_on_device"].get():
        assert rank["kept"] == [False, False, False], "the control: without offload the device keeps them"
        assert rank["moved"] == [True, True, True]
        moved, returned, held = rank["bytes"]
        assert moved == returned == 3 * 4 * 12 * 32 * 4 and held == 0


def test_only_the_language_tower_is_recomputed(single: dict[str, Outcome], sharded: dict[str, Outcome]) -> None:
    expected = single["towers"].get()[0]["gradients"]
    for rank in sharded["towers"].get():
        assert rank["report"] == (
            "2 of 7: 0 of 3 vision, 2 of 4 language blocks recomputed in backward, outputs of matmul kept; "
            "inputs of 2 blocks in host memory; all that 5 blocks save for backward in host memory"
        )
        assert relative_error(expected, rank["gradients"]) <= GRADIENT_BAR


def test_names_evaluation_and_generation_are_the_plain_models(sharded: dict[str, Outcome]) -> None:
    for rank in sharded["everything_together"].get():
        assert rank["names"] and rank["tokens"]
        assert rank["loss"][0] == pytest.approx(rank["loss"][1], abs=CURVE_BAR)
        assert rank["report"] == (
            "3 of 3 blocks recomputed in backward, outputs of attention and matmul kept; "
            "inputs of 3 blocks in host memory; 3 blocks compiled (aot_eager)"
        )


def test_in_bf16_forward_and_recompute_share_a_graph(sharded: dict[str, Outcome]) -> None:
    for rank in sharded["graphs_in_bf16"].get():
        assert rank["graphs"] <= 2 and rank["breaks"] == 0
        assert relative_error(rank["expected"], rank["gradients"]) <= 5e-3


def test_inductor_gives_the_same_gradients(single: dict[str, Outcome], sharded: dict[str, Outcome]) -> None:
    expected = single["inductor"].get()[0]["gradients"]
    for rank in sharded["inductor"].get():
        assert 1 <= rank["graphs"] <= 2, "the input of the first block needs no gradient"
        assert relative_error(expected, rank["gradients"]) <= 1e-5


@pytest.mark.parametrize("name", ["torch_compile_argument", "dynamo_in_launch_file"])
def test_a_request_to_compile_the_model_compiles_its_blocks(name: str, sharded: dict[str, Outcome]) -> None:
    ranks = sharded[name].get()
    for rank in ranks:
        assert "3 blocks compiled (aot_eager)" in rank["report"]
        assert rank["names"] and rank["is_model"] == "LlamaForCausalLM"
        assert rank["graphs"] == 1, "of the blocks' forward; evaluation runs uncompiled"
        assert rank["losses"][1] < rank["losses"][0]
    printed = ranks[0]["printed"]
    assert printed.count("torch.compile: every block for itself (aot_eager), not the whole model") == 1
    assert printed.count("_scaled_dot_product_cudnn_attention never ran in a checkpointed block") == 1
    assert ("dynamo_use_fullgraph" in printed) == (name == "dynamo_in_launch_file")
