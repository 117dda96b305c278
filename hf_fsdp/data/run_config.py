"""A run config in two halves: the `fsdp:` section is ours, every other key is the training library's.

The file comes first, the command line over it. Recipes hand the training half to their parser.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hf_fsdp.config.io import is_accelerate_file, load_yaml
from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.errors import ConfigError, Problem, nearest_names

_WORDS = ("eval_strategy", "save_strategy", "logging_strategy")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a person asked for, before any training library looked at it.

    Args:
        path: the YAML file, or None.
        fsdp: the `fsdp` section, with `--fsdp.*` over it.
        values: the other keys of the file.
        flags: the other flags of the command line, `-` turned into `_`, for the library's parser.
    """

    path: str | None
    fsdp: FSDPConfig
    values: dict[str, Any]
    flags: list[str]

    @property
    def typed(self) -> frozenset[str]:
        """The training keys that a person typed, in the file or on the command line."""
        flags = {flag[2:].partition("=")[0] for flag in self.flags if flag.startswith("--")}
        return frozenset(self.values) | flags | {name.removeprefix("no_") for name in flags}


def read_run_config(argv: Sequence[str], known_keys: Collection[str]) -> RunConfig:
    """Read the command line and the file it names, as `--config FILE` or as its first word.

    Args:
        argv: the command line without the program. ``--fsdp.precision fp32`` and
            ``--fsdp.sharding.reshard_after_forward=false`` change the `fsdp` section; a whole section replaces
            all of its keys.
        known_keys: training keys that may stand in the file.

    Raises:
        ConfigError: no such file, not a run config, unknown keys (nearest name, file and line), or a problem of
            the `fsdp` section; all of them.
    """
    path, overrides, flags = _split(argv)
    values = _read_file(path, known_keys) if path else {}
    fsdp = FSDPConfig.from_yaml(path) if path and "fsdp" in values else FSDPConfig()
    values.pop("fsdp", None)
    return RunConfig(path=path, fsdp=override(fsdp, overrides), values=values, flags=flags)


def override(config: FSDPConfig, changes: Mapping[str, str]) -> FSDPConfig:
    """Return `config` with dotted keys or whole sections replaced by values written as in YAML.

    Raises:
        ConfigError: a change that is not a key of the config, or a result that does not fit together.
    """
    if not changes:
        return config
    import yaml

    values = {key: config.get(key) for key in config.said}
    for key, text in changes.items():
        stated = FSDPConfig.from_mapping({key: yaml.safe_load(text)}, source=f"--fsdp.{key}")
        if "." not in key:
            values = {name: value for name, value in values.items() if not name.startswith(f"{key}.")}
        values.update({name: stated.get(name) for name in stated.said})
    return FSDPConfig.from_mapping(values, source="the run config and the command line")


def write_run_config(path: str | Path, fsdp: FSDPConfig, groups: Sequence[Any]) -> None:
    """Write every setting as a run config that starts the same run again, on any number of processes.

    Args:
        path: the file to write.
        fsdp: its `fsdp` section.
        groups: argument dataclasses; one with a `to_dict` (TrainingArguments) is asked for plain values.
    """
    import yaml

    values: dict[str, Any] = {}
    for group in groups:
        plain = group.to_dict() if hasattr(group, "to_dict") else vars(group)
        # `to_dict` hides every value whose name ends in `_token`, an `eos_token` too; the secret ones are dropped.
        plain = {key: getattr(group, key, value) if key.endswith("_token") else value for key, value in plain.items()}
        values |= {item.name: plain[item.name] for item in fields(group) if plain.get(item.name) is not None}
    # `fsdp` and `fsdp_config` carry the section a second time; a token is nobody else's.
    drop = {"fsdp", "fsdp_config", "hub_token", "push_to_hub_token"}
    if values.get("global_batch_size"):
        drop.add("gradient_accumulation_steps")  # follows from it, by the number of processes
    kept = {key: value for key, value in values.items() if key not in drop}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(yaml.safe_dump({**kept, "fsdp": fsdp.to_mapping()}, sort_keys=False), encoding="utf-8")


def _split(argv: Sequence[str]) -> tuple[str | None, dict[str, str], list[str]]:
    path: str | None = None
    overrides: dict[str, str] = {}
    flags: list[str] = []
    words = iter(argv)
    for word in words:
        if not word.startswith("--"):
            if path is None and not flags:
                path = word
            else:
                flags.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name == "config" or name.startswith("fsdp."):
            value = value if equals else next(words, "")
            if not value:
                raise ConfigError(f"--{name} has no value", fix=f"--{name} VALUE")
            if name == "config":
                path = value
            else:
                overrides[name.removeprefix("fsdp.")] = value
        else:
            flags.append(f"--{name}{equals}{value}")
    return path, overrides, flags


def _read_file(path: str, known_keys: Collection[str]) -> dict[str, Any]:
    parent = Path(path).parent
    if not Path(path).is_file() and parent.is_dir():
        others = {child.name: str(child) for child in parent.iterdir() if child.suffix in (".yaml", ".yml")}
        near = [others[name] for name in nearest_names(Path(path).name, others)]
        raise ConfigError(
            f"there is no run config {path}",
            near=", ".join(near) or None,
            fix=f"give {near[0]}" if near else "give an existing YAML file, e.g. configs/train/llama2_7b_lora.yaml",
        )
    data, lines = load_yaml(path)
    if not isinstance(data, Mapping) or is_accelerate_file(data):
        FSDPConfig.from_yaml(path)  # raises, and says what the file is and how to use it
    problems = []
    for key in data:
        if key == "fsdp" or key in known_keys:
            continue
        near = nearest_names(str(key), known_keys)
        problems.append(
            Problem(
                message=f"{key}={data[key]!r} is not a key of this recipe",
                near=", ".join(near) or None,
                fix=f"{near[0]}: {data[key]}" if near else f"remove {key}",
                source=f"{path}:{lines.get((key,), 1)}",
            )
        )
    if problems:
        raise ConfigError(problems)
    values = {str(key): value for key, value in data.items()}
    for key in _WORDS:  # YAML reads a bare `no` as false
        if values.get(key) is False:
            values[key] = "no"
    return values
