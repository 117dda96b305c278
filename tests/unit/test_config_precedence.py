"""FSDPConfig over TrainingArguments over Accelerate's file: who wins, what is printed, what is refused."""

from __future__ import annotations

import pytest

from hf_fsdp import FSDPConfig
from hf_fsdp.config import Stated, merge
from hf_fsdp.config.precedence import RAM_EFFICIENT_LOADING
from hf_fsdp.errors import ConfigError

BF16_TYPED = Stated("bf16", "TrainingArguments(bf16=True)", typed=True)
BF16_DEFAULT = Stated("bf16", "SFTConfig's default bf16=True", typed=False)
FP32_FILE = Stated("no", "Accelerate's launch file (ACCELERATE_MIXED_PRECISION=no)")


def test_nothing_stated_leaves_the_defaults_and_prints_nothing() -> None:
    merged = merge(FSDPConfig(), {}, {})
    assert merged.config == FSDPConfig()
    assert merged.overrides == ()


def test_each_layer_fills_what_the_layers_above_leave_open() -> None:
    merged = merge(
        FSDPConfig(sharding={"reshard_after_forward": False}),
        {"activation_checkpointing.mode": Stated(True, "TrainingArguments(gradient_checkpointing=True)", True)},
        {"checkpoint.format": Stated("SHARDED_STATE_DICT", "file"), "precision.preset": BF16_DEFAULT},
    )
    config = merged.config
    assert config.sharding.reshard_after_forward is False
    assert config.activation_checkpointing.mode == "full"
    assert config.checkpoint.format == "sharded"
    assert config.precision.preset == "bf16-mixed"
    assert config.sources["checkpoint.format"] == "file"
    assert merged.overrides == ()


def test_auto_follows_the_layers_below() -> None:
    merged = merge(FSDPConfig(precision="auto"), {}, {"precision.preset": FP32_FILE})
    assert merged.config.precision.preset == "fp32"
    assert merged.overrides == ()


def test_an_override_of_a_value_nobody_typed_is_printed_once() -> None:
    merged = merge(FSDPConfig(precision="fp32"), {"precision.preset": BF16_DEFAULT}, {})
    assert merged.config.precision.preset == "fp32"
    assert merged.overrides == (
        "precision.preset: fp32 (FSDPConfig(...)) is used, not bf16-mixed (SFTConfig's default bf16=True)",
    )


def test_training_arguments_win_over_accelerates_file() -> None:
    merged = merge(FSDPConfig(), {"precision.preset": BF16_TYPED}, {"precision.preset": FP32_FILE})
    assert merged.config.precision.preset == "bf16-mixed"
    assert len(merged.overrides) == 1
    assert "ACCELERATE_MIXED_PRECISION=no" in merged.overrides[0]


def test_equal_values_say_nothing_however_they_are_spelt() -> None:
    merged = merge(
        FSDPConfig(precision="bf16-mixed"), {"precision.preset": BF16_TYPED}, {"precision.preset": BF16_DEFAULT}
    )
    assert merged.overrides == ()


def test_two_typed_values_that_contradict_are_refused_and_either_repair_works() -> None:
    config = FSDPConfig(precision="fp32", activation_checkpointing="none")
    below = {
        "precision.preset": BF16_TYPED,
        "activation_checkpointing.mode": Stated("full", "TrainingArguments(gradient_checkpointing=True)", True),
    }
    with pytest.raises(ConfigError, match="^2 problems") as caught:
        merge(config, below, {})
    first = caught.value.problems[0]
    assert "fp32 in FSDPConfig(...) and bf16-mixed by TrainingArguments(bf16=True)" in first.message
    assert first.fix == "write precision.preset: bf16-mixed in FSDPConfig(...), or remove TrainingArguments(bf16=True)"
    assert merge(config, {}, {}).config == config
    agreed = FSDPConfig.from_mapping({"precision.preset": "bf16-mixed", "activation_checkpointing.mode": "full"})
    assert merge(agreed, below, {}).overrides == ()


def test_a_typed_value_of_the_launch_file_is_overridden_not_refused() -> None:
    merged = merge(FSDPConfig(precision="bf16"), {}, {"precision.preset": Stated("no", "file", typed=True)})
    assert merged.config.precision.preset == "bf16-mixed"
    assert len(merged.overrides) == 1


def test_values_of_lower_layers_are_checked_all_at_once_with_their_sources() -> None:
    with pytest.raises(ConfigError, match="^2 problems") as caught:
        merge(
            FSDPConfig(),
            {"precision.preset": Stated("fp8", "TrainingArguments(fp8=True)", True)},
            {"offload.parameters": Stated("maybe", "file")},
        )
    assert [problem.source for problem in caught.value.problems] == ["TrainingArguments(fp8=True)", "file"]


def test_how_to_wrap_is_decided_by_one_layer() -> None:
    def select(model: object) -> list[object]:
        return [model]

    below = {"wrap.layer_classes": Stated("A,B", "file"), "wrap.policy": Stated("transformer_layers", "file")}
    merged = merge(FSDPConfig(wrap=select), {}, below)
    assert merged.config.wrap.callable is select
    assert merged.config.wrap.layer_classes == ()
    assert merged.overrides == ("wrap.layer_classes: [A, B] (file) is not used, FSDPConfig(...) decides",)
    assert merge(FSDPConfig(), {}, below).config.wrap.layer_classes == ("A", "B")
    merged = merge(FSDPConfig(wrap=["C"]), {}, below)
    assert merged.config.wrap.layer_classes == ("C",)
    assert merged.overrides == ("wrap.layer_classes: [C] (FSDPConfig(...)) is used, not [A, B] (file)",)


def test_which_blocks_to_checkpoint_is_decided_by_one_layer() -> None:
    below = {
        "activation_checkpointing.mode": Stated("full", "default"),
        "activation_checkpointing.every": Stated(2, "default"),
    }
    merged = merge(FSDPConfig(activation_checkpointing="none"), below, {})
    assert merged.config.activation_checkpointing.mode == "none"
    assert merged.config.activation_checkpointing.every == 1
    assert len(merged.overrides) == 2
    assert merge(FSDPConfig(), below, {}).config.activation_checkpointing.every == 2
    waiting = FSDPConfig(activation_checkpointing={"mode": "auto", "every": 3})
    config = merge(waiting, {"activation_checkpointing.mode": Stated("full", "default")}, {}).config
    assert (config.activation_checkpointing.mode, config.activation_checkpointing.every) == ("full", 3)


def test_ram_efficient_loading_is_no_key_of_the_config_and_passes() -> None:
    assert merge(FSDPConfig(), {}, {RAM_EFFICIENT_LOADING: Stated(True, "file")}).config == FSDPConfig()
