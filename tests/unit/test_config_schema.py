"""FSDPConfig: short forms, names people bring along, refusals, and the way through TrainingArguments."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import Trainer, TrainingArguments

from hf_fsdp import FSDPCallback, FSDPConfig
from hf_fsdp.config import (
    ActivationCheckpointingConfig,
    OffloadConfig,
    PrecisionConfig,
    ShardingConfig,
    WrapConfig,
)
from hf_fsdp.config.parse import ALIASES, DOTTED_KEYS, SECTION_FIELDS
from hf_fsdp.config.schema import SECTION_CLASSES
from hf_fsdp.config.validate import check_config, note_config
from hf_fsdp.config.values import FIELD_PARSERS
from hf_fsdp.errors import ConfigError


def follow(fix: str) -> FSDPConfig:
    """Read a fix as YAML, the way a person pastes it."""
    return FSDPConfig.from_mapping(yaml.safe_load(fix))


class LlamaDecoderLayer:
    """Stands for a model's class; only its name counts."""


def select_units(model: Any) -> list[Any]:
    return list(model)


def test_every_field_of_every_section_has_a_parser_and_the_dataclass_agrees() -> None:
    for section, names in SECTION_FIELDS.items():
        assert tuple(field.name for field in dataclasses.fields(SECTION_CLASSES[section])) == names
    assert set(DOTTED_KEYS) == set(FIELD_PARSERS)
    assert set(ALIASES.values()) <= set(DOTTED_KEYS)


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"wrap": "transformer_layers"}, "wrap.policy", "transformer_layers"),
        ({"wrap": "TRANSFORMER_BASED_WRAP"}, "wrap.policy", "transformer_layers"),
        ({"wrap": ["A", "B"]}, "wrap.layer_classes", ("A", "B")),
        ({"wrap": "LlamaDecoderLayer"}, "wrap.layer_classes", ("LlamaDecoderLayer",)),
        ({"wrap": {"layer_classes": "A, B"}}, "wrap.layer_classes", ("A", "B")),
        ({"wrap": {"transformer_layer_cls_to_wrap": "A,B, A"}}, "wrap.layer_classes", ("A", "B")),
        ({"transformer_layer_cls_to_wrap": ["A"]}, "wrap.layer_classes", ("A",)),
        ({"fsdp_transformer_layer_cls_to_wrap": "A"}, "wrap.layer_classes", ("A",)),
        ({"wrap": LlamaDecoderLayer}, "wrap.layer_classes", ("LlamaDecoderLayer",)),
        ({"wrap": {LlamaDecoderLayer}}, "wrap.layer_classes", ("LlamaDecoderLayer",)),
        ({"wrap": select_units}, "wrap.callable", select_units),
        ({"precision": "bf16"}, "precision.preset", "bf16-mixed"),
        ({"precision": "BF16_mixed"}, "precision.preset", "bf16-mixed"),
        ({"precision": "no"}, "precision.preset", "fp32"),
        ({"precision": False}, "precision.preset", "fp32"),
        ({"precision": "float32"}, "precision.preset", "fp32"),
        ({"precision": "pure_bf16"}, "precision.preset", "bf16-true"),
        ({"mixed_precision": "bf16"}, "precision.preset", "bf16-mixed"),
        ({"precision": {"reduce_dtype": "torch.bfloat16"}}, "precision.reduce_dtype", "bfloat16"),
        ({"precision": {"keep_norms_fp32": "yes"}}, "precision.keep_norms_fp32", True),
        ({"precision": {"save_dtype": "bf16"}}, "precision.save_dtype", "bfloat16"),
        ({"offload": "none"}, "offload.parameters", False),
        ({"offload": False}, "offload.optimizer", False),
        ({"offload": []}, "offload.activations", "none"),
        ({"offload": True}, "offload.parameters", True),
        ({"offload": "cpu"}, "offload.optimizer", True),
        ({"offload": "parameters, activations"}, "offload.activations", "auto"),
        ({"activation_checkpointing": {"fraction": "50%"}}, "activation_checkpointing.fraction", 0.5),
        ({"offload": ["parameters", "activations"]}, "offload.activations", "auto"),
        ({"offload": {"parameters": True}}, "offload.optimizer", True),
        ({"offload": {"activations": "saved-tensors"}}, "offload.activations", "saved_tensors"),
        ({"offload": {"pin_memory": "auto"}}, "offload.pin_memory", "auto"),
        ({"offload": {"pin_memory": "no"}}, "offload.pin_memory", False),
        ({"cpu_offload": "true"}, "offload.parameters", True),
        ({"wrap": "size"}, "wrap.policy", "size"),
        ({"wrap": "SIZE_BASED_WRAP"}, "wrap.policy", "size"),
        ({"wrap": {"min_num_params": "20M"}}, "wrap.min_num_params", 20_000_000),
        ({"wrap": {"min_num_params": 1e8}}, "wrap.min_num_params", 100_000_000),
        ({"wrap": {"min_num_params": "1e6"}}, "wrap.policy", "size"),
        ({"wrap": {"granularity": "attention-and-mlp"}}, "wrap.granularity", "attention_and_mlp"),
        ({"precision": "fp16"}, "precision.preset", "fp16-mixed"),
        ({"precision": {"keep_norms_fp32": "auto"}}, "precision.keep_norms_fp32", "auto"),
        ({"activation_checkpointing": "selective"}, "activation_checkpointing.selective", ("attention",)),
        ({"activation_checkpointing": {"selective": "matmul, aten.mm"}}, "activation_checkpointing.mode", "full"),
        ({"activation_checkpointing": {"towers": ["Language"]}}, "activation_checkpointing.towers", ("language",)),
        ({"activation_checkpointing": {"fraction": "0.5"}}, "activation_checkpointing.fraction", 0.5),
        ({"compile": "blocks"}, "compile.blocks", True),
        ({"compile": False}, "compile.blocks", False),
        ({"compile": {"backend": "aot_eager"}}, "compile.blocks", True),
        ({"compile": {"mode": "max_autotune"}}, "compile.mode", "max-autotune"),
        ({"torch_compile": "true"}, "compile.blocks", True),
        ({"offload": {"parameters": "false"}}, "offload.parameters", False),
        ({"activation_checkpointing": True}, "activation_checkpointing.mode", "full"),
        ({"activation_checkpointing": "false"}, "activation_checkpointing.mode", "none"),
        ({"activation_checkpointing": {"every": "2"}}, "activation_checkpointing.every", 2),
        ({"activation_checkpointing": {"every": 2}}, "activation_checkpointing.mode", "full"),
        ({"activation_checkpointing.every": 2}, "activation_checkpointing.mode", "full"),
        ({"gradient_checkpointing": True}, "activation_checkpointing.mode", "full"),
        ({"fsdp_activation_checkpointing": "true"}, "activation_checkpointing.mode", "full"),
        ({"sharding": {"reshard_after_forward": "False"}}, "sharding.reshard_after_forward", False),
        ({"sharding": {"reshard_after_forward": "SHARD_GRAD_OP"}}, "sharding.reshard_after_forward", False),
        ({"sharding": "full_shard"}, "sharding.reshard_after_forward", True),
        ({"sharding": {"dp_shard_size": "4"}}, "sharding.dp_shard_size", 4),
        ({"sharding": {"dp_shard_size": "auto"}}, "sharding.dp_shard_size", "auto"),
        ({"sharding": {"forward_prefetch": True}}, "sharding.forward_prefetch", 1),
        ({"sharding": {"backward_prefetch": 0}}, "sharding.backward_prefetch", 0),
        ({"sharding.require_sharding": "1"}, "sharding.require_sharding", True),
        ({"checkpoint": "sharded"}, "checkpoint.format", "sharded"),
        ({"checkpoint": {"format": "FULL_STATE_DICT"}}, "checkpoint.format", "full"),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, "checkpoint.format", "sharded"),
    ],
)
def test_what_people_type_is_understood_and_shown_in_our_names(given: dict[str, Any], key: str, value: Any) -> None:
    config = FSDPConfig.from_mapping(given)
    assert config.get(key) == value
    assert type(config.get(key)) is type(value)
    assert key in config.said


