"""Where a person's own `LoraConfig` puts adapters, by PEFT's own rule, and whether that was meant."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_fsdp.errors import Problem
from hf_fsdp.policies.linear_layers import ALL_LINEAR, linears_by_part, part_of_modules
from hf_fsdp.policies.model_parts import LANGUAGE, as_part_names, find_parts, resolve_parts


def count_lora_targets(model: nn.Module, config: Any) -> dict[str, int]:
    """Return how many layers of each part a `peft.LoraConfig` would put adapters on, by PEFT's own rule.

    Args:
        model: before `get_peft_model`.
        config: its `target_modules` may be a list, a pattern, ``all-linear``, or None for PEFT's default of the family.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    parts = part_of_modules(model)
    settings = copy.copy(config)
    if config.target_modules is None:
        settings.target_modules = _default_targets(model)
    elif isinstance(config.target_modules, str) and config.target_modules.lower() == ALL_LINEAR:
        layers = linears_by_part(model, inside_attention=True).values()
        settings.target_modules = {path for paths in layers for path in paths}
    hits = (path for path in parts if check_target_module_exists(settings, path))
    counts: dict[str, int] = {}
    for path in hits:
        counts[parts[path]] = counts.get(parts[path], 0) + 1
    return {part: counts[part] for part in find_parts(model).names if part in counts}


def check_lora_targets(
    model: nn.Module, config: Any, parts: str | Sequence[str] = (LANGUAGE,), *, source: str | None = None
) -> list[Problem]:
    """Return what is wrong with a person's own `LoraConfig`: adapters in parts that nobody asked for.

    Args:
        model: before `get_peft_model`.
        config: the `LoraConfig`.
        parts: that may get adapters.
        source: where the config comes from, for the message.
    """
    found = find_parts(model)
    wanted = resolve_parts(model, found, as_part_names(parts), "lora_parts")
    counts = count_lora_targets(model, config)
    strays = {part: count for part, count in counts.items() if part not in wanted}
    if not strays:
        return []
    typed = config.target_modules
    shown = sorted(typed) if isinstance(typed, (list, set, tuple)) else typed
    hit = ", ".join(f"{count} in the {part}" for part, count in counts.items())
    both = [part for part in found.names if part in wanted or part in strays]
    return [
        Problem(
            message=f"lora_target_modules={shown} hits layers in parts that lora_parts={sorted(wanted)} leaves out: "
            f"{hit}",
            fix=f"lora_parts: [{', '.join(both)}]; or, to adapt the {', '.join(sorted(wanted))} only, "
            f"LoraConfig(target_modules=lora_targets(model, {sorted(wanted)}, {shown!r}))",
            source=source,
        )
    ]


def _default_targets(model: Any) -> set[str]:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    return set(DEFAULTS.get(getattr(model.config, "model_type", ""), ()))
