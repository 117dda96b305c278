"""What a person types becomes checked values: short forms, aliases, words for booleans, refusals by name.

Nothing here knows the dataclasses of `schema.py`: a raw mapping goes in, `Parsed` comes out, with every
problem found on the way. A key is written `section.field` ("dotted") everywhere in this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_fsdp.config.values import (
    FALSE_WORDS,
    FIELD_PARSERS,
    SIZE_POLICY_WORDS,
    TRANSFORMER_POLICY_WORDS,
    TRUE_WORDS,
    Rejected,
    parse_field,
    shown,
    word_of,
    yaml_value,
)
from hf_fsdp.errors import Problem, nearest_names

SECTION_FIELDS: dict[str, tuple[str, ...]] = {
    "wrap": ("policy", "layer_classes", "callable", "granularity", "min_num_params"),
    "precision": ("preset", "keep_norms_fp32", "reduce_dtype", "save_dtype"),
    "offload": ("parameters", "optimizer", "activations", "pin_memory"),
    "activation_checkpointing": ("mode", "every", "fraction", "selective", "towers"),
    "compile": ("blocks", "backend", "mode"),
    "sharding": (
        "reshard_after_forward",
        "dp_shard_size",
        "dp_replicate_size",
        "forward_prefetch",
        "backward_prefetch",
        "sync_each_batch",
        "require_sharding",
    ),
    "checkpoint": ("format", "async_save", "optimizer", "grace_seconds", "self_test"),
}
DOTTED_KEYS: tuple[str, ...] = tuple(f"{section}.{name}" for section, names in SECTION_FIELDS.items() for name in names)

# 20 MB in bf16: above the size at which a network's latency decides.
DEFAULT_MIN_NUM_PARAMS = 10_000_000

# Keys that choose among blocks or operators.
SELECTORS = ("every", "fraction", "selective", "towers")

# Names that people bring from Accelerate, TrainingArguments and torch. They are understood inside their
# section and at the top level, with or without Accelerate's `fsdp_` prefix, and shown under our names.
ALIASES: dict[str, str] = {
    "transformer_layer_cls_to_wrap": "wrap.layer_classes",
    "transformer_cls_names_to_wrap": "wrap.layer_classes",
    "auto_wrap_policy": "wrap.policy",
    "mixed_precision": "precision.preset",
    "gradient_checkpointing": "activation_checkpointing.mode",
    "reshard_after_forward": "sharding.reshard_after_forward",
    "dp_shard_size": "sharding.dp_shard_size",
    "dp_replicate_size": "sharding.dp_replicate_size",
    "state_dict_type": "checkpoint.format",
    "cpu_offload": "offload.parameters",
    "offload_params": "offload.parameters",
    "activation_checkpointing_offload": "offload.activations",
    "torch_compile": "compile.blocks",
    "min_num_params": "wrap.min_num_params",
}


@dataclass
class Parsed:
    """The result of one pass over a raw config: values by dotted key, who said them, and all problems."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


Locate = Callable[[tuple[Any, ...]], str]


def parse_config(raw: Mapping[Any, Any], locate: Locate) -> Parsed:
    """Read a whole config.

    Args:
        raw: section or alias or dotted key -> value, as typed. Values of a section may be short forms.
        locate: path of keys as typed -> where they were typed (``file:line`` or ``FSDPConfig(...)``).

    Returns:
        `Parsed`; ``problems`` holds everything that is wrong, in reading order.
    """
    parsed = Parsed()
    for key, value in raw.items():
        _parse_top_level(parsed, key, value, locate)
    for given, implied, value in _IMPLIED:
        if parsed.values.get(given) and implied not in parsed.values:
            parsed.values[implied], parsed.sources[implied] = value, parsed.sources[given]
    return parsed


# What one key says about another that was left out: "every second block" only means something when on.
_IMPLIED: tuple[tuple[str, str, Any], ...] = (
    *((f"activation_checkpointing.{name}", "activation_checkpointing.mode", "full") for name in SELECTORS),
    ("wrap.min_num_params", "wrap.policy", "size"),
    ("offload.parameters", "offload.optimizer", True),  # the state of a shard is where the shard is
    ("compile.backend", "compile.blocks", True),
    ("compile.mode", "compile.blocks", True),
)


