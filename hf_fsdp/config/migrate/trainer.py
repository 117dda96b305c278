"""Reads `fsdp` and `fsdp_config` of TrainingArguments, from YAML or JSON; the old string form too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_fsdp.config.migrate.deepspeed import read_deepspeed_file
from hf_fsdp.config.migrate.setting import OldConfig, YamlFile, read_fsdp_block
from hf_fsdp.config.values import FALSE_WORDS, TRUE_WORDS, shown, word_of, yaml_value
from hf_fsdp.errors import Problem, nearest_names

KIND = "TrainingArguments"
# Keys of TrainingArguments that decide about precision and memory; LLaMA-Factory passes them on.
TRAINING_KEYS = {
    "bf16": "bf16",
    "fp16": "fp16",
    "gradient_checkpointing": "gradient_checkpointing",
    "torch_compile": "compile",
    "torch_compile_backend": "compile_backend",
    "torch_compile_mode": "compile_mode",
    "fsdp_transformer_layer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "fsdp_min_num_params": "min_num_params",
}
STRATEGY_WORDS = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard")
OPTION_WORDS = (*STRATEGY_WORDS, "offload", "auto_wrap")


def read_trainer(file: YamlFile) -> OldConfig:
    """Return what a mapping of TrainingArguments says, or of the JSON file that ``fsdp_config`` names."""
    old = OldConfig(kind=KIND, path=file.path)
    if "fsdp" not in file.data and "fsdp_config" not in file.data:  # the fsdp_config file itself
        old.kind = "the fsdp_config of TrainingArguments"
        read_fsdp_block(old, file, "", file.data)
        return old
    read_trainer_keys(old, file)
    for key in file.data:
        if str(key) not in {"fsdp", "fsdp_config", "deepspeed", *TRAINING_KEYS}:
            old.other_keys.append(str(key))
    if old.other_keys and not {"bf16", "fp16"} & set(file.data):
        old.silent_precision = ("fp32", "neither bf16 nor fp16 in the old arguments")
    return old


def read_trainer_keys(old: OldConfig, file: YamlFile) -> None:
    """Read the keys of TrainingArguments that decide about sharding, precision and memory."""
    if file.data.get("fsdp") is not None:
        read_option_words(old, file.data["fsdp"], file.source("fsdp"))
    block = file.data.get("fsdp_config")
    if isinstance(block, str):
        old.problems.append(
            Problem(
                message=f"fsdp_config: {block} names another file, which holds the settings",
                fix=f"put its keys under fsdp_config: in a copy; or migrate it alone: hf-fsdp migrate {block}",
                source=file.source("fsdp_config"),
            )
        )
    else:
        read_fsdp_block(old, file, "fsdp_config", block)
    if file.data.get("deepspeed"):
        if file.data.get("fsdp") or file.data.get("fsdp_config"):
            old.problems.append(
                Problem(
                    message="deepspeed and fsdp are both set, and a run follows one of them",
                    fix="remove the one that the old run did not follow, in a copy of the file",
                    source=file.source("deepspeed"),
                )
            )
        else:
            read_deepspeed_file(old, file.data["deepspeed"], "deepspeed", file.source("deepspeed"))
    for key, name in TRAINING_KEYS.items():
        if key in file.data:
            old.add(name, file.data[key], f"{key}: {yaml_value(file.data[key])}", file.source(key))


def read_option_words(old: OldConfig, value: Any, source: str) -> None:
    """Read ``fsdp: "full_shard auto_wrap offload"``, a list of the same words, or a switch."""
    text = f"fsdp: {yaml_value(value)}"
    if isinstance(value, Mapping):
        old.problems.append(
            Problem(message=f"fsdp={shown(value)} is a mapping", fix="fsdp: full_shard auto_wrap", source=source)
        )
        return
    if word_of(value) in TRUE_WORDS:
        return
    if not value or word_of(value) in FALSE_WORDS:
        old.problems.append(
            Problem(message=f"{text} switches FSDP off", fix="fsdp: true   # if the run was sharded", source=source)
        )
        return
    words = value.replace(",", " ").split() if isinstance(value, str) else list(value)
    for word in words:
        option = word_of(word)
        if option in STRATEGY_WORDS:
            old.add("sharding_strategy", option, text, source)
        elif option == "offload":
            old.add("offload_params", True, text, source)
        elif option == "auto_wrap":
            pass  # the default of both: units are the blocks of the model
        else:
            near = nearest_names(option, OPTION_WORDS)
            old.problems.append(
                Problem(
                    message=f"{text} holds {shown(word)}, which is not an option of fsdp",
                    fix=f"fsdp: {near[0] if near else 'full_shard auto_wrap'}",
                    near=", ".join(near) or None,
                    source=source,
                )
            )
