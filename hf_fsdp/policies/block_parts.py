"""The parts of a block that can be units of their own: attention, feed-forward, experts, mixers.

Found from the structure: children with children of their own (or with weights of their own) that hold a good share of
the block. Norms, single linear layers and small things stay in the block's unit.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import nn

from hf_fsdp.errors import WrapPolicyError
from hf_fsdp.policies.blocks import MIN_PARAMETERS, Draft, class_name, has_forward, num_parameters
from hf_fsdp.policies.raw_reads import Sources
from hf_fsdp.policies.wrap_plan import num_outer

# A child with less of its block is not worth a gather of its own, unless it has `MIN_PARAMETERS`.
MIN_PART_SHARE = 0.01
# Above this share a child that is the only part is the block: beside it only a norm would be left.
MAX_PART_SHARE = 0.95


def split_blocks(model: nn.Module, draft: Draft, sources: Sources, shared: dict[str, tuple[str, ...]]) -> None:
    """Add the parts of every block of `draft` to it; a block that has none keeps its one unit, with a note.

    Args:
        model: the root.
        draft: the blocks; changed in place.
        sources: what the forwards of the model read and call.
        shared: the names of every tensor that more than one module holds.

    Raises:
        WrapPolicyError: no block of the model has parts.
    """
    outermost = {name: block for name, block in draft.blocks.items() if not num_outer(name, draft.blocks)}
    parts: dict[str, nn.Module] = {}
    whole: dict[str, list[str]] = {}
    for name, block in outermost.items():
        found = _parts(name, block, sources, shared)
        parts |= found
        if not found:
            whole.setdefault(type(block).__name__, []).append(name)
    new = {name: part for name, part in parts.items() if name not in draft.blocks}
    if not parts and outermost:
        kinds = ", ".join(f"{cls} ({_children(outermost[names[0]])})" for cls, names in whole.items())
        raise WrapPolicyError(
            f"wrap.granularity='attention_and_mlp': no block of {class_name(model)} has attention and MLP as modules "
            f"that can be gathered apart: {kinds}",
            fix="wrap: transformer_layers   # whole blocks are the units",
        )
    draft.notes += [
        f"{len(names)} x {cls} (the first is {names[0]}) stay whole units: they have no attention and MLP that can be "
        "gathered apart"
        for cls, names in whole.items()
    ]
    draft.blocks = _in_order(model, draft.blocks | new)


def split_reversible_blocks(
    model: nn.Module, draft: Draft, sources: Sources, shared: dict[str, tuple[str, ...]]
) -> None:
    """Replace blocks that are run backwards (Reformer's) by their parts.

    A reversible block computes its inputs again from its outputs in backward, by calling its parts from a method of its
    own: its forward hooks, which gather a unit, do not run there, and those of its parts do.
    """
    reversible = [name for name, block in draft.blocks.items() if hasattr(type(block), "backward_pass")]
    for name in reversible:
        parts = _parts(name, draft.blocks[name], sources, shared)
        del draft.blocks[name]
        draft.blocks |= parts
    if reversible:
        draft.blocks = _in_order(model, draft.blocks)
        draft.notes.append(f"{len(reversible)} reversible blocks are run past their forward; their parts are the units")


def _in_order(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(blocks.items(), key=lambda item: order[item[0]]))


def _parts(name: str, block: nn.Module, sources: Sources, shared: dict[str, tuple[str, ...]]) -> dict[str, nn.Module]:
    total = num_parameters(block.parameters())
    called = {call.target for call in sources.calls}
    parts: dict[str, nn.Module] = {}
    for path, child in _callable_children(name, block, called):
        held = num_parameters(child.parameters())
        if held >= min(MIN_PART_SHARE * total, MIN_PARAMETERS) and held > 0:
            if sources.is_gathered_by_its_forward(path) and not _shares_with_others(path, shared):
                parts[path] = child
    is_one_piece = len(parts) == 1 and num_parameters(next(iter(parts.values())).parameters()) > MAX_PART_SHARE * total
    return {} if is_one_piece else parts


def _callable_children(name: str, module: nn.Module, called: Container[str]) -> Iterator[tuple[str, nn.Module]]:
    """Children that are called and are more than one layer, also of lists (T5) but not of lists of experts."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}"
        # A Sequential may be called, or only looped over.
        is_list = not has_forward(child) or (type(child).forward is nn.Sequential.forward and path not in called)
        if is_list and "expert" not in child_name.lower():
            yield from _callable_children(path, child, called)
        elif not is_list and _is_compound(child):
            yield path, child


def _is_compound(module: nn.Module) -> bool:
    """Has children, or matrices of its own that torch's layers do not know (experts in one tensor)."""
    if any(True for _ in module.children()):
        return True
    is_torch_layer = type(module).__module__.startswith("torch.nn.")
    return not is_torch_layer and sum(parameter.dim() > 1 for parameter in module.parameters(recurse=False)) > 1


def _shares_with_others(path: str, shared: dict[str, tuple[str, ...]]) -> bool:
    for names in shared.values():
        inside = [name.startswith(f"{path}.") for name in names]
        if any(inside) and not all(inside):
            return True
    return False


def _children(block: nn.Module) -> str:
    return ", ".join(name for name, child in block.named_children() if any(True for _ in child.parameters()))
