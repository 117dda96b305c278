"""Look at a sharded model and say what is really there; fail loudly when it is not what was asked.

Losses cannot tell FSDP from DDP. So after preparation the audit asks torch, unit by unit, which parameters it holds,
in which dtypes, and how much of each is on this rank.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_fsdp.errors import Problem, ShardingError
from hf_fsdp.policies.blocks import class_name
from hf_fsdp.policies.packed_weights import describe_quantization
from hf_fsdp.policies.wrap_plan import Unit
from hf_fsdp.sharding.agree import checksum
from hf_fsdp.sharding.apply import AppliedSharding, get_applied_sharding
from hf_fsdp.sharding.audit_parts import PartRow, describe_trained_parts
from hf_fsdp.sharding.mesh import agree_all, shard_axis_size
from hf_fsdp.sharding.shards import reshard_all
from hf_fsdp.sharding.training_proof import TrainingReport
from hf_fsdp.torch_private import local_shard, read_unit_state


@dataclass
class UnitRow:
    """One unit, as torch holds it. Counts are of parameters, `num_local` those on this rank."""

    name: str
    kind: str
    num_parameters: int
    num_local: int
    num_trained: int
    storage: str
    compute: str
    reduce: str
    output: str
    reshard_after_forward: bool
    names: tuple[str, ...]
    optimizer_state: str = "(none yet)"


@dataclass
class Audit:
    """What a sharded model is made of. Figures are read off the live model on this rank, none is estimated."""

    model_class: str
    world_size: int
    mesh: dict[str, int]
    precision: str
    units: list[UnitRow]
    num_parameters: int
    num_sharded: int
    num_local: int
    num_trained: int
    num_frozen: int
    ties: dict[str, list[str]]
    num_checkpointed_blocks: int
    num_blocks: int
    num_tensors_agreed: int
    tensors_taken_from_rank_0: list[str]
    weights_checksum: str
    replicas_equal: bool | None
    host_memory: str = ""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    activations: str = ""
    first_step: dict[str, Any] | None = None
    parts: list[PartRow] = field(default_factory=list)
    after_training: dict[str, Any] | None = None

    @property
    def sharded_share(self) -> float:
        """Share of the parameters that are split over ranks, 0 to 1."""
        return self.num_sharded / self.num_parameters if self.num_parameters else 0.0

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values, as `audit.json` holds them."""
        return {**asdict(self), "sharded_share": self.sharded_share}

    def __str__(self) -> str:
        from hf_fsdp.sharding.audit_table import render_audit

        return render_audit(self)

    def add_first_step(
        self, without_gradient: list[str], not_moved: list[str], optimizer_state_dtypes: dict[str, str]
    ) -> None:
        """Add what the first optimizer step showed: the dtype of its state by unit, and parameters left behind."""
        for row in self.units:
            found = sorted({optimizer_state_dtypes[name] for name in row.names if name in optimizer_state_dtypes})
            row.optimizer_state = "+".join(found) or ("-" if row.num_trained == 0 else "none")
        self.first_step = {"without_gradient": without_gradient, "not_moved": not_moved}

    def add_training(self, report: TrainingReport) -> None:
        """Add what the training changed: frozen parts as they were, trained ones moved."""
        self.after_training = report.to_mapping()

    def write(self, path: Path) -> None:
        """Write `audit.json`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_mapping(), indent=2) + "\n", encoding="utf-8")


def audit_sharding(model: nn.Module, optimizer: Optimizer | None = None) -> Audit:
    """Compare what torch holds with what `apply_fsdp` was asked for; collective.

    Args:
        model: a model that went through `apply_fsdp`.
        optimizer: when given, its parameters must be the sharded ones.

    Raises:
        ShardingError: with every deviation, on all ranks; above all when nothing is sharded.
    """
    applied = get_applied_sharding(model)
    if applied is None:
        raise ShardingError(
            f"{type(model).__name__} is not sharded by hf-fsdp: every rank holds all "
            f"{sum(p.numel() for p in model.parameters()):,} parameters",
            fix="give FSDPCallback() to Trainer(callbacks=[...]), or call apply_fsdp(model, config)",
        )
    reshard_all(model)
    problems = _check_parameters(model, applied) + _check_units(model, applied)
    if optimizer is not None:
        problems += _check_optimizer(model, optimizer)
    replicas_equal, replica_problems = _check_replicas(model, applied)
    everyone = agree_all([problem.message for problem in problems + replica_problems])
    if any(everyone):
        rank = next(rank for rank, found in enumerate(everyone) if found)
        mine = problems + replica_problems
        raise ShardingError(
            mine or [Problem(message=f"rank {rank} reports: {text}", fix=_FIX) for text in everyone[rank]]
        )
    return _describe(model, applied, replicas_equal, optimizer)


_FIX = "this is a bug of hf-fsdp or a change made to the model after it was sharded; report it with audit.json"


def _check_parameters(model: nn.Module, applied: AppliedSharding) -> list[Problem]:
    problems = []
    size = shard_axis_size(applied.mesh)
    rank = applied.mesh.get_local_rank(applied.mesh.ndim - 1)
    for name, parameter in model.named_parameters():
        if name in applied.replicated:
            continue
        if not isinstance(parameter, DTensor):
            kind = "trained parameter" if parameter.requires_grad else "parameter"
            problems.append(Problem(message=f"{kind} {name} is not sharded: this rank holds all of it", fix=_FIX))
            continue
        expected = _shard_numel(tuple(parameter.shape), size, rank)
        if local_shard(parameter).numel() != expected:
            problems.append(
                Problem(
                    message=f"{name} holds {local_shard(parameter).numel()} values here, its shard is {expected}",
                    fix=_FIX,
                )
            )
    for first, names in applied.ties.items():
        holders = dict(model.named_parameters(remove_duplicate=False))
        if len({id(holders.get(name)) for name in names}) != 1:
            problems.append(Problem(message=f"the tie between {' and '.join(names)} is broken ({first})", fix=_FIX))
    return problems


def _shard_numel(shape: tuple[int, ...], size: int, rank: int) -> int:
    """Values of a tensor that `rank` of `size` holds: rows are dealt in chunks of ceil(rows / size), as torch does."""
    chunk = math.ceil(shape[0] / size)
    rows = max(0, min(chunk, shape[0] - rank * chunk))
    return rows * math.prod(shape[1:])


def _check_units(model: nn.Module, applied: AppliedSharding) -> list[Problem]:
    problems = []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    planned_modules: set[int] = set()
    for unit, planned in applied.unit_names:
        planned_modules.update(id(module) for module in unit.modules)
        state = read_unit_state(unit.modules[0])
        if state is None:
            if planned:
                problems.append(Problem(message=f"unit {unit.label} was planned and does not exist", fix=_FIX))
            continue
        held = {names.get(id(parameter), "(unknown)") for parameter in state.parameters}
        expected = set(planned) - set(applied.replicated)
        if held != expected:
            odd = sorted(held ^ expected)[:3]
            problems.append(Problem(message=f"unit {unit.label} differs from its plan in {', '.join(odd)}", fix=_FIX))
        if state.mixed_precision != applied.precision.policy(unit.kind):
            problems.append(
                Problem(message=f"unit {unit.label} runs under {state.mixed_precision}, which is not ours", fix=_FIX)
            )
        if state.is_in_host_memory != isinstance(applied.offload, CPUOffloadPolicy) and held:
            where = "in host memory" if state.is_in_host_memory else "on the device"
            problems.append(
                Problem(message=f"unit {unit.label} is {where}, which offload.parameters does not say", fix=_FIX)
            )
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and id(module) not in planned_modules:
            problems.append(Problem(message=f"{name} is a unit that was not planned", fix=_FIX))
    return problems


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> list[Problem]:
    known = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [parameter for parameter in held if id(parameter) not in known]
    if strangers:
        message = (
            f"the optimizer holds {len(strangers)} parameters that are not the sharded ones, so they would not train"
        )
        return [Problem(message=message, fix=_FIX)]
    missing = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not any(parameter is other for other in held)
    ]
    if missing and len(held) == 0:
        return [Problem(message="the optimizer holds no parameter", fix=_FIX)]
    return []


def _check_replicas(model: nn.Module, applied: AppliedSharding) -> tuple[bool | None, list[Problem]]:
    """Under hybrid sharding every replica must hold the same shards."""
    if applied.mesh.ndim == 1:
        return None, []
    mine = {name: checksum(local_shard(parameter)) for name, parameter in model.named_parameters()}
    coordinate = applied.mesh.get_local_rank(applied.mesh.ndim - 1)
    everyone: list[tuple[int, dict[str, str]]] = agree_all((coordinate, mine))
    for rank, (other, theirs) in enumerate(everyone):
        if other == coordinate and theirs != mine:
            name = next(name for name in mine if theirs.get(name) != mine[name])
            return False, [Problem(message=f"{name} differs from its replica on rank {rank}", fix=_FIX)]
    return True, []


# -- description ------------------------------------------------------------------------------------------------------


def _describe(
    model: nn.Module, applied: AppliedSharding, replicas_equal: bool | None, optimizer: Optimizer | None
) -> Audit:
    parameters = dict(model.named_parameters())
    rows = [
        _describe_unit(unit, names, [parameters[name] for name in names], applied)
        for unit, names in applied.unit_names
        if names or unit.kind == "root"
    ]
    trained = sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in parameters.values())
    mesh_names = applied.mesh.mesh_dim_names or tuple(f"axis {i}" for i in range(applied.mesh.ndim))
    return Audit(
        model_class=class_name(model),
        world_size=applied.mesh.size(),
        mesh={name: applied.mesh.size(axis) for axis, name in enumerate(mesh_names)},
        precision=applied.precision.preset + (" (norms fp32)" if applied.precision.keep_norms_fp32 else ""),
        units=rows,
        num_parameters=total,
        num_sharded=sum(p.numel() for p in parameters.values() if isinstance(p, DTensor)),
        num_local=sum(local_shard(parameter).numel() for parameter in parameters.values()),
        num_trained=trained,
        num_frozen=total - trained,
        ties={first: list(names) for first, names in applied.ties.items()},
        num_checkpointed_blocks=applied.num_checkpointed,
        num_blocks=len(applied.plan.blocks),
        activations=applied.activations.describe() if applied.activations else "",
        num_tensors_agreed=applied.agreement.num_tensors,
        tensors_taken_from_rank_0=list(applied.agreement.replaced),
        weights_checksum=applied.agreement.checksum,
        replicas_equal=replicas_equal,
        host_memory=_describe_host_memory(applied),
        notes=[*applied.plan.notes, *describe_quantization(model)],
        warnings=list(applied.plan.warnings),
        parts=describe_trained_parts(model, optimizer),
    )


def _describe_unit(
    unit: Unit, names: tuple[str, ...], parameters: list[nn.Parameter], applied: AppliedSharding
) -> UnitRow:
    state = read_unit_state(unit.modules[0])
    policy = state.mixed_precision if state else applied.precision.policy(unit.kind)
    storage = sorted({_dtype_name(parameter.dtype) for parameter in parameters})
    return UnitRow(
        name=unit.label,
        kind=unit.kind,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_local=sum(local_shard(parameter).numel() for parameter in parameters),
        num_trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        storage="+".join(storage) or "-",
        compute=_dtype_name(policy.param_dtype),
        reduce=_dtype_name(policy.reduce_dtype),
        output=_dtype_name(policy.output_dtype or policy.param_dtype),
        reshard_after_forward=bool(state and state.reshard_after_forward),
        names=names,
    )


def _describe_host_memory(applied: AppliedSharding) -> str:
    if not isinstance(applied.offload, CPUOffloadPolicy):
        return ""
    return f"shards of parameters, gradients and optimizer{', pinned' if applied.offload.pin_memory else ''}"


def _dtype_name(dtype: torch.dtype | None) -> str:
    return "as stored" if dtype is None else str(dtype).removeprefix("torch.")
