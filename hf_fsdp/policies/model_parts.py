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
from hf_fsdp.policies.other_tools import OTHER_NAMES, answer_other_tools
from hf_fsdp.policies.towers import OTHER, tower_of

LANGUAGE, VISION, AUDIO, PROJECTOR, ALL = "language", "vision", "audio", "projector", "all"
# Between the towers: also where it lies inside the vision tower (Qwen-VL's merger, Qwen3-VL's deepstack mergers).
_PROJECTOR = re.compile(
    r"projector|(language|text|vision|visual|image|modality)_projection|connector|(^|_)merger(_|$)|aligner|resampler"
    r"|perceiver|abstractor|q_?former|query_tokens|^mlp1$|^mm_|multi_?modal|image_newline|view_sep|embed_(vision|audio)"
)


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

    def by_parameter(self) -> dict[str, str]:
        """Return the part of every parameter, by its name."""
        return {name: part for part, names in self.names.items() for name in names}


@dataclass(frozen=True)
class PartRow:
    """One part of a model: where it lies and how large it is.

    Args:
        part: ``language``, ``projector``, …
        paths: the outermost modules that hold nothing else, and parameters that lie outside of such modules.
        num_parameters: values, a tied tensor counted once.
    """

    part: str
    paths: tuple[str, ...]
    num_parameters: int


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


def describe_parts(model: nn.Module) -> list[PartRow]:
    """Return where each part of a model lies, read off the model itself.

    Args:
        model: as for `find_parts`; on the meta device is enough.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=16,
        ...                      num_attention_heads=1, num_key_value_heads=1)
        >>> [(row.part, row.paths) for row in describe_parts(LlamaForCausalLM(config))]
        [('language', ('model', 'lm_head'))]
    """
    named = dict(model.named_parameters())
    return [
        PartRow(part, part_paths(model, names), sum(named[name].numel() for name in names))
        for part, names in find_parts(model).names.items()
    ]


def part_paths(model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Return the outermost modules whose parameters are all among `names`, then parameters that no such module holds.

    Args:
        model: any module.
        names: parameters of one part or of several.
    """
    wanted = set(names)
    held = {id(parameter) for name, parameter in model.named_parameters() if name in wanted}
    paths: list[str] = []
    loose: list[str] = []

    def walk(module: nn.Module, path: str) -> None:
        parameters = [id(parameter) for parameter in module.parameters()]
        if path and parameters and all(parameter in held for parameter in parameters):
            paths.append(path)
            return
        prefix = f"{path}." if path else ""
        loose.extend(prefix + name for name, p in module.named_parameters(recurse=False) if id(p) in held)
        for name, child in module.named_children():
            walk(child, prefix + name)

    walk(model, "")
    return (*paths, *loose)


def set_trainable(model: nn.Module, parts: str | Sequence[str]) -> ModelParts:
    """Train the named parts of a model and freeze the others.

    Call it before PEFT and before sharding: the optimizer, the precision of what is kept and the memory of a step
    follow `requires_grad`.

    Args:
        model: of transformers.
        parts: among ``language``, ``projector``, ``vision``, ``audio``, ``other``; or ``all`` alone. One name or a
            list; names in one string may be separated by commas, as on a command line.

    Returns:
        The parts, as `find_parts` does.

    Raises:
        ConfigError: the model has no such part, or nothing would be trained; every problem at once.

    Example:
        >>> from torch import nn
        >>> from hf_fsdp import set_trainable
        >>> model = nn.ModuleDict({"vision_tower": nn.Linear(2, 2), "language_model": nn.Linear(2, 2)})
        >>> parts = set_trainable(model, "language")
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['language_model.weight', 'language_model.bias']
    """
    found = find_parts(model)
    asked = as_part_names(parts)
    wanted = resolve_parts(model, found, asked, "trainable")
    named = dict(model.named_parameters())
    for part, names in found.names.items():
        for name in names:
            if named[name].is_floating_point():
                named[name].requires_grad_(part in wanted)
    return found


def as_part_names(parts: str | Sequence[str]) -> list[str]:
    """Return the names that a person typed: a list, one name, or several in one string, as command lines give them."""
    texts = [parts] if isinstance(parts, str) else parts
    return [word for text in texts for word in re.split(r"[,\s\[\]]+", text) if word]


def resolve_parts(model: nn.Module, found: ModelParts, asked: Sequence[str], key: str) -> set[str]:
    """Return the parts that are meant by `asked`, ``all`` replaced by those of the model.

    Args:
        model: for messages.
        found: its parts.
        asked: what was typed.
        key: the config key that it was typed for, e.g. ``trainable``.

    Raises:
        ConfigError: with every problem.
    """
    if list(asked) == [ALL]:
        return set(found.names)
    problems = [_unknown_part(part, found, model, key) for part in asked if part not in {*found.names, ALL}]
    if ALL in asked:
        problems.append(Problem(message=f"{key}={list(asked)} names all and more", fix=f"{key}: all"))
    if not asked:
        problems.append(Problem(message=f"{key}=[] trains nothing", fix=f"{key}: [{', '.join(found.names)}]"))
    if problems:
        raise ConfigError(problems)
    return set(asked)


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


_PLACES = {VISION: "vision tower", AUDIO: "audio tower", PROJECTOR: "projector", LANGUAGE: "language model"}


def _unknown_part(part: str, found: ModelParts, model: nn.Module, key: str) -> Problem:
    have: Iterable[str] = found.names
    name = type(model).__name__
    if part in OTHER_NAMES:
        answer = answer_other_tools({part: True}, part_names=found.names)
        return Problem(
            message=f"{key}={part} is another tool's name: it freezes the {OTHER_NAMES[part]}",
            fix=answer[0].fix if key == "trainable" else f"{key}: [{', '.join(have)}], or some of them",
        )
    if part in _PLACES:
        is_text = set(have) == {LANGUAGE}
        return Problem(
            message=f"{key}={part}: {name} has no {_PLACES[part]}" + (": it is a model of text alone" * is_text),
            fix=f"{key}: all, or a vision-language model" if is_text else f"{key}: [{', '.join(have)}], or some",
        )
    return Problem(
        message=f"{key}={part} is no part of {name}",
        near=", ".join(nearest_names(part, have)) or None,
        fix=f"{key}: [{', '.join(have)}], or some of them",
    )
