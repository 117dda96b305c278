"""Configs in and out of files: YAML with line numbers, Accelerate's launch file, TrainingArguments' dict."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hf_fsdp.config.parse import (
    DOTTED_KEYS,
    SECTION_FIELDS,
    Locate,
    Parsed,
    parse_config,
    strip_prefix,
)
from hf_fsdp.config.values import Rejected, parse_bool, shown, yaml_value
from hf_fsdp.errors import ConfigError, Problem, nearest_names

TRAINER_SOURCE = "TrainingArguments.fsdp_config"
TRAINER_BLOCK = "hf_fsdp"
# Without an `fsdp:` section, one of these is enough to know that the file is Accelerate's.
ACCELERATE_ONLY_KEYS = frozenset({"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"})
EXAMPLE_SECTION = "fsdp:\n  wrap: transformer_layers\n  precision: bf16-mixed"


class _Loader(yaml.SafeLoader):
    """`yaml.safe_load`'s loader, under a name of its own so that nothing registered elsewhere changes it."""


def load_yaml(path: str | os.PathLike[str]) -> tuple[Any, dict[tuple[Any, ...], int]]:
    """Read one YAML document with safe-load semantics and the line of each key.

    Args:
        path: the file.

    Returns:
        the data, and path of keys (at most three deep) -> line number from 1.

    Raises:
        ConfigError: an empty path, missing, a folder, unreadable, not UTF-8, broken, empty, or with a key given
            twice.
    """
    if not str(path).strip():
        raise ConfigError("the path of the config file is empty", fix="name a YAML file, e.g. configs/run.yaml")
    text = _read_text(Path(path))
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:  # a character that YAML does not allow, such as NUL
        raise _forbidden_character(path, text, error) from None
    try:
        node = loader.get_single_node()
        duplicates = list(_find_duplicates(node, str(path)))
        if duplicates:
            raise ConfigError(duplicates)
        data = loader.construct_document(node) if node is not None else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _broken_yaml(path, error) from None
    finally:
        loader.dispose()
    if data is None:
        raise ConfigError(f"{path} is empty", fix=f"write at least\n{EXAMPLE_SECTION}", source=str(path))
    return data, dict(_find_lines(node))


def read_fsdp_section(path: str | os.PathLike[str]) -> tuple[Mapping[Any, Any], Locate]:
    """Return the ``fsdp:`` section of a YAML file, and a function that says where each of its keys stands.

    Raises:
        ConfigError: the file cannot be read, is Accelerate's launch file, or has no such mapping.
    """
    data, lines = load_yaml(path)
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{path} holds {_kind(data)}, not a mapping with an `fsdp:` section",
            fix=f"write\n{EXAMPLE_SECTION}",
            source=f"{path}:1",
        )
    if "fsdp" not in data:
        raise ConfigError(_missing_section(path, data))
    section = data["fsdp"]
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"fsdp={shown(section)} is not a mapping of sections",
            fix=f"write\n{EXAMPLE_SECTION}",
            source=f"{path}:{lines.get(('fsdp',), 1)}",
        )

    def locate(keys: tuple[Any, ...]) -> str:
        while keys and ("fsdp", *keys) not in lines:
            keys = keys[:-1]
        return f"{path}:{lines.get(('fsdp', *keys), 1)}"

    return section, locate


def is_accelerate_file(data: Any) -> bool:
    """Return whether parsed YAML is a launch file of Accelerate rather than one of ours."""
    return (
        isinstance(data, Mapping)
        and not isinstance(data.get("fsdp"), Mapping)
        and bool(ACCELERATE_ONLY_KEYS & set(data))
    )


