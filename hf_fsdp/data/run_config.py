"""A run config in two halves: the `fsdp:` section is ours, every other key is the training library's.

The file comes first, the command line over it. Recipes hand the training half to their parser.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_fsdp.config.io import ACCELERATE_ONLY_KEYS, EXAMPLE_SECTION, is_accelerate_file, load_yaml
from hf_fsdp.config.parse import DOTTED_KEYS, SECTION_FIELDS
from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.config.values import shown, yaml_value
from hf_fsdp.errors import ConfigError, Problem, nearest_names
from hf_fsdp.policies.other_tools import KNOWN_KEYS, answer_other_tools

# Names that these settings had in older releases or have elsewhere; the nearest spelling would be another setting.
_RENAMED = {
    "group_by_length": "train_sampling_strategy",
    "max_seq_length": "max_length",
    "cutoff_len": "max_length",
    "torch_dtype": "dtype",
    "evaluation_strategy": "eval_strategy",
}
_WORDS = ("eval_strategy", "save_strategy", "logging_strategy")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a person asked for, before any training library looked at it.

    Args:
        path: the YAML file, or None.
        fsdp: the `fsdp` section, with `--fsdp.*` over it.
        values: the other keys of the file.
        flags: the other flags of the command line, `-` turned into `_`, for the library's parser.
        sources: training key -> where it was typed, ``file:line`` or the flag.
    """

    path: str | None
    fsdp: FSDPConfig
    values: dict[str, Any]
    flags: list[str]
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def typed(self) -> frozenset[str]:
        """The training keys that a person typed, in the file or on the command line."""
        flags = set(_flag_names(self.flags))
        return frozenset(self.values) | flags | {name.removeprefix("no_") for name in flags}


def read_run_config(
    argv: Sequence[str], known_keys: Collection[str], *, script: str = "recipes/text/train.py"
) -> RunConfig:
    """Read the command line and the file it names, as `--config FILE` or as its first word.

    Args:
        argv: the command line without the program. ``--fsdp.precision fp32`` and
            ``--fsdp.sharding.reshard_after_forward=false`` change the `fsdp` section; a whole section replaces
            all of its keys.
        known_keys: training keys that may stand in the file, and be flags.
        script: the program, for the commands in messages.

    Raises:
        ConfigError: no such file, not a run config, two of them, unknown keys or flags (nearest name, file and
            line), or a problem of the `fsdp` section; all of them.
    """
    problems: list[Problem] = []
    path, overrides, flags = _split(argv, problems)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if path is not None:
        values, sources = _read_file(path, known_keys, script, problems)
    problems += _unknown_flags(flags, known_keys)
    fsdp = FSDPConfig()
    try:
        if path is not None and "fsdp" in values:
            fsdp = FSDPConfig.from_yaml(path)
    except ConfigError as error:
        problems += error.problems
    try:
        fsdp = override(fsdp, overrides)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    values.pop("fsdp", None)
    sources |= {name: f"--{name}" for name in _flag_names(flags)}
    return RunConfig(path=path, fsdp=fsdp, values=values, flags=flags, sources=sources)


def override(config: FSDPConfig, changes: Mapping[str, str]) -> FSDPConfig:
    """Return `config` with dotted keys or whole sections replaced by values written as in YAML.

    Raises:
        ConfigError: changes that are not YAML or no keys of the config (all of them), or a result that does not
            fit together.
    """
    if not changes:
        return config
    import yaml

    values = {key: config.get(key) for key in config.said}
    problems: list[Problem] = []
    for key, text in changes.items():
        try:
            stated = FSDPConfig.from_mapping({key: yaml.safe_load(text)}, source=f"--fsdp.{key}")
        except ConfigError as error:
            problems += error.problems
            continue
        except (yaml.YAMLError, ValueError) as error:
            problems.append(_broken_value(key, text, error))
            continue
        if "." not in key:
            values = {name: value for name, value in values.items() if not name.startswith(f"{key}.")}
        values.update({name: stated.get(name) for name in stated.said})
    if problems:
        raise ConfigError(problems)
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


def _split(argv: Sequence[str], problems: list[Problem]) -> tuple[str | None, dict[str, str], list[str]]:
    """Return the file, the changes of the `fsdp` section by dotted key, and the flags for the library's parser."""
    paths: list[str] = []
    overrides: dict[str, str] = {}
    flags: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "-h":
            flags.append("--help")
        elif not word.startswith("--"):
            (flags if flags else paths).append(word)  # after a flag it is that flag's value
        else:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name not in ("config", "fsdp", "fsdp_config") and not name.startswith("fsdp."):
                flags.append(f"--{name}{equals}{value}")
                continue
            value = value if equals else next(words, "")
            if not value:
                problems.append(Problem(message=f"--{name} has no value", fix=f"--{name} VALUE"))
            elif name == "config":
                paths.append(value)
            elif name.startswith("fsdp."):
                overrides[name.removeprefix("fsdp.")] = value
            else:
                problems.append(_whole_section(name, value))
    if len(paths) > 1:
        problems.append(
            Problem(
                message=f"there is more than one run config: {', '.join(paths)}",
                fix="give one: " + "   or   ".join(dict.fromkeys(paths)),
                source="the command line",
            )
        )
    if "" in paths:
        raise ConfigError("the path of the run config is empty", fix="give a YAML file", source="the command line")
    return (paths[0] if len(paths) == 1 else None), overrides, flags  # of two, none is read