@pytest.mark.parametrize(
    ("given", "message", "fixed"),
    [
        (
            {"wrap": {"granularity": "attention"}},
            "not one of layer, attention_and_mlp",
            ("wrap.granularity", "attention_and_mlp"),
        ),
        ({"wrap": {"min_num_params": 0}}, "is below 1", ("wrap.min_num_params", 1)),
        ({"wrap": {"min_num_params": "many"}}, "is not a whole number", ("wrap.min_num_params", 1)),
        (
            {"wrap": {"policy": "transformer_layers", "min_num_params": 7}},
            "has no meaning under wrap.policy=transformer_layers",
            ("wrap.policy", "size"),
        ),
        (
            {"wrap": {"policy": "size", "layer_classes": ["A"]}},
            "policy=size and wrap.layer_classes both say",
            ("wrap.policy", "size"),
        ),
        (
            {"wrap": {"policy": "size", "granularity": "attention_and_mlp"}},
            "contradict each other",
            ("wrap.granularity", "attention_and_mlp"),
        ),
        ({"wrap": "transformer_layer"}, "is not a wrap policy", ("wrap.policy", "transformer_layers")),
        ({"wrap": "no_wrap"}, "would make the whole model one unit", ("wrap.policy", "transformer_layers")),
        ({"wrap": ["model.layers"]}, "not the name of a class", ("wrap.policy", "transformer_layers")),
        ({"wrap": {"callable": "f"}}, "is not a Python function", ("wrap.policy", "transformer_layers")),
        ({"wrap": 3}, "wrap=3 is not a way to wrap", ("wrap.policy", "transformer_layers")),
        ({"wrap": None}, "wrap is empty", ("wrap.policy", "transformer_layers")),
        ({"precision": "fp8"}, "'fp8' arrives in a later release", ("precision.preset", "fp32")),
        ({"precision": "fp16-true"}, "lose small updates", ("precision.preset", "fp16-mixed")),
        ({"precision": "bf16-mixd"}, "is not a precision", ("precision.preset", "bf16-mixed")),
        ({"precision": True}, "preset=True is not a precision", ("precision.preset", "bf16-mixed")),
        ({"precision": {"reduce_dtype": "float16"}}, "not one of float32, bfloat16", None),
        ({"precision": {"keep_norms_fp32": "maybe"}}, "neither true nor false", ("precision.keep_norms_fp32", True)),
        ({"offload": "optimizer"}, "state is where the parameters' shards are", ("offload.parameters", True)),
        ({"offload": {"optimizer": True}}, "state is where the parameters' shards are", ("offload.optimizer", True)),
        (
            {"offload": {"parameters": True, "optimizer": False}},
            "state is where the parameters' shards are",
            ("offload.optimizer", True),
        ),
        ({"offload": "activation"}, "is not something that can be offloaded", ("offload.activations", "auto")),
        ({"offload": {"activations": "block_input"}}, "is not one of", ("offload.activations", "block_inputs")),
        (
            {"offload": {"activations": "block_inputs"}, "activation_checkpointing": "none"},
            "more than the inputs of blocks is kept",
            ("activation_checkpointing.mode", "full"),
        ),
        (
            {"activation_checkpointing": {"towers": ["languge"]}},
            "holds 'languge'",
            ("activation_checkpointing.towers", ("language",)),
        ),
        (
            {"activation_checkpointing": {"fraction": 1.5}},
            "not a share of the blocks",
            ("activation_checkpointing.fraction", 0.5),
        ),
        (
            {"activation_checkpointing": {"selective": ["at tention"]}},
            "which is not an operator",
            ("activation_checkpointing.selective", ("attention",)),
        ),
        (
            {"activation_checkpointing": {"selective": 3}},
            "is not a list of names",
            ("activation_checkpointing.selective", ("attention", "matmul")),
        ),
        (
            {"activation_checkpointing": {"fraction": 0.5, "every": 2}},
            "both choose which blocks",
            ("activation_checkpointing.fraction", 0.5),
        ),
        (
            {"activation_checkpointing": {"mode": "none", "fraction": 0.5}},
            "contradict each other",
            ("activation_checkpointing.fraction", 0.5),
        ),
        (
            {"activation_checkpointing": {"mode": "selective"}},
            "which operators are kept is a key of its own",
            ("activation_checkpointing.selective", ("attention",)),
        ),
        ({"compile": "all"}, "is not a way to compile", ("compile.blocks", True)),
        ({"compile": {"mode": "max-autotun"}}, "is not one of default", ("compile.mode", "max-autotune")),
        ({"compile": {"backend": 3}}, "is not the name of a compiler", ("compile.backend", "inductor")),
        ({"activation_checkpointing": "ful"}, "is not a mode", ("activation_checkpointing.mode", "full")),
        ({"activation_checkpointing": 2}, "is a number, not a mode", ("activation_checkpointing.every", 2)),
        ({"activation_checkpointing": {"every": 0}}, "every=0 is below 1", ("activation_checkpointing.every", 1)),
        (
            {"activation_checkpointing": {"mode": "none", "every": 2}},
            "contradict",
            ("activation_checkpointing.every", 2),
        ),
        ({"sharding": {"dp_replicate_size": True}}, "is not a whole number", ("sharding.dp_replicate_size", 1)),
        ({"sharding": {"dp_shard_size": 2.5}}, "is not a whole number", ("sharding.dp_shard_size", "auto")),
        ({"sharding": {"dp_shard_size": 0}}, "is below 1", ("sharding.dp_shard_size", "auto")),
        ({"sharding": {"forward_prefetch": -1}}, "is below 0", ("sharding.forward_prefetch", 0)),
        ({"sharding": "hybrid_shard"}, "does not say how many replicas", ("sharding.dp_replicate_size", 2)),
        ({"sharding": 4}, "is not a mapping", ("sharding.dp_shard_size", "auto")),
        ({"sharding": {"dp_shard_siz": 4}}, "dp_shard_siz=4 is not a key", ("sharding.dp_shard_size", 4)),
        ({"precision": {"dp_shard_size": 4}}, "precision.dp_shard_size=4 is not a key", ("sharding.dp_shard_size", 4)),
        ({"dp_shard_siz": 4}, "dp_shard_siz=4 is not a key", ("sharding.dp_shard_size", 4)),
        ({"precison": "fp32"}, "precison='fp32' is not a key", ("precision.preset", "fp32")),
        ({"checkpoint": "shard"}, "is not a checkpoint format", ("checkpoint.format", "sharded")),
        ({"checkpoint": "LOCAL_STATE_DICT"}, "does not exist under FSDP2", ("checkpoint.format", "sharded")),
        ({"checkpoint": {"optimizer": "none"}}, "neither saved nor fresh", ("checkpoint.optimizer", "saved")),
        ({"checkpoint": {"grace_seconds": 0}}, "seconds above 0", ("checkpoint.grace_seconds", "auto")),
        ({"checkpoint": {"grace_seconds": True}}, "seconds above 0", ("checkpoint.grace_seconds", "auto")),
        ({"precision": "fp32", "mixed_precision": "bf16"}, "preset is given twice", ("precision.preset", "bf16-mixed")),
    ],
)
def test_what_cannot_be_used_is_refused_and_the_fix_works(
    given: dict[str, Any], message: str, fixed: tuple[str, Any] | None
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        FSDPConfig.from_mapping(given, source="here")
    (problem,) = caught.value.problems
    assert problem.source and problem.source.startswith("here")
    if fixed is not None:
        assert follow(problem.fix.replace("keep one of them, as ", "")).get(fixed[0]) == fixed[1]


def test_an_unrecognisable_key_lists_what_exists() -> None:
    with pytest.raises(ConfigError, match="zzzz=1 is not a key") as caught:
        FSDPConfig.from_mapping({"zzzz": 1})
    assert caught.value.problems[0].fix == f"remove zzzz; the sections are {', '.join(SECTION_FIELDS)}"


def test_all_problems_come_in_one_error() -> None:
    with pytest.raises(ConfigError, match="^4 problems") as caught:
        FSDPConfig(precision="fp99", offload="disk", wrap={"size": 3}, sharding={"dp_replicate_size": 0})
    assert len(caught.value.problems) == 4


def test_a_section_dataclass_of_the_wrong_section_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision=.* is a OffloadConfig") as caught:
        FSDPConfig(precision=OffloadConfig())  # type: ignore[arg-type]
    assert caught.value.problems[0].fix == "precision=PrecisionConfig(...)"


def test_dataclasses_mappings_and_short_forms_mean_the_same() -> None:
    by_class = FSDPConfig(
        wrap=WrapConfig(layer_classes=("A",)),
        precision=PrecisionConfig(preset="fp32"),
        activation_checkpointing=ActivationCheckpointingConfig(mode="full", every=2),
        sharding=ShardingConfig(dp_replicate_size=2),
    )
    by_mapping = FSDPConfig(
        wrap=["A"], precision="fp32", activation_checkpointing={"every": 2}, sharding={"dp_replicate_size": 2}
    )
    assert by_class == by_mapping
    assert hash(by_class) == hash(by_mapping)
    assert by_class.said == by_mapping.said


def test_values_in_a_section_dataclass_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="offload.activations='disk' is not one of"):
        FSDPConfig(offload=OffloadConfig(activations="disk"))
    assert FSDPConfig(precision=PrecisionConfig(preset="bf16")).precision.preset == "bf16-mixed"