def write_fsdp_yaml(mapping: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a complete config mapping as YAML under ``fsdp:``, one line a section."""
    lines = [
        "# hf-fsdp: read with FSDPConfig.from_yaml(...). The launch file is another one: hf-fsdp config --help",
        "fsdp:",
    ]
    for section, fields in mapping.items():
        text = yaml.safe_dump(dict(fields), default_flow_style=True, sort_keys=False, width=10**6).strip()
        lines.append(f"  {section}: {text}")
    return "\n".join(lines) + "\n"


# ---- TrainingArguments.fsdp_config --------------------------------------------------------------------

# Keys of TrainingArguments.fsdp_config (transformers and, through it, Accelerate's plugin) that carry no
# decision of ours: FSDP2 always does what they ask for, or the callback reads them from the plugin itself.
TRAINER_KEYS_WITHOUT_EFFECT = frozenset(
    {"cpu_ram_efficient_loading", "use_orig_params", "sync_module_states", "limit_all_gathers", "xla_fsdp_settings"}
)
TRAINER_KEYS_REFUSED_WHEN_ON = {
    "xla": ("trains on TPUs, which hf-fsdp does not", "remove xla"),
    "xla_fsdp_v2": ("trains on TPUs, which hf-fsdp does not", "remove xla_fsdp_v2"),
    "xla_fsdp_grad_ckpt": ("trains on TPUs, which hf-fsdp does not", "remove xla_fsdp_grad_ckpt"),
    "ignored_modules": (
        "arrives in a later release and is refused rather than ignored",
        "remove ignored_modules",
    ),
    "mixed_precision_policy": ("is not read by Trainer", "remove it and say mixed_precision: bf16-mixed"),
}
TRAINER_KEYS_CONVERTED = {
    "transformer_layer_cls_to_wrap": "wrap.layer_classes",
    "transformer_cls_names_to_wrap": "wrap.layer_classes",
    "auto_wrap_policy": "wrap.policy",
    "reshard_after_forward": "sharding.reshard_after_forward",
    "sharding_strategy": "sharding",
    "activation_checkpointing": "activation_checkpointing.mode",
    "gradient_checkpointing": "activation_checkpointing.mode",
    "mixed_precision": "precision.preset",
    "state_dict_type": "checkpoint.format",
    "cpu_offload": "offload.parameters",
    "offload_params": "offload.parameters",
    "activation_checkpointing_offload": "offload.activations",
    "min_num_params": "wrap.min_num_params",
    "forward_prefetch": "sharding.forward_prefetch",
    "backward_prefetch": "sharding.backward_prefetch",
}
# Where the repair in our words would not be a key that Trainer reads.
TRAINER_REPAIRS = {
    "auto_wrap_policy": "auto_wrap_policy: TRANSFORMER_BASED_WRAP",
    "cpu_offload": "cpu_offload: false",
    "offload_params": "offload_params: false",
    "reshard_after_forward": "reshard_after_forward: true",
    "sharding_strategy": "sharding_strategy: FULL_SHARD",
    "state_dict_type": "state_dict_type: FULL_STATE_DICT",
    "activation_checkpointing": "activation_checkpointing: true   # or false",
    "transformer_layer_cls_to_wrap": "remove transformer_layer_cls_to_wrap; the blocks are found from the model",
}
BACKWARD_PREFETCH_WORDS = {"backward_pre": 1, "no_prefetch": 0}


def parse_trainer_mapping(fsdp_config: Mapping[str, Any]) -> tuple[Parsed, frozenset[str]]:
    """Read ``TrainingArguments.fsdp_config``: our own block, Trainer's keys, or both.

    Returns:
        the parsed values with all problems, and the dotted keys that a person stated.
    """
    if not isinstance(fsdp_config, Mapping):
        raise ConfigError(
            f"fsdp_config={shown(fsdp_config)} is not a mapping",
            fix="TrainingArguments(fsdp=True, fsdp_config=...): it reads a path itself, once fsdp is on",
            source=TRAINER_SOURCE,
        )
    stock = _parse_stock_keys({key: value for key, value in fsdp_config.items() if key != TRAINER_BLOCK})
    block = fsdp_config.get(TRAINER_BLOCK)
    if block is None:
        return stock, frozenset(stock.values)
    if not isinstance(block, Mapping):
        problem = Problem(
            message=f"{TRAINER_BLOCK}={shown(block)} is not a mapping",
            fix="fsdp_config=config.to_trainer() writes it",
            source=TRAINER_SOURCE,
        )
        return Parsed(problems=[problem]), frozenset()
    own, said = _parse_own_block(block)
    for key, value in stock.values.items():
        _add_stock_value(own, said, key, value, stock.sources[key])
    own.problems += stock.problems
    return own, frozenset(said)


def _parse_own_block(block: Mapping[str, Any]) -> tuple[Parsed, set[str]]:
    raw_sources = block.get("sources")
    sources = dict(raw_sources) if isinstance(raw_sources, Mapping) else {}
    own = parse_config({key: value for key, value in block.items() if key not in ("said", "sources")}, _in_trainer)
    said = set(block["said"]) if "said" in block else set(own.values)
    for key in own.values:
        own.sources[key] = sources.get(key, TRAINER_SOURCE)
    return own, said & set(DOTTED_KEYS)


def _add_stock_value(own: Parsed, said: set[str], key: str, value: Any, source: str) -> None:
    """Let a Trainer key that somebody added beside our block count, unless the block states otherwise."""
    if key not in own.values or own.values[key] == value:
        return
    if key in said and own.values[key] != "auto":
        own.problems.append(
            Problem(
                message=f"{key} is stated twice: {yaml_value(own.values[key])} in {own.sources[key]} "
                f"and {yaml_value(value)} in {source}",
                fix=f"remove the second from fsdp_config, or write {key}: {yaml_value(value)} in the first",
                source=source,
            )
        )
        return
    own.values[key], own.sources[key] = value, source
    said.add(key)


def _in_trainer(keys: tuple[Any, ...]) -> str:
    return f"{TRAINER_SOURCE}[{str(keys[0])!r}]" if keys else TRAINER_SOURCE


def _parse_stock_keys(stock: Mapping[str, Any]) -> Parsed:
    """Convert Trainer's own keys; what has no meaning for FSDP2 passes, what we cannot do is refused."""
    raw: dict[str, Any] = {}
    origin: dict[str, str] = {}
    problems: list[Problem] = []
    for key, value in stock.items():
        name = strip_prefix(str(key))
        try:
            target = _convert_stock_key(name, value)
        except Rejected as rejected:
            problems.append(
                Problem(message=rejected.message, fix=rejected.fix, near=rejected.near, source=_in_trainer((key,)))
            )
            continue
        for dotted, item in target.items():
            raw[dotted] = item
            origin[dotted] = _in_trainer((key,))
    parsed = parse_config(raw, lambda keys: origin.get(keys[0], TRAINER_SOURCE))
    parsed.problems = problems + [_in_trainers_words(problem, stock) for problem in parsed.problems]
    return parsed


def _in_trainers_words(problem: Problem, stock: Mapping[str, Any]) -> Problem:
    """Return the problem of a converted key with a repair under the key's own name."""
    for key in stock:
        if problem.source == _in_trainer((key,)) and strip_prefix(str(key)) in TRAINER_REPAIRS:
            return replace(problem, fix=TRAINER_REPAIRS[strip_prefix(str(key))])
    return problem


def _convert_stock_key(name: str, value: Any) -> dict[str, Any]:
    """Return dotted key -> raw value for one Trainer key (without prefix); empty when it decides nothing."""
    word = str(value).strip().lower()
    if name == "version":
        if word != "2":
            raise Rejected(f"version={shown(value)}: hf-fsdp runs FSDP2", fix="version: 2")
        return {}
    if name in TRAINER_KEYS_WITHOUT_EFFECT or value is None:
        _require_known(name, value)
        return {}
    if name in TRAINER_KEYS_REFUSED_WHEN_ON:
        if word in ("false", "0", "", "[]", "no"):
            return {}
        reason, fix = TRAINER_KEYS_REFUSED_WHEN_ON[name]
        raise Rejected(f"{name}={shown(value)} {reason}", fix=fix)
    if name == "auto_wrap_policy" and word == "no_wrap":
        return {}  # only says that Accelerate must not wrap; the callback always wraps
    if name == "backward_prefetch" and isinstance(value, str):
        if word not in BACKWARD_PREFETCH_WORDS:
            raise Rejected(f"{name}={shown(value)} does not exist under FSDP2", fix="backward_prefetch: BACKWARD_PRE")
        return {"sharding.backward_prefetch": BACKWARD_PREFETCH_WORDS[word]}
    if name == "activation_checkpointing" and not parse_bool(name, value):
        return {}  # Trainer's default; its gradient_checkpointing may still say otherwise
    if name in ("min_num_params", "activation_checkpointing_offload") and word in ("0", "", "false"):
        return {}  # Trainer's default
    if name == "sharding_strategy" and word in ("no_shard", "3"):
        raise Rejected("sharding_strategy=NO_SHARD shards nothing", fix="sharding_strategy: FULL_SHARD")
    if name in TRAINER_KEYS_CONVERTED:
        return {TRAINER_KEYS_CONVERTED[name]: value}
    _require_known(name, value)
    return {name: value}


def _require_known(name: str, value: Any) -> None:
    known = {*TRAINER_KEYS_WITHOUT_EFFECT, *TRAINER_KEYS_REFUSED_WHEN_ON, *TRAINER_KEYS_CONVERTED, "version"}
    if name in known | set(SECTION_FIELDS) | set(DOTTED_KEYS):
        return
    near = nearest_names(name, sorted(known | {TRAINER_BLOCK}))
    raise Rejected(
        f"{name}={shown(value)} is not a key of TrainingArguments.fsdp_config",
        fix=f"{near[0]}: {yaml_value(value)}" if near else f"remove {name}",
        near=", ".join(near) or None,
    )


# ---- reading text and nodes ---------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder, not a YAML file", fix="name a file in it", near=_yaml_files(path), source=str(path)
        )
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        names = {file.name: str(file) for file in _siblings(path)}
        near = [names[name] for name in nearest_names(path.name, names)]
        fix = f"use {near[0]}" if near else "check the path"
        raise ConfigError(f"{path} does not exist", fix=fix, near=", ".join(near) or None, source=str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start})",
            fix="save it as UTF-8, or name a YAML file",
            source=str(path),
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", fix="make the file readable for this user", source=str(path)
        ) from None


