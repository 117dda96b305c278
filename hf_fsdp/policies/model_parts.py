"""Which part of a model a parameter belongs to, and which parts are trained.

The parts are those that papers freeze and train: the vision (or audio) tower, the projector between it and the
language model, and the language model with its embeddings and head. They are found by the names that transformers and
its remote-code models use, so a new family needs no entry here; it is tested for every family that the recipes
name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_fsdp.errors import ConfigError, Problem, nearest_names
from hf_fsdp.policies.towers import OTHER, tower_of

LANGUAGE, VISION, AUDIO, PROJECTOR, ALL = "language", "vision", "audio", "projector", "all"
# Between the towers: also where it lies inside the vision tower (Qwen-VL's merger, Qwen3-VL's deepstack mergers).
_PROJECTOR = re.compile(
    r"projector|(language|text|vision|visual|image|modality)_projection|connector|(^|_)merger(_|$)|aligner|resampler"
    r"|perceiver|abstractor|q_?former|query_tokens|^mlp1$|^mm_|multi_?modal|image_newline|view_sep|embed_(vision|audio)"
)
# What other tools say -> the part that they freeze.
OTHER_NAMES: Mapping[str, str] = {
    "freeze_vision_tower": VISION,
    "freeze_vit": VISION,
    "freeze_vision_encoder": VISION,
    "freeze_mm_vision_tower": VISION,
    "freeze_multi_modal_projector": PROJECTOR,
    "freeze_aligner": PROJECTOR,
    "freeze_mm_mlp_adapter": PROJECTOR,
    "freeze_language_model": LANGUAGE,
    "freeze_llm": LANGUAGE,
    "freeze_backbone": LANGUAGE,
}


@dataclass(frozen=True)
class ModelParts:
    """The parameters of every part of a model, by name, in the model's order; a tied one under its first name."""

    names: Mapping[str, tuple[str, ...]]

    def part_of(self, name: str) -> str:
        """Return the part of a parameter.

        Raises:
            KeyError: the model has no such parameter.
        """
        for part, names in self.names.items():
            if name in names:
                return part
        raise KeyError(name)


def find_parts(model: nn.Module) -> ModelParts:
    """Return the parts of a model, adapters counted with the layer that they are on.

    Args:
        model: of transformers, maybe under PEFT; sharded or not.
    """
    names: dict[str, list[str]] = {}
    ends = _embeddings_and_head(model)
    for name, parameter in model.named_parameters():
        part = LANGUAGE if id(parameter) in ends else _part_by_name(name)
        names.setdefault(part, []).append(name)
    if set(names) <= {OTHER, LANGUAGE}:  # a model of text alone has no towers to name
        names = {LANGUAGE: [name for name, _ in model.named_parameters()]}
    order = [LANGUAGE, PROJECTOR, VISION, AUDIO, OTHER]
    return ModelParts({part: tuple(names[part]) for part in order if part in names})


def set_trainable(model: nn.Module, parts: Sequence[str]) -> ModelParts:
    """Train the named parts of a model and freeze the others.

    Call it before PEFT and before sharding: the optimizer, the precision of what is kept and the memory of a step
    follow `requires_grad`.

    Args:
        model: of transformers.
        parts: among ``language``, ``projector``, ``vision``, ``audio``, ``other``; or ``all`` alone.

    Returns:
        The parts, as `find_parts` does.

    Raises:
        ConfigError: the model has no such part, or nothing would be trained; every problem at once.
    """
    found = find_parts(model)
    wanted = set(found.names) if list(parts) == [ALL] else set(parts)
    problems = [_unknown_part(part, found, model) for part in parts if part not in found.names and [part] != [ALL]]
    if ALL in parts and len(parts) > 1:
        problems.append(Problem(message=f"trainable={list(parts)} names all and more", fix="trainable: all"))
    if not wanted and not problems:
        problems.append(Problem(message="trainable=[] trains nothing", fix=f"trainable: [{', '.join(found.names)}]"))
    if problems:
        raise ConfigError(problems)
    named = dict(model.named_parameters())
    for part, names in found.names.items():
        for name in names:
            if named[name].is_floating_point():
                named[name].requires_grad_(part in wanted)
    return found


def _part_by_name(name: str) -> str:
    """The outermost part of the path decides; inside a vision or audio tower a projector is one all the same."""
    tower = None
    for word in name.split("."):
        if _PROJECTOR.search(word.lower()):
            return PROJECTOR
        tower = tower or tower_of(word)
        if tower == LANGUAGE:
            return LANGUAGE
    return tower or OTHER


def _embeddings_and_head(model: Any) -> set[int]:
    """Return the parameters of the language model that lie beside it: token embeddings, head."""
    found: set[int] = set()
    for get in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, get)()
        except (AttributeError, NotImplementedError):  # a plain module, or a model without a vocabulary
            continue
        if isinstance(module, nn.Module):
            found.update(id(parameter) for parameter in module.parameters())
    return found


def _unknown_part(part: str, found: ModelParts, model: nn.Module) -> Problem:
    have: Iterable[str] = found.names
    if part in OTHER_NAMES:
        rest = [name for name in have if name != OTHER_NAMES[part]]
        return Problem(
            message=f"trainable={part} is another tool's name: it freezes the {OTHER_NAMES[part]}",
            fix=f"trainable: [{', '.join(rest)}]",
        )
    return Problem(
        message=f"trainable={part} is no part of {type(model).__name__}",
        near=", ".join(nearest_names(part, have)) or None,
        fix=f"trainable: [{', '.join(have)}], or some of them",
    )