def test_said_and_sources_are_only_what_was_stated() -> None:
    assert FSDPConfig().said == frozenset()
    config = FSDPConfig(precision={"reduce_dtype": "float32"})
    assert config.said == {"precision.reduce_dtype"}
    assert config.sources == {"precision.reduce_dtype": "FSDPConfig(...)"}
    assert config == FSDPConfig()  # said is not part of what a config means


def test_replace_keeps_what_was_said() -> None:
    config = FSDPConfig(precision="fp32", sharding={"reshard_after_forward": True})
    changed = dataclasses.replace(config, checkpoint="sharded")  # type: ignore[arg-type]
    assert changed.checkpoint.format == "sharded"
    assert changed.said == config.said | {"checkpoint.format"}


def test_a_config_survives_copy_and_pickle_and_stays_frozen() -> None:
    config = FSDPConfig(precision="fp32", wrap=["A"])
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert twin.said == config.said
    with pytest.raises(dataclasses.FrozenInstanceError, match="precision"):
        config.precision = PrecisionConfig()  # type: ignore[misc]


def test_a_config_comes_back_from_its_own_mapping_yaml_and_json() -> None:
    config = FSDPConfig(
        wrap=["A"],
        precision={"preset": "bf16", "save_dtype": "bf16"},
        offload=["parameters", "activations"],
        activation_checkpointing={"selective": ["attention"], "towers": ["language"], "fraction": 0.5},
        compile="blocks",
        checkpoint="sharded",
    )
    assert list(config.to_mapping()) == list(SECTION_FIELDS)
    assert FSDPConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config
    assert FSDPConfig.from_mapping(yaml.safe_load(config.to_yaml())["fsdp"]) == config