def _whole_section(name: str, value: str) -> Problem:
    """Return the refusal of ``--fsdp VALUE``, with the same thing a key at a time."""
    import yaml

    try:
        section = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):
        section = None
    if isinstance(section, Mapping) and section:
        fix = " ".join(f"--fsdp.{key} {shlex.quote(yaml_value(item))}" for key, item in section.items())
    elif "shard_grad_op" in value:
        fix = "--fsdp.sharding.reshard_after_forward false"
    elif "full_shard" in value or "auto_wrap" in value:
        fix = f"remove --{name}: every run of more than one process is fully sharded"
    else:
        fix = "--fsdp.SECTION VALUE, e.g. --fsdp.precision fp32"
    return Problem(
        message=f"--{name} {shown(value)}: the fsdp section is changed a key at a time", fix=fix, source=f"--{name}"
    )


def _broken_value(key: str, text: str, error: Exception) -> Problem:
    reason = str(getattr(error, "problem", None) or error).splitlines()[0]
    closing = {"[": "]", "{": "}"}.get(text[:1])
    fix = f"--fsdp.{key} {shlex.quote(text + closing)}" if closing and closing not in text else f"--fsdp.{key} VALUE"
    return Problem(message=f"--fsdp.{key} {shown(text)} is not valid YAML: {reason}", fix=fix, source=f"--fsdp.{key}")


def _flag_names(flags: Sequence[str]) -> list[str]:
    return [flag[2:].partition("=")[0] for flag in flags if flag.startswith("--")]


def _unknown_flags(flags: Sequence[str], known_keys: Collection[str]) -> Iterator[Problem]:
    for index, flag in enumerate(flags):
        name, equals, value = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or name == "help" or {name, name.removeprefix("no_")} & set(known_keys):
            continue
        following = flags[index + 1] if index + 1 < len(flags) else ""
        value = value if equals else "" if following.startswith("--") else following
        if name in KNOWN_KEYS and "trainable" in known_keys:
            yield from answer_other_tools({name: value or "true"}, source="the command line")
            continue
        near = _near_keys(name, known_keys)
        yield Problem(
            message=f"--{name} is not a flag of this recipe",
            near=", ".join(f"--{key}" for key in near) or None,
            fix=f"--{near[0]} {shlex.quote(_renamed_value(name, value))}".removesuffix(" ''")
            if near
            else f"remove {flag}",
            source="the command line",
        )


def _renamed_value(name: Any, value: Any) -> str:
    """Return what a setting's value is called under its new name: a switch became a choice."""
    return str(name) if name == "group_by_length" else str(value)


def _near_keys(name: str, known_keys: Collection[str]) -> list[str]:
    """Return similar keys; a section of the fsdp config that lost its `fsdp.` comes first."""
    if name in SECTION_FIELDS or name in DOTTED_KEYS:
        return [f"fsdp.{name}"]
    if _RENAMED.get(name) in known_keys:
        return [_RENAMED[name]]
    return nearest_names(name, sorted(known_keys))


def _read_file(
    path: str, known_keys: Collection[str], script: str, problems: list[Problem]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a run config and where each stands; unknown keys go to `problems`."""
    parent = Path(path).parent
    if not Path(path).exists() and parent.is_dir():
        others = {child.name: str(child) for child in parent.iterdir() if child.suffix in (".yaml", ".yml")}
        near = [others[name] for name in nearest_names(Path(path).name, others)]
        raise ConfigError(
            f"there is no run config {path}",
            near=", ".join(near) or None,
            fix=f"give {near[0]}" if near else "give an existing YAML file, e.g. configs/train/llama2_7b_lora.yaml",
        )
    data, lines = load_yaml(path)
    if not isinstance(data, Mapping):
        FSDPConfig.from_yaml(path)  # raises, and says what the file holds instead
    if _is_launch_file(data, known_keys):
        raise ConfigError(
            f"{path} is a launch file of Accelerate, not a run config",
            fix=f"accelerate launch --config_file {shlex.quote(path)} {script} RUN_CONFIG",
            source=f"{path}:1",
        )
    sources = {str(key): f"{path}:{lines.get((key,), 1)}" for key in data}
    others = {str(key): value for key, value in data.items() if key in KNOWN_KEYS and key not in known_keys}
    if others and "trainable" in known_keys:  # a recipe that trains parts: what another program calls them is answered
        problems += answer_other_tools(others, lora=bool(data.get("use_peft")), source=sources[next(iter(others))])
    else:
        others = {}
    for key in data:
        if key == "fsdp_config":
            problems.append(
                Problem(
                    message="fsdp_config is Trainer's own section, which is not read here",
                    fix=f"remove fsdp_config and write\n{EXAMPLE_SECTION}",
                    source=sources["fsdp_config"],
                )
            )
        elif key != "fsdp" and key not in known_keys and key not in others:
            near = _near_keys(str(key), known_keys)
            fix = f"{near[0]}: {_renamed_value(key, data[key])}" if near else f"remove {key}"
            if near and near[0].startswith("fsdp."):
                fix = f"fsdp: {{{key}: {yaml_value(data[key])}}}"
            problems.append(
                Problem(
                    message=f"{key}={data[key]!r} is not a key of this recipe",
                    near=", ".join(near) or None,
                    fix=fix,
                    source=sources[str(key)],
                )
            )
    values = {str(key): value for key, value in data.items()}
    for key in _WORDS:  # YAML reads a bare `no` as false
        if values.get(key) is False:
            values[key] = "no"
    return values, sources


def _is_launch_file(data: Any, known_keys: Collection[str]) -> bool:
    """Return whether this is Accelerate's file; `fsdp_config` alone also stands in run configs for Trainer."""
    if not is_accelerate_file(data):
        return False
    only_here = set(data) & set(known_keys) - {"fsdp_config", "use_cpu", "debug"}
    return bool((ACCELERATE_ONLY_KEYS - {"fsdp_config"}) & set(data)) or not only_here
