"""Reads LLaMA-Factory's training YAML; sharding itself is in the Accelerate or DeepSpeed file it runs with.

Its newer files (v1) say it themselves, in `dist_config`.
"""

from __future__ import annotations

from collections.abc import Mapping

from hf_fsdp.config.migrate.setting import Left, OldConfig, YamlFile, read_fsdp_block
from hf_fsdp.config.migrate.trainer import TRAINING_KEYS, read_trainer_keys
from hf_fsdp.config.values import TRUE_WORDS, shown, word_of, yaml_value
from hf_fsdp.errors import Problem

KIND = "a training config of LLaMA-Factory"
OWN_KEYS = {"pure_bf16": "pure_bf16", "upcast_layernorm": "upcast_layernorm"}
CHECKPOINTING_OFF = "disable_gradient_checkpointing"
LEFT_KEYS = {
    "use_unsloth": "Unsloth's patches do not shard",
    "use_unsloth_gc": "blocks are recomputed by torch's own checkpointing",
    "use_reentrant_gc": "blocks are recomputed with the random state kept, never reentrant",
    "upcast_lmhead_output": "losses are computed in float32 already",
    "use_galore": "GaLore's projections do not see sharded gradients whole",
    "use_badam": "BAdam switches blocks on and off under the shards",
}


def read_llama_factory(file: YamlFile) -> OldConfig:
    """Return what a training config says; what its Accelerate file says is migrated from that file."""
    old = OldConfig(kind=KIND, path=file.path)
    read_trainer_keys(old, file)
    for key, name in OWN_KEYS.items():
        if key in file.data:
            old.add(name, file.data[key], f"{key}: {yaml_value(file.data[key])}", file.source(key))
    off = file.data.get(CHECKPOINTING_OFF)
    if "gradient_checkpointing" not in file.data:
        text = f"{CHECKPOINTING_OFF}: {yaml_value(off)}" if off is not None else f"{CHECKPOINTING_OFF} is not set"
        old.add("gradient_checkpointing", word_of(off) not in TRUE_WORDS, text, file.source(CHECKPOINTING_OFF))
    for key, why in LEFT_KEYS.items():
        if word_of(file.data.get(key, "")) in TRUE_WORDS:
            old.left.append(Left(f"{key}: {yaml_value(file.data[key])}", why, "no equivalent"))
    if not {"fsdp", "fsdp_config", "deepspeed"} & set(file.data):
        why = "the Accelerate file that the run was started with holds the rest: hf-fsdp migrate THAT_FILE"
        old.left.append(Left("sharding", why, "no equivalent"))
    if not {"bf16", "fp16", "pure_bf16"} & set(file.data):
        old.silent_precision = ("fp32", "none of bf16, fp16 and pure_bf16 is set")
    known = {"fsdp", "fsdp_config", "deepspeed", CHECKPOINTING_OFF, *TRAINING_KEYS, *OWN_KEYS, *LEFT_KEYS}
    old.other_keys = [str(key) for key in file.data if str(key) not in known]
    return old


# Keys of v1 beside `dist_config` -> the name they are read under, and what v1 does without them.
V1_KEYS = {
    "bf16": ("bf16", True),
    "enable_activation_checkpointing": ("gradient_checkpointing", True),
    "cp_size": ("cp_size", 1),
}


def read_llama_factory_v1(file: YamlFile) -> OldConfig:
    """Return what a config of LLaMA-Factory's v1 says: `dist_config`, precision and checkpointing."""
    old = OldConfig(kind=f"{KIND} (v1)", path=file.path)
    block = file.data.get("dist_config")
    name = block.get("name") if isinstance(block, Mapping) else block
    if not isinstance(block, Mapping) or word_of(name) != "fsdp2":
        old.problems.append(
            Problem(
                message=f"dist_config: {shown(name)} is not FSDP2, and nothing else of v1 is read",
                fix="dist_config: {name: fsdp2}",
                source=file.source("dist_config"),
            )
        )
        return old
    own = {"name", "dcp_path"}  # dcp_path: where v1 keeps a converted copy of the weights
    read_fsdp_block(old, file, "dist_config", {key: value for key, value in block.items() if key not in own})
    for key, (setting, default) in V1_KEYS.items():
        text = f"{key}: {yaml_value(file.data[key])}" if key in file.data else f"{key} is not set"
        old.add(setting, file.data.get(key, default), text, file.source(key))
    old.other_keys = [str(key) for key in file.data if str(key) not in {"dist_config", *V1_KEYS}]
    return old
