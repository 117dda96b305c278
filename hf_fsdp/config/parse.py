"""What a person types becomes checked values: short forms, aliases, words for booleans, refusals by name.

Nothing here knows the dataclasses of `schema.py`: a raw mapping goes in, `Parsed` comes out, with every
problem found on the way. A key is written `section.field` ("dotted") everywhere in this package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_fsdp.errors import Problem, nearest_names

SECTION_FIELDS: dict[str, tuple[str, ...]] = {
    "wrap": ("policy", "layer_classes", "callable"),
    "precision": ("preset", "keep_norms_fp32", "reduce_dtype", "save_dtype"),
    "offload": ("parameters", "optimizer", "activations"),
    "activation_checkpointing": ("mode", "every"),
    "sharding": (
        "reshard_after_forward",
        "dp_shard_size",
        "dp_replicate_size",
        "forward_prefetch",
        "backward_prefetch",
        "sync_each_batch",
        "require_sharding",
    ),
    "checkpoint": ("format", "async_save"),
}
DOTTED_KEYS: tuple[str, ...] = tuple(f"{section}.{name}" for section, names in SECTION_FIELDS.items() for name in names)

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
}

TRUE_WORDS = frozenset({"true", "yes", "on", "1", "y", "t"})
FALSE_WORDS = frozenset({"false", "no", "off", "0", "n", "f"})
PRESETS = ("auto", "fp32", "bf16-mixed", "bf16-true")
PRESET_ALIASES = {
    "bf16": "bf16-mixed",
    "bfloat16": "bf16-mixed",
    "mixed_bf16": "bf16-mixed",
    "no": "fp32",
    "float32": "fp32",
    "32": "fp32",
    "pure_bf16": "bf16-true",
}
LATER_PRESETS = frozenset({"fp16", "fp16-mixed", "float16", "fp8", "fp16-true"})
DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16"}
TRANSFORMER_POLICY_WORDS = frozenset({"transformer_layers", "transformer_based_wrap", "transformer_auto_wrap", "auto"})
SIZE_POLICY_WORDS = frozenset({"size", "size_based_wrap"})
LATER_CHECKPOINTING = ("selective", "towers", "fraction")


class Rejected(Exception):
    """A value that cannot be used; `Reading` adds the key and where it came from."""

    def __init__(self, message: str, *, fix: str, near: str | None = None):
        super().__init__(message)
        self.message, self.fix, self.near = message, fix, near


@dataclass
class Parsed:
    """The result of one pass over a raw config: values by dotted key, who said them, and all problems."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


Locate = Callable[[tuple[Any, ...]], str]


def later_release(what: str, fix: str) -> Rejected:
    """Return the refusal of something that is understood but not built yet."""
    return Rejected(f"{what} arrives in a later release and is refused rather than ignored", fix=fix)


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
    mode, every = "activation_checkpointing.mode", "activation_checkpointing.every"
    if every in parsed.values and mode not in parsed.values:  # "every second block" only means something when on
        parsed.values[mode], parsed.sources[mode] = "full", parsed.sources[every]
    return parsed


def parse_field(dotted: str, value: Any) -> Any:
    """Return the checked value of one field given by its dotted key.

    Raises:
        Rejected: the value cannot be used.
        KeyError: no such field (a mistake in this package, not of a person).
    """
    return FIELD_PARSERS[dotted](dotted, value)


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
        if (section, key) in LATER_KEYS:
            raise later_release(f"{section}.{key}={shown(value)}", LATER_KEYS[section, key])
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
        if _word(value) in TRANSFORMER_POLICY_WORDS | SIZE_POLICY_WORDS:
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
    parts = ("parameters", "optimizer", "activations")
    if value is False or (isinstance(value, str) and _word(value) in FALSE_WORDS | {"none", ""}):
        return dict.fromkeys(parts, False)
    words = [value] if not isinstance(value, (list, tuple, set, frozenset)) else list(value)
    if not words:
        return dict.fromkeys(parts, False)
    known = {"true": "parameters", "cpu": "parameters", "params": "parameters", **{part: part for part in parts}}
    for word in words:
        if _word(word) not in known and _word(word) not in TRUE_WORDS:
            near = nearest_names(str(word), [*parts, "none"])
            raise Rejected(
                f"offload={shown(value)} is not something that can be offloaded",
                fix="offload: none",
                near=", ".join(near) or ", ".join([*parts, "none"]),
            )
    raise later_release(f"offload={shown(value)}", "offload: none")


def _expand_activation_checkpointing(value: Any) -> Mapping[str, Any]:
    return {"mode": value}


