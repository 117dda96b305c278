"""Another program's optimizer state in our form: tensors by parameter name, the rest for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_fsdp.checkpoint.foreign.dcp_metadata import DcpFolder, read_dcp_folder
from hf_fsdp.checkpoint.foreign.dcp_source import DcpSource, read_value
from hf_fsdp.checkpoint.foreign.mapped_source import MappedSource
from hf_fsdp.checkpoint.foreign.names import LiveNames, canonical_names, names_of_numbers, shape_problems
from hf_fsdp.checkpoint.foreign.torch_file import load_torch_file
from hf_fsdp.checkpoint.json_state import encode_state
from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.tensor_source import EmptySource, TensorSource, read_whole

_ROOT, _STATE, _GROUPS, _PARAMS = "optimizer", "state", "param_groups", "params"
_FIX = "take another checkpoint, or checkpoint: {optimizer: fresh}"


@dataclass
class ForeignOptimizer:
    """What a file or a folder holds of an optimizer, by parameter name.

    Args:
        source: tensors named ``state.<parameter>.<key>``; None when there is no state at all.
        groups: as `optimizer_state.OptimizerState.groups`, for `load_optimizer_state`.
        missing: what is not there, in plain words.
    """

    source: TensorSource | None
    groups: dict[str, Any]
    missing: list[str] = field(default_factory=list)


@dataclass
class _Raw:
    """State as the file has it: parameter (name or number) -> state key -> where the value is."""

    where: str
    state: dict[Any, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


def open_optimizer_file(path: Path, live: LiveNames | None) -> ForeignOptimizer:
    """Return the content of `optimizer.bin` (Accelerate, FULL_STATE_DICT) or `optimizer.pt` (Trainer).

    Raises:
        CheckpointError: the file is damaged or hostile, or numbers parameters that the live optimizer does not have.
    """
    content = load_torch_file(path)
    if not isinstance(content, dict) or not isinstance(content.get(_STATE), dict):
        raise CheckpointError(f"{path} holds no state of an optimizer", fix=_FIX)
    raw = _Raw(str(path), content[_STATE], content.get(_GROUPS) or [])
    if _is_numbered(raw) and (live is None or live.groups is None):
        unread = f"optimizer state: {path.name} numbers its parameters, and without this run's optimizer"
        return ForeignOptimizer(None, {}, [f"{unread} nobody can tell which is which"])
    names, groups = _name_parameters(raw, live)
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, key, value in _entries(raw, names):
        if isinstance(value, torch.Tensor):
            tensors[f"{_STATE}.{name}.{key}"] = value
        else:
            scalars.setdefault(name, {})[key] = encode_state(value, f"{path}: {name}.{key}")
    _check_shapes(raw, names, live, lambda value: tuple(value.shape) if isinstance(value, torch.Tensor) else None)
    return _finish(MappedSource(tensors, str(path)), scalars, groups)


def open_optimizer_folder(folder: Path, live: LiveNames | None) -> ForeignOptimizer:
    """Return the content of `optimizer_0/` (Accelerate, SHARDED_STATE_DICT).

    Raises:
        CheckpointError: as `read_dcp_folder`, or state that belongs to no parameter.
    """
    dcp = read_dcp_folder(folder)
    raw = _Raw(str(folder))
    raw.groups = _dcp_groups(dcp)
    for key, path in dcp.paths.items():
        if path[:2] == (_ROOT, _STATE) and len(path) == 4:
            raw.state.setdefault(path[2], {})[str(path[3])] = key
    names, groups = _name_parameters(raw, live)
    keys: dict[str, str] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, state_key, key in _entries(raw, names):
        if key in dcp.tensors:
            keys[f"{_STATE}.{name}.{state_key}"] = key
        else:
            scalars.setdefault(name, {})[state_key] = encode_state(read_value(dcp, key), f"{folder}: {key}")
    _check_shapes(raw, names, live, lambda key: dcp.tensors[key].shape if key in dcp.tensors else None)
    return _finish(DcpSource(dcp, keys), scalars, groups)


def _dcp_groups(dcp: DcpFolder) -> list[dict[str, Any]]:
    """DCP stores every hyperparameter of every group as a value of its own."""
    groups: dict[int, dict[str, Any]] = {}
    for key, path in dcp.paths.items():
        if path[:2] != (_ROOT, _GROUPS):
            continue
        if len(path) != 4 or not isinstance(path[2], int):
            raise CheckpointError(f"{dcp.path}: {key} is no hyperparameter of a group", fix=_FIX)
        if key in dcp.tensors:  # a learning rate that is a tensor
            with closing(DcpSource(dcp, {key: key})) as source:
                value: Any = read_whole(source, key)
        else:
            value = read_value(dcp, key)
        groups.setdefault(path[2], {})[str(path[3])] = value
    return [groups[index] for index in sorted(groups)]


def _name_parameters(raw: _Raw, live: LiveNames | None) -> tuple[dict[Any, str], list[dict[str, Any]]]:
    """Return parameter as the file has it -> name, and the groups with their parameters' names."""
    names: dict[Any, str]
    parameters = _parameters(raw)
    if _is_numbered(raw):
        groups_of_numbers = [group[_PARAMS] for group in raw.groups]
        names = names_of_numbers(groups_of_numbers, (live and live.groups) or (), raw.where)
    else:
        names = {key: name for name, key in canonical_names(parameters, live, raw.where).items()}
        # A tied tensor was listed under two names: what is left out belongs to the first.
        names.update({key: _first(key, live) for key in parameters if key not in names})
    groups = [
        {
            "params": list(dict.fromkeys(names[parameter] for parameter in group[_PARAMS])),
            "settings": encode_state(
                {key: value for key, value in group.items() if key not in (_PARAMS, "param_names")}, raw.where
            ),
        }
        for group in raw.groups
    ]
    return names, groups