# ---- TrainingArguments --------------------------------------------------------------------------------


def test_the_whole_config_travels_through_trainer_arguments() -> None:
    config = FSDPConfig(wrap=["A"], precision="fp32", sharding={"reshard_after_forward": False})
    carried = json.loads(json.dumps(config.to_trainer()))
    assert carried["auto_wrap_policy"] == "NO_WRAP"
    assert carried["reshard_after_forward"] is False
    back = FSDPConfig.from_trainer(carried)
    assert back == config
    assert back is not None
    assert back.said == config.said
    assert back.sources == config.sources


def test_trainer_arguments_keep_the_config_after_their_own_processing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "restored by monkeypatch")
    from transformers import TrainingArguments

    config = FSDPConfig(precision="fp32", checkpoint="sharded")
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, fsdp=True, fsdp_config=config.to_trainer())
    assert FSDPConfig.from_trainer(args.fsdp_config) == config
    stock = {"transformer_layer_cls_to_wrap": "A", "fsdp_reshard_after_forward": "false"}
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, fsdp=True, fsdp_config=stock)
    read = FSDPConfig.from_trainer(args.fsdp_config)
    assert read is not None
    assert read.wrap.layer_classes == ("A",)
    assert read.sharding.reshard_after_forward is False


def test_a_function_cannot_travel_and_the_error_says_what_can() -> None:
    config = FSDPConfig(wrap=select_units)
    for write in (config.to_trainer, config.to_mapping, config.to_yaml):
        with pytest.raises(ConfigError, match=r"wrap.callable=<function select_units") as caught:
            write()
        assert "FSDPCallback(config)" in caught.value.problems[0].fix


