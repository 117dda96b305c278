"""Cross-field checks: settings that are fine alone and wrong together. Every problem is returned, none raised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_fsdp.errors import Problem

if TYPE_CHECKING:
    from hf_fsdp.config.schema import FSDPConfig


def check_config(config: FSDPConfig, world_size: int | None = None) -> list[Problem]:
    """Return what contradicts itself in `config`.

    Args:
        config: parsed values; each is fine on its own.
        world_size: number of processes, once it is known; the mesh sizes are checked against it.
    """
    problems = [*_check_wrap(config), *_check_activation_checkpointing(config)]
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
    if config.precision.keep_norms_fp32 and config.precision.preset == "fp32":
        notes.append("precision.keep_norms_fp32 changes nothing under fp32: all weights already are")
    return notes


def _source(config: FSDPConfig, *keys: str) -> str | None:
    return "; ".join(dict.fromkeys(config.sources[key] for key in keys if key in config.sources)) or None


def _check_wrap(config: FSDPConfig) -> list[Problem]:
    wrap = config.wrap
    if wrap.callable is None or not wrap.layer_classes:
        return []
    return [
        Problem(
            message=f"wrap.layer_classes={list(wrap.layer_classes)} and wrap.callable both say what a unit is",
            fix="keep one of them; a function can select by class itself: "
            "[module for module in model.modules() if type(module).__name__ == 'LlamaDecoderLayer']",
            source=_source(config, "wrap.layer_classes", "wrap.callable"),
        )
    ]


def _check_activation_checkpointing(config: FSDPConfig) -> list[Problem]:
    section = config.activation_checkpointing
    if section.mode != "none" or section.every == 1:
        return []
    return [
        Problem(
            message=f"activation_checkpointing.mode=none and every={section.every} contradict each other",
            fix=f"activation_checkpointing: {{every: {section.every}}}   # or activation_checkpointing: none",
            source=_source(config, "activation_checkpointing.mode", "activation_checkpointing.every"),
        )
    ]


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
