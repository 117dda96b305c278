"""Fill a model's local shards from files: every rank reads its own boxes of every tensor and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from hf_fsdp.errors import CheckpointError, Problem
from hf_fsdp.sharding.buffers import named_persistent_buffers
from hf_fsdp.sharding.shards import local_box, local_tensor, reshard_all
from hf_fsdp.storage.tensor_source import TensorSource

_SHOWN = 5


@dataclass
class ReadReport:
    """What `read_into_model` did on this rank.

    `missing` are tensors of the model that the source has not (left as they were), `unused` tensors of the source
    that the model has no place for.
    """

    num_tensors: int = 0
    num_bytes: int = 0
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def read_into_model(
    model: nn.Module,
    source: TensorSource,
    names: Mapping[str, str] | None = None,
    *,
    strict: bool = True,
    on_bytes: Callable[[int], None] | None = None,
) -> ReadReport:
    """Fill the parameters and persistent buffers of a model from `source`, each rank its own part.

    Not collective: a rank that cannot read raises alone, so call it under `outcome.agreed`. Names, shapes and dtypes
    are compared before a byte is read. Tied weights are one tensor, found under any of their names. Values are cast
    to the dtype that the model holds.

    Args:
        model: sharded (DTensors) or not (plain tensors), with storage. Gathered units are freed first.
        source: whole tensors by name.
        names: name in the model -> name in `source`: exactly these are filled. Default: every parameter and
            persistent buffer, under its own name.
        strict: whether a tensor that is missing in `source`, or one of `source` that has no place in the model, is
            an error. They are reported else. Shapes that differ are always one.
        on_bytes: called with the number of bytes after every tensor, for a progress bar.

    Raises:
        CheckpointError: with every difference, or the damage of a file.
    """
    reshard_all(model)
    targets = _targets(model)
    aliases = _aliases(targets)
    report = ReadReport()
    wanted: dict[int, tuple[torch.Tensor, str]] = {}
    problems = []
    used = set()
    for name in targets if names is None else names:
        if name not in targets:
            problems.append(_problem(f"{name} is no parameter or persistent buffer of {type(model).__name__}"))
            continue
        tensor = targets[name]
        known = [name] if names is not None else aliases[id(tensor)]
        keys = [key for key in ((names or {}).get(alias, alias) for alias in known) if key in source.tensors]
        used.update(keys)
        if not keys:
            report.missing.append(name)
        elif source.tensors[keys[0]].shape != tuple(tensor.shape):
            shape = list(source.tensors[keys[0]].shape)
            problems.append(_problem(f"{name} is {list(tensor.shape)} in the model and {shape} in the files"))
        else:
            wanted[id(tensor)] = (tensor, keys[0])
    report.unused = [name for name in source.tensors if name not in used]
    if strict:
        problems += [_problem(f"{name} is in the model and not in the files") for name in report.missing]
        problems += [_problem(f"{name} is in the files and not in the model") for name in report.unused]
    if problems:
        raise CheckpointError(problems[:_SHOWN])
    for tensor, key in wanted.values():
        num_bytes = read_local(tensor, source, key)
        report.num_tensors += 1
        report.num_bytes += num_bytes
        if on_bytes is not None:
            on_bytes(num_bytes)
    return report


def read_local(tensor: torch.Tensor, source: TensorSource, key: str) -> int:
    """Fill this rank's part of `tensor` in place from tensor `key`, which has the same whole shape.

    Returns:
        How many bytes of it this rank holds.
    """
    local = local_tensor(tensor)
    with torch.no_grad():
        if local.numel():
            source.read(key, local_box(tensor).offsets, local)
    return local.numel() * local.element_size()


def _targets(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(named_persistent_buffers(model))}


def _aliases(targets: Mapping[str, torch.Tensor]) -> dict[int, list[str]]:
    aliases: dict[int, list[str]] = {}
    for name, tensor in targets.items():
        aliases.setdefault(id(tensor), []).append(name)
    return aliases


def _problem(message: str) -> Problem:
    return Problem(message=message, fix="build the model as it was when it was saved: same config, same adapters")