def test_trainer_kwargs_only_carry_the_config_in_a_single_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = FSDPConfig(checkpoint="full")
    kwargs = config.trainer_kwargs()
    assert set(kwargs) == {"fsdp_config"} and set(kwargs["fsdp_config"]) == {"hf_fsdp"}
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, **kwargs)
    assert not arguments.fsdp
    callback = FSDPCallback()
    Trainer(model=torch.nn.Linear(2, 2), args=arguments, callbacks=[callback])
    assert callback.checkpoints.config.format == "full"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert set(FSDPConfig().trainer_kwargs()) == {"fsdp_config"}
    assert FSDPConfig(wrap=lambda *args: []).trainer_kwargs() == {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    kwargs = FSDPConfig().trainer_kwargs()
    assert kwargs["fsdp"] is True
    assert "hf_fsdp" in kwargs["fsdp_config"]


def test_trainer_kwargs_send_several_processes_without_an_accelerator_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it, Trainer sees no group of processes on such a machine and says that FSDP needs one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "")
    for available, expected in ((True, None), (False, "true")):
        monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
        accelerator = SimpleNamespace(is_available=lambda available=available: available)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(accelerator=accelerator))
        FSDPConfig().trainer_kwargs()
        assert os.environ.get("ACCELERATE_USE_CPU") == expected