def _expand_sharding(value: Any) -> Mapping[str, Any]:
    word = _word(value)
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
    "sharding": _expand_sharding,
    "checkpoint": _expand_checkpoint,
}
DEFAULT_TEXT = {
    "wrap": "transformer_layers",
    "precision": "auto",
    "offload": "none",
    "activation_checkpointing": "auto",
    "sharding": "{reshard_after_forward: true}",
    "checkpoint": "full",
}
LATER_KEYS = {
    ("wrap", "granularity"): "wrap: transformer_layers",
    ("wrap", "min_num_params"): "wrap: transformer_layers",
    **{("activation_checkpointing", key): "activation_checkpointing: full" for key in LATER_CHECKPOINTING},
}


# ---- one value at a time ------------------------------------------------------------------------------


def parse_bool(dotted: str, value: Any) -> bool:
    """Return what a boolean or a word for one says; ``"false"`` is False."""
    if isinstance(value, bool):
        return value
    word = _word(value)
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise Rejected(f"{dotted}={shown(value)} is neither true nor false", fix=f"{dotted}: true   # or false")


def parse_count(dotted: str, value: Any, minimum: int) -> int:
    """Return a whole number of at least `minimum`; ``"2"`` is 2, a boolean or a fraction is refused."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value.strip()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Rejected(f"{dotted}={shown(value)} is not a whole number", fix=f"{dotted}: {max(minimum, 1)}")
    if value < minimum:
        raise Rejected(f"{dotted}={value} is below {minimum}", fix=f"{dotted}: {minimum}")
    return value


def _parse_policy(dotted: str, value: Any) -> str:
    word = _word(value)
    if word in TRANSFORMER_POLICY_WORDS:
        return "transformer_layers"
    if word in SIZE_POLICY_WORDS:
        raise later_release(f"{dotted}={shown(value)} (wrapping by size)", "wrap: transformer_layers")
    if word in ("no_wrap", "none"):
        raise Rejected(
            f"{dotted}={shown(value)} would make the whole model one unit, gathered at once on every GPU",
            fix="wrap: transformer_layers",
        )
    near = nearest_names(str(value), ["transformer_layers"])
    raise Rejected(
        f"{dotted}={shown(value)} is not a wrap policy",
        fix="wrap: transformer_layers",
        near=", ".join(near) or "transformer_layers, or class names such as [LlamaDecoderLayer]",
    )


def _parse_layer_classes(dotted: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        items: list[Any] = [part for part in (part.strip() for part in value.split(",")) if part]
    elif isinstance(value, (set, frozenset)):
        items = sorted(value, key=str)
    elif isinstance(value, Sequence):
        items = list(value)
    else:
        items = [value]
    names = [_class_name(dotted, item, value) for item in items]
    return tuple(dict.fromkeys(names))


def _class_name(dotted: str, item: Any, value: Any) -> str:
    name = item.__name__ if isinstance(item, type) else item.strip() if isinstance(item, str) else None
    if name is None or not name.isidentifier():
        raise Rejected(
            f"{dotted}={shown(value)} holds {shown(item)}, which is not the name of a class",
            fix="wrap: transformer_layers   # finds the blocks; or name classes: wrap: [LlamaDecoderLayer]",
        )
    return name


def _parse_callable(dotted: str, value: Any) -> Callable[..., Any] | None:
    if value is None or (callable(value) and not isinstance(value, type)):
        return value
    raise Rejected(
        f"{dotted}={shown(value)} is not a Python function",
        fix="wrap: transformer_layers   # a function can only be given in Python: FSDPConfig(wrap=function)",
    )


def _parse_preset(dotted: str, value: Any) -> str:
    if value is False:  # YAML reads `precision: no` as a boolean; Accelerate's "no" means no mixed precision
        return "fp32"
    word = _word(value).removeprefix("torch.")
    word = PRESET_ALIASES.get(word, word).replace("_", "-")
    if word in PRESETS:
        return word
    if word in LATER_PRESETS:
        raise later_release(f"{dotted}={shown(value)}", f"{dotted}: fp32   # or bf16-mixed where the GPU has bf16")
    near = nearest_names(str(value), [*PRESETS, *PRESET_ALIASES]) if not isinstance(value, bool) else []
    best = PRESET_ALIASES.get(near[0], near[0]) if near else "bf16-mixed"
    raise Rejected(
        f"{dotted}={shown(value)} is not a precision",
        fix=f"{dotted}: {best}",
        near=", ".join(near) or ", ".join(PRESETS),
    )


def _parse_dtype(dotted: str, value: Any, allowed: tuple[str, ...]) -> str:
    word = _word(value).removeprefix("torch.")
    word = DTYPE_ALIASES.get(word, word)
    if word in allowed:
        return word
    near = nearest_names(word, allowed)
    fix = near[0] if near else allowed[0]
    raise Rejected(
        f"{dotted}={shown(value)} is not one of {', '.join(allowed)}",
        fix=f"{dotted}: {fix}",
        near=", ".join(near) or None,
    )


def _parse_reduce_dtype(dotted: str, value: Any) -> str:
    return _parse_dtype(dotted, value, ("float32", "bfloat16"))


def _parse_save_dtype(dotted: str, value: Any) -> str:
    return _parse_dtype(dotted, value, ("auto", "float32", "bfloat16"))


def _parse_offload_part(dotted: str, value: Any) -> bool:
    if parse_bool(dotted, value):
        raise later_release(f"{dotted}=True", "offload: none")
    return False


def _parse_checkpointing_mode(dotted: str, value: Any) -> str:
    word = _word(value)
    if word in ("auto", "none", "full"):
        return word
    if word in TRUE_WORDS:
        return "full"
    if word in FALSE_WORDS:
        return "none"
    if word in LATER_CHECKPOINTING:
        raise later_release(f"activation_checkpointing={shown(value)}", "activation_checkpointing: full")
    if isinstance(value, int):
        raise Rejected(
            f"activation_checkpointing={value} is a number, not a mode",
            fix=f"activation_checkpointing: {{every: {max(value, 1)}}}",
        )
    near = nearest_names(str(value), ["auto", "none", "full"])
    raise Rejected(
        f"activation_checkpointing={shown(value)} is not a mode",
        fix=f"activation_checkpointing: {near[0] if near else 'full'}",
        near=", ".join(near) or "auto, none, full, {every: 2}",
    )


def _parse_every(dotted: str, value: Any) -> int:
    return parse_count(dotted, value, 1)


def _parse_reshard(dotted: str, value: Any) -> bool:
    word = _word(value)
    if word in ("full_shard", "shard_grad_op"):
        return word == "full_shard"
    return parse_bool(dotted, value)


def _parse_shard_size(dotted: str, value: Any) -> int | str:
    if isinstance(value, str) and _word(value) == "auto":
        return "auto"
    try:
        return parse_count(dotted, value, 1)
    except Rejected as rejected:
        raise Rejected(rejected.message, fix=f"{dotted}: auto") from None


def _parse_replicate_size(dotted: str, value: Any) -> int:
    return parse_count(dotted, value, 1)


def _parse_prefetch(dotted: str, value: Any) -> int:
    if isinstance(value, bool) or _word(value) in ("true", "false"):  # FSDP1's boolean: one unit ahead, or none
        return int(parse_bool(dotted, value))
    return parse_count(dotted, value, 0)


def _parse_format(dotted: str, value: Any) -> str:
    word = _word(value)
    named = {"full_state_dict": "full", "sharded_state_dict": "sharded", "full": "full", "sharded": "sharded"}
    if word in named:
        return named[word]
    if word == "local_state_dict":
        raise Rejected(f"{dotted}={shown(value)} does not exist under FSDP2", fix=f"{dotted}: sharded")
    near = nearest_names(str(value), ["full", "sharded"])
    raise Rejected(
        f"{dotted}={shown(value)} is not a checkpoint format",
        fix=f"{dotted}: {near[0] if near else 'full'}",
        near=", ".join(near) or "full, sharded",
    )


def _parse_async_save(dotted: str, value: Any) -> bool:
    if parse_bool(dotted, value):
        raise later_release(f"{dotted}=True", f"{dotted}: false")
    return False


FIELD_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "wrap.policy": _parse_policy,
    "wrap.layer_classes": _parse_layer_classes,
    "wrap.callable": _parse_callable,
    "precision.preset": _parse_preset,
    "precision.keep_norms_fp32": parse_bool,
    "precision.reduce_dtype": _parse_reduce_dtype,
    "precision.save_dtype": _parse_save_dtype,
    "offload.parameters": _parse_offload_part,
    "offload.optimizer": _parse_offload_part,
    "offload.activations": _parse_offload_part,
    "activation_checkpointing.mode": _parse_checkpointing_mode,
    "activation_checkpointing.every": _parse_every,
    "sharding.reshard_after_forward": _parse_reshard,
    "sharding.dp_shard_size": _parse_shard_size,
    "sharding.dp_replicate_size": _parse_replicate_size,
    "sharding.forward_prefetch": _parse_prefetch,
    "sharding.backward_prefetch": _parse_prefetch,
    "sharding.sync_each_batch": parse_bool,
    "sharding.require_sharding": parse_bool,
    "checkpoint.format": _parse_format,
    "checkpoint.async_save": _parse_async_save,
}


# ---- how values are shown -----------------------------------------------------------------------------


def _word(value: Any) -> str:
    return str(value).strip().lower()


def shown(value: Any) -> str:
    """Return `value` as a message shows it: one line, and never a screenful."""
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def yaml_value(value: Any) -> str:
    """Return `value` as a person would type it in YAML (flow style), for a fix that can be pasted."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {yaml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(yaml_value(item) for item in value) + "]"
    text = str(value)
    return text if re.fullmatch(r"[\w./+][\w./+ -]*", text) else json.dumps(text)
