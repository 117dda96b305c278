"""One value at a time: what a person types becomes a checked value, or is `Rejected` with its repair.

`parse.py` finds the key that a value belongs to; here each key says what it takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_fsdp.errors import nearest_names

TRUE_WORDS = frozenset({"true", "yes", "on", "1", "y", "t"})
FALSE_WORDS = frozenset({"false", "no", "off", "0", "n", "f"})
PRESETS = ("auto", "fp32", "bf16-mixed", "bf16-true", "fp16-mixed")
PRESET_ALIASES = {
    "bf16": "bf16-mixed",
    "bfloat16": "bf16-mixed",
    "mixed_bf16": "bf16-mixed",
    "no": "fp32",
    "float32": "fp32",
    "32": "fp32",
    "pure_bf16": "bf16-true",
    "fp16": "fp16-mixed",
    "float16": "fp16-mixed",
    "mixed_fp16": "fp16-mixed",
}
LATER_PRESETS = frozenset({"fp8", "fp8-mixed"})
DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16"}
TRANSFORMER_POLICY_WORDS = frozenset({"transformer_layers", "transformer_based_wrap", "transformer_auto_wrap", "auto"})
SIZE_POLICY_WORDS = frozenset({"size", "size_based_wrap"})
GRANULARITIES = ("layer", "attention_and_mlp")
ACTIVATION_PLACES = ("none", "auto", "block_inputs", "saved_tensors")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
TOWERS = ("language", "vision", "audio")


class Rejected(Exception):
    """A value that cannot be used; `Reading` adds the key and where it came from."""

    def __init__(self, message: str, *, fix: str, near: str | None = None):
        super().__init__(message)
        self.message, self.fix, self.near = message, fix, near


def later_release(what: str, fix: str) -> Rejected:
    """Return the refusal of something that is understood but not built yet."""
    return Rejected(f"{what} arrives in a later release and is refused rather than ignored", fix=fix)


# ---- one value at a time ------------------------------------------------------------------------------


def parse_bool(dotted: str, value: Any) -> bool:
    """Return what a boolean or a word for one says; ``"false"`` is False."""
    if isinstance(value, bool):
        return value
    word = word_of(value)
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
    word = word_of(value)
    if word in TRANSFORMER_POLICY_WORDS:
        return "transformer_layers"
    if word in SIZE_POLICY_WORDS:
        return "size"
    if word in ("no_wrap", "none"):
        raise Rejected(
            f"{dotted}={shown(value)} would make the whole model one unit, gathered at once on every GPU",
            fix="wrap: transformer_layers",
        )
    near = nearest_names(str(value), ["transformer_layers", "size"])
    raise Rejected(
        f"{dotted}={shown(value)} is not a wrap policy",
        fix="wrap: transformer_layers",
        near=", ".join(near) or "transformer_layers, size, or class names such as [LlamaDecoderLayer]",
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
    word = word_of(value).removeprefix("torch.")
    word = PRESET_ALIASES.get(word, word).replace("_", "-")
    if word in PRESETS:
        return word
    if word in ("fp16-true", "pure-fp16"):
        raise Rejected(
            f"{dotted}={shown(value)}: weights stored in fp16 lose small updates and no scaler can help",
            fix=f"{dotted}: fp16-mixed   # fp32 stored, fp16 compute, loss scaling",
        )
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
    word = word_of(value).removeprefix("torch.")
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


def _parse_activation_place(dotted: str, value: Any) -> str:
    word = word_of(value).replace("-", "_")
    if value is True or word in TRUE_WORDS:
        return "auto"
    if value is False or word in FALSE_WORDS:
        return "none"
    return _one_of(dotted, word, ACTIVATION_PLACES, shown(value))


def _parse_pin_memory(dotted: str, value: Any) -> bool | str:
    return "auto" if word_of(value) == "auto" else parse_bool(dotted, value)


def _parse_granularity(dotted: str, value: Any) -> str:
    return _one_of(dotted, word_of(value).replace("-", "_"), GRANULARITIES, shown(value))


def _parse_min_num_params(dotted: str, value: Any) -> int:
    if isinstance(value, str) and (match := re.fullmatch(r"([\d._]+(?:[eE]\+?\d+)?)\s*([kKmMbB]?)", value.strip())):
        value = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[match[2].lower()]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return parse_count(dotted, value, 1)


def _parse_checkpointing_mode(dotted: str, value: Any) -> str:
    word = word_of(value)
    if word in ("auto", "none", "full"):
        return word
    if word in TRUE_WORDS:
        return "full"
    if word == "selective":
        raise Rejected(
            f"{dotted}={shown(value)}: which operators are kept is a key of its own",
            fix="activation_checkpointing: {selective: [attention]}",
        )
    if word in FALSE_WORDS:
        return "none"
    if isinstance(value, int):
        raise Rejected(
            f"activation_checkpointing={value} is a number, not a mode",
            fix=f"activation_checkpointing: {{every: {max(value, 1)}}}",
        )
    near = nearest_names(str(value), ["auto", "none", "full", "selective"])
    raise Rejected(
        f"activation_checkpointing={shown(value)} is not a mode",
        fix=f"activation_checkpointing: {near[0] if near else 'full'}",
        near=", ".join(near) or "auto, none, full, selective, {every: 2}, {fraction: 0.5}, {towers: [language]}",
    )


def _parse_fraction(dotted: str, value: Any) -> float:
    try:
        text = str(value).strip()
        number = float(text.rstrip("%")) / (100 if text.endswith("%") else 1) if not isinstance(value, bool) else None
    except (TypeError, ValueError):
        number = None
    if number is None or not 0 < number <= 1:
        raise Rejected(
            f"{dotted}={shown(value)} is not a share of the blocks, above 0 and at most 1", fix=f"{dotted}: 0.5"
        )
    return number


def _parse_operators(dotted: str, value: Any) -> tuple[str, ...]:
    names = _words(dotted, value, "[attention, matmul]")
    broken = [name for name in names if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name)]
    if broken:
        raise Rejected(
            f"{dotted}={shown(value)} holds {broken[0]!r}, which is not an operator", fix=f"{dotted}: [attention]"
        )
    return names


def _parse_towers(dotted: str, value: Any) -> tuple[str, ...]:
    names = tuple(name.lower() for name in _words(dotted, value, "[language]"))
    if unknown := [name for name in names if name not in TOWERS]:
        near = nearest_names(unknown[0], TOWERS)
        raise Rejected(
            f"{dotted}={shown(value)} holds {unknown[0]!r}, which is not one of {', '.join(TOWERS)}",
            fix=f"{dotted}: [{near[0] if near else 'language'}]",
            near=", ".join(near) or None,
        )
    return names


def _words(dotted: str, value: Any, example: str) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple, set, frozenset)) or not all(isinstance(item, str) for item in items):
        raise Rejected(f"{dotted}={shown(value)} is not a list of names", fix=f"{dotted}: {example}")
    return tuple(dict.fromkeys(item.strip() for item in items if item.strip()))


def _parse_backend(dotted: str, value: Any) -> str:
    word = word_of(value).replace("-", "_")
    if isinstance(value, str) and re.fullmatch(r"[\w.]+", word):
        return word
    raise Rejected(f"{dotted}={shown(value)} is not the name of a compiler backend", fix=f"{dotted}: inductor")


def _parse_compile_mode(dotted: str, value: Any) -> str:
    return _one_of(dotted, word_of(value).replace("_", "-"), COMPILE_MODES, shown(value))


def _one_of(dotted: str, word: str, allowed: tuple[str, ...], typed: str) -> str:
    if word in allowed:
        return word
    near = nearest_names(word, allowed)
    raise Rejected(
        f"{dotted}={typed} is not one of {', '.join(allowed)}",
        fix=f"{dotted}: {near[0] if near else allowed[-1]}",
        near=", ".join(near) or None,
    )


def _parse_keep_norms(dotted: str, value: Any) -> bool | str:
    return "auto" if word_of(value) == "auto" else parse_bool(dotted, value)


def _parse_every(dotted: str, value: Any) -> int:
    return parse_count(dotted, value, 1)


def _parse_reshard(dotted: str, value: Any) -> bool:
    word = word_of(value)
    if word in ("full_shard", "shard_grad_op"):
        return word == "full_shard"
    return parse_bool(dotted, value)


def _parse_shard_size(dotted: str, value: Any) -> int | str:
    if isinstance(value, str) and word_of(value) == "auto":
        return "auto"
    try:
        return parse_count(dotted, value, 1)
    except Rejected as rejected:
        raise Rejected(rejected.message, fix=f"{dotted}: auto") from None


def _parse_replicate_size(dotted: str, value: Any) -> int:
    return parse_count(dotted, value, 1)


def _parse_prefetch(dotted: str, value: Any) -> int:
    if isinstance(value, bool) or word_of(value) in ("true", "false"):  # FSDP1's boolean: one unit ahead, or none
        return int(parse_bool(dotted, value))
    return parse_count(dotted, value, 0)


def _parse_format(dotted: str, value: Any) -> str:
    word = word_of(value)
    named = {"full_state_dict": "full", "sharded_state_dict": "sharded", "full": "full", "sharded": "sharded"}
    if word in named:
        return named[word]
    if word == "local_state_dict":
        raise Rejected(f"{dotted}={shown(value)} does not exist under FSDP2", fix=f"{dotted}: sharded")
    near = nearest_names(str(value), ["full", "sharded"])
    raise Rejected(
        f"{dotted}={shown(value)} is not a checkpoint format",
        fix=f"{dotted}: {near[0] if near else 'sharded'}",
        near=", ".join(near) or "full, sharded",
    )


def _parse_resumed_optimizer(dotted: str, value: Any) -> str:
    word = word_of(value)
    if word in ("saved", "fresh"):
        return word
    raise Rejected(f"{dotted}={shown(value)} is neither saved nor fresh", fix=f"{dotted}: saved", near="saved, fresh")


def _parse_grace(dotted: str, value: Any) -> float | str:
    if word_of(value) == "auto":
        return "auto"
    try:
        seconds = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = float("nan")
    if not 0 < seconds < float("inf"):
        raise Rejected(f"{dotted}={shown(value)} is not a number of seconds above 0", fix=f"{dotted}: auto")
    return seconds


FIELD_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "wrap.policy": _parse_policy,
    "wrap.layer_classes": _parse_layer_classes,
    "wrap.callable": _parse_callable,
    "wrap.granularity": _parse_granularity,
    "wrap.min_num_params": _parse_min_num_params,
    "precision.preset": _parse_preset,
    "precision.keep_norms_fp32": _parse_keep_norms,
    "precision.reduce_dtype": _parse_reduce_dtype,
    "precision.save_dtype": _parse_save_dtype,
    "offload.parameters": parse_bool,
    "offload.optimizer": parse_bool,
    "offload.activations": _parse_activation_place,
    "offload.pin_memory": _parse_pin_memory,
    "activation_checkpointing.mode": _parse_checkpointing_mode,
    "activation_checkpointing.every": _parse_every,
    "activation_checkpointing.fraction": _parse_fraction,
    "activation_checkpointing.selective": _parse_operators,
    "activation_checkpointing.towers": _parse_towers,
    "compile.blocks": parse_bool,
    "compile.backend": _parse_backend,
    "compile.mode": _parse_compile_mode,
    "sharding.reshard_after_forward": _parse_reshard,
    "sharding.dp_shard_size": _parse_shard_size,
    "sharding.dp_replicate_size": _parse_replicate_size,
    "sharding.forward_prefetch": _parse_prefetch,
    "sharding.backward_prefetch": _parse_prefetch,
    "sharding.sync_each_batch": parse_bool,
    "sharding.require_sharding": parse_bool,
    "checkpoint.format": _parse_format,
    "checkpoint.async_save": parse_bool,
    "checkpoint.optimizer": _parse_resumed_optimizer,
    "checkpoint.grace_seconds": _parse_grace,
    "checkpoint.self_test": parse_bool,
}


def parse_field(dotted: str, value: Any) -> Any:
    """Return the checked value of one field given by its dotted key.

    Raises:
        Rejected: the value cannot be used.
        KeyError: no such field (a mistake in this package, not of a person).
    """
    return FIELD_PARSERS[dotted](dotted, value)


# ---- how values are shown -----------------------------------------------------------------------------


def word_of(value: Any) -> str:
    return str(value).strip().lower()


def shown(value: Any) -> str:
    """Return `value` as a message shows it: one line, and never a screenful."""
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def yaml_value(value: Any, depth: int = 0) -> str:
    """Return `value` as a person would type it in YAML (flow style), for a fix that can be pasted.

    An alias to its own parent goes on for ever; past `depth` 20 it is cut.
    """
    if depth > 20:
        return "..."
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {yaml_value(item, depth + 1)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(yaml_value(item, depth + 1) for item in value) + "]"
    text = str(value)
    return text if re.fullmatch(r"[\w./+][\w./+ -]*", text) else json.dumps(text)
