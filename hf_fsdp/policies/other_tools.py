"""What other fine-tuning programs call freezing and training the parts of a model, answered with our keys.

Their switches only mean something beside what each program does when nothing is said (LLaMA-Factory freezes the
tower, InternVL's script does not), so the program is recognised by its names first, and the answer is the whole line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_fsdp.errors import Problem

_LANGUAGE, _VISION, _AUDIO, _PROJECTOR = "language", "vision", "audio", "projector"
_ORDER = (_LANGUAGE, _PROJECTOR, _VISION, _AUDIO, "other")


@dataclass(frozen=True)
class _Tool:
    """One program: what it trains when nothing is said, and what its names change.

    Args:
        freezes: names that freeze a part when true and train it when false.
        trains: the opposite.
        trains_only: names that, when true, freeze everything but a part.
        rates: learning rates by part.
        uses_lora: its names choose where adapters go.
    """

    name: str
    default: tuple[str, ...]
    freezes: Mapping[str, str] = field(default_factory=dict)
    trains: Mapping[str, str] = field(default_factory=dict)
    trains_only: Mapping[str, str] = field(default_factory=dict)
    rates: Mapping[str, str] = field(default_factory=dict)
    uses_lora: bool = False

    def knows(self, keys: Iterable[str]) -> int:
        """Return how many of `keys` are this program's."""
        return sum(key in names for key in keys for names in (self.freezes, self.trains, self.trains_only, self.rates))


# In the order of preference where names fit several.
_TOOLS = (
    _Tool(
        "LLaMA-Factory",
        (_LANGUAGE,),
        freezes={
            "freeze_vision_tower": _VISION,
            "freeze_multi_modal_projector": _PROJECTOR,
            "freeze_language_model": _LANGUAGE,
        },
        trains_only={"train_mm_proj_only": _PROJECTOR},
    ),
    _Tool(
        "ms-swift",
        (_LANGUAGE,),
        freezes={"freeze_vit": _VISION, "freeze_aligner": _PROJECTOR, "freeze_llm": _LANGUAGE},
        rates={"vit_lr": _VISION, "aligner_lr": _PROJECTOR},
    ),
    _Tool(
        "LLaVA",
        (_LANGUAGE, _PROJECTOR),
        freezes={
            "freeze_mm_mlp_adapter": _PROJECTOR,
            "freeze_backbone": _LANGUAGE,
            "freeze_mm_vision_tower": _VISION,
            "freeze_mm_vision_resampler": _PROJECTOR,
        },
        trains={"unfreeze_mm_vision_tower": _VISION},
        trains_only={"tune_mm_mlp_adapter": _PROJECTOR, "tune_mm_vision_resampler": _PROJECTOR},
        rates={"mm_projector_lr": _PROJECTOR, "mm_vision_tower_lr": _VISION},
    ),
    _Tool(
        "Qwen-VL's own script",
        (),
        trains={"tune_mm_llm": _LANGUAGE, "tune_mm_mlp": _PROJECTOR, "tune_mm_vision": _VISION},
        rates={"mm_projector_lr": _PROJECTOR, "vision_tower_lr": _VISION},
    ),
    _Tool(
        "Qwen-VL-Series-Finetune",
        (_LANGUAGE, _PROJECTOR, _VISION),
        freezes={"freeze_merger": _PROJECTOR, "freeze_vision_tower": _VISION, "freeze_llm": _LANGUAGE},
        rates={"merger_lr": _PROJECTOR, "projector_lr": _PROJECTOR, "vision_lr": _VISION},
    ),
    _Tool(
        "InternVL's script",
        (_LANGUAGE, _PROJECTOR, _VISION),
        freezes={"freeze_mlp": _PROJECTOR, "freeze_backbone": _VISION, "freeze_llm": _LANGUAGE},
    ),
    _Tool(
        "Unsloth",
        (_LANGUAGE, _VISION),
        trains={"finetune_vision_layers": _VISION, "finetune_language_layers": _LANGUAGE},
        uses_lora=True,
    ),
    _Tool(
        "another program",
        (_LANGUAGE, _PROJECTOR),
        freezes={"freeze_vision_encoder": _VISION, "freeze_vision_model": _VISION, "freeze_projector": _PROJECTOR},
    ),
)
# Not switches: lists of parts (LLaVA-NeXT) and patterns of parameter names (Axolotl, ms-swift).
_PART_LIST = "mm_tunable_parts"
_TUNABLE = {
    "mm_vision_tower": _VISION,
    "mm_mlp_adapter": _PROJECTOR,
    "mm_vision_resampler": _PROJECTOR,
    "mm_language_model": _LANGUAGE,
}
_PATTERNS = ("unfrozen_parameters", "trainable_parameters", "trainable_parameters_regex")

