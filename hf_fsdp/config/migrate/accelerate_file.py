"""Reads Accelerate's launch file, of FSDP1, FSDP2 or DeepSpeed; LLaMA-Factory's `examples/accelerate` are such."""

from __future__ import annotations

from typing import Any

from hf_fsdp.config.migrate.deepspeed import read_deepspeed_mapping
from hf_fsdp.config.migrate.setting import Left, Machines, OldConfig, YamlFile, read_fsdp_block
from hf_fsdp.config.values import FALSE_WORDS, Rejected, parse_count, shown, word_of, yaml_value
from hf_fsdp.errors import Problem

KIND = "a launch file of Accelerate"
# These say nothing at their defaults; anything else is passed on the command line or has no meaning here.
LAUNCHER_ONLY = {
    "gpu_ids": "a choice of this machine: CUDA_VISIBLE_DEVICES=0,1 or `accelerate launch --gpu_ids 0,1`",
    "rdzv_backend": "copy the line into the new launch file if you need it",
    "enable_cpu_affinity": "copy the line into the new launch file if you need it",
    "mpirun_config": "only read on CPUs with MPI; copy it into the new launch file if you need it",
    "fp8_config": "fp8 is not built",
    "use_cpu": "hf-fsdp uses the CPU where there is no GPU",
    "debug": "copy the line into the new launch file if you need it",
    "downcast_bf16": "only read on TPUs",
    "command_file": "only read for TPU pods",
    "commands": "only read for TPU pods",
    "tpu_name": "only read for TPU pods",
    "tpu_zone": "only read for TPU pods",
    "tpu_use_cluster": "only read for TPU pods",
    "tpu_use_sudo": "only read for TPU pods",
    "tpu_vm": "only read for TPU pods",
    "tpu_env": "only read for TPU pods",
}
WITHOUT_MEANING = frozenset({"all", "static", "none", "", "[]", "{}"}) | FALSE_WORDS
CARRIED = frozenset(
    {
        "compute_environment",
        "distributed_type",
        "num_processes",
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "main_training_function",
        "same_network",
    }
)
BLOCKS = frozenset({"fsdp_config", "deepspeed_config", "megatron_lm_config", "dynamo_config", "parallelism_config"})
DYNAMO = {
    "backend": "compile_backend",
    "mode": "compile_mode",
    "use_fullgraph": "compile_fullgraph",
    "use_dynamic": "compile_dynamic",
    "use_regional_compilation": "compile_regional",
}
PARALLELISM = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "ep_size")


def read_accelerate_file(file: YamlFile) -> OldConfig:
    """Return what the launch file says; keys of the launcher itself are kept apart."""
    old = OldConfig(kind=KIND, path=file.path)
    _read_kind(old, file)
    old.machines = _read_machines(old, file)
    read_fsdp_block(old, file, "fsdp_config", file.data.get("fsdp_config"))
    _read_block(old, file, "dynamo_config", "dynamo_", DYNAMO)
    _read_block(old, file, "parallelism_config", "parallelism_config_", {name: name for name in PARALLELISM})
    precision = file.data.get("mixed_precision")
    if precision is not None:  # YAML reads a bare `no` as false
        word = "no" if precision is False else precision
        old.add("mixed_precision", word, f"mixed_precision: {yaml_value(word)}", file.source("mixed_precision"))
    else:
        old.silent_precision = ("fp32", "the launch file has no mixed_precision, which is fp32")
    for key, value in file.data.items():
        _read_other_key(old, file, key, value)
    return old


def _read_kind(old: OldConfig, file: YamlFile) -> None:
    kind = word_of(file.data.get("distributed_type", "FSDP"))
    source = file.source("distributed_type")
    if kind == "deepspeed":
        read_deepspeed_mapping(
            old, file.data.get("deepspeed_config"), "deepspeed_config", file.source("deepspeed_config")
        )
    elif kind != "fsdp":
        old.problems.append(
            Problem(
                message=f"distributed_type: {file.data['distributed_type']} shards nothing that could be migrated",
                fix="write a new launch file: hf-fsdp config MODEL --gpus 8 -o fsdp.yaml",
                source=source,
            )
        )
    elif not file.data.get("fsdp_config"):
        old.problems.append(
            Problem(
                message=f"{file.path} asks for FSDP and has no fsdp_config",
                fix="write a new launch file: hf-fsdp config MODEL --gpus 8 -o fsdp.yaml",
                source=source,
            )
        )


def _read_machines(old: OldConfig, file: YamlFile) -> Machines:
    numbers: dict[str, int] = {}
    for name, minimum in (("num_processes", 1), ("num_machines", 1), ("machine_rank", 0), ("main_process_port", 1)):
        value = file.data.get(name)
        if value is None:
            continue
        try:
            numbers[name] = parse_count(name, value, minimum)
        except Rejected as rejected:
            old.problems.append(Problem(message=rejected.message, fix=rejected.fix, source=file.source(name)))
    address = file.data.get("main_process_ip")
    return Machines(**numbers, main_process_ip=str(address) if address else None)


def _read_block(old: OldConfig, file: YamlFile, section: str, prefix: str, names: dict[str, str]) -> None:
    block = file.data.get(section)
    if not isinstance(block, dict):
        return
    for key, value in block.items():
        name = names.get(str(key).removeprefix(prefix))
        text = f"{section}.{key}: {yaml_value(value)}"
        if name is not None:
            old.add(name, value, text, file.source(section, key))
        elif word_of(value) not in WITHOUT_MEANING:
            old.left.append(Left(text, "not read by hf-fsdp", "no equivalent"))


def _read_other_key(old: OldConfig, file: YamlFile, key: Any, value: Any) -> None:
    name = str(key)
    if name in CARRIED | BLOCKS | {"mixed_precision"}:
        if name == "compute_environment" and word_of(value) != "local_machine":
            old.left.append(
                Left(f"{name}: {value}", "hf-fsdp writes launch files for your own machines", "no equivalent")
            )
        return
    if name == "dynamo_backend":  # how files were written before dynamo_config
        old.add("compile_backend", value, f"dynamo_backend: {yaml_value(value)}", file.source(name))
    elif name in LAUNCHER_ONLY:
        if word_of(value) not in WITHOUT_MEANING:
            old.left.append(Left(f"{name}: {yaml_value(value)}", LAUNCHER_ONLY[name], "no equivalent"))
    else:
        old.problems.append(
            Problem(
                message=f"{name}={shown(value)} is not a key of Accelerate's launch file",
                fix=f"remove {name}; Accelerate itself refuses the file with it",
                source=file.source(name),
            )
        )
