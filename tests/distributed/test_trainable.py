"""Frozen parts of a vision-language model stay frozen, to the bit, and cost what frozen parts should."""

from __future__ import annotations

import pytest

from tests.distributed.harness import Outcome, run_cases
from tests.distributed.trainable_cases import CASES

TOWER_TENSORS, PROJECTOR_TENSORS, LANGUAGE_TENSORS, ADAPTER_TENSORS = 55, 4, 21, 28


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases("tests.distributed.trainable_cases", list(CASES), world_size=2)


def test_a_frozen_tower_keeps_16_bits_and_has_neither_gradients_nor_optimizer_state(
    outcomes: dict[str, Outcome],
) -> None:
    for rank in outcomes["frozen_tower"].get():
        assert rank["is_sharded"]
        assert rank["dtypes"] == {
            "language": ["torch.float32"],
            "projector": ["torch.float32"],
            "vision": ["torch.bfloat16"],
        }
        trained = {"language": LANGUAGE_TENSORS, "projector": PROJECTOR_TENSORS}
        assert rank["gradients"] == trained and rank["state"] == trained


def test_frozen_tensors_are_bit_for_bit_what_they_were_and_trained_ones_moved(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["frozen_tower"].get():
        report = rank["report"]
        assert (report["vision"]["num_frozen"], report["vision"]["num_frozen_changed"]) == (TOWER_TENSORS, 0)
        for part, count in (("language", LANGUAGE_TENSORS), ("projector", PROJECTOR_TENSORS)):
            assert report[part]["num_trained"] == report[part]["num_moved"] == count
            assert not report[part]["never_got_a_gradient"] and not report[part]["did_not_move"]
        assert "vision: 55 of 55 frozen tensors are bit for bit what they were" in rank["lines"]


def test_the_audit_shows_each_part_with_its_rate(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["frozen_tower"].get():
        rows = {row["name"]: row for row in rank["audit"]}
        assert rows["vision"]["num_trained"] == 0 and rows["vision"]["storage"] == "bfloat16"
        assert rows["projector"]["learning_rates"] == (2e-3,) and rows["language"]["learning_rates"] == (1e-2,)
        assert sum(row["num_parameters"] for row in rows.values()) == 50704
        assert "part         vision     29.0K, frozen, stored bf16" in rank["table"]
        assert "part         projector  2112, 2112 trained at 0.002, stored fp32" in rank["table"]
        assert rank["logged"] == pytest.approx([0.2] * 3)
        saved = {row["part"]: row for row in rank["audit_json"]["parts"]}
        assert saved["vision"]["num_frozen"] == TOWER_TENSORS and saved["projector"]["num_moved"] == PROJECTOR_TENSORS
        assert rank["audit_json"]["num_steps"] == 3 and rank["audit_json"]["changed_frozen"] == []


def test_layers_behind_the_features_that_are_taken_never_get_a_gradient_and_are_named(
    outcomes: dict[str, Outcome],
) -> None:
    for rank in outcomes["everything_trained"].get():
        vision = rank["report"]["vision"]
        names = vision["never_got_a_gradient"]
        assert len(names) == 18 and vision["num_moved"] == TOWER_TENSORS - 18 and not vision["did_not_move"]
        assert all("encoder.layers.2." in name or "post_layernorm" in name for name in names)
        assert any("and 15 more never got a gradient, which is normal" in line for line in rank["lines"])


def test_a_frozen_tensor_that_one_rank_changed_is_an_error_on_all(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["frozen_changed"].get():
        assert rank["error"].startswith("ShardingError: 1 frozen tensors of the vision are not what they were")
        assert rank["name"] in rank["error"] and "on rank 1)" in rank["error"]


def test_batch_norms_of_a_frozen_tower_keep_their_statistics(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["batch_norm"].get():
        assert rank["names"] == ["vision_tower.0.1", "vision_tower.1.1"]
        vision = rank["held=True"]["vision"]
        assert (vision["num_frozen"], vision["num_frozen_changed"]) == (14, 0)  # 8 weights and 6 statistics
        assert "running_mean" in rank["held=False"] and "6 frozen tensors" in rank["held=False"]


def test_a_frozen_tower_keeps_no_activations_for_backward(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["saved_activations"].get():
        assert rank["all"]["vision"] > 50 and "vision" in rank["all"]["alive"]
        for name in ("language", "language and projector", "LoRA", "LoRA and projector", "token embeddings"):
            assert rank[name]["vision"] == 0 and rank[name]["language"] > 50, name
            assert "vision" not in rank[name]["alive"] and rank[name]["trained_without_gradient"] == 0, name
        # What TRL does to a model with adapters, and what takes it back.
        assert rank["LoRA, inputs marked"]["vision"] > 50
        assert rank["LoRA, inputs released"]["vision"] == 0
        assert rank["LoRA, inputs released"]["gradients"] == rank["LoRA"]["gradients"]


def test_checkpointing_of_one_tower_recomputes_that_tower_only(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["saved_activations"].get():
        recomputed, plain = rank["all, language recomputed"], rank["all"]
        assert recomputed["checkpointed"] == ["language"] and recomputed["num_checkpointed"] == 2
        assert recomputed["vision"] == plain["vision"] and recomputed["language"] < plain["language"] / 5
        assert recomputed["loss"] == plain["loss"] and recomputed["gradients"] == plain["gradients"]
        for name in ("language, recomputed", "LoRA, recomputed"):
            assert rank[name]["vision"] == 0 and rank[name]["trained_without_gradient"] == 0
        # A checkpoint around a frozen block lets go of its input as soon as the forward has gone on.
        assert rank["LoRA, all recomputed"]["checkpointed"] == ["language", "vision"]
        assert "vision" not in rank["LoRA, all recomputed"]["alive"]


def test_adapters_beside_a_projector_in_full_train_save_and_resume(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["adapter_with_projector"].get():
        assert rank["is_sharded"]
        for report in (rank["report"], rank["resumed_report"]):
            assert report["language"]["num_moved"] == report["language"]["num_trained"] == ADAPTER_TENSORS
            assert report["projector"]["num_moved"] == report["projector"]["num_trained"] == PROJECTOR_TENSORS
            assert [report[part]["num_frozen_changed"] for part in report] == [0, 0, 0]
        assert rank["resumed_differs"] == [] and rank["lines_without_steps"] == []
        assert rank["groups"] == rank["resumed_groups"]
        assert rank["groups"] == [
            ("", 1e-2, 0.0, ADAPTER_TENSORS),
            ("projector", 2e-3, 0.01, 2),
            ("projector", 2e-3, 0.0, 2),
        ]


def test_the_saved_adapter_holds_the_projector_and_merges_into_the_right_model(outcomes: dict[str, Outcome]) -> None:
    rank = outcomes["adapter_with_projector"].get()[0]
    assert rank["reload_differs"] == []
    assert not any(rank["loading_info"].values())
    assert rank["merged_weights"] <= 1e-6 and rank["merged_differs"] <= 1e-5
    assert rank["trained_differs"] > 0.1  # against the base, so that equal means something


def test_under_qlora_tower_and_projector_stay_in_16_bits_and_packed_weights_unchanged(
    outcomes: dict[str, Outcome],
) -> None:
    for rank in outcomes["four_bit_base"].get():
        assert rank["is_sharded"] and rank["packed"] == ["language_model"]
        report = rank["report"]
        assert report["language"]["num_frozen"] > LANGUAGE_TENSORS  # scales and codes are hashed too
        assert [report[part]["num_frozen_changed"] for part in report] == [0, 0, 0]
        assert report["language"]["num_moved"] == ADAPTER_TENSORS
        assert report["projector"]["num_moved"] == PROJECTOR_TENSORS
