"""What once was silently wrong, or lost at the end, stays right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.harness import Outcome, run_cases
from tests.distributed.test_parity import compare_weights
from tests.distributed.trap_cases import CASES, TWINS

MODULE = "tests.distributed.trap_cases"


@pytest.fixture(scope="module")
def two() -> dict[str, Outcome]:
    return run_cases(MODULE, list(CASES), world_size=2)


@pytest.fixture(scope="module")
def single() -> dict[str, Outcome]:
    return run_cases(MODULE, TWINS, world_size=1)


def ranks(outcomes: dict[str, Outcome], name: str) -> list[Any]:
    return outcomes[name].get()


def test_label_smoothing_is_that_of_one_process(two: dict[str, Outcome], single: dict[str, Outcome]) -> None:
    """Trainer decides by the class name whether labels are shifted, and `fully_shard` renames classes."""
    twin = ranks(single, "label_smoothing")[0]
    for rank in ranks(two, "label_smoothing"):
        assert rank["losses"] == pytest.approx(twin["losses"], abs=1e-5)
        compare_weights(twin["weights"], rank["weights"])


def test_a_model_that_ignores_num_items_has_the_loss_of_one_process(
    two: dict[str, Outcome], single: dict[str, Outcome]
) -> None:
    twin = ranks(single, "model_that_ignores_num_items")[0]
    for rank in ranks(two, "model_that_ignores_num_items"):
        assert rank["losses"] == pytest.approx(twin["losses"], abs=1e-5)
        assert rank["norms"] == pytest.approx(twin["norms"], abs=1e-5)


@pytest.mark.parametrize("kind", ["head", "own"])
def test_other_losses_have_the_gradients_of_one_process(
    kind: str, two: dict[str, Outcome], single: dict[str, Outcome]
) -> None:
    twin = ranks(single, "other_losses")[0][kind]
    for rank in ranks(two, "other_losses"):
        assert rank[kind]["norms"] == pytest.approx(twin["norms"], abs=1e-5)
        assert rank[kind]["losses"] == pytest.approx(twin["losses"], abs=1e-5)


@pytest.mark.parametrize("family", ["t5", "bert"])
def test_bf16_losses_are_computed_in_float32(family: str, two: dict[str, Outcome]) -> None:
    for rank in ranks(two, "losses_in_float32"):
        found = rank[family]
        assert not found["is_a_bf16_number"]
        assert found["loss"] == pytest.approx(found["expected"], abs=1e-2)


def test_labels_and_sample_weights_keep_their_precision_under_bf16(two: dict[str, Outcome]) -> None:
    for rank in ranks(two, "labels_keep_their_precision"):
        assert rank == {"x": "torch.bfloat16", "labels": [[1003.0, 1005.0, 1007.0, 1009.0]], "weights": [1001.0]}


def test_looking_at_the_model_during_a_step_changes_no_number(two: dict[str, Outcome]) -> None:
    for rank in ranks(two, "forwards_around_the_step"):
        assert rank["looking"] == rank["plain"]


def test_the_checkpoint_format_is_the_configs(two: dict[str, Outcome]) -> None:
    for rank in ranks(two, "checkpoint_format_is_the_configs"):
        assert "model.safetensors" in rank["full"] and "model.safetensors" not in rank["sharded"]
        shards = {name for name in rank["sharded"] if name.startswith("model/")}
        assert len(shards) == 2 and not shards & set(rank["full"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("replicas_without_shards", "every rank would hold the whole model"),
        ("two_trainers_built_before_training", "prepared under the FSDPConfig of another Trainer"),
        ("two_configs_for_one_trainer", "bf16-mixed in FSDPConfig(...) and fp32 by TrainingArguments.fsdp_config"),
    ],
)
def test_what_would_train_something_else_is_refused(name: str, message: str, two: dict[str, Outcome]) -> None:
    for rank in ranks(two, name):
        assert message in rank["error"]


def test_a_trainer_without_the_callback_is_stock_again(two: dict[str, Outcome]) -> None:
    for rank in ranks(two, "stock_trainer_afterwards"):
        assert rank["left"] is None
        assert rank["wrapped"] == "DistributedDataParallel"
        assert rank["losses"][-1] < rank["losses"][0]


def test_save_pretrained_of_the_model_itself_writes_whole_weights(two: dict[str, Outcome]) -> None:
    for rank in ranks(two, "save_pretrained_on_all_ranks"):
        assert rank == {"dtype": "torch.bfloat16", "equal": True}


def test_save_pretrained_on_one_rank_is_an_error_and_no_hang(two: dict[str, Outcome]) -> None:
    assert "was called on rank 0 and not on all ranks" in ranks(two, "save_pretrained_on_one_rank")[0]["error"]


def test_weights_are_not_saved_after_a_step_on_a_loss_that_is_not_finite(two: dict[str, Outcome]) -> None:
    for rank in ranks(two, "nan_between_logged_steps_is_not_saved"):
        assert rank["error"].startswith("NumericsError: step 3: the loss is not finite on rank 1")
        assert "go on from a checkpoint before step 3" in rank["error"]
        assert rank["saved"] == ["checkpoint-2"]
    for rank in ranks(two, "nan_is_not_saved_at_the_end_of_an_epoch"):
        assert "go on from a checkpoint before step 3" in rank["error"]
        assert rank["saved"] == []


def test_models_that_cannot_be_sharded_right_are_refused_and_the_advice_works(two: dict[str, Outcome]) -> None:
    for rank in ranks(two, "unfit_models"):
        assert "layerdrop=0.1: every rank would skip layers" in rank["layerdrop"]
        assert "layerdrop=0.1: every rank would skip layers" in rank["layerdrop_in_config"]
        assert "keep_norms_fp32: true" in rank["batch_norm"]
        assert "prompts are learned beside the model" in rank["prompt"]


def test_mixed_dtypes_in_a_unit_become_what_the_precision_says_and_float64_is_refused(two: dict[str, Outcome]) -> None:
    for rank in ranks(two, "mixed_dtypes_in_a_unit"):
        assert rank["stored"] == {
            "fp32": ["torch.float32"],
            "bf16-mixed": ["torch.float32"],
            "bf16-true": ["torch.bfloat16"],
        }
        assert "model.layers.0.input_layernorm.weight (float64)" in rank["error"]
        assert "model.float()" in rank["error"]


def test_optimizers_that_need_whole_matrices_are_refused(two: dict[str, Outcome]) -> None:
    for rank in ranks(two, "unfit_optimizers"):
        for name in ("adafactor", "adagrad"):
            assert f"optim='{name}' does not work on sharded parameters" in rank[name]


def test_views_and_expanded_buffers_are_sharded_and_agreed_on(two: dict[str, Outcome]) -> None:
    for rank in ranks(two, "odd_memory_layouts"):
        assert rank == {"contiguous": True, "scale": [0.0, 0.0, 0.0, 0.0]}