def strip_prefix(key: str) -> str:
    """Return `key` without Accelerate's ``fsdp_``."""
    return key.removeprefix("fsdp_")


def _parse_top_level(parsed: Parsed, key: Any, value: Any, locate: Locate) -> None:
    name = key if isinstance(key, str) else None
    at = locate((key,))
    if name in SECTION_FIELDS:
        _parse_section(parsed, name, value, (key,), locate)
    elif name is not None and name.split(".")[0] in SECTION_FIELDS:
        section, _, rest = name.partition(".")
        _parse_section(parsed, section, {rest: value}, (key,), lambda path: at)
    elif name is not None and strip_prefix(name) in SECTION_FIELDS:  # e.g. fsdp_activation_checkpointing: true
        _parse_section(parsed, strip_prefix(name), value, (key,), locate)
    elif name is not None and strip_prefix(name) in ALIASES:
        section, _, rest = ALIASES[strip_prefix(name)].partition(".")
        _parse_section(parsed, section, {rest: value}, (key,), lambda path: at)
    else:
        parsed.problems.append(_unknown_key(str(key), value, None, at))


def _parse_section(parsed: Parsed, section: str, value: Any, path: tuple[Any, ...], locate: Locate) -> None:
    at = locate(path)
    try:
        if value is None:
            raise Rejected(f"{section} is empty", fix=f"{section}: {DEFAULT_TEXT[section]}")
        is_mapping = isinstance(value, Mapping)
        fields = SHORT_FORMS[section](value) if not is_mapping else value
    except Rejected as rejected:
        parsed.problems.append(_problem(rejected, at))
        return
    for key, item in fields.items():
        where = locate((*path, key)) if is_mapping else at
        _parse_item(parsed, section, key, item, where)


def _parse_item(parsed: Parsed, section: str, key: Any, value: Any, at: str) -> None:
    name = strip_prefix(key) if isinstance(key, str) else key
    dotted = ALIASES.get(name, "") if isinstance(name, str) else ""
    if not dotted.startswith(f"{section}."):
        dotted = f"{section}.{key}"
    try:
        if dotted not in FIELD_PARSERS:
            parsed.problems.append(_unknown_key(str(key), value, section, at))
            return
        if value is None and dotted != "wrap.callable":
            raise Rejected(f"{dotted} is empty", fix=f"give {dotted} a value, or remove the line for its default")
        _record(parsed, dotted, parse_field(dotted, value), at)
    except Rejected as rejected:
        parsed.problems.append(_problem(rejected, at))


def _record(parsed: Parsed, dotted: str, value: Any, at: str) -> None:
    if dotted in parsed.values and parsed.values[dotted] != value:
        first = parsed.sources[dotted]
        raise Rejected(
            f"{dotted} is given twice: {shown(parsed.values[dotted])} ({first}) and {shown(value)}",
            fix=f"keep one of them, as {dotted}: {yaml_value(value)}",
        )
    parsed.values[dotted] = value
    parsed.sources[dotted] = at


def _problem(rejected: Rejected, at: str) -> Problem:
    return Problem(message=rejected.message, fix=rejected.fix, near=rejected.near, source=at)


def _unknown_key(key: str, value: Any, section: str | None, at: str) -> Problem:
    """Return the problem of a key that nothing knows; the nearest known one is the repair."""
    shown_key = f"{section}.{key}" if section else key
    if section is None and strip_prefix(key) == "version":
        return Problem(
            message=f"{key}={shown(value)} is a key of Accelerate and Trainer, not of the fsdp config",
            fix=f"remove {key}; hf-fsdp always runs FSDP2",
            source=at,
        )
    own = {name: f"{section}.{name}" for name in SECTION_FIELDS[section]} if section else {}
    anywhere = {name: name for name in SECTION_FIELDS} if not section else {}
    anywhere |= {dotted.partition(".")[2]: dotted for dotted in DOTTED_KEYS} | ({} if section else ALIASES)
    near: list[str] = []
    for known in (own, anywhere):  # a key of this section first; else one typed a level too high or low
        near = near or list(dict.fromkeys(known[name] for name in nearest_names(strip_prefix(key), known)))
    if near:
        fix = f"{near[0]}: {yaml_value(value)}"
    elif section:
        fix = f"remove {shown_key}; {section} has the keys {', '.join(SECTION_FIELDS[section])}"
    else:
        fix = f"remove {shown_key}; the sections are {', '.join(SECTION_FIELDS)}"
    message = f"{shown_key}={shown(value)} is not a key of the fsdp config"
    return Problem(message=message, fix=fix, near=", ".join(near) or None, source=at)


