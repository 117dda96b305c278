"""QLoRA: a 4-bit base, sharded, gives the numbers of one process; evaluating, saving and resuming change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.harness import Outcome, run_cases
from tests.distributed.qlora_cases import CASES, PARITY, TWINS, WRITTEN
from tests.distributed.test_parity import CURVE_BAR, compare_gradients, compare_weights
from tests.distributed.test_precision import distance

MODULE = "tests.distributed.qlora_cases"


@pytest.fixture(scope="module")
def two() -> dict[str, Outcome]:
    return run_cases(MODULE, [name for name in CASES if name != "uneven"], world_size=2)


@pytest.fixture(scope="module")
def single() -> dict[str, Outcome]:
    return run_cases(MODULE, TWINS, world_size=1)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
@pytest.mark.parametrize("name", PARITY)
def test_two_processes_equal_one_in_fp32(
    name: str, optimizer: str, two: dict[str, Outcome], single: dict[str, Outcome]
) -> None:
    twin = single[name].get()[0][optimizer]
    assert not any(twin["is_sharded"])
    for rank in two[name].get():
        run = rank[optimizer]
        assert all(run["is_sharded"]) and run["trained_dtypes"] == ["torch.float32"]
        assert len(run["packed"]) == 21
        assert all(local * 2 == whole for whole, local in run["packed"].values()), "packed weights are not halved"
        compare_gradients(twin["gradients"], run["gradients"])
        assert run["losses"] == pytest.approx(twin["losses"], abs=CURVE_BAR)
        assert run["norms"] == pytest.approx(twin["norms"], abs=CURVE_BAR)
        if optimizer == "sgd":
            compare_weights(twin["weights"], run["weights"])
        assert all(torch.equal(run["packed_bits"][n], twin["packed_bits"][n]) for n in twin["packed_bits"])


@pytest.mark.parametrize("name", WRITTEN)
def test_bf16_equals_the_written_reference(name: str, two: dict[str, Outcome]) -> None:
    for rank in two[name].get():
        sharded, expected = rank["sharded"], rank["reference"]
        assert sharded["sharded"] and sharded["packed_as_before"]
        for what in ("gradients", "weights"):
            assert {n: t.dtype for n, t in sharded[what].items()} == {n: t.dtype for n, t in expected[what].items()}
            assert distance(sharded[what], expected[what]) <= 1e-6, what
        # The comparison can fail: adapters stored in the other dtype are far away.
        assert distance(rank["wrong"]["weights"], expected["weights"]) > 1e-4


def test_three_processes_with_uneven_packed_shards_equal_one() -> None:
    ranks = run_cases(MODULE, ["uneven"], world_size=3)["uneven"].get()
    for rank in ranks:
        compare_gradients(rank["expected"], rank["gradients"])
    for name, (_, rows) in ranks[0]["rows"].items():
        held = [rank["rows"][name][0] for rank in ranks]
        assert sum(held) == rows and held[2] < held[0], name


def test_every_bit_pattern_passes_through_a_gather(two: dict[str, Outcome]) -> None:
    for rank in two["every_bit_pattern"].get():
        assert len(rank) == 6 and all(rank.values()), rank


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_an_evaluation_after_every_step_changes_no_bit_of_training(precision: str, two: dict[str, Outcome]) -> None:
    for rank in two["evaluation"].get():
        evaluated, plain = rank[f"{precision} with"], rank[f"{precision} without"]
        assert (len(evaluated["eval_losses"]), len(plain["eval_losses"])) == (4, 0)
        assert (evaluated["num_rewritten"], plain["num_rewritten"]) == (0, 0)
        assert same_training(evaluated, plain)


def test_training_and_evaluation_are_those_of_one_process_that_never_evaluates(
    two: dict[str, Outcome], single: dict[str, Outcome]
) -> None:
    twin = single["evaluation"].get()[0]
    assert twin["fp32 with"]["num_rewritten"] == 0
    assert twin["fp32 with"]["losses"] == twin["fp32 without"]["losses"]
    for rank in two["evaluation"].get():
        assert rank["fp32 with"]["losses"] == pytest.approx(twin["fp32 without"]["losses"], abs=CURVE_BAR)
        assert rank["fp32 with"]["eval_losses"] == pytest.approx(twin["fp32 with"]["eval_losses"], abs=CURVE_BAR)
        compare_gradients(twin["fp32 without"]["gradients"], rank["fp32 with"]["gradients"])


def test_no_weight_is_rewritten_for_avx512_and_all_would_be_without_us(two: dict[str, Outcome]) -> None:
    for rank in two["rewriting"].get():
        assert rank["offered"] and rank["protected"] == 0
        assert rank["unprotected"] == rank["layers"] == 21


def test_lora_dropout_under_checkpointing_changes_no_bit(two: dict[str, Outcome]) -> None:
    for rank in two["dropout_under_checkpointing"].get():
        assert (rank["none_blocks"], rank["full_blocks"]) == (0, 3)
        assert same_training(rank["none"], rank["full"])


def test_a_saved_adapter_on_a_fresh_base_gives_the_same_logits(two: dict[str, Outcome]) -> None:
    for rank in two["saved_adapter"].get():
        for name, bar in (("fp32", 1e-5), ("bf16-mixed", 2**-7)):
            found = rank[name]
            assert found["equal"] and found["count"] == 42
            assert found["logits"] <= bar * found["size"]
            assert {"adapter_config.json", "adapter_model.safetensors"} <= set(found["files"])


def test_the_whole_base_is_saved_with_its_scales_and_without_a_cast(two: dict[str, Outcome]) -> None:
    for rank, found in enumerate(two["saved_base_in_4_bits"].get()):
        assert found["bits"] and found["equal"] and found["in_4_bits"] == found["layers"] == 21
        assert found["scales"] == (21 if rank == 0 else 0)


def test_all_ranks_start_from_the_bits_and_scales_of_the_first(two: dict[str, Outcome]) -> None:
    for rank in two["different_scales"].get():
        weight = f"{rank['name']}.weight"
        assert rank["replaced"] == [
            weight,
            f"{weight}.quant_state.absmax",
            f"{weight}.quant_state.nested.absmax",
        ]
        assert rank["equal"] and rank["bits"] and rank["tensors"] == 5
        assert rank["num_tensors"] == rank["expected_num"]


def test_another_kind_of_4_bits_on_one_rank_is_refused_on_all(two: dict[str, Outcome]) -> None:
    for rank in two["other_blocksize_on_one_rank"].get():
        assert "nf4 of float32 in blocks of 64" in rank["error"] and "fp4 of float32" in rank["error"]


def test_sft_trains_adapters_in_float32_on_a_base_that_is_not_upcast(two: dict[str, Outcome]) -> None:
    for rank in two["sft"].get():
        found = rank["bf16-mixed"]
        assert found["sharded"] and found["share"] == 1.0
        assert (found["lora"], found["frozen"]) == (["torch.float32"], ["torch.bfloat16"])
        assert found["saved"] == ["torch.float32"]
        assert not found["not_moved"] and len(found["losses"]) == 2
        assert any(
            note.startswith("21 layers in 4 bits (nf4, scales quantized again): 110.6K") for note in found["notes"]
        )
        assert not any("frozen in float32" in note for note in found["notes"])
    printed = two["sft"].get()[0]["bf16-mixed"]["printed"]
    assert printed.count("42 adapter weights beside 4-bit layers were in bfloat16 and are stored in float32") == 1
    assert "27.6K numbers of bfloat16" in printed


def test_sft_keeps_adapters_in_bfloat16_where_bf16_true_says_so(two: dict[str, Outcome]) -> None:
    for rank in two["sft"].get():
        found = rank["bf16-true"]
        assert found["lora"] == found["saved"] == ["torch.bfloat16"]
        assert "adapter weights beside 4-bit layers" not in found["printed"]


def test_what_prepare_model_for_kbit_training_costs_is_said(two: dict[str, Outcome]) -> None:
    for rank in two["prepared_by_peft"].get():
        assert rank["prepared"]["loss"] == pytest.approx(rank["plain"]["loss"], abs=0.05)
        said = [note for note in rank["prepared"]["notes"] if "frozen in float32, twice what computing needs" in note]
        assert len(said) == 1 and "embed_tokens.weight" in said[0] and "lm_head.weight" in said[0]
        assert not any("frozen in float32" in note for note in rank["plain"]["notes"])


def same_training(actual: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Equal to the bit: losses, gradients of the first step, trained and packed weights at the end."""
    return actual["losses"] == expected["losses"] and all(
        torch.equal(actual[what][name], tensor)
        for what in ("gradients", "weights", "packed_bits")
        for name, tensor in expected[what].items()
    )
