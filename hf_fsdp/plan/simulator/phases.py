"""Which part of the step is running: hooks tell the tracker when forward and backward reach a layer or the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_fsdp.plan.simulator.depth import Tower
from hf_fsdp.plan.simulator.tracker import Tracker
from hf_fsdp.policies.blocks import base_model

HEAD = "head and loss"
START = "embeddings"


def watch_phases(model: nn.Module, tracker: Tracker, towers: Sequence[Tower], depths: Mapping[str, int]) -> None:
    """Name the phases of every forward and backward of `model` from now on.

    Hooks are put before those of FSDP, so that what a unit gathers counts to the phase that needs it.

    Args:
        model: after sharding.
        tracker: its `phase` is set.
        towers: of the whole model.
        depths: tower -> layers of this one.
    """
    prefix = _prefix(model)
    for tower in towers:
        layers: Any = model.get_submodule(prefix + tower.path)
        count = depths[tower.name]
        label = f"{tower.name}, " if len(towers) > 1 else ""
        for position, layer in enumerate(layers):
            _watch(layer, tracker, f"{label}{tower.place(position, count)}")
    base: Any = base_model(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if head is not None:
        _watch(head, tracker, HEAD)
    if towers:
        main: Any = model.get_submodule(prefix + _main_tower(towers).path)
        last = main[-1]
        # What comes after the last layer is the head's, also where a loss in chunks never calls the head.
        last.register_forward_hook(lambda *args: _enter(tracker, "forward", HEAD))


def _main_tower(towers: Sequence[Tower]) -> Tower:
    return next((tower for tower in towers if tower.name == "language"), towers[-1])


def _prefix(model: nn.Module) -> str:
    """PEFT's wrapper comes before the paths of the model inside."""
    return "base_model.model." if hasattr(model, "get_base_model") else ""


def _watch(module: nn.Module, tracker: Tracker, place: str) -> None:
    def before(module: nn.Module, args: Any) -> None:
        tracker.recomputes = tracker.phase.startswith("backward")
        if not tracker.recomputes:
            _enter(tracker, "forward", place)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if tracker.recomputes:  # also when it was stopped early, having made all that the backward needs
            tracker.recomputes = False
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient: _enter(tracker, "backward", place))

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after, prepend=True, always_call=True)


def _enter(tracker: Tracker, direction: str, place: str) -> None:
    if not (direction == "forward" and tracker.phase.startswith("backward")):
        tracker.phase = f"{direction}: {place}"