def test_trainer_kwargs_refuse_a_single_process_where_sharding_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = FSDPConfig(sharding={"require_sharding": True})
    with pytest.raises(ConfigError, match="require_sharding is true and there is one process"):
        config.trainer_kwargs()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert config.trainer_kwargs()["fsdp"] is True


def test_an_unknown_argument_in_python_is_refused_as_in_a_file() -> None:
    with pytest.raises(ConfigError, match="precison='fp32' is not a") as caught:
        FSDPConfig(precison="fp32")
    assert caught.value.problems[0].near.startswith("precision")


def test_trainer_kwargs_keep_the_launch_files_way_of_reading_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "True")
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    assert FSDPConfig().trainer_kwargs()["fsdp_config"]["cpu_ram_efficient_loading"] is False
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert FSDPConfig().trainer_kwargs()["fsdp_config"]["cpu_ram_efficient_loading"] is True


@pytest.mark.parametrize(
    ("stock", "key", "value"),
    [
        ({"transformer_layer_cls_to_wrap": "A, B"}, "wrap.layer_classes", ("A", "B")),
        ({"fsdp_transformer_layer_cls_to_wrap": ["A"]}, "wrap.layer_classes", ("A",)),
        ({"reshard_after_forward": "false"}, "sharding.reshard_after_forward", False),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "sharding.reshard_after_forward", False),
        ({"activation_checkpointing": "true"}, "activation_checkpointing.mode", "full"),
        ({"fsdp_activation_checkpointing": True}, "activation_checkpointing.mode", "full"),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, "checkpoint.format", "sharded"),
        ({"cpu_offload": "false"}, "offload.parameters", False),
        ({"cpu_offload": True}, "offload.parameters", True),
        ({"activation_checkpointing_offload": True}, "offload.activations", "auto"),
        ({"min_num_params": 1000}, "wrap.min_num_params", 1000),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, "wrap.policy", "size"),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, "wrap.policy", "transformer_layers"),
        ({"backward_prefetch": "NO_PREFETCH"}, "sharding.backward_prefetch", 0),
        ({"forward_prefetch": "true"}, "sharding.forward_prefetch", 1),
    ],
)
def test_trainers_own_keys_are_converted(stock: dict[str, Any], key: str, value: Any) -> None:
    config = FSDPConfig.from_trainer(stock)
    assert config is not None
    assert config.get(key) == value
    assert key in config.said
    assert config.sources[key] == f"TrainingArguments.fsdp_config[{next(iter(stock))!r}]"


def test_keys_that_decide_nothing_are_accepted() -> None:
    stock = {
        "version": 2,
        "min_num_params": 0,
        "xla": False,
        "xla_fsdp_v2": False,
        "xla_fsdp_grad_ckpt": False,
        "cpu_ram_efficient_loading": True,
        "use_orig_params": "true",
        "activation_checkpointing": "false",
        "auto_wrap_policy": "NO_WRAP",
        "transformer_layer_cls_to_wrap": None,
    }
    config = FSDPConfig.from_trainer(stock)
    assert config is not None
    assert config.said == frozenset()
    assert FSDPConfig.from_trainer({}) is None


