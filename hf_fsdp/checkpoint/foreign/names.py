"""The names of another program's checkpoint as those of the live model and its optimizer."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hf_fsdp.checkpoint.model_state import expected_names, read_model_state
from hf_fsdp.checkpoint.optimizer_state import FRESH_FIX
from hf_fsdp.errors import CheckpointError, Problem
from hf_fsdp.sharding.adapters import DEFAULT_FOLDER, adapter_keys

# Modules that wrappers put into the tree; FSDP1, activation checkpointing and torch.compile in this order.
_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}
_DDP = "module."
_FLAT = re.compile(r"_?flat_param(_\d+)?")


@dataclass(frozen=True)
class LiveNames:
    """What the names of a checkpoint are matched with.

    Args:
        names: every name that a state dict of the model may have, aliases of tied tensors too.
        saved: the names that a checkpoint should hold: all of them, or of a PEFT model those that are trained.
        shapes: name of each parameter -> its whole shape.
        groups: the parameter names of each of the optimizer's groups, in order; what parameter numbers stand for.
        adapters: folder of an adapter -> key in PEFT's file -> name.
        active_adapter: the folder of the adapter that is trained.
        first_names: alias of a tied tensor -> the name that its parameter goes by.
        file_names: returns key in a file of `save_pretrained` -> name, where transformers writes an older one than it
            uses; called only when a file has keys that are no live names.
    """

    names: frozenset[str]
    saved: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]
    groups: tuple[tuple[str, ...], ...] | None = None
    adapters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    active_adapter: str = DEFAULT_FOLDER
    first_names: Mapping[str, str] = field(default_factory=dict)
    file_names: Callable[[], Mapping[str, str]] = dict

    def adapter_keys(self, folder: str | None = None) -> Mapping[str, str]:
        """Return key in PEFT's file -> name for the adapter of `folder`; default: the one that is trained."""
        return self.adapters.get(folder or self.active_adapter, {})

    def file_keys(self, keys: Iterable[str]) -> Mapping[str, str]:
        """Return key in a file of `save_pretrained` -> name, for a file with these keys."""
        return {} if self.names.issuperset(keys) else self.file_names()


def live_names(model: nn.Module, optimizer: Optimizer | None = None) -> LiveNames:
    """Return the names of a model, sharded or not, and of its optimizer (its parameters are the model's)."""
    state = read_model_state(model)
    owner = {id(parameter): name for name, parameter in model.named_parameters()}
    active = getattr(model, "active_adapter", "default")
    return LiveNames(
        names=frozenset(expected_names(model)),
        saved=frozenset(state.tensors),
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        groups=None
        if optimizer is None
        else tuple(tuple(owner[id(parameter)] for parameter in group["params"]) for group in optimizer.param_groups),
        adapters=adapter_keys(model),
        active_adapter=DEFAULT_FOLDER if active == "default" or not isinstance(active, str) else active,
        first_names={name: first for first, names in state.ties.items() for name in names if name != first},
        file_names=functools.partial(_names_in_files, model),
    )


def _names_in_files(model: nn.Module) -> dict[str, str]:
    """transformers itself says under which names it writes: it is given empty tensors and asked to write them.

    Weights that it cuts into several (the experts of a layer) are not among them.
    """
    if "transformers" not in sys.modules or not isinstance(model, sys.modules["transformers"].PreTrainedModel):
        return {}
    from transformers.core_model_loading import revert_weight_conversion

    stand_ins = {name: torch.empty(tensor.shape, device="meta") for name, tensor in model.state_dict().items()}
    names = {id(stand_in): name for name, stand_in in stand_ins.items()}
    written = revert_weight_conversion(model, dict(stand_ins))
    return {key: names[id(tensor)] for key, tensor in written.items() if names.get(id(tensor), key) != key}


def canonical_names(
    keys: Iterable[str], live: LiveNames | None, where: str, renames: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return name -> key for the keys of a file, as the live model calls them.

    Parts of names that wrappers leave (FSDP1, DDP, activation checkpointing, torch.compile) are dropped, and of tied
    tensors the first name stays.

    Args:
        keys: of the file.
        live: None leaves tied tensors as they are in the file.
        where: the file, for messages.
        renames: key -> live name for keys that are no live names.

    Raises:
        CheckpointError: flat parameters of FSDP1, which have no names, or two keys that become one name.
    """
    keys = list(keys)
    if flat := [key for key in keys if any(_FLAT.fullmatch(part) for part in key.split("."))]:
        raise CheckpointError(
            f"{where} holds flat parameters of FSDP1 ({flat[0]}): slices of many tensors in one, without their names",
            fix="resume it once with the program that wrote it and save under fsdp_state_dict_type: SHARDED_STATE_DICT",
        )
    plain = {key: ".".join(part for part in key.split(".") if part not in _WRAPPERS) for key in keys}
    if live is None:
        is_ddp = all(name.startswith(_DDP) for name in plain.values())
    else:
        is_ddp = not any(name.startswith(_DDP) for name in live.names)
    first_names = {} if live is None else live.first_names
    names: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for key, name in plain.items():
        if is_ddp:
            name = name.removeprefix(_DDP)
        if live is not None and name not in live.names:
            name = (renames or {}).get(name, name)
        if name in first_names:
            aliases[first_names[name]] = key
        elif name in names:
            raise CheckpointError(
                f"{names[name]} and {key} of {where} are both {name}", fix="take a checkpoint of one model only"
            )
        else:
            names[name] = key
    return {**aliases, **names}


def names_of_numbers(
    groups: Sequence[Sequence[Any]], live_groups: Sequence[Sequence[str]], where: str
) -> dict[Any, str]:
    """Return parameter number -> name for an optimizer that numbers its parameters in the order of its groups.

    Raises:
        CheckpointError: the live optimizer has other groups, so that the numbers stand for other parameters.
    """
    sizes, live_sizes = [len(group) for group in groups], [len(group) for group in live_groups]
    if sizes != live_sizes:
        raise CheckpointError(
            f"{where} numbers its parameters, groups of {sizes}, and this run's optimizer has groups of {live_sizes}, "
            "so nobody can tell which number is which parameter",
            fix=f"train the same parameters with the same weight decay as before, or {FRESH_FIX}",
        )
    return {
        number: name
        for group, live_group in zip(groups, live_groups, strict=True)
        for number, name in zip(group, live_group, strict=True)
    }


# State that has the shape of its parameter, whatever the optimizer.
_SHAPED_KEYS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "exp_inf", "ax"}


def shape_problems(tensors: Mapping[tuple[str, str], tuple[int, ...]], live: LiveNames, where: str) -> list[Problem]:
    """Return what does not fit when ``(parameter, state key) -> shape`` is compared with the live parameters."""
    return [
        Problem(
            message=f"{key} of parameter {name} is {list(shape)} in {where} and the parameter is "
            f"{list(live.shapes[name])}",
            fix=f"train the same parameters as before, or {FRESH_FIX}",
        )
        for (name, key), shape in tensors.items()
        if key in _SHAPED_KEYS and name in live.shapes and shape != live.shapes[name]
    ]