def _siblings(path: Path) -> list[Path]:
    try:
        return sorted(file for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml"))
    except OSError:
        return []


def _yaml_files(folder: Path) -> str | None:
    files = sorted(str(file) for file in folder.glob("*.y*ml"))
    return ", ".join(files[:5]) or None


def _forbidden_character(path: str | os.PathLike[str], text: str, error: yaml.reader.ReaderError) -> ConfigError:
    line = text.count("\n", 0, error.position) + 1
    return ConfigError(
        f"{path} is not valid YAML: line {line} holds the character U+{ord(text[error.position]):04X}",
        fix=f"remove that character from line {line}, or name a YAML file",
        source=f"{path}:{line}",
    )


def _broken_yaml(path: str | os.PathLike[str], error: Exception) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    reason = str(getattr(error, "problem", None) or error).splitlines()[0]
    source = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    if isinstance(error, RecursionError):
        reason = "it is nested too deeply"
    fix = "repair that line: `key: value`, two spaces for each level"
    if "\\t" in reason:
        fix = "replace the tab by spaces"
    elif "expected a single document" in str(error):
        fix = "keep one document: remove the `---` line and what follows it"
    return ConfigError(f"{path} is not valid YAML: {reason}", fix=fix, source=source)


def _find_duplicates(root: yaml.Node | None, path: str) -> Iterator[Problem]:
    """Yield a problem for each key given twice in one mapping; YAML would silently keep the last."""
    seen: set[int] = set()
    pending = [root] if root is not None else []
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
        if not isinstance(node, yaml.MappingNode):
            continue
        first: dict[tuple[str, str], yaml.Mark] = {}
        for key, value in node.value:
            pending.append(value)
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            before = first.setdefault((key.tag, key.value), key.start_mark)
            if before is not key.start_mark:
                lines = f"{before.line + 1} and {key.start_mark.line + 1}"
                yield Problem(
                    message=f"{key.value} is given twice, on lines {lines}",
                    fix=f"keep one of the two, on lines {lines}",
                    source=f"{path}:{key.start_mark.line + 1}",
                )


def _find_lines(
    node: yaml.Node | None, path: tuple[Any, ...] = (), depth: int = 3
) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield path of keys -> line, to a fixed depth: an alias may point at its own parent."""
    if depth == 0 or not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            here = (*path, key.value)
            yield here, key.start_mark.line + 1
            yield from _find_lines(value, here, depth - 1)


def _kind(data: Any) -> str:
    if isinstance(data, list):
        return "a list"
    return f"one value ({shown(data)})"


def _missing_section(path: str | os.PathLike[str], data: Mapping[Any, Any]) -> Problem:
    if is_accelerate_file(data):
        return Problem(
            message=f"{path} is a launch file of Accelerate, not an fsdp config",
            fix=f"accelerate launch --config_file {path} train.py   # and in train.py: "
            "Trainer(..., callbacks=[FSDPCallback()])",
            source=f"{path}:1",
        )
    own = [str(key) for key in data if key in SECTION_FIELDS]
    if own:
        return Problem(
            message=f"{path} has {', '.join(own)} at the top level, outside an `fsdp:` section",
            fix="put a line `fsdp:` above and indent the sections below it by two spaces",
            source=f"{path}:1",
        )
    near = nearest_names("fsdp", [str(key) for key in data])
    return Problem(
        message=f"{path} has no `fsdp:` section",
        fix=f"rename {near[0]} to fsdp" if near else f"add\n{EXAMPLE_SECTION}",
        near=", ".join(near) or None,
        source=f"{path}:1",
    )
