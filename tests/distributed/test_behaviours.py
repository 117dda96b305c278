"""A Trainer under `FSDPCallback` does what a Trainer does, or refuses with advice that works."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.behaviour_cases import CASES, REFUSALS
from tests.distributed.harness import Outcome, run_cases

MODULE = "tests.distributed.behaviour_cases"
ON_THREE = ["classification_head_smaller_than_the_world", "optimizer_built_before_with_empty_shards", "plain_loop"]
ON_FOUR = ["lora_differs_between_replicas", "audit_fails_when_replicas_differ"]


@pytest.fixture(scope="module")
def two() -> dict[str, Outcome]:
    return run_cases(MODULE, [name for name in CASES if name not in ON_FOUR], world_size=2)


@pytest.fixture(scope="module")
def three() -> dict[str, Outcome]:
    return run_cases(MODULE, ON_THREE, world_size=3)


@pytest.fixture(scope="module")
def four() -> dict[str, Outcome]:
    return run_cases(MODULE, ON_FOUR, world_size=4)


def first(outcome: Outcome) -> dict[str, Any]:
    return outcome.get()[0]


# -- ways of using a Trainer ------------------------------------------------------------------------------------------


def test_evaluate_and_predict_before_train_shard_the_model_and_change_nothing(two: dict[str, Outcome]) -> None:
    for rank in two["evaluate_and_predict_before_train"].get():
        assert rank["sharded"]
        assert rank["predicted"] == [7, 12, 67]
        assert rank["after"] < rank["before"]
        assert rank["losses"] == first(two["train_without_evaluating"])["losses"]


def test_model_init_builds_and_shards_anew_for_each_train(two: dict[str, Outcome]) -> None:
    for rank in two["model_init"].get():
        assert rank["sharded"]
        assert rank["first"] == rank["second"]


def test_a_second_train_goes_on_from_the_first(two: dict[str, Outcome]) -> None:
    for rank in two["two_train_calls"].get():
        assert rank["sharded"]
        assert max(rank["second"]) < min(rank["first"])


def test_uneven_last_batches_do_not_hang(two: dict[str, Outcome]) -> None:
    for rank in two["uneven_last_batches"].get():
        assert rank["steps"] == 6
        assert 0 < rank["eval_loss"] < 10


def test_generate_works_with_other_lengths_on_every_rank(two: dict[str, Outcome]) -> None:
    for rank in two["generate_with_different_lengths"].get():
        assert rank["tokens"] == rank["expected"]


def test_seq2seq_trainer_generates_in_predict(two: dict[str, Outcome]) -> None:
    for rank in two["seq2seq_with_generation"].get():
        assert rank["sharded"]
        assert rank["losses"][-1] < rank["losses"][0]
        assert rank["shape"][1] > 1


@pytest.mark.parametrize("setting", ["label_smoothing", "neftune"])
def test_settings_applied_by_train_itself_are_in_force(setting: str, two: dict[str, Outcome]) -> None:
    for rank in two[setting].get():
        assert rank["sharded"]
        assert rank["losses"] != first(two["plain"])["losses"]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_under_dropout_checkpointing_changes_no_bit(method: str, two: dict[str, Outcome]) -> None:
    for rank in two[f"dropout_{method}"].get():
        assert rank["dropout_is_on"]
        assert rank["equal"] and rank["weights_equal"] and rank["losses_equal"]


def test_each_micro_batch_is_synchronised_unless_deferral_is_asked_for(two: dict[str, Outcome]) -> None:
    for rank in two["sync_each_batch_or_deferred"].get():
        assert rank["each"]["reduced_early"] and not rank["deferred"]["reduced_early"]
        assert rank["each"]["losses"] == pytest.approx(rank["deferred"]["losses"], abs=1e-5)
    rank = first(two["sync_each_batch_or_deferred"])
    line = "keeps whole fp32 gradients between micro-batches: 107.6 KiB on every process (estimated"
    assert line in rank["deferred"]["printed"] and line not in rank["each"]["printed"]


def test_prefetching_further_ahead_changes_no_number(two: dict[str, Outcome]) -> None:
    for rank in two["prefetch"].get():
        assert rank["losses"] == first(two["plain"])["losses"]


def test_a_wrap_function_given_to_the_callback_is_used(two: dict[str, Outcome]) -> None:
    for rank in two["wrap_callable"].get():
        assert rank["sharded"]
        assert rank["losses"] == pytest.approx(first(two["train_without_evaluating"])["losses"], abs=1e-6)


def test_a_plain_loop_gives_the_same_curve_on_two_and_three_processes(
    two: dict[str, Outcome], three: dict[str, Outcome]
) -> None:
    assert all(rank["same"] for rank in two["plain_loop"].get())
    losses = first(two["plain_loop"])["losses"]
    assert first(three["plain_loop"])["losses"] == pytest.approx(losses, abs=1e-5)
    assert losses[2] < losses[1] < losses[0]


# -- weights and optimizers -------------------------------------------------------------------------------------------


def test_a_new_head_of_one_row_is_rank_0s_on_every_rank_and_trains(
    two: dict[str, Outcome], three: dict[str, Outcome]
) -> None:
    for outcome in (two, three):
        ranks = outcome["classification_head_smaller_than_the_world"].get()
        assert [rank["local_head"] for rank in ranks] == [32] + [0] * (len(ranks) - 1)
        for rank in ranks:
            assert rank["equal_on_all_ranks"] and rank["is_rank_0s"] and rank["head_moved"]
            assert rank["num_replaced"] > 0


def test_optimizer_groups_keep_their_parameters_when_shards_are_empty(
    two: dict[str, Outcome], three: dict[str, Outcome]
) -> None:
    for outcome in (two, three):
        for rank in outcome["optimizer_built_before_with_empty_shards"].get():
            assert rank["moved"] == {name: name.endswith("weight") for name in rank["moved"]}


def test_meta_weights_get_rank_0s_values_and_stay_tied(two: dict[str, Outcome]) -> None:
    for rank in two["weights_on_meta_except_on_rank_0"].get():
        assert rank["same"] and rank["same_buffers"] and rank["tied"]


def test_unseeded_adapters_are_equal_on_hybrid_replicas(four: dict[str, Outcome]) -> None:
    for rank in four["lora_differs_between_replicas"].get():
        assert rank["mesh"] == {"dp_replicate": 2, "dp_shard": 2}
        assert rank["replicas_equal"] is True


def test_tensors_that_two_units_want_are_in_one_unit_and_train_right(two: dict[str, Outcome]) -> None:
    for rank in two["odd_structures"].get():
        assert rank["worst"] < 1e-6
        assert rank["tied"]
        assert rank["units"] == [["layers.0"], ["layers.1", "layers.2"], ["layers.3"], [""]]
        assert rank["notes"] == ["first stays in the root unit: first.up is read outside its forward"]


def test_models_that_differ_between_ranks_are_refused(two: dict[str, Outcome]) -> None:
    for rank in two["different_models_are_refused"].get():
        assert "is [67, 32] float32 on rank 0 and [80, 32] float32 on rank 1" in rank["error"]


def test_mesh_sizes_must_multiply_to_the_world(two: dict[str, Outcome]) -> None:
    for rank in two["mesh_sizes_that_do_not_multiply"].get():
        assert "dp_replicate_size=3 do not multiply to the 2 processes" in rank["error"]
        assert "dp_replicate_size: 2}" in rank["error"]


# -- saving and resuming ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("save_full", "torch.bfloat16"), ("save_sharded", "torch.float32"), ("save_lora_sharded", "torch.float32")],
)
def test_save_model_leaves_a_folder_that_from_pretrained_loads(name: str, dtype: str, two: dict[str, Outcome]) -> None:
    for rank in two[name].get():
        assert rank["missing"] == [] and rank["wrong"] == []
        assert rank["dtypes"] == [dtype]
        assert rank["num_moved"] == rank["num_trained"] > 0


# -- audit and step monitor -------------------------------------------------------------------------------------------


def test_the_audit_is_printed_once_and_written(two: dict[str, Outcome]) -> None:
    ranks = two["audit_files_and_table"].get()
    audit = json.loads(ranks[0]["audit"])
    assert audit["world_size"] == 2 and audit["sharded_share"] == 1.0
    assert audit["num_local"] < audit["num_parameters"] * 0.6
    assert audit["num_checkpointed_blocks"] == 2 and audit["num_blocks"] == 3
    block = audit["units"][0]
    assert (block["storage"], block["compute"], block["reduce"]) == ("float32", "bfloat16", "float32")
    assert block["optimizer_state"] == "float32"
    assert audit["first_step"] == {"without_gradient": [], "not_moved": []}
    assert ranks[0]["printed"].count("FSDP audit: LlamaForCausalLM on 2 processes") == 1
    assert ranks[1]["printed"] == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("audit_fails_when_a_parameter_is_whole", "model.norm.weight is not sharded: this rank holds all of it"),
        ("audit_fails_when_nothing_is_sharded", "every rank holds all 27,552 parameters"),
        ("audit_fails_on_another_policy", "unit model.layers.1 LlamaDecoderLayer runs under MixedPrecisionPolicy"),
        ("audit_fails_on_a_foreign_optimizer", "the optimizer holds 30 parameters that are not the sharded ones"),
    ],
)
def test_the_audit_fails_loudly(name: str, message: str, two: dict[str, Outcome]) -> None:
    for rank in two[name].get():
        assert message in rank["error"]


def test_the_audit_fails_on_all_ranks_when_replicas_differ(four: dict[str, Outcome]) -> None:
    for rank in four["audit_fails_when_replicas_differ"].get():
        assert "model.norm.weight differs from its replica" in rank["error"]


@pytest.mark.parametrize(("name", "step"), [("nan_loss_at_first_step", 1), ("nan_loss_later", 3)])
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_the_step(
    name: str, step: int, two: dict[str, Outcome]
) -> None:
    for rank in two[name].get():
        assert rank["error"].startswith(f"NumericsError: step {step}: the loss is not finite on rank 1")
        assert rank["weights_finite"] and rank["steps"] == step - 1


def test_parameters_without_a_gradient_are_named_after_the_first_step(two: dict[str, Outcome]) -> None:
    rank = first(two["parameter_without_gradient"])
    expected = ["model.layers.0.unused.weight", "model.layers.0.unused.bias"]
    assert json.loads(rank["first_step"]) == {"without_gradient": expected, "not_moved": []}
    assert "2 trained parameters got no gradient in the first step" in rank["printed"]


def test_a_warm_up_from_zero_is_no_finding(two: dict[str, Outcome]) -> None:
    rank = first(two["warm_up_from_zero_is_no_finding"])
    assert json.loads(rank["first_step"]) == {"without_gradient": [], "not_moved": []}
    assert "warning" not in rank["printed"]


# -- refusals ---------------------------------------------------------------------------------------------------------

MESSAGES = {
    "full_eval": "bf16_full_eval=True casts the whole model",
    "auto_find_batch_size": "auto_find_batch_size=True restarts training on one rank",
    "jit_checkpoint": "enable_jit_checkpoint=True saves on a signal without asking the other ranks",
    "save_on_each_node": "save_on_each_node=True asks for a whole checkpoint on every machine",
    "config_without_fsdp": "fsdp_config is given without fsdp",
    "callback_without_fsdp": "in a run of 2 processes in which FSDP is off",
    "plugin_checkpointing": "fsdp_activation_checkpointing",
    "typed_twice": "activation_checkpointing.mode is stated twice",
    "unknown_key": "reshard_after_foward=True is not a key",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_work_is_refused_and_the_advice_works(name: str, two: dict[str, Outcome]) -> None:
    for rank in two[name].get():
        assert MESSAGES[name] in rank["error"]
        assert "\n  fix   " in rank["error"]
        assert rank["followed"]


def test_a_callback_added_too_late_is_refused_in_train_and_evaluate(two: dict[str, Outcome]) -> None:
    for rank in two["callback_added_too_late"].get():
        for call in ("train", "evaluate"):
            assert "FSDPCallback was added after Trainer was built" in rank[call]
            assert "Trainer(..., callbacks=[FSDPCallback()])" in rank[call]
