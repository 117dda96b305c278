"""Reads Axolotl's YAML: its `fsdp`, `fsdp_version` and `fsdp_config`, precision and checkpointing."""

from __future__ import annotations

from hf_fsdp.config.migrate.setting import Left, OldConfig, YamlFile
from hf_fsdp.config.migrate.trainer import TRAINING_KEYS, read_trainer_keys
from hf_fsdp.config.values import FALSE_WORDS, word_of, yaml_value
from hf_fsdp.errors import Problem

KIND = "a config of Axolotl"
OWN_KEYS = {
    "fsdp_version": "version",
    "bfloat16": "pure_bf16",
    "activation_offloading": "activation_offloading",
    "dp_shard_size": "dp_shard_size",
    "dp_replicate_size": "dp_replicate_size",
    "tensor_parallel_size": "tp_size",
    "context_parallel_size": "cp_size",
    "sequence_parallel_degree": "sp_size",
    "expert_parallel_size": "ep_size",
}
LEFT_KEYS = {
    "fsdp_final_state_dict_type": ("not needed", "save_model always writes a folder that from_pretrained loads"),
    "gradient_checkpointing_kwargs": (
        "not needed",
        "blocks are recomputed with the random state kept, never reentrant",
    ),
    "float16": ("no equivalent", "weights stored in fp16 lose small updates; fp16: true is fp16-mixed"),
    "fp8": ("no equivalent", "fp8 is not built"),
}


def read_axolotl(file: YamlFile) -> OldConfig:
    """Return what an Axolotl config says about sharding; data and training keys are only named."""
    old = OldConfig(kind=KIND, path=file.path)
    if not any(file.data.get(key) for key in ("fsdp", "fsdp_config", "deepspeed")):
        old.problems.append(
            Problem(
                message=f"{file.path} shards nothing: it has no fsdp, fsdp_config or deepspeed",
                fix="write a new config instead: fsdp: {wrap: transformer_layers, precision: bf16-mixed}",
                source=f"{file.path}:1",
            )
        )
    # Axolotl's fsdp_config is enough; an empty `fsdp: []` beside it switches nothing off.
    said = {key: value for key, value in file.data.items() if key != "fsdp" or value}
    read_trainer_keys(old, YamlFile(file.path, said, file.lines))
    for key, name in OWN_KEYS.items():
        if key in file.data:
            if name == "pure_bf16" and word_of(file.data[key]) in FALSE_WORDS:
                continue
            old.add(name, file.data[key], f"{key}: {yaml_value(file.data[key])}", file.source(key))
    for key, (kind, why) in LEFT_KEYS.items():
        if key in file.data and word_of(file.data[key]) not in FALSE_WORDS | {"none"}:
            old.left.append(Left(f"{key}: {yaml_value(file.data[key])}", why, kind))
    known = {"fsdp", "fsdp_config", "deepspeed", *TRAINING_KEYS, *OWN_KEYS, *LEFT_KEYS}
    old.other_keys = [str(key) for key in file.data if str(key) not in known]
    return old