# ---- short forms: one word or one list for a whole section --------------------------------------------


def _expand_wrap(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        if word_of(value) in TRANSFORMER_POLICY_WORDS | SIZE_POLICY_WORDS:
            return {"policy": value}
        if "," in value or value[:1].isupper():
            return {"layer_classes": value}
        return {"policy": value}
    if isinstance(value, type) or isinstance(value, (Sequence, set, frozenset)):
        return {"layer_classes": value}
    if callable(value):
        return {"callable": value}
    raise Rejected(f"wrap={shown(value)} is not a way to wrap a model", fix="wrap: transformer_layers")


def _expand_precision(value: Any) -> Mapping[str, Any]:
    return {"preset": value}


def _expand_offload(value: Any) -> Mapping[str, Any]:
    off = {"parameters": False, "optimizer": False, "activations": "none"}
    if value is False or (isinstance(value, str) and word_of(value) in FALSE_WORDS | {"none", ""}):
        return off
    if isinstance(value, str):
        value = value.split(",")
    words = [value] if not isinstance(value, (list, tuple, set, frozenset)) else list(value)
    on: dict[str, Any] = {}
    for word in words:
        name = _OFFLOAD_WORDS.get(word_of(word), word_of(word))
        if name in TRUE_WORDS:
            name = "parameters"
        if name not in off:
            near = nearest_names(str(word), [*off, "none"])
            raise Rejected(
                f"offload={shown(value)} is not something that can be offloaded",
                fix=f"offload: {near[0] if near else 'none'}",
                near=", ".join(near) or ", ".join([*off, "none"]),
            )
        on |= {"activations": "auto"} if name == "activations" else {name: True}
    return {**off, **on, **({"optimizer": True} if "parameters" in on else {})}


_OFFLOAD_WORDS = {"cpu": "parameters", "params": "parameters"}


def _expand_activation_checkpointing(value: Any) -> Mapping[str, Any]:
    # Kept attention alone costs one hidden state a block and saves the largest part of the recompute.
    return {"selective": ["attention"]} if word_of(value) == "selective" else {"mode": value}


def _expand_compile(value: Any) -> Mapping[str, Any]:
    word = word_of(value)
    if word in ("blocks", "block"):
        return {"blocks": True}
    if word in TRUE_WORDS | FALSE_WORDS | {"none"}:
        return {"blocks": word in TRUE_WORDS}
    raise Rejected(f"compile={shown(value)} is not a way to compile", fix="compile: blocks   # or none")


def _expand_sharding(value: Any) -> Mapping[str, Any]:
    word = word_of(value)
    if word in ("full_shard", "shard_grad_op"):  # FSDP1's names for the same choice
        return {"reshard_after_forward": word == "full_shard"}
    if word in ("hybrid_shard", "hybrid_shard_zero2"):
        raise Rejected(
            f"sharding={shown(value)} does not say how many replicas",
            fix="sharding: {dp_replicate_size: 2}   # the number of replicas, usually the number of machines",
        )
    raise Rejected(
        f"sharding={shown(value)} is not a mapping", fix="sharding: {reshard_after_forward: true, dp_shard_size: auto}"
    )


def _expand_checkpoint(value: Any) -> Mapping[str, Any]:
    return {"format": value}


SHORT_FORMS: dict[str, Callable[[Any], Mapping[str, Any]]] = {
    "wrap": _expand_wrap,
    "precision": _expand_precision,
    "offload": _expand_offload,
    "activation_checkpointing": _expand_activation_checkpointing,
    "compile": _expand_compile,
    "sharding": _expand_sharding,
    "checkpoint": _expand_checkpoint,
}
DEFAULT_TEXT = {
    "wrap": "transformer_layers",
    "precision": "auto",
    "offload": "none",
    "activation_checkpointing": "auto",
    "compile": "none",
    "sharding": "{reshard_after_forward: true}",
    "checkpoint": "sharded",
}
