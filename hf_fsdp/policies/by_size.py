"""Units by size, for models that are no transformers: modules of at least N parameters, found bottom-up.

A module becomes a unit when what is not yet in a unit inside it reaches N. It must also be one that can be gathered by
its own forward: it is called, nothing outside reads its weights or calls its parts past it, which of its parts run is
not decided by the data, and every owner of a shared tensor in it lies inside it.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from torch import nn

from hf_fsdp.errors import WrapPolicyError
from hf_fsdp.policies.blocks import Draft, class_name, has_forward, model_size, num_parameters
from hf_fsdp.policies.coverage import unit_limit
from hf_fsdp.policies.raw_reads import Sources
from hf_fsdp.policies.wrap_plan import shared_owners
from hf_fsdp.units import format_count

# How often the smallest size is halved in the search for one that gives sensible units, from a quarter of the model on.
_NUM_HALVINGS = 12


def blocks_by_size(model: nn.Module, min_num_params: int, sources: Sources, taken: Container[int]) -> Draft:
    """Return the units of at least `min_num_params` parameters.

    Args:
        model: any module.
        min_num_params: of a unit, not counting what is in units inside it.
        sources: what the forwards of the model read and call.
        taken: ids of modules that are in a unit of their own already (norms kept in fp32).

    Raises:
        WrapPolicyError: no module reaches the size; with a size that gives sensible units.
    """
    search = _Search.of(model, sources, taken)
    units = search.run(min_num_params)
    if not units.modules:
        raise WrapPolicyError(
            f"wrap.min_num_params={min_num_params}: no module of {class_name(model)} that can be a unit holds so many "
            f"parameters, so the whole model would be one group: a {model_size(model)} all-gather",
            near=search.largest(),
            fix=_advice(search.suggest()),
        )
    draft = Draft(units.modules)
    better = search.suggest() if units.largest > search.limit else None
    if better is not None and better < min_num_params and (after := search.run(better).largest) < units.largest:
        draft.notes.append(
            f"the largest unit ({units.name_of_largest}) holds {format_count(units.largest)} parameters; under "
            f"wrap: {{policy: size, min_num_params: {better}}} it would be {format_count(after)}"
        )
    return draft


def _advice(size: int | None) -> str:
    if size is None:
        return (
            "name the modules: wrap: {layer_classes: [NameOfYourLayer]} or, in Python, "
            "FSDPConfig(wrap=lambda model: [list of modules])"
        )
    return f"wrap: {{policy: size, min_num_params: {size}}}"


@dataclass
class _Units:
    """The units of one size, in the order of the model, and how many parameters each gathers; `""` is the root."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        return max(self.sizes.values())

    @property
    def name_of_largest(self) -> str:
        return max(self.sizes, key=self.sizes.__getitem__) or "the root"


@dataclass(frozen=True)
class _Search:
    """The walk through one model, for any size."""

    model: nn.Module
    sources: Sources
    taken: Container[int]
    limit: float
    # Every parameter by id: its size, and all its names when more than one module holds it.
    owners: dict[int, tuple[str, ...]] = field(default_factory=dict)
    paths: dict[int, list[str]] = field(default_factory=dict)
    allowed: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, sources: Sources, taken: Container[int]) -> _Search:
        by_name = dict(model.named_parameters())
        owners = {id(by_name[first]): names for first, names in shared_owners(model).items()}
        paths: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            paths.setdefault(id(module), []).append(name)
        return cls(model, sources, taken, unit_limit(model), owners, paths)

    def run(self, size: int) -> _Units:
        """Return the units of at least `size` parameters."""
        units = _Units()
        left = self._visit("", self.model, size, units, set(), is_chosen_by_data=False)
        units.sizes[""] = sum(left.values())
        order = {name: index for index, (name, _) in enumerate(self.model.named_modules())}
        units.modules = dict(sorted(units.modules.items(), key=lambda item: order[item[0]]))
        return units

    def suggest(self) -> int | None:
        """Return the largest size under which no unit is too large, else the one with the smallest largest unit."""
        total = num_parameters(self.model.parameters())
        tried: list[tuple[int, int]] = []
        for halving in range(_NUM_HALVINGS):
            size = _round_down(total // (4 << halving))
            if size < 1:
                break
            units = self.run(size)
            if len(units.modules) > 1 and units.largest <= self.limit:
                return size
            if units.modules:
                tried.append((units.largest, -size))
        return -min(tried)[1] if tried else None

    def largest(self) -> str | None:
        """The largest modules inside the model that could be units, with their sizes."""
        sizes = {
            f"{name} {type(module).__name__}": num_parameters(module.parameters())
            for name, module in self.model.named_modules()
            if name and self._may_be_unit(name, module)
        }
        top = sorted(sizes.items(), key=lambda item: -item[1])[:4]
        return ", ".join(f"{name} ({format_count(size)})" for name, size in top if size) or None

    def _visit(
        self,
        name: str,
        module: nn.Module,
        size: int,
        units: _Units,
        seen: set[int],
        *,
        is_chosen_by_data: bool,
    ) -> dict[int, int]:
        """Add the units inside `module` and itself; return the parameters that are in none, by id."""
        if id(module) in self.taken or id(module) in seen:
            return {}
        seen.add(id(module))
        free = {id(parameter): parameter.numel() for parameter in module.parameters(recurse=False)}
        # Which experts run is decided by the data: their gathers would not pair up over the ranks.
        inside = is_chosen_by_data or (not has_forward(module) and "expert" in name.rpartition(".")[2].lower())
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            free |= self._visit(path, child, size, units, seen, is_chosen_by_data=inside)
        if not inside and sum(free.values()) >= size and name and self._may_be_unit(name, module):
            if not any(self._is_shared_with_others(parameter, module) for parameter in free):
                units.modules[name] = module
                units.sizes[name] = sum(free.values())
                return {}
        return free

    def _may_be_unit(self, name: str, module: nn.Module) -> bool:
        if name not in self.allowed:
            self.allowed[name] = (
                has_forward(module) and self._is_entered(name, module) and self.sources.is_gathered_by_its_forward(name)
            )
        return self.allowed[name]

    def _is_entered(self, name: str, module: nn.Module) -> bool:
        """A Sequential is often only looped over, and then its own forward never runs."""
        if type(module).forward is not nn.Sequential.forward:
            return True
        parent = self.model.get_submodule(name.rpartition(".")[0])
        if type(parent).forward is nn.Sequential.forward:  # which calls every one of its children
            return parent is self.model or self._is_entered(name.rpartition(".")[0], parent)
        return any(call.target == name for call in self.sources.calls)

    def _is_shared_with_others(self, parameter: int, module: nn.Module) -> bool:
        paths = self.paths[id(module)]
        return any(not any(owner.startswith(f"{path}.") for path in paths) for owner in self.owners.get(parameter, ()))


def _round_down(value: int) -> int:
    """Two leading digits: a person reads 1500000 and not 1572864."""
    digits = len(str(value))
    return value if digits <= 2 else value // 10 ** (digits - 2) * 10 ** (digits - 2)
