"""Packed samples do not see each other, and every loss that reads the head equals one process's, or is refused."""

from __future__ import annotations

import pytest

from tests.distributed.data_cases import CASES, LOSSES, MASKLESS, TWINS
from tests.distributed.harness import Outcome, run_cases
from tests.distributed.test_parity import compare_gradients

MODULE = "tests.distributed.data_cases"
TRAINED = [name for name in TWINS if name != "packed_logits"]


@pytest.fixture(scope="module")
def two() -> dict[str, Outcome]:
    return run_cases(MODULE, list(CASES), world_size=2)


@pytest.fixture(scope="module")
def single() -> dict[str, Outcome]:
    return run_cases(MODULE, TWINS, world_size=1)


def test_a_packed_sample_gets_the_logits_it_gets_alone(two: dict[str, Outcome], single: dict[str, Outcome]) -> None:
    for rank in (*two["packed_logits"].get(), *single["packed_logits"].get()):
        assert len(rank) == 4  # sdpa and eager, training and evaluation
        for name, difference in rank.items():
            assert difference["worst"] <= 1e-5, name
            assert difference["leak"] >= 0.01, name  # the comparison can fail


@pytest.mark.parametrize("name", TRAINED)
def test_losses_and_gradients_equal_a_single_process(
    name: str, two: dict[str, Outcome], single: dict[str, Outcome]
) -> None:
    twin, ranks = single[name].get()[0], two[name].get()
    assert not twin["sharded"] and all(rank["sharded"] for rank in ranks)
    losses = [sum(pair) / len(pair) for pair in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert losses == pytest.approx(twin["losses"], abs=1e-5)
    for rank in ranks:
        compare_gradients(twin["gradients"], rank["gradients"])


@pytest.mark.parametrize("name", [name for name in TRAINED if name != "own_chunked_loss"])
def test_each_process_holds_its_shard(name: str, two: dict[str, Outcome]) -> None:
    ranks = two[name].get()
    assert sum(rank["local"] for rank in ranks) == pytest.approx(ranks[0]["numel"], rel=0.01)
    assert all(rank["local"] <= 0.52 * rank["numel"] for rank in ranks)


@pytest.mark.parametrize("name", ["packed_training", "metrics_on_logits"])
def test_evaluation_equals_a_single_process(name: str, two: dict[str, Outcome], single: dict[str, Outcome]) -> None:
    twin = single[name].get()[0]["metrics"]
    assert "eval_loss" in twin and ("eval_mean_logit" in twin) == (name == "metrics_on_logits")
    for rank in two[name].get():
        assert rank["metrics"] == pytest.approx(twin, abs=1e-5)


def test_packed_held_out_rows_give_the_loss_of_the_rows_alone(two: dict[str, Outcome]) -> None:
    for rank in two["packed_evaluation"].get():
        assert rank["rows True"] < rank["rows False"] == 16
        assert rank["packed"] == pytest.approx(rank["alone"], abs=1e-5)


def test_the_proof_is_said_in_one_line(two: dict[str, Outcome]) -> None:
    printed = two["packed_training"].get()[0]["printed"]
    assert printed.count("packing: a packed sample gets the logits it gets alone") == 1
    assert "packing:" not in two["dft"].get()[0]["printed"]


def test_an_attention_without_masks_is_refused_for_packing_and_the_advice_works(two: dict[str, Outcome]) -> None:
    for rank in two["packing_is_refused"].get():
        for name in ("maskless", "maskless evaluation"):
            error, text = rank[name]
            assert error == "DataError" and "does not keep the samples of a row apart" in text
            assert f"attn_implementation='{MASKLESS}'" in text and "fix   attn_implementation: sdpa" in text
    for rank in two["packed_training"].get():  # the advice: sdpa
        assert rank["num_rows"] < 24


def test_a_family_that_ignores_positions_is_refused_for_packing_and_trains_without(two: dict[str, Outcome]) -> None:
    for rank in two["packing_is_refused"].get():
        error, text = rank["family"]
        assert error == "DataError" and "OPTForCausalLM" in text and "fix   packing: false" in text
        assert rank["family unpacked"] == ("", "")


def test_packing_arguments_that_leak_are_refused_and_the_advice_works(two: dict[str, Outcome]) -> None:
    for rank in two["packing_is_refused"].get():
        assert rank["wrapped"][0] == rank["eval only"][0] == "IntegrationError"
        assert "fix   packing_strategy: bfd   (or bfd_split" in rank["wrapped"][1]
        assert rank["split"] == ("", "")
        assert "fix   eval_packing: false   (or packing: true)" in rank["eval only"][1]


def test_liger_is_refused_by_name_and_the_advice_works(two: dict[str, Outcome]) -> None:
    for rank in two["losses_are_refused"].get():
        error, text = rank["liger"]
        assert (
            error == "IntegrationError" and "use_liger_kernel=True" in text and "fix   use_liger_kernel=False" in text
        )
        assert rank["without"] == ("", "")


def test_trls_activation_offloading_is_refused_and_ours_works(two: dict[str, Outcome]) -> None:
    for rank in two["losses_are_refused"].get():
        error, text = rank["offloading"]
        assert error == "IntegrationError" and "activation_offloading=True moves activations" in text
        assert "FSDPConfig(offload='activations')" in text
        assert rank["ours"] == ("", "")


def test_every_loss_has_its_twin() -> None:
    assert {function.__name__ for function in LOSSES} <= set(TWINS)
