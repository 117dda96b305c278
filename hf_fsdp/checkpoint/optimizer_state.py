"""The optimizer's state by parameter name: independent of groups, of units and of the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_fsdp.checkpoint.json_state import decode_state, encode_state
from hf_fsdp.errors import CheckpointError, Problem, nearest_names
from hf_fsdp.sharding.shards import as_shard, local_box
from hf_fsdp.storage.tensor_source import TensorSource

_PREFIX = "state."
# How a step is computed, and not what it gives: each run decides by its own device and arguments.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
FRESH_FIX = "checkpoint: {optimizer: fresh} to go on with these weights and a fresh optimizer"


@dataclass(frozen=True)
class OptimizerState:
    """What is saved of an optimizer.

    Args:
        tensors: ``state.<parameter>.<key>`` -> tensor, sharded like its parameter where it has its shape.
        groups: for JSON: the class, each group's hyperparameters and parameter names, state that is no tensor, the
            parameters that had no state because they never got a gradient, and the state that was a plain tensor of
            this rank's part.
    """

    tensors: dict[str, torch.Tensor]
    groups: dict[str, Any]


def read_optimizer_state(model: nn.Module, optimizer: Optimizer) -> OptimizerState:
    """Return what a checkpoint of `optimizer` holds; nothing is copied.

    Raises:
        CheckpointError: state that is neither the parameter's shape, nor one number: rank-local blocks of which no
            other number of ranks could make sense; tensors inside containers; state that belongs to no parameter.
    """
    _refuse_what_is_nowhere(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    groups = []
    without_state = []
    plain = []
    for group in optimizer.param_groups:
        held = [names[id(parameter)] for parameter in group["params"]]
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"params": held, "settings": encode_state(settings, "the optimizer's param_groups")})
        for name, parameter in zip(held, group["params"], strict=True):
            state = optimizer.state.get(parameter)
            if not state:
                without_state.append(name)
                continue
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{_PREFIX}{name}.{key}"] = saved = _as_sharded(name, key, value, parameter)
                    if saved is not value:
                        plain.append(f"{name}.{key}")
                else:
                    if _holds_tensors(value):
                        raise CheckpointError(
                            f"the optimizer keeps tensors inside a {type(value).__name__} in {key} of {name}: each "
                            "rank has its own, and nothing says how they belong together",
                            fix="keep each tensor under a key of its own in optimizer.state[parameter]",
                        )
                    scalars.setdefault(name, {})[key] = encode_state(value, f"optimizer state {name}.{key}")
    return OptimizerState(
        tensors,
        {
            "class": type(optimizer).__name__,
            "groups": groups,
            "scalars": scalars,
            "without_state": without_state,
            "plain": plain,
        },
    )


def _refuse_what_is_nowhere(optimizer: Optimizer) -> None:
    """Raise for state that `optimizer` keeps beside that of its parameters: a checkpoint would lose it."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = [f"state[{key!r}]" for key, value in optimizer.state.items() if id(key) not in parameters and value]
    if type(optimizer).state_dict is not Optimizer.state_dict:
        found += [f"state_dict()[{key!r}]" for key in optimizer.state_dict() if key not in ("state", "param_groups")]
    if found:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps {', '.join(found[:3])}, which belongs to no parameter and would not be "
            "saved",
            fix="keep it in param_groups, or in the state of a parameter",
        )


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_holds_tensors(item) for item in value)
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _as_sharded(name: str, key: str, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the state as a DTensor when it is a plain tensor in the shape of a sharded parameter's local part."""
    if isinstance(value, DTensor) or value.numel() == 1 or not isinstance(parameter, DTensor):
        return value
    if tuple(value.shape) == local_box(parameter).shape:
        return as_shard(value, parameter)
    raise CheckpointError(
        f"the optimizer keeps {key} {list(value.shape)} for this rank's part of {name} "
        f"{list(local_box(parameter).shape)}, which no other run could read",
        fix='optim="adamw_torch_fused", whose state has the shape of the parameters',
    )


def load_optimizer_state(
    model: nn.Module,
    optimizer: Optimizer,
    source: TensorSource,
    groups: Mapping[str, Any],
    saved_dtypes: Mapping[str, torch.dtype] | None = None,
) -> int:
    """Give `optimizer` the saved state, each rank reading its own part only.

    Args:
        model: the sharded model that the optimizer trains.
        optimizer: fresh, or with state that is replaced.
        source: tensors named ``state.<parameter>.<key>``.
        groups: what `OptimizerState.groups` held.
        saved_dtypes: of the parameters. State that was in its parameter's dtype gets the one that it has now.

    Returns:
        The number of parameters that got state.

    Raises:
        CheckpointError: another optimizer, other groups, or state that is missing; before anything is changed.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    keys = _keys_by_parameter(source, groups)
    pairs = _match_groups(optimizer, names, groups)
    without, plain = set(groups.get("without_state", ())), set(groups.get("plain", ()))
    lacking = [
        name
        for group, _ in pairs
        for name in (names[id(parameter)] for parameter in group["params"])
        if name not in keys and name not in without and name not in groups.get("scalars", {})
    ]
    # Ours lists what had none; of another program's, state that is empty altogether may be that of plain SGD.
    if lacking and (keys or groups.get("class") is not None):
        raise CheckpointError(
            f"the checkpoint has no optimizer state for {len(lacking)} trained parameters, the first {lacking[0]}",
            fix=FRESH_FIX,
        )
    optimizer.state.clear()
    for group, saved in pairs:
        settings = {key: value for key, value in decode_state(saved["settings"]).items() if key not in _IMPLEMENTATION}
        group.update({key: _like(settings[key], group.get(key)) for key in settings})
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            name = names[id(parameter)]
            was = (saved_dtypes or {}).get(name, parameter.dtype)
            state = {key: _read(source, f"{_PREFIX}{name}.{key}", parameter, on_device) for key in keys.get(name, ())}
            state = {key: _followed(value, parameter, was) for key, value in state.items()}
            for key in state:
                if f"{name}.{key}" in plain and isinstance(value := state[key], DTensor):
                    state[key] = value.to_local()
            scalars = groups.get("scalars", {}).get(name, {})
            state.update({key: decode_state(value) for key, value in scalars.items()})
            if state:
                optimizer.state[parameter] = state
    return len(optimizer.state)


def _keys_by_parameter(source: TensorSource, groups: Mapping[str, Any]) -> dict[str, list[str]]:
    parameters = {name for group in groups["groups"] for name in group["params"]}
    keys: dict[str, list[str]] = {}
    for name in source.tensors:
        parameter, _, key = name.removeprefix(_PREFIX).rpartition(".")
        while parameter not in parameters and "." in parameter:  # a key may have dots of its own
            parameter, _, start = parameter.rpartition(".")
            key = f"{start}.{key}"
        keys.setdefault(parameter, []).append(key)
    return keys


def _followed(value: torch.Tensor, parameter: torch.Tensor, was: torch.dtype) -> torch.Tensor:
    """Cast state that was in its parameter's dtype with it, as torch does: its steps want them alike."""
    return value.to(parameter.dtype) if value.dim() and value.dtype == was else value


def _match_groups(
    optimizer: Optimizer, names: Mapping[int, str], groups: Mapping[str, Any]
) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Return each live group with the saved one that has its parameters."""
    saved_class = groups.get("class")
    problems = []
    if saved_class is not None and saved_class != type(optimizer).__name__:
        problems.append(
            Problem(
                message=f"the checkpoint holds the state of {saved_class} and this run uses {type(optimizer).__name__}",
                fix=f"the optimizer that the checkpoint was trained with, or {FRESH_FIX}",
            )
        )
    saved_of = {name: index for index, group in enumerate(groups["groups"]) for name in group["params"]}
    pairs = []
    for index, group in enumerate(optimizer.param_groups):
        held = [names[id(parameter)] for parameter in group["params"]]
        strangers = [name for name in held if name not in saved_of]
        if strangers:
            near = nearest_names(strangers[0], saved_of)
            problems.append(
                Problem(
                    message=f"this run trains {strangers[0]} and {len(strangers) - 1} more parameters that the "
                    "optimizer of the checkpoint did not have",
                    near=", ".join(near) or None,
                    fix=f"train the same parameters (adapter rank, targets, frozen parts) as before, or {FRESH_FIX}",
                )
            )
            continue
        owners = {saved_of[name] for name in held}
        if len(owners) > 1:
            problems.append(
                Problem(
                    message=f"the optimizer's group {index} is split over {len(owners)} groups of the checkpoint, "
                    "so its learning rate and decay are not known",
                    fix=f"the same groups (weight decay, learning rates) as before, or {FRESH_FIX}",
                )
            )
        elif owners:
            pairs.append((group, groups["groups"][owners.pop()]))
    if not problems and len(optimizer.param_groups) != len(groups["groups"]):
        problems.append(
            Problem(
                message=f"the optimizer has {len(optimizer.param_groups)} groups and that of the checkpoint "
                f"{len(groups['groups'])}, so which learning rates and schedules go on is not known",
                fix=f"the same groups (weight decay, learning rates) as before, or {FRESH_FIX}",
            )
        )
    if problems:
        raise CheckpointError(problems)
    return pairs


def _read(source: TensorSource, name: str, parameter: torch.Tensor, on_device: bool) -> torch.Tensor:
    info = source.tensors[name]
    if len(info.shape) == 0:  # a step count: one number for all ranks
        value = torch.empty(info.shape, dtype=info.dtype)
        source.read(name, (), value)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return value.to(local.device) if on_device else value
    if not isinstance(parameter, DTensor) or info.shape != tuple(parameter.shape):
        value = torch.empty(info.shape, dtype=info.dtype, device=parameter.device)
        source.read(name, (0,) * len(info.shape), value)
        return value
    box = local_box(parameter)
    local = torch.empty(box.shape, dtype=info.dtype, device=parameter.to_local().device)
    source.read(name, box.offsets, local)
    return as_shard(local, parameter)


def _like(saved: Any, live: Any) -> Any:
    """Give a hyperparameter the type that the live optimizer has it in (a learning rate may be a tensor)."""
    if isinstance(live, torch.Tensor) and not isinstance(saved, torch.Tensor):
        return torch.as_tensor(saved, dtype=live.dtype, device=live.device)
    if isinstance(live, tuple) and isinstance(saved, list):
        return tuple(saved)
    return saved


def changed_settings(optimizer: Optimizer, groups: Mapping[str, Any]) -> list[str]:
    """Return what this run asks of its optimizer otherwise than the saved groups say, as ``lr 0.1 (this run: 0.2)``."""
    found: dict[str, None] = {}
    for group, saved in zip(optimizer.param_groups, groups["groups"], strict=False):
        settings = decode_state(saved["settings"])
        for key in ("initial_lr", "betas", "eps", "weight_decay", "momentum", "alpha"):
            if key in settings and key in group and _like(settings[key], group[key]) != group[key]:
                found[f"{key.removeprefix('initial_')} {settings[key]} (this run: {group[key]})"] = None
    return list(found)
