"""Which modules of a model are its layers: repeated blocks found from the structure, by class name or by a callable.

Every transformer has its layers as a list of modules, so they are found there and not by a class name that may be
absent, renamed or too small (`_no_split_modules` of LLaVA names a class it does not contain; Idefics' names the
attention and not the layer).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hf_fsdp.errors import WrapPolicyError, nearest_names
from hf_fsdp.units import format_bytes

# A list of blocks or an embedding with less than this share of the parameters is not worth a gather of its own,
# unless it has this many parameters: a vision tower is small beside a language model of 100B and still to be sharded.
MIN_SHARE = 0.01
MIN_PARAMETERS = 10_000_000
# A unit above this share of the parameters (or above the largest tensor, which cannot be split) is reported.
MAX_UNIT_SHARE = 0.25


@dataclass
class Draft:
    """The blocks by name, in the order of the model, and what to tell about the choice."""

    blocks: dict[str, nn.Module]
    notes: list[str] = field(default_factory=list)


def find_blocks(model: nn.Module) -> Draft:
    """Find the layers of every tower of `model` from its structure; what `_no_split_modules` says only helps.

    Raises:
        WrapPolicyError: nothing in the model repeats.
    """
    declared = _declared_classes(model)
    present = {type(module).__name__ for module in model.modules()}
    body = num_parameters(model.parameters()) - num_parameters(_vocabulary_parameters(model))
    start = _blocks_of_list if is_block_list(model, "", declared) else _walk
    draft = Draft(dict(start(model, declared & present, body, "")))
    if absent := declared - present:
        draft.notes.append(f"the model names {', '.join(sorted(absent))} as layers but holds none; left out")
    # A list of one layer does not repeat, so there the declared name decides. Declared single modules (the embeddings
    # of BERT, a pooling head) are no blocks, unless the model has nothing else to offer.
    for name, module in _declared_modules(model, declared & present):
        in_list = name.rpartition(".")[2].isdigit() or not draft.blocks
        if (
            in_list
            and not is_related(name, draft.blocks)
            and is_worth_a_unit(num_parameters(module.parameters()), body)
        ):
            draft.blocks[name] = module
    if not draft.blocks:
        raise WrapPolicyError(
            f"wrap.policy='transformer_layers' finds no repeated blocks in {class_name(model)}, "
            f"so the whole model would be one group: a {model_size(model)} all-gather",
            near=_candidates(model),
            fix=f"wrap: {{layer_classes: [{_first_candidate(model) or 'NameOfYourLayer'}]}} or, in Python, "
            "FSDPConfig(wrap=lambda model: [list of modules])",
        )
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    draft.blocks = dict(sorted(draft.blocks.items(), key=lambda item: order[item[0]]))
    return draft


def _walk(root: nn.Module, declared: set[str], body: int, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost repeated blocks: children of a list of layers, or what a too large layer repeats inside.

    `body` is the number of parameters without vocabulary-sized ones: beside a large vocabulary every layer of a small
    model would look negligible.
    """
    for name, child in root.named_children():
        path = f"{prefix}{name}"
        if is_block_list(child, name, declared) and is_worth_a_unit(num_parameters(child.parameters()), body):
            yield from _blocks_of_list(child, declared, body, f"{path}.")
        else:
            yield from _walk(child, declared, body, f"{path}.")


def _blocks_of_list(layers: nn.Module, declared: set[str], body: int, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for index, block in layers.named_children():
        path = f"{prefix}{index}"
        if isinstance(block, nn.ModuleList) and all(_has_children(layer) for layer in block):
            # A stage as a bare list, even of one layer: it is one of several.
            yield from _blocks_of_list(block, declared, body, f"{path}.")
            continue
        inner = list(_walk(block, declared, body, f"{path}."))
        is_stage = num_parameters(block.parameters()) > MAX_UNIT_SHARE * body and type(block).__name__ not in declared
        if inner and (is_stage or not has_forward(block)):
            yield from inner
        elif has_forward(block) and _has_parameters(block):
            yield path, block


def is_block_list(module: nn.Module, name: str, declared: set[str]) -> bool:
    """A list of layers: modules with children, of one class or of classes that recur (attention and state space)."""
    # Experts are lists of modules too, but which of them run is decided by the data: their gathers would not pair up.
    if not isinstance(module, nn.ModuleList | nn.Sequential) or "expert" in name.lower():
        return False
    children = [child for child in module.children() if _has_parameters(child)]
    if len(children) < 2 or not all(_has_children(child) for child in children):
        return False
    counts = Counter(type(child).__name__ for child in children)
    # A Sequential may hold a stem, stages and a head, which are no layers of one kind.
    return isinstance(module, nn.ModuleList) or set(counts) <= declared or len(children) >= 2 * len(counts)


def is_worth_a_unit(held: int, total: int) -> bool:
    """Whether `held` of `total` parameters are enough for a gather of their own."""
    return held >= min(MIN_SHARE * total, MIN_PARAMETERS)


def has_forward(module: nn.Module) -> bool:
    """Whether a unit of `module` is ever entered: ModuleList and bare containers are not called."""
    return getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _declared_modules(model: nn.Module, declared: set[str]) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if name and type(module).__name__ in declared]


