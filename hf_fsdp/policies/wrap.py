"""Which modules become units: blocks, embeddings, head, norms, root; each shared tensor in one unit.

A unit is what is gathered together. Too large, and the gather holds the model; too small, and the step waits for
the network. Transformer layers are the right size (see `blocks.py` for how they are found).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from hf_fsdp.config.schema import WrapConfig
from hf_fsdp.errors import WrapPolicyError
from hf_fsdp.policies.blocks import (
    MAX_UNIT_SHARE,
    MIN_SHARE,
    Draft,
    blocks_by_class,
    blocks_from_callable,
    class_name,
    find_blocks,
    has_forward,
    holder_of,
    is_block_list,
    is_related,
    is_worth_a_unit,
    num_parameters,
)
from hf_fsdp.policies.precision import PrecisionTable, find_norms
from hf_fsdp.policies.raw_reads import RawRead, find_raw_reads, is_read_from_outside
from hf_fsdp.units import format_count

UnitKind = Literal["block", "embedding", "head", "norms", "root"]

# What a unit may hold beside its largest tensor before that is reported: a tied embedding comes with a final norm.
BESIDE_LARGEST_SHARE = 0.05
# From this share on, a table that is not the token embedding (Gemma's per-layer ones) is worth a unit.
LARGE_TABLE_SHARE = 0.1


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered together by one `fully_shard` call."""

    kind: UnitKind
    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]

    @property
    def label(self) -> str:
        """Name and class, as the audit shows them."""
        if self.kind == "norms":
            return f"norms ({len(self.names)})"
        name = "(root)" if self.kind == "root" else self.names[0]
        more = f" +{len(self.names) - 1}" if len(self.names) > 1 else ""
        return f"{name}{more} {class_name(self.modules[0])}"


@dataclass(frozen=True)
class WrapPlan:
    """The units of a model, inner ones first and the root last.

    `root_owned` are names of shared tensors that the root keeps because their owners would be in different units.
    """

    units: tuple[Unit, ...]
    root_owned: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def blocks(self) -> list[nn.Module]:
        """The repeated blocks in the order of the model, none inside another: what is checkpointed."""
        named = {
            name: module
            for unit in self.units
            if unit.kind == "block"
            for name, module in zip(unit.names, unit.modules, strict=True)
        }
        order = {id(module): index for index, module in enumerate(self.units[-1].modules[0].modules())}
        outermost = [module for name, module in named.items() if not _outer_blocks(name, named)]
        return sorted(outermost, key=lambda module: order[id(module)])


def build_wrap_plan(model: nn.Module, config: WrapConfig, precision: PrecisionTable) -> WrapPlan:
    """Decide the units of `model`.

    Args:
        model: any module, on any device, meta included; PEFT-wrapped and partly frozen models are fine.
        config: the `wrap` section.
        precision: decides whether norms are a unit of their own.

    Raises:
        WrapPolicyError: no unit is found, a class name matches nothing, or repeated blocks would stay in a root unit
            that holds more than a quarter of the model.
    """
    if config.callable is not None:
        draft = blocks_from_callable(model, config.callable)
    elif config.layer_classes:
        draft = Draft(blocks_by_class(model, config.layer_classes))
    else:
        draft = find_blocks(model)
    owners = shared_owners(model)
    reads = find_raw_reads(model)
    _leave_read_blocks_to_the_root(draft, reads)
    norms = find_norms(model, reads) if precision.keep_norms_fp32 else []
    edges = _edge_units(model, draft, owners, reads)
    block_groups, root_owned = _settle_shared_tensors(draft.blocks, owners)

    units: list[Unit] = []
    if norms:
        units.append(Unit("norms", tuple(name for name, _ in norms), tuple(module for _, module in norms)))
    units += [Unit("block", group, tuple(draft.blocks[name] for name in group)) for group in block_groups]
    units += edges
    units.append(Unit("root", ("",), (model,)))
    plan = WrapPlan(tuple(units), frozenset(root_owned), tuple(draft.notes))
    return WrapPlan(plan.units, plan.root_owned, plan.notes, tuple(_check_coverage(plan, model)))