@pytest.mark.parametrize(
    ("stock", "message", "fix"),
    [
        ({"version": 1}, "hf-fsdp runs FSDP2", "version: 2"),
        ({"cpu_offload": "perhaps"}, "neither true nor false", "cpu_offload: false"),
        ({"auto_wrap_policy": "SIZED"}, "is not a wrap policy", "auto_wrap_policy: TRANSFORMER_BASED_WRAP"),
        ({"transformer_layer_cls_to_warp": ["A"]}, "is not a key of TrainingArguments.fsdp_config", None),
        ({"fsdp_reshard_after_foward": True}, "reshard_after_foward=True is not a key", "reshard_after_forward: true"),
        ({"xla": True}, "trains on TPUs", None),
        (
            {"activation_checkpointing": "perhaps"},
            "neither true nor false",
            "activation_checkpointing: true   # or false",
        ),
        ({"ignored_modules": ["a"]}, "arrives in a later release", None),
        ({"sharding_strategy": "NO_SHARD"}, "shards nothing", "sharding_strategy: FULL_SHARD"),
        ({"backward_prefetch": "BACKWARD_POST"}, "does not exist under FSDP2", "backward_prefetch: BACKWARD_PRE"),
        ({"mixed_precision_policy": {"param": 1}}, "is not read by Trainer", None),
    ],
)
def test_trainer_keys_that_cannot_be_followed_are_refused(stock: dict[str, Any], message: str, fix: str | None) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        FSDPConfig.from_trainer(stock)
    (problem,) = caught.value.problems
    assert problem.source == f"TrainingArguments.fsdp_config[{next(iter(stock))!r}]"
    if fix is not None:
        assert problem.fix == fix
        assert FSDPConfig.from_trainer(yaml.safe_load(fix)) is not None


def test_a_path_in_fsdp_config_says_that_trainer_reads_it() -> None:
    with pytest.raises(ConfigError, match="fsdp_config='fsdp.json' is not a mapping"):
        FSDPConfig.from_trainer("fsdp.json")  # type: ignore[arg-type]


def test_a_key_added_beside_our_block_counts_unless_the_config_states_otherwise() -> None:
    added = {**FSDPConfig().to_trainer(), "activation_checkpointing": True}
    config = FSDPConfig.from_trainer(added)
    assert config is not None
    assert config.activation_checkpointing.mode == "full"
    stated = {**FSDPConfig(sharding={"reshard_after_forward": True}).to_trainer(), "reshard_after_forward": False}
    with pytest.raises(ConfigError, match="reshard_after_forward is stated twice: true in .* and false in"):
        FSDPConfig.from_trainer(stated)


# ---- cross-field checks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sharding", "world_size", "message"),
    [
        ({"dp_shard_size": 4}, 8, "= 4, but there are 8 processes"),
        ({"dp_shard_size": 4, "dp_replicate_size": 4}, 8, "= 16, but there are 8 processes"),
        ({"dp_replicate_size": 3}, 8, "does not divide 8 processes"),
        ({"dp_replicate_size": 8}, 8, "no parameter would be split"),
        ({"dp_shard_size": 1, "dp_replicate_size": 8}, 8, "no parameter would be split"),
        ({"require_sharding": True}, 1, "only one process"),
    ],
)
def test_a_mesh_that_does_not_fit_is_a_problem_and_its_fix_fits(
    sharding: dict[str, Any], world_size: int, message: str
) -> None:
    config = FSDPConfig(sharding=sharding)
    (problem,) = check_config(config, world_size)
    assert re.search(message, problem.message)
    assert problem.source == "FSDPConfig(...)"
    repaired = follow(problem.fix.rpartition("; or ")[2])
    assert check_config(repaired, world_size) == []


def test_meshes_that_fit_have_no_problem() -> None:
    for sharding, world_size in (
        ({}, 8),
        ({"dp_replicate_size": 2}, 8),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, 8),
        ({"dp_shard_size": 8}, 1),  # one process runs unsharded, whatever the mesh is meant for
    ):
        assert check_config(FSDPConfig(sharding=sharding), world_size) == []


def test_class_names_and_a_function_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="both say what a unit is"):
        FSDPConfig(wrap={"layer_classes": ["A"], "callable": select_units})
    with pytest.raises(ConfigError, match="granularity=attention_and_mlp and wrap.callable both say"):
        FSDPConfig(wrap={"granularity": "attention_and_mlp", "callable": select_units})


def test_allowed_but_notable_settings_are_noted() -> None:
    (line,) = note_config(FSDPConfig(precision={"reduce_dtype": "bfloat16"}))
    assert "rounds every sum" in line
    (line,) = note_config(FSDPConfig(precision={"preset": "fp32", "keep_norms_fp32": True}))
    assert "changes nothing" in line
    assert note_config(FSDPConfig()) == []
