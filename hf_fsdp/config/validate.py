"""Cross-field checks: settings that are fine alone and wrong together. Every problem is returned, none raised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_fsdp.config.parse import DEFAULT_MIN_NUM_PARAMS, SELECTORS
from hf_fsdp.config.values import yaml_value
from hf_fsdp.errors import Problem

if TYPE_CHECKING:
    from hf_fsdp.config.schema import FSDPConfig


def check_config(config: FSDPConfig, world_size: int | None = None) -> list[Problem]:
    """Return what contradicts itself in `config`.

    Args:
        config: parsed values; each is fine on its own.
        world_size: number of processes, once it is known; the mesh sizes are checked against it.
    """
    problems = [*_check_wrap(config), *_check_offload(config), *_check_activation_checkpointing(config)]
    if world_size is not None:
        problems += _check_world_size(config, world_size)
    return problems


def note_config(config: FSDPConfig) -> list[str]:
    """Return plain lines about settings that are allowed but that a person should know about."""
    notes = []
    if config.precision.reduce_dtype == "bfloat16":
        notes.append(
            "precision.reduce_dtype: bfloat16 halves the gradient traffic and rounds every sum over the GPUs "
            "to 8 bits of mantissa; float32 is the default"
        )
    if config.precision.keep_norms_fp32 is True and config.precision.preset == "fp32":
        notes.append("precision.keep_norms_fp32 changes nothing under fp32: all weights already are")
    return notes


def _source(config: FSDPConfig, *keys: str) -> str | None:
    return "; ".join(dict.fromkeys(config.sources[key] for key in keys if key in config.sources)) or None


def _check_wrap(config: FSDPConfig) -> list[Problem]:
    wrap = config.wrap
    problems = []
    if wrap.callable is not None and wrap.layer_classes:
        problems.append(
            Problem(
                message=f"wrap.layer_classes={list(wrap.layer_classes)} and wrap.callable both say what a unit is",
                fix="keep one of them; a function can select by class itself: "
                "[module for module in model.modules() if type(module).__name__ == 'LlamaDecoderLayer']",
                source=_source(config, "wrap.layer_classes", "wrap.callable"),
            )
        )
    by_size = wrap.policy == "size"
    named = [name for name in ("layer_classes", "callable") if getattr(wrap, name)]
    if by_size and named:
        problems.append(
            Problem(
                message=f"wrap.policy=size and wrap.{named[0]} both say what a unit is",
                fix=f"wrap: {{policy: size, min_num_params: {wrap.min_num_params}}}   # or remove policy: size",
                source=_source(config, "wrap.policy", "wrap.min_num_params", f"wrap.{named[0]}"),
            )
        )
    if by_size and wrap.granularity != "layer":
        problems.append(
            Problem(
                message=f"wrap.policy=size and wrap.granularity={wrap.granularity} contradict each other: "
                "units by size know no attention",
                fix=f"wrap: {{granularity: {wrap.granularity}}}   # or wrap: size",
                source=_source(config, "wrap.policy", "wrap.min_num_params", "wrap.granularity"),
            )
        )
    if wrap.callable is not None and wrap.granularity != "layer":
        problems.append(
            Problem(
                message=f"wrap.granularity={wrap.granularity} and wrap.callable both say what a unit is",
                fix="keep one of them; the function can return attention and MLP modules itself",
                source=_source(config, "wrap.granularity", "wrap.callable"),
            )
        )
    if not by_size and wrap.min_num_params != DEFAULT_MIN_NUM_PARAMS:
        problems.append(
            Problem(
                message=f"wrap.min_num_params={wrap.min_num_params} has no meaning under wrap.policy={wrap.policy}",
                fix=f"wrap: {{policy: size, min_num_params: {wrap.min_num_params}}}   # or remove min_num_params",
                source=_source(config, "wrap.policy", "wrap.min_num_params"),
            )
        )
    return problems


def _check_offload(config: FSDPConfig) -> list[Problem]:
    offload = config.offload
    problems = []
    if offload.optimizer != offload.parameters:
        problems.append(
            Problem(
                message=f"offload.parameters={yaml_value(offload.parameters)} and "
                f"offload.optimizer={yaml_value(offload.optimizer)}: under FSDP2 the optimizer's state is where the "
                "parameters' shards are",
                fix="offload: parameters   # both; or offload: none",
                source=_source(config, "offload.parameters", "offload.optimizer"),
            )
        )
    if offload.activations == "block_inputs" and config.activation_checkpointing.mode == "none":
        problems.append(
            Problem(
                message="offload.activations=block_inputs and activation_checkpointing.mode=none contradict each "
                "other: without recomputation more than the inputs of blocks is kept",
                fix="activation_checkpointing: full   # or offload: {activations: saved_tensors}",
                source=_source(config, "offload.activations", "activation_checkpointing.mode"),
            )
        )
    return problems


def _check_activation_checkpointing(config: FSDPConfig) -> list[Problem]:
    section = config.activation_checkpointing
    chosen = {
        name: value
        for name in SELECTORS
        if (value := getattr(section, name)) != {"every": 1, "fraction": 1.0}.get(name, ())
    }
    problems = []
    if section.mode == "none" and chosen:
        name, value = next(iter(chosen.items()))
        problems.append(
            Problem(
                message=f"activation_checkpointing.mode=none and {name}={yaml_value(value)} contradict each other",
                fix=f"activation_checkpointing: {{{name}: {yaml_value(value)}}}   # or activation_checkpointing: none",
                source=_source(config, "activation_checkpointing.mode", f"activation_checkpointing.{name}"),
            )
        )
    if {"every", "fraction"} <= set(chosen):
        problems.append(
            Problem(
                message=f"activation_checkpointing.every={section.every} and fraction={section.fraction} both choose "
                "which blocks are checkpointed",
                fix=f"activation_checkpointing: {{fraction: {section.fraction}}}   # or {{every: {section.every}}}",
                source=_source(config, "activation_checkpointing.every", "activation_checkpointing.fraction"),
            )
        )
    return problems


def _check_world_size(config: FSDPConfig, world_size: int) -> list[Problem]:
    sharding = config.sharding
    replicate, shard = sharding.dp_replicate_size, sharding.dp_shard_size
    source = _source(config, "sharding.dp_shard_size", "sharding.dp_replicate_size")
    if world_size == 1:
        # One process runs unsharded, whatever the mesh is meant to be on the real machine.
        if not sharding.require_sharding:
            return []
        return [
            Problem(
                message="sharding.require_sharding=True, but there is only one process and nothing to shard over",
                fix="start at least two processes: accelerate launch --config_file FILE --num_processes 2 train.py; "
                "or sharding.require_sharding: false",
                source=_source(config, "sharding.require_sharding"),
            )
        ]
    if isinstance(shard, int) and shard * replicate != world_size:
        return [
            Problem(
                message=f"sharding.dp_shard_size={shard} x dp_replicate_size={replicate} = {shard * replicate}, "
                f"but there are {world_size} processes",
                fix=_mesh_fix(world_size, replicate),
                source=source,
            )
        ]
    if world_size % replicate:
        return [
            Problem(
                message=f"sharding.dp_replicate_size={replicate} does not divide {world_size} processes",
                fix=_mesh_fix(world_size, replicate),
                source=source,
            )
        ]
    if world_size // replicate == 1:
        return [
            Problem(
                message=f"sharding.dp_replicate_size={replicate} over {world_size} processes leaves one process a "
                "copy: no parameter would be split",
                fix=_mesh_fix(world_size, 1),
                source=source,
            )
        ]
    return []


def _mesh_fix(world_size: int, wanted_replicas: int) -> str:
    """Return the valid mesh whose number of replicas is nearest to the wanted one."""
    valid = [count for count in range(1, world_size // 2 + 1) if world_size % count == 0]
    replicas = min(valid, key=lambda count: (abs(count - wanted_replicas), count))
    return (
        f"sharding: {{dp_replicate_size: {replicas}, dp_shard_size: auto}}   "
        f"# {replicas} x {world_size // replicas} = {world_size}"
    )
