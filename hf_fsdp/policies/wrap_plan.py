"""What a wrap plan is: units, their parameters, and the order in which they are gathered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from hf_fsdp.policies.blocks import class_name

_EXPERTS = re.compile(r"expert|(^|[._])moe([._]|$)", re.IGNORECASE)

UnitKind = Literal["block", "embedding", "head", "norms", "root"]


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
    `by_size`: the units were chosen by `wrap.policy: size` and are no layers of one kind.
    """

    units: tuple[Unit, ...]
    root_owned: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    by_size: bool = False

    @property
    def blocks(self) -> list[nn.Module]:
        """What is checkpointed, in the order of the model, none inside another.

        The repeated blocks: whole, also where their attention and MLP are units of their own. Under
        `wrap.policy: size`, the units that hold more than one layer, and of nested ones the inner: recomputing a
        single convolution saves nothing, and recomputing half of the model at once saves little.
        """
        named = self._named_blocks()
        if self.by_size:
            named = {name: module for name, module in named.items() if any(True for _ in module.children())}
            return [module for name, module in named.items() if not any(num_outer(other, [name]) for other in named)]
        return [module for name, module in named.items() if not num_outer(name, named)]

    @property
    def nested_modules(self) -> list[nn.Module]:
        """Modules inside `blocks` that are gathered apart: attention and MLP, norms in fp32."""
        inside = {id(module) for block in self.blocks for module in block.modules() if module is not block}
        return [module for unit in self.units for module in unit.modules if id(module) in inside]

    @property
    def gather_orders(self) -> list[tuple[list[nn.Module], list[nn.Module]]]:
        """For every list of blocks, the units in the order in which forward and backward gather them.

        A block's own unit (its norms) comes before its parts in both directions, the parts turn round.
        """
        named = self._named_blocks()
        chains: dict[str, list[str]] = {}
        for name in named:
            outermost = next(other for other in named if name == other or name.startswith(f"{other}."))
            chains.setdefault("" if self.by_size else outermost.rpartition(".")[0], []).append(name)
        return [
            ([named[name] for name in chain], [named[name] for name in _in_backward(chain)])
            for chain in chains.values()
        ]

    def _named_blocks(self) -> dict[str, nn.Module]:
        """The modules of block units by name, in the order of the model: outer before inner."""
        named = {
            name: module
            for unit in self.units
            if unit.kind == "block"
            for name, module in zip(unit.names, unit.modules, strict=True)
        }
        order = {id(module): index for index, module in enumerate(self.units[-1].modules[0].modules())}
        return dict(sorted(named.items(), key=lambda item: order[id(item[1])]))


def _in_backward(chain: list[str]) -> list[str]:
    """`[0, 0.attn, 0.mlp, 1, 1.attn, 1.mlp]` -> `[1, 1.mlp, 1.attn, 0, 0.mlp, 0.attn]`."""
    inside_first: list[str] = []
    pending: list[str] = []
    for name in chain:
        while pending and not name.startswith(f"{pending[-1]}."):
            inside_first.append(pending.pop())
        pending.append(name)
    return [*pending, *inside_first[::-1]]


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


def is_chosen_by_data(names: Iterable[str]) -> bool:
    """Whether any of these parameters belongs to experts: which of them get a gradient, the tokens of a rank decide.

    A unit reduces the gradients that it has. Where one rank has more of them than another the sums do not fit, which
    ends in a crash or a hang; such a unit has to count a missing gradient as zero.
    """
    return any(_EXPERTS.search(name) for name in names)


def num_outer(name: str, blocks: Iterable[str] | Mapping[str, nn.Module]) -> int:
    """In how many other `blocks` the module `name` lies."""
    return sum(name.startswith(f"{other}.") for other in blocks)
