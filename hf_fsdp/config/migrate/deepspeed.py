"""Reads the ZeRO stage and offload of a DeepSpeed config, which stand for two of FSDP's strategies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_fsdp.config.migrate.setting import Left, OldConfig
from hf_fsdp.config.values import shown, word_of, yaml_value
from hf_fsdp.errors import Problem

STRATEGY_OF_STAGE = {"2": "SHARD_GRAD_OP", "3": "FULL_SHARD"}


def read_deepspeed_file(old: OldConfig, value: Any, key: str, source: str) -> None:
    """Read the JSON file that `key` names, from the folder of the old file upwards, or from here."""
    if isinstance(value, Mapping):
        read_deepspeed_mapping(old, value, key, source)
        return
    name = Path(str(value))
    folders = [Path.cwd(), *Path(old.path).resolve().parents]
    found = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if found is None:
        old.problems.append(
            Problem(
                message=f"{key}: {value} names a DeepSpeed config that is not there",
                fix=f"run the command in the folder that {value} is relative to",
                source=source,
            )
        )
        return
    try:
        data = json.loads(found.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        old.problems.append(
            Problem(
                message=f"{found} cannot be read as JSON: {str(error).splitlines()[0]}",
                fix="repair the file, or remove the key from a copy",
                source=source,
            )
        )
        return
    read_deepspeed_mapping(old, data, f"{key} ({name.name})", source)


def read_deepspeed_mapping(old: OldConfig, data: Any, key: str, source: str) -> None:
    """Read Accelerate's ``deepspeed_config`` (flat keys) or DeepSpeed's own JSON (``zero_optimization``)."""
    if not isinstance(data, Mapping):
        old.problems.append(
            Problem(message=f"{key}={shown(data)} is not a mapping", fix="{zero_stage: 3}", source=source)
        )
        return
    nested = data.get("zero_optimization")
    zero: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}
    stage = zero.get("stage", data.get("zero_stage"))
    text = f"{key}: ZeRO stage {stage}"
    if str(stage) not in STRATEGY_OF_STAGE:
        old.problems.append(
            Problem(
                message=f"{text} keeps whole weights and gradients on every GPU, which FSDP has no strategy for",
                fix="a config with ZeRO stage 2 or 3; or train with DDP",
                source=source,
            )
        )
        return
    old.add("sharding_strategy", STRATEGY_OF_STAGE[str(stage)], text, source)
    _read_offload(old, data, zero, key, source)
    old.left.append(
        Left(
            text,
            "buckets, prefetch and overlap of DeepSpeed have no counterpart: FSDP2 works block by block",
            "changed",
        )
    )


def _read_offload(old: OldConfig, data: Mapping[str, Any], zero: Mapping[str, Any], key: str, source: str) -> None:
    def device(part: str) -> str:
        block = zero.get(f"offload_{part}")
        found = block.get("device") if isinstance(block, Mapping) else data.get(f"offload_{part}_device")
        return word_of(found) if found is not None else "none"

    parameters, optimizer = device("param"), device("optimizer")
    if parameters not in ("none", ""):
        old.add("offload_params", True, f"{key}: offload_param to {yaml_value(parameters)}", source)
    elif optimizer not in ("none", ""):
        why = "FSDP2 has no offload of the optimizer alone; `offload: parameters` moves both"
        old.left.append(Left(f"{key}: offload_optimizer to {optimizer}", why, "no equivalent"))
    if "nvme" in (parameters, optimizer):
        old.left.append(Left(f"{key}: offload to nvme", "host memory is used, never a disk", "changed"))