def unit_parameters(plan: WrapPlan) -> list[tuple[Unit, dict[str, nn.Parameter]]]:
    """Return the parameters of every unit by canonical name: each belongs to the first unit that reaches it.

    The same rule that `fully_shard` follows when it is called on the units in order.
    """
    root = plan.units[-1].modules[0]
    names = canonical_names(root)
    root_owned = {id(parameter) for name, parameter in root.named_parameters() if name in plan.root_owned}
    taken: set[int] = set()
    result = []
    for unit in plan.units:
        own: dict[str, nn.Parameter] = {}
        for module in unit.modules:
            for parameter in module.parameters():
                held_by_root = id(parameter) in root_owned and unit.kind != "root"
                if id(parameter) not in taken and not held_by_root:
                    taken.add(id(parameter))
                    own[names[id(parameter)]] = parameter
        result.append((unit, own))
    return result


def canonical_names(model: nn.Module) -> dict[int, str]:
    """Map `id(parameter)` to its first name in `model`."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def shared_owners(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, for every parameter held by more than one module, its first name and all its names (tied weights)."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {names[0]: tuple(names) for names in by_id.values() if len(names) > 1}


# -- embeddings, head, shared tensors ---------------------------------------------------------------------------------


def _edge_units(
    model: nn.Module, draft: Draft, owners: dict[str, tuple[str, ...]], reads: frozenset[RawRead]
) -> list[Unit]:
    """Units for input embeddings and head of every tower, where nothing outside their own forward reads them."""
    shared = {name for group in owners.values() for name in group}
    total = num_parameters(model.parameters())
    units: dict[str, Unit] = {}
    for name, module, kind in _edges(model, total):
        if not name or name in units or is_related(name, draft.blocks) or any(_overlap(name, other) for other in units):
            continue
        own = {f"{name}.{parameter}" for parameter, _ in module.named_parameters()}
        if own & shared or not is_worth_a_unit(num_parameters(module.parameters()), total) or not has_forward(module):
            continue
        if is_read_from_outside(name, reads):
            draft.notes.append(f"{name} stays in the root unit: its weight is read outside its own forward")
            continue
        units[name] = Unit(kind, (name,), (module,))
    return list(units.values())


def _edges(model: nn.Module, total: int) -> Iterator[tuple[str, nn.Module, UnitKind]]:
    """Candidates: what the towers call their embeddings and heads, and other tables that are large (per-layer ones)."""
    names = {id(module): name for name, module in model.named_modules()}
    getters: tuple[tuple[str, UnitKind], ...] = (
        ("get_input_embeddings", "embedding"),
        ("get_output_embeddings", "head"),
    )
    for getter, kind in getters:
        for module in model.modules():
            found = _call_getter(module, getter)
            if found is not None and id(found) in names:
                yield names[id(found)], found, kind
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and num_parameters(module.parameters()) > LARGE_TABLE_SHARE * total:
            yield name, module, "embedding"


def _call_getter(module: nn.Module, getter: str) -> nn.Module | None:
    function = getattr(module, getter, None)
    if function is None:
        return None
    try:
        found = function()
    except (NotImplementedError, AttributeError, TypeError):
        return None  # transformers raises for towers that have no token embedding
    return found if isinstance(found, nn.Module) else None


def _settle_shared_tensors(
    blocks: dict[str, nn.Module], owners: dict[str, tuple[str, ...]]
) -> tuple[list[tuple[str, ...]], set[str]]:
    """Put all owners of a shared tensor in one unit.

    A tensor shared with anything outside the blocks is kept by the root, which is whole during the entire forward
    and backward; blocks that share a tensor only among themselves become one unit.
    """
    group_of = {name: [name] for name in blocks}
    root_owned: set[str] = set()
    for first, names in owners.items():
        holders = {holder_of(name, blocks) for name in names}
        if None in holders and len(holders) > 1:
            root_owned.add(first)
        elif None not in holders and len(holders) > 1:
            merged: list[str] = []
            for holder in holders:
                merged += [name for name in group_of[holder] if name not in merged]  # type: ignore[index]
            for name in merged:
                group_of[name] = merged
    order = list(blocks)
    groups = dict.fromkeys(tuple(sorted(group_of[name], key=order.index)) for name in order)
    # Inner ones first: a unit takes what is still free in its modules.
    return sorted(groups, key=lambda group: -max(_outer_blocks(name, blocks) for name in group)), root_owned


def _leave_read_blocks_to_the_root(draft: Draft, reads: frozenset[RawRead]) -> None:
    """Take out blocks that hold a tensor which something outside them reads: the root is whole all the while.

    The whole block and not the tensor alone: `fully_shard` never gives a parent what lies inside a nested unit.
    """
    readers: dict[str, set[str]] = {}
    for read in reads:
        holder = holder_of(read.target, draft.blocks)
        if read.certain and holder is not None and holder_of(read.reader, draft.blocks) != holder:
            readers.setdefault(holder, set()).add(read.target)
    for name, targets in readers.items():
        del draft.blocks[name]
        shown = ", ".join(sorted(targets)[:3])
        draft.notes.append(f"{name} stays in the root unit: {shown} is read outside its forward")


def _outer_blocks(name: str, blocks: Iterable[str]) -> int:
    """In how many other blocks `name` lies."""
    return sum(name.startswith(f"{other}.") for other in blocks)


def _overlap(name: str, other: str) -> bool:
    return name.startswith(f"{other}.") or other.startswith(f"{name}.")


# -- coverage ---------------------------------------------------------------------------------------------------------


def _check_coverage(plan: WrapPlan, model: nn.Module) -> list[str]:
    total = num_parameters(model.parameters())
    largest = max((parameter.numel() for parameter in model.parameters()), default=0)
    limit = max(MAX_UNIT_SHARE * total, largest + BESIDE_LARGEST_SHARE * total)
    warnings = []
    for unit, parameters in unit_parameters(plan):
        held = num_parameters(parameters.values())
        if held <= limit or total == 0:
            continue
        share = f"{held / total:.0%} of the parameters ({format_count(held)} of {format_count(total)})"
        if unit.kind == "root" and (unwrapped := _unwrapped_lists(model, plan, parameters, total)):
            raise WrapPolicyError(
                f"the root unit would hold {share}, because repeated blocks stay unwrapped: "
                + "; ".join(f"{name} ({count} x {cls})" for name, count, cls in unwrapped),
                fix="wrap: transformer_layers, or add these classes: wrap: {layer_classes: ["
                + ", ".join(dict.fromkeys([*_plan_classes(plan), *(cls for _, _, cls in unwrapped)]))
                + "]}",
            )
        # Two or three layers of a small model are each more than a quarter of it, and there is nothing to be done.
        if unit.kind != "block" or len(plan.blocks) > 4:
            warnings.append(f"unit {unit.label} holds {share}: its all-gather is the peak of the step")
    return warnings


def _unwrapped_lists(
    model: nn.Module, plan: WrapPlan, root_parameters: dict[str, nn.Parameter], total: int
) -> list[tuple[str, int, str]]:
    in_root = {id(parameter) for name, parameter in root_parameters.items() if name not in plan.root_owned}
    found: list[tuple[str, int, str]] = []
    for name, module in model.named_modules():
        if not is_block_list(module, name.rpartition(".")[2], set()):
            continue
        children = [child for child in module.children() if has_forward(child)]
        held = sum(parameter.numel() for parameter in module.parameters() if id(parameter) in in_root)
        inside = any(name.startswith(f"{outer}.") for outer, _, _ in found)
        if children and not inside and held >= MIN_SHARE * total:
            found.append((name, len(children), type(children[0]).__name__))
    return found


def _plan_classes(plan: WrapPlan) -> list[str]:
    return list(dict.fromkeys(type(module).__name__ for module in plan.blocks))
