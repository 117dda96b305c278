"""What an old config says, in one form for all kinds of files: `OldSetting`s under FSDP's own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_fsdp.config.io import TRAINER_KEYS_CONVERTED, TRAINER_KEYS_REFUSED_WHEN_ON, TRAINER_KEYS_WITHOUT_EFFECT
from hf_fsdp.config.parse import strip_prefix
from hf_fsdp.config.values import shown, yaml_value
from hf_fsdp.errors import Problem, nearest_names


@dataclass(frozen=True)
class OldSetting:
    """One thing that the old config decides.

    Args:
        name: the name under which `meaning.py` reads it, e.g. ``sharding_strategy``.
        value: as the old file has it.
        text: as a person wrote it, on one line, for comments: ``fsdp_config.fsdp_offload_params: true``.
        source: ``file:line``.
    """

    name: str
    value: Any
    text: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines of an Accelerate launch file, for the new one; None where the file does not say."""

    num_processes: int | None = None
    num_machines: int | None = None
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int = 29500


@dataclass(frozen=True)
class Left:
    """Something of the old config that is not in the new one, or that means something else there.

    Args:
        text: the old setting as written.
        why: what happens instead.
        kind: ``assumed``, ``changed``, ``not needed`` or ``no equivalent``.
    """

    text: str
    why: str
    kind: str


@dataclass(kw_only=True)
class OldConfig:
    """Everything that was read from one old file.

    Args:
        kind: what the file is, in words.
        path: the file.
        settings: in the order of the file.
        silent_precision: precision of the old run when the file says nothing, and why; None: others decide.
        machines: from an Accelerate launch file.
        other_keys: keys about data and training, which are not sharding.
        left: what the reader itself could not carry over.
        problems: what makes the file unusable.
    """

    kind: str
    path: str
    settings: list[OldSetting] = field(default_factory=list)
    silent_precision: tuple[str, str] | None = None
    machines: Machines | None = None
    other_keys: list[str] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add(self, name: str, value: Any, text: str, source: str) -> None:
        """Add a setting; None says nothing in any of the old formats."""
        if value is not None:
            self.settings.append(OldSetting(name, value, text, source))


@dataclass(frozen=True)
class YamlFile:
    """A parsed YAML or JSON mapping and the lines of its keys."""

    path: str
    data: Mapping[Any, Any]
    lines: Mapping[tuple[Any, ...], int]

    def source(self, *keys: Any) -> str:
        """Return ``file:line`` of a key, or of the nearest key above it whose line is known."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{self.path}:{self.lines.get(keys, 1)}"


# Every name that a block of fsdp keys may hold, without prefix -> the name it is read under. Accelerate's file,
# TrainingArguments.fsdp_config and Axolotl's block share those that `io.py` knows; the rest are other programs' words.
FSDP_BLOCK_NAMES: dict[str, str] = {
    **{
        name: name
        for name in sorted({*TRAINER_KEYS_WITHOUT_EFFECT, *TRAINER_KEYS_REFUSED_WHEN_ON, *TRAINER_KEYS_CONVERTED})
    },
    "version": "version",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "backward_prefetch_policy": "backward_prefetch",
    "cpu_offload": "offload_params",
    "gradient_checkpointing": "activation_checkpointing",
    "mixed_precision_policy": "mixed_precision",
    "final_state_dict_type": "final_state_dict_type",
    "pin_memory": "pin_memory",
    "cpu_offload_pin_memory": "pin_memory",
}


def read_fsdp_block(old: OldConfig, file: YamlFile, section: str, block: Any) -> None:
    """Read a mapping of fsdp keys, with or without ``fsdp_``; an unknown key is a problem, never dropped."""
    if block is None:
        return
    if not isinstance(block, Mapping):
        old.problems.append(
            Problem(
                message=f"{section}={shown(block)} is not a mapping",
                fix=f"put the keys under {section}:, or name the file that {section} stands in",
                source=file.source(section),
            )
        )
        return
    for key, value in block.items():
        path = (section, key) if section else (key,)
        text = f"{'.'.join(map(str, path))}: {yaml_value(value)}"
        name = FSDP_BLOCK_NAMES.get(strip_prefix(str(key)))
        if name is None:
            old.problems.append(_unknown(str(key), value, file.source(*path)))
        else:
            old.add(name, value, text, file.source(*path))


def _unknown(key: str, value: Any, source: str) -> Problem:
    prefix = "fsdp_" if key.startswith("fsdp_") else ""
    near = nearest_names(strip_prefix(key), FSDP_BLOCK_NAMES)
    return Problem(
        message=f"{key}={shown(value)} is not a key of FSDP that hf-fsdp knows, so its meaning could be lost",
        fix=f"{prefix}{near[0]}: {yaml_value(value)}" if near else f"remove {key} from a copy of the file",
        near=", ".join(prefix + name for name in near) or None,
        source=source,
    )