# What other programs say -> the part that they freeze, for a switch in the place of a part.
OTHER_NAMES: Mapping[str, str] = {
    name: part for tool in reversed(_TOOLS) for name, part in tool.freezes.items() if part in _ORDER
}
KNOWN_KEYS = frozenset(
    [
        _PART_LIST,
        *_PATTERNS,
        *(
            key
            for tool in _TOOLS
            for names in (tool.freezes, tool.trains, tool.trains_only, tool.rates)
            for key in names
        ),
    ]
)


def answer_other_tools(
    values: Mapping[str, Any],
    *,
    part_names: Mapping[str, Iterable[str]] | None = None,
    lora: bool = False,
    source: str | None = None,
) -> list[Problem]:
    """Say in our keys what the keys of other programs mean; the keys themselves are not taken.

    Args:
        values: unknown keys of a config with their values; those that no program is known for are passed over.
        part_names: the parameters of the model by part (`ModelParts.names`), where it is known: parts that it lacks
            are left out of the answer, and patterns of parameter names are held against it.
        lora: the run trains adapters, so the switches say where those go: ``lora_parts`` is answered.
        source: where the values stand, for the message.

    Returns:
        A problem for each known key. The fixes of all switches are one line, which means what all of them mean
        together in their own program.

    Example:
        >>> [problem] = answer_other_tools({"freeze_vision_tower": False})
        >>> problem.fix
        'trainable: [language, vision]'
    """
    keys = [key for key in values if key in KNOWN_KEYS]
    problems = []
    tool = max(_TOOLS, key=lambda candidate: candidate.knows(keys))  # the first of the best
    switches = [key for key in keys if key in {**tool.freezes, **tool.trains, **tool.trains_only}]
    if switches:
        parts = _available(_trained_parts(tool, values), part_names)
        line = _line("lora_parts" if lora or tool.uses_lora else "trainable", parts)
        kept = ", ".join(sorted(_available(tool.default, part_names), key=_ORDER.index)) or "nothing"
        problems += [
            Problem(
                message=f"{key}={values[key]} is {tool.name}'s name (which trains {kept} unless told otherwise)"
                + _other_meaning(key, tool),
                fix=line,
                source=source,
            )
            for key in switches
        ]
    for key in keys:
        if key == _PART_LIST:
            problems.append(_answer_list(values[key], part_names, lora, source))
        elif key in _PATTERNS:
            problems.append(_answer_patterns(key, values[key], part_names, source))
        elif key not in switches:
            problems.append(_answer_rate_or_stray(key, values[key], tool, source))
    return problems


def as_switch(value: Any) -> bool:
    """Return what a switch says, typed (`true`) or as text from a command line (`"False"`)."""
    return str(value).strip().lower() in ("true", "1", "yes", "on")


