"""Which modules become units: blocks, embeddings, head, norms, root; each shared tensor in one unit.

A unit is what is gathered together. Too large, and the gather holds the model; too small, and the step waits for
the network. Transformer layers are the right size (see `blocks.py` for how they are found).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import nn

from hf_fsdp.config.schema import WrapConfig
from hf_fsdp.policies.block_parts import split_blocks, split_reversible_blocks
from hf_fsdp.policies.blocks import (
    Draft,
    blocks_by_class,
    blocks_from_callable,
    find_blocks,
    has_forward,
    holder_of,
    is_related,
    is_worth_a_unit,
    num_parameters,
)
from hf_fsdp.policies.by_size import blocks_by_size
from hf_fsdp.policies.coverage import check_coverage
from hf_fsdp.policies.precision import PrecisionTable, find_norms
from hf_fsdp.policies.raw_reads import RawRead, Sources, is_read_from_outside, read_sources
from hf_fsdp.policies.wrap_plan import (
    Unit,
    UnitKind,
    WrapPlan,
    num_outer,
    shared_owners,
)

# From this share on, a table that is not the token embedding (Gemma's per-layer ones) is worth a unit.
LARGE_TABLE_SHARE = 0.1


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
    owners = shared_owners(model)
    sources = read_sources(model)
    norms = find_norms(model, sources.reads) if precision.keep_norms_fp32 else []
    if config.policy == "size":
        draft = blocks_by_size(model, config.min_num_params, sources, {id(module) for _, module in norms})
        edges: list[Unit] = []
    else:
        draft = _draft_layers(model, config, sources, owners)
        edges = _edge_units(model, draft, owners, sources.reads)
    block_groups, root_owned = _settle_shared_tensors(model, draft.blocks, owners)

    units: list[Unit] = []
    if norms:
        units.append(Unit("norms", tuple(name for name, _ in norms), tuple(module for _, module in norms)))
    units += [Unit("block", group, tuple(draft.blocks[name] for name in group)) for group in block_groups]
    units += edges
    units.append(Unit("root", ("",), (model,)))
    by_size = config.policy == "size"
    plan = WrapPlan(tuple(units), frozenset(root_owned), tuple(dict.fromkeys(draft.notes)), by_size=by_size)
    return dataclasses.replace(plan, warnings=tuple(check_coverage(plan, model)))


def _draft_layers(model: nn.Module, config: WrapConfig, sources: Sources, owners: dict[str, tuple[str, ...]]) -> Draft:
    if config.callable is not None:
        draft = blocks_from_callable(model, config.callable)
    elif config.layer_classes:
        draft = Draft(blocks_by_class(model, config.layer_classes))
    else:
        draft = find_blocks(model)
    _leave_read_blocks_to_the_root(draft, sources.reads)
    split_reversible_blocks(model, draft, sources, owners)
    if config.granularity == "attention_and_mlp":
        split_blocks(model, draft, sources, owners)
    return draft


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
    model: nn.Module, blocks: dict[str, nn.Module], owners: dict[str, tuple[str, ...]]
) -> tuple[list[tuple[str, ...]], set[str]]:
    """Put all owners of a shared tensor in one unit.

    A tensor shared with anything outside the blocks is kept by the root, which is whole during the entire forward
    and backward; blocks that share a tensor only among themselves become one unit.
    """
    group_of = {name: [name] for name in blocks}
    root_owned: set[str] = set()
    first_name: dict[int, str] = {}
    same = {path: first_name.setdefault(id(m), path) for path, m in model.named_modules(remove_duplicate=False)}
    for first, names in owners.items():
        holders = {_holder(name, blocks, same) for name in names}
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
    return sorted(groups, key=lambda group: -max(num_outer(name, blocks) for name in group)), root_owned


def _holder(name: str, blocks: dict[str, nn.Module], same: dict[str, str]) -> str | None:
    """The innermost block on the way to `name`, where `same` says which paths are one module held twice."""
    parts = name.split(".")
    paths = (".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1))
    return next((same[path] for path in paths if same.get(path) in blocks), None)


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


def _overlap(name: str, other: str) -> bool:
    return name.startswith(f"{other}.") or other.startswith(f"{name}.")