def _is_numbered(raw: _Raw) -> bool:
    return any(not isinstance(parameter, str) for parameter in _parameters(raw))


def _parameters(raw: _Raw) -> list[Any]:
    for group in raw.groups:
        if not isinstance(group, dict) or not isinstance(group.get(_PARAMS), list):
            raise CheckpointError(f"{raw.where} has a group without parameters", fix=_FIX)
    listed = [parameter for group in raw.groups for parameter in group[_PARAMS]]
    if not all(isinstance(parameter, str | int) for parameter in [*listed, *raw.state]):
        raise CheckpointError(f"{raw.where} has parameters that are neither names nor numbers", fix=_FIX)
    if strangers := set(raw.state) - set(listed):
        raise CheckpointError(
            f"{raw.where} has state of {len(strangers)} parameters that are in none of its groups", fix=_FIX
        )
    return listed


def _first(key: str, live: LiveNames | None) -> str:
    return key if live is None else live.first_names.get(key, key)


def _entries(raw: _Raw, names: Mapping[Any, str]) -> Iterable[tuple[str, str, Any]]:
    for parameter, state in raw.state.items():
        if not isinstance(state, dict):
            raise CheckpointError(f"{raw.where}: the state of {names[parameter]} is not a mapping", fix=_FIX)
        for key, value in state.items():
            yield names[parameter], str(key), value


def _check_shapes(raw: _Raw, names: Mapping[Any, str], live: LiveNames | None, shape_of: Any) -> None:
    if live is None:
        return
    shapes = {(name, key): shape_of(value) for name, key, value in _entries(raw, names)}
    problems = shape_problems({place: shape for place, shape in shapes.items() if shape is not None}, live, raw.where)
    if problems:
        raise CheckpointError(problems[:5])


def _finish(source: TensorSource, scalars: dict[str, dict[str, Any]], groups: list[dict[str, Any]]) -> ForeignOptimizer:
    if not source.tensors and not scalars and all(_keeps_no_state(group["settings"]) for group in groups):
        return ForeignOptimizer(EmptySource(), {"class": None, "groups": groups, "scalars": {}, "without_state": []})
    with_state = {name.removeprefix(f"{_STATE}.").rpartition(".")[0] for name in source.tensors} | set(scalars)
    return ForeignOptimizer(
        source if with_state else None,
        {
            "class": None,  # neither program writes it down
            "groups": groups,
            "scalars": scalars,
            "without_state": [name for group in groups for name in group["params"] if name not in with_state],
        },
    )


def _keeps_no_state(settings: Mapping[str, Any]) -> bool:
    """SGD without momentum: nothing is lost when its file holds no state."""
    return "dampening" in settings and settings.get("momentum") == 0