def _trained_parts(tool: _Tool, values: Mapping[str, Any]) -> set[str]:
    trained = set(tool.default)
    for key, part in tool.trains_only.items():
        if key in values and as_switch(values[key]):
            trained = {part}
    for names, trains in ((tool.freezes, False), (tool.trains, True)):
        for key, part in names.items():
            if key in values:
                (trained.add if as_switch(values[key]) is trains else trained.discard)(part)
    for key, part in tool.trains_only.items():  # LLaVA trains it behind `freeze_backbone`
        if key in values and as_switch(values[key]):
            trained = trained & {part} | {part}
    return trained


def _available(parts: Iterable[str], part_names: Mapping[str, Iterable[str]] | None) -> set[str]:
    return {part for part in parts if part_names is None or part in part_names}


def _line(key: str, parts: Iterable[str]) -> str:
    ordered = sorted(parts, key=_ORDER.index)
    if not ordered:
        return f"{key}: [language], or another part: together these freeze everything"
    return f"{key}: [{', '.join(ordered)}]"


def _other_meaning(key: str, tool: _Tool) -> str:
    """`freeze_backbone` freezes the language model in LLaVA and the tower in InternVL."""
    meant = {**tool.freezes, **tool.trains}.get(key)
    others = [(other.name, part) for other in _TOOLS if (part := other.freezes.get(key)) not in (None, meant)]
    return "".join(f"; in {name} it means the {part}" for name, part in others)


def _answer_rate_or_stray(key: str, value: Any, tool: _Tool, source: str | None) -> Problem:
    for other in (tool, *_TOOLS):
        if key in other.rates:
            return Problem(
                message=f"{key}={value} is {other.name}'s name for the learning rate of the {other.rates[key]}",
                fix=f"part_learning_rate: {{{other.rates[key]}: {_rate(value)}}}",
                source=source,
            )
    owner = next(other for other in _TOOLS if other.knows([key]))
    return Problem(
        message=f"{key}={value} is {owner.name}'s name, beside names of {tool.name}: the two have different defaults",
        fix=_line("trainable", _trained_parts(owner, {key: value})) + f" is what it means in {owner.name} alone",
        source=source,
    )


def _answer_list(value: Any, part_names: Mapping[str, Iterable[str]] | None, lora: bool, source: str | None) -> Problem:
    asked = [word.strip() for word in str(value).split(",")] if isinstance(value, str) else list(value or ())
    known = {_TUNABLE[word] for word in asked if word in _TUNABLE}
    return Problem(
        message=f"{_PART_LIST}={value} is LLaVA-NeXT's name",
        fix=_line("lora_parts" if lora else "trainable", _available(known, part_names)),
        source=source,
    )


def _answer_patterns(
    key: str, value: Any, part_names: Mapping[str, Iterable[str]] | None, source: str | None
) -> Problem:
    patterns = [value] if isinstance(value, str) else list(value or ())
    message = f"{key}={patterns} names parameters by pattern"
    if part_names is None:
        return Problem(message=message, fix="trainable: [language], with the parts that these lie in", source=source)
    whole, touched = [], []
    for part, names in part_names.items():
        hits = [any(_matches(pattern, name) for pattern in patterns) for name in names]
        if all(hits):
            whole.append(part)
        elif any(hits):
            touched.append(f"{sum(hits)} of {len(hits)} parameters of the {part}")
    if touched:
        message += f", which takes {', '.join(touched)}; trainable names whole parts"
        return Problem(
            message=message,
            fix="trainable with whole parts; or in Python, after set_trainable, requires_grad_(False) on the others: "
            "the audit shows what is trained",
            source=source,
        )
    return Problem(message=message, fix=_line("trainable", whole), source=source)


def _matches(pattern: str, name: str) -> bool:
    """As Axolotl does, from the start of the name; also without the `model.` that newer names begin with."""
    try:
        compiled = re.compile(pattern)
    except re.error:
        return False
    return any(compiled.match(known) for known in (name, name.removeprefix("model.")))


def _rate(value: Any) -> str:
    """Return a rate as YAML reads it: 2e-5 without a point is text there."""
    try:
        return f"{float(value):.1e}"
    except (TypeError, ValueError):
        return str(value)
