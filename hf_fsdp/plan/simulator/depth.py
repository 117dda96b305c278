"""Deep models from shallow ones: a few layers are simulated and extended over those that are alike.

A tower is a list of layers that repeats with a period (1 for Llama, 6 for Gemma 3, whose every sixth layer sees
everything), after a few layers of another make (the dense ones before experts). Layers are taken out of the middle,
whole periods at a time. Memory within each phase of the step is then a straight line in the number of periods, because
one layer more adds the same weights and activations every time; what is special about the first and the last layers
(nothing left to fetch ahead, the head's buffers still there) is a phase of its own. The largest phase may change with
depth, so the line is drawn through each phase and not through the peak.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_fsdp.errors import WrapPolicyError
from hf_fsdp.policies.blocks import find_blocks
from hf_fsdp.policies.towers import find_towers

# Layers that differ from the middle at each end: the first two and the last (a unit is fetched one ahead).
_EDGE_LAYERS = 3
_MAX_PERIOD = 12
_OWN_NUMBER = re.compile(r"idx|index|number|(^|_)id$|^layer$")


@dataclass(frozen=True)
class Tower:
    """One list of layers.

    Args:
        name: ``language``, ``vision``, …; numbered where a model has several of a name.
        path: of the `nn.ModuleList`.
        num_layers: of the model.
        prefix: layers at the start that are not part of the repetition.
        period: layers after which the make of layers repeats.
        min_layers: fewest layers that have all phases of the whole model.
        special: layers that do more than their like, and are never left out.
    """

    name: str
    path: str
    num_layers: int
    prefix: int
    period: int
    min_layers: int
    special: tuple[int, ...] = ()

    @property
    def is_long(self) -> bool:
        """Whether two shallow models are less work than the whole one."""
        return self.num_layers > 2 * self.min_layers + self.period

    def kept(self, num_layers: int) -> list[int]:
        """The layers of the whole model that stay when it has `num_layers`: those of the middle go."""
        start = self.prefix + self.period + bool(self.special)  # the second layer is to be one of the many
        ordinary = [index for index in range(start, self.num_layers) if index not in self.special]
        gone = set(ordinary[: self.num_layers - num_layers])
        return [index for index in range(self.num_layers) if index not in gone]

    def repeating(self, period: int, num_ahead: int = 1) -> Tower:
        """This tower with a period of so many layers: settings may alternate where layers do not.

        Args:
            period: layers.
            num_ahead: units that are gathered ahead; so many more layers at each end are not like the middle.
        """
        # The middle has to hold every kind of a period, beside the edges.
        least = self.prefix + max(_EDGE_LAYERS, 2 * num_ahead + 1) + period
        least += (self.num_layers - least) % period
        return replace(self, period=period, min_layers=min(least, self.num_layers))

    def keeping(self, special: Sequence[int]) -> Tower:
        """This tower with layers that do more than their like, so that none of them is left out."""
        found = tuple(layer for layer in special if layer < self.num_layers)
        ordinary = self.prefix + self.period + 3  # up to the second one, and two at the end
        return replace(self, special=found, min_layers=min(ordinary + len(found), self.num_layers))

    def place(self, position: int, num_layers: int) -> str:
        """What is special about the layer at `position` among `num_layers`, in words."""
        from_end = num_layers - 1 - position
        if position <= self.prefix:
            return "first layer" if position == 0 else f"layer {position}"
        if position == self.prefix + 1:
            return "second layer"
        return "last layer" if from_end == 0 else "middle layers"


def find_depths(model: nn.Module) -> list[Tower]:
    """Return the towers of `model`; a model without repeated layers has none."""
    try:
        blocks = find_blocks(model).blocks
    except WrapPolicyError:
        return []
    towers = []
    for tower, names in find_towers(model, blocks).items():
        lists: dict[str, list[str]] = {}
        for name in names:
            lists.setdefault(name.rpartition(".")[0], []).append(name)
        for index, (path, layers) in enumerate(lists.items()):
            if not isinstance(model.get_submodule(path), nn.ModuleList):
                continue
            if [name.rpartition(".")[2] for name in layers] != [str(number) for number in range(len(layers))]:
                continue
            prefix, period = _repetition([_make(blocks[name]) for name in layers])
            label = tower if index == 0 else f"{tower} {index + 1}"
            towers.append(Tower(label, path, len(layers), prefix, 1, len(layers)).repeating(period))
    return towers


def _make(layer: nn.Module) -> tuple[Any, ...]:
    """What two layers must have in common to take the same memory."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    # Whatever a layer keeps as a word, a switch or a number may change what it does: `attention_type`, `use_rope`,
    # `sliding_window`; but its own number.
    kinds = tuple(
        (name, value)
        for module in layer.modules()
        for name, value in vars(module).items()
        if isinstance(value, str | int) and not _OWN_NUMBER.search(name)
    )
    return type(layer).__name__, shapes, kinds


def _repetition(makes: Sequence[Any]) -> tuple[int, int]:
    """Return (prefix, period) with the fewest layers to simulate; no repetition: the whole list is the prefix."""
    found = [
        (prefix, period)
        for prefix in range(min(len(makes), 8))
        for period in range(1, _MAX_PERIOD + 1)
        if len(makes) - prefix >= 2 * period
        and all(makes[index] == makes[index - period] for index in range(prefix + period, len(makes)))
    ]
    return min(found, key=lambda pair: pair[0] + 3 * pair[1], default=(len(makes), 1))


@contextmanager
def shortened(model: nn.Module, depths: Mapping[str, int], towers: Sequence[Tower]) -> Iterator[None]:
    """Let `model` have fewer layers for a while: tower name -> layers."""
    saved: list[tuple[nn.Module, str, nn.Module]] = []
    for tower in towers:
        wanted = depths.get(tower.name, tower.num_layers)
        if wanted == tower.num_layers:
            continue
        parent_path, _, attribute = tower.path.rpartition(".")
        parent = model.get_submodule(parent_path)
        layers: Any = model.get_submodule(tower.path)
        saved.append((parent, attribute, layers))
        setattr(parent, attribute, nn.ModuleList([layers[index] for index in tower.kept(wanted)]))
    try:
        yield
    finally:
        for parent, attribute, layers in saved:
            setattr(parent, attribute, layers)


def depths_to_simulate(towers: Sequence[Tower]) -> list[dict[str, int]]:
    """Return the depths of each simulation: the shallowest, then one period more in each tower that is long."""
    least = {tower.name: tower.min_layers if tower.is_long else tower.num_layers for tower in towers}
    longer = [{**least, tower.name: least[tower.name] + tower.period} for tower in towers if tower.is_long]
    return [least, *longer]


def extend(values: Sequence[float], towers: Sequence[Tower]) -> float:
    """Return the value at full depth from those at `depths_to_simulate`, in its order."""
    long = [tower for tower in towers if tower.is_long]
    total = values[0]
    for tower, value in zip(long, values[1:], strict=True):
        periods = (tower.num_layers - tower.min_layers) / tower.period
        total += (value - values[0]) * periods
    return total
