"""Values in a config.json that its class takes and no model can be built or run with; told before anything is built.

transformers looks at the types of values and at little else: what is zero, negative or of an unknown kind would be an
error of the model's code, minutes later and in other words, or a figure for a model that cannot be trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from hf_fsdp.errors import Problem, nearest_names

# Sizes -> the most that is believed; a slip of the keyboard above it would take hours, or overflow torch's count.
_SIZES: dict[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "depth"), 10_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads"), 10**6),
    **dict.fromkeys(("hidden_size", "intermediate_size", "head_dim", "embed_dim", "moe_intermediate_size"), 10**7),
    **dict.fromkeys(("image_size", "patch_size", "spatial_merge_size", "temporal_patch_size", "window_size"), 10**6),
    "vocab_size": 10**8,
    **dict.fromkeys(("max_position_embeddings", "attention_chunk_size"), 10**10),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
# Kinds of rotary tables that models compute themselves, beside those in transformers' own table.
_OWN_ROPES = ("default", "axial", "mrope")
_DTYPES = ("float32", "bfloat16", "float16", "auto")

_Wrong = tuple[str, str, str | None]  # message, fix, near


def check_values(name: str, data: Mapping[str, Any], config: Any, source: str) -> list[Problem]:
    """Return every value that cannot be.

    Args:
        name: of the model, as it was typed.
        data: its config.json.
        config: what transformers made of it.
        source: the file.
    """
    wrong = [*_check_dtype(data), *_check_pictures(config)]
    for path, part in _parts(config):
        wrong += [(f"{path}{message}", fix, near) for message, fix, near in _check_part(part)]
    return [
        Problem(message=f"MODEL {name!r}: {message}", fix=fix, near=near, source=source) for message, fix, near in wrong
    ]


def _parts(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """`config` and the configs in it (text_config, vision_config), each with its path."""
    yield path, config
    for key in getattr(config, "sub_configs", None) or {}:
        part = _value(config, key)
        if part is not None:
            yield from _parts(part, f"{path}{key}.")


def _value(part: Any, key: str) -> Any:
    """A value of a config; None where there is none, or one for each layer (Gemma 4 raises an error of its own)."""
    try:
        return getattr(part, key, None)
    except Exception:
        return None


def _check_part(part: Any) -> Iterator[_Wrong]:
    sizes = {key: _value(part, key) for key in (*_SIZES, *_EXPERTS, "num_experts_per_tok")}
    names = {real: name for name, real in (getattr(part, "attribute_map", None) or {}).items()}
    bad = [key for key, value in sizes.items() if key in _SIZES and _is_no_size(part, key, value)]
    for key in bad:
        written = next((name for name, real in names.items() if real == key), key)
        yield f"{written}={sizes[key]} is no size", f"{written} between 1 and {_SIZES[key]:,}", None
    if not bad:
        yield from _check_together({key: value for key, value in sizes.items() if isinstance(value, int)})
    yield from _check_rope(part)
    yield from _check_activation(part)


def _is_no_size(part: Any, key: str, value: Any) -> bool:
    default = vars(type(part)).get(key)
    if value == default or isinstance(default, property):  # has a meaning in its class, also where it is 0 or -1
        return False
    if value is None:
        return isinstance(default, int) and key in ("image_size", "patch_size")
    return isinstance(value, int) and not 0 < value <= _SIZES[key]


def _check_together(sizes: Mapping[str, int]) -> Iterator[_Wrong]:
    heads, groups = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    if heads and groups and heads % groups:
        yield (
            f"num_key_value_heads={groups}: {heads} attention heads cannot share so many",
            f"num_key_value_heads: a divisor of {heads}, such as {math.gcd(heads, groups)}",
            None,
        )
    experts = next((key for key in _EXPERTS if key in sizes), None)
    chosen = sizes.get("num_experts_per_tok")
    if experts and chosen is not None and sizes[experts] > 0 and not 0 < chosen <= sizes[experts]:
        yield (
            f"num_experts_per_tok={chosen}: there are {sizes[experts]} experts",
            f"num_experts_per_tok between 1 and {sizes[experts]}",
            None,
        )
    side, patch = sizes.get("image_size"), sizes.get("patch_size")
    if side and patch and patch > side:
        yield f"patch_size={patch} is larger than image_size={side}", f"patch_size: {side} or less", None


def _check_rope(part: Any) -> Iterator[_Wrong]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    table = _value(part, "rope_parameters")
    if not isinstance(table, Mapping):
        return
    known = (*ROPE_INIT_FUNCTIONS, *_OWN_ROPES)
    for settings in (table, *(value for value in table.values() if isinstance(value, Mapping))):
        kind = settings.get("rope_type", "default")
        if kind not in known:
            near = nearest_names(str(kind), known)
            yield (
                f"rope_type={kind!r} is no kind of rotary positions that transformers has",
                f"rope_type: {(near or ['default'])[0]}",
                ", ".join(near or known),
            )
        for key in ("rope_theta", "factor"):
            value = settings.get(key)
            if value is not None and (isinstance(value, str) or not 0 < value < math.inf):
                yield f"{key}={value!r} of its rotary positions is no positive number", f"{key}: a number above 0", None
        yield from _check_sections(part, settings)


def _check_sections(part: Any, settings: Mapping[str, Any]) -> Iterator[_Wrong]:
    """Positions in several directions share out the half of a head that is rotated."""
    sections, heads = settings.get("mrope_section"), _value(part, "num_attention_heads")
    size = _value(part, "head_dim") or (_value(part, "hidden_size") or 0) // (heads or 1)
    half = int(size * (settings.get("partial_rotary_factor") or 1)) // 2
    if isinstance(sections, list | tuple) and half and sum(sections) != half:
        yield f"mrope_section={list(sections)} adds up to {sum(sections)}", f"sections that add up to {half}", None


def _check_activation(part: Any) -> Iterator[_Wrong]:
    from transformers.activations import ACT2FN

    for key in _ACTIVATIONS:
        value = _value(part, key)
        if isinstance(value, str) and value not in ACT2FN:
            near = nearest_names(value, ACT2FN)
            yield (
                f"{key}={value!r} is no activation of transformers",
                f"{key}: {(near or ['silu'])[0]}",
                ", ".join(near or ACT2FN),
            )


def _check_dtype(data: Mapping[str, Any]) -> Iterator[_Wrong]:
    for key in ("dtype", "torch_dtype"):
        value = data.get(key)
        plain = str(value).removeprefix("torch.")
        if value is not None and not isinstance(value, Mapping) and plain not in _DTYPES:
            yield f"{key}={value!r} is no dtype that weights are trained in", f"{key}: bfloat16", ", ".join(_DTYPES)


def _check_pictures(config: Any) -> Iterator[_Wrong]:
    vision = _value(config, "vision_config")
    if vision is None:
        return
    given, wanted = _value(vision, "out_hidden_size"), _value(_value(config, "text_config"), "hidden_size")
    # Without values nobody counts whether features fill the places of pictures, as the model does in training.
    if str(config.model_type).startswith("qwen") and given and wanted and given != wanted:
        yield (
            f"vision_config.out_hidden_size={given}: the language model's hidden_size is {wanted}",
            f"vision_config.out_hidden_size: {wanted}",
            None,
        )
    layers, chosen = _value(vision, "num_hidden_layers"), _value(config, "vision_feature_layer")
    if not isinstance(layers, int):
        return
    for layer in chosen if isinstance(chosen, list | tuple) else [chosen]:
        if isinstance(layer, int) and layers > 0 and not -layers - 1 <= layer <= layers:
            yield (
                f"vision_feature_layer={layer}: the vision tower has {layers} layers",
                f"vision_feature_layer: between {-layers - 1} and {layers}",
                None,
            )