def _vocabulary_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Embedding tables, and heads of the same shape that are not tied to them."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    shapes = {parameter.shape for parameter in tables}
    return [parameter for parameter in model.parameters() if parameter.dim() == 2 and parameter.shape in shapes]


def _declared_classes(model: nn.Module) -> set[str]:
    declared: set[str] = set()
    for module in model.modules():
        declared.update(getattr(module, "_no_split_modules", None) or ())
    return declared


def blocks_by_class(model: nn.Module, layer_classes: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules of the named classes.

    Raises:
        WrapPolicyError: a name matches nothing, or names a container that is never called.
    """
    wanted = tuple(dict.fromkeys(layer_classes))
    counts = Counter(type(module).__name__ for name, module in model.named_modules() if name)
    missing = [name for name in wanted if name not in counts]
    if missing:
        consequence = (
            f", so the whole model would be one group: a {model_size(model)} all-gather"
            if len(missing) == len(wanted)
            else ""
        )
        near = [near for name in missing for near in nearest_names(name, counts)]
        raise WrapPolicyError(
            f"wrap.layer_classes={missing} matches no module of {class_name(model)}{consequence}",
            near=", ".join(f"{name} ({counts[name]})" for name in dict.fromkeys(near)) or _candidates(model),
            fix=_fixed_classes(wanted, counts),
        )
    chosen = {name: module for name, module in model.named_modules() if name and type(module).__name__ in wanted}
    if containers := list(dict.fromkeys(type(m).__name__ for m in chosen.values() if not has_forward(m))):
        raise WrapPolicyError(
            f"wrap.layer_classes={containers} names a container, which is never called and so never gathered",
            near=_candidates(model),
            fix="wrap: transformer_layers, or name the class of the layers inside it",
        )
    return {name: module for name, module in chosen.items() if _has_parameters(module)}


def _fixed_classes(wanted: tuple[str, ...], counts: Counter[str]) -> str:
    """What to write: near names in place of missing ones, or without those that nothing resembles."""
    fixed: list[str] = []
    for name in wanted:
        fixed += [name] if name in counts else nearest_names(name, counts)[:1]
    if not fixed:
        return "wrap: transformer_layers (finds the layers from the model itself)"
    return f"wrap: {{layer_classes: [{', '.join(dict.fromkeys(fixed))}]}}"


def blocks_from_callable(model: nn.Module, choose: Callable[[nn.Module], Any]) -> Draft:
    """Return the modules that a person's callable chooses.

    Raises:
        WrapPolicyError: it returned nothing, something outside the model, the model, or a container.
    """
    returned = choose(model)
    chosen = [returned] if isinstance(returned, nn.Module) and has_forward(returned) else list(returned or ())
    names = {id(module): name for name, module in model.named_modules()}
    strangers = [module for module in chosen if id(module) not in names or module is model]
    containers = [module for module in chosen if isinstance(module, nn.Module) and not has_forward(module)]
    if not chosen or strangers or containers:
        received = "no module"
        if strangers:
            received = f"{len(strangers)} objects that are not modules inside the model"
        elif containers:
            received = f"a {type(containers[0]).__name__}, which is never called and so never gathered,"
        raise WrapPolicyError(
            f"the wrap callable returned {received} for {class_name(model)}",
            near=_candidates(model),
            fix="return the modules to shard, e.g. FSDPConfig(wrap=lambda model: list(model.model.layers))",
            source="FSDPConfig(wrap=...)",
        )
    return Draft({names[id(module)]: module for module in chosen})


# -- what a module is like ---------------------------------------------------------------------------------------------


def _candidates(model: nn.Module) -> str | None:
    return ", ".join(f"{name} ({count})" for name, count in _repeated_classes(model)) or None


def _first_candidate(model: nn.Module) -> str | None:
    return next((name for name, _ in _repeated_classes(model)), None)


def _repeated_classes(model: nn.Module) -> list[tuple[str, int]]:
    """Classes that recur and could be units, those that come first in the model (the outer ones) first."""
    counts = Counter(
        type(module).__name__ for module in model.modules() if _has_children(module) and has_forward(module)
    )
    return [(name, count) for name, count in counts.most_common(6) if count > 1]


def base_model(module: nn.Module) -> nn.Module:
    """Return the model inside PEFT's wrapper, whose forward takes anything; another model as it is."""
    get_base_model: Any = getattr(module, "get_base_model", None)
    return module if get_base_model is None else get_base_model()


def class_name(module: nn.Module) -> str:
    """Return the class a person wrote: of the model inside PEFT."""
    return type(base_model(module)).__name__


def model_size(model: nn.Module) -> str:
    """Return the bytes of all parameters of `model` in words."""
    return format_bytes(sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()))


def num_parameters(parameters: Iterable[nn.Parameter]) -> int:
    """Return the number of values in `parameters`, shared ones counted once."""
    return sum({id(parameter): parameter.numel() for parameter in parameters}.values())


def holder_of(name: str, blocks: Container[str]) -> str | None:
    """Return the innermost of `blocks` that is `name` or that it lies in."""
    parts = name.split(".")
    return next((path for i in range(len(parts), 0, -1) if (path := ".".join(parts[:i])) in blocks), None)


def is_related(name: str, blocks: Collection[str]) -> bool:
    """Whether `name` is one of `blocks`, inside one, or around one."""
    return holder_of(name, blocks) is not None or any(block.startswith(f"{name}.") for block in blocks) or not name
