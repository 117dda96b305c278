"""Shard a model in place: units, agreed weights, activation checkpointing, storage dtypes, optimizer parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.errors import ShardingError
from hf_fsdp.policies.activation import (
    ActivationPlan,
    apply_activations,
    disable_cache_in_training,
    plan_activations,
    turn_off_model_checkpointing,
)
from hf_fsdp.policies.frozen_inputs import release_frozen_inputs
from hf_fsdp.policies.host import build_offload_policy
from hf_fsdp.policies.packed_weights import keep_layout, move_quantization_state, quantization_tensors
from hf_fsdp.policies.precision import PrecisionTable, find_norms, resolve_precision
from hf_fsdp.policies.wrap import build_wrap_plan
from hf_fsdp.policies.wrap_plan import Unit, WrapPlan, is_chosen_by_data, shared_owners, unit_parameters
from hf_fsdp.sharding.agree import AgreementReport, agree_on_tensors, check_same_structure, prove_agreement
from hf_fsdp.sharding.fitness import refuse_unfit_model, refuse_unfit_plan
from hf_fsdp.sharding.gather import make_save_collective
from hf_fsdp.sharding.mesh import agreement_group, build_mesh
from hf_fsdp.sharding.missing_images import install_missing_images
from hf_fsdp.sharding.read_shards import read_shards, take_unread
from hf_fsdp.sharding.root_forward import install_root_hooks
from hf_fsdp.sharding.running_stats import install_running_stats

_ATTRIBUTE = "_hf_fsdp_sharding"


@dataclass(repr=False)
class AppliedSharding:
    """What `apply_fsdp` did to a model; the audit compares it with what torch holds.

    `unit_names` gives every unit's parameters by canonical name, `ties` the names of every shared tensor,
    `load_dtypes` the dtype each parameter had before, which `save_model` writes by default.
    """

    config: FSDPConfig
    precision: PrecisionTable
    plan: WrapPlan
    mesh: DeviceMesh
    unit_names: tuple[tuple[Unit, tuple[str, ...]], ...]
    ties: dict[str, tuple[str, ...]]
    load_dtypes: dict[str, torch.dtype]
    replicated: tuple[str, ...] = ()
    activations: ActivationPlan | None = None
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    replaced_model_checkpointing: bool = False
    agreement: AgreementReport = field(default_factory=AgreementReport)

    @property
    def num_checkpointed(self) -> int:
        """Blocks that are recomputed in backward."""
        return len(self.activations.checkpointed) if self.activations else 0

    def __repr__(self) -> str:
        return f"AppliedSharding({len(self.plan.units)} units, {self.precision.preset}, {self.mesh})"


def apply_fsdp(
    model: nn.Module,
    config: FSDPConfig | None = None,
    mesh: DeviceMesh | None = None,
    *,
    optimizers: Sequence[Optimizer] = (),
    device_type: str | None = None,
) -> AppliedSharding:
    """Shard `model` in place by FSDP2, the same way for any training loop; collective.

    Use it in your own loop before the optimizer is built, or hand the optimizers over to have their parameters
    replaced by the sharded ones. `FSDPCallback` calls it for Trainer.

    Args:
        model: any module on CPU or meta (rank 0 needs values); PEFT-wrapped and partly frozen models are fine.
        config: defaults to `FSDPConfig()`. `auto` values take their defaults: `bf16-mixed`, no checkpointing.
        mesh: 1-D (`dp_shard`) or 2-D (`dp_replicate`, `dp_shard`); default: all ranks, in the config's sizes.
        optimizers: built on `model`'s parameters, without state yet.
        device_type: `cuda`, `cpu`, …: where parameters go; default: where the process group reduces.

    Returns:
        The record that `audit_sharding` checks. A model that is sharded already is left as it is.

    Raises:
        WrapPolicyError, PrecisionError, ShardingError: before anything is changed, on all ranks alike.

    Example:
        >>> from hf_fsdp import FSDPConfig, apply_fsdp
        >>> # under torchrun, after torch.distributed.init_process_group():
        >>> # applied = apply_fsdp(model, FSDPConfig(precision="fp32"))
        >>> # optimizer = torch.optim.AdamW(model.parameters())
    """
    if (applied := get_applied_sharding(model)) is not None:
        return applied
    config = config or FSDPConfig()
    precision = resolve_precision(config.precision)
    refuse_unfit_model(model, config, precision)
    plan = build_wrap_plan(model, config.wrap, precision)
    refuse_unfit_plan(plan, config)
    activations = plan_activations(model, config, plan.blocks, plan.nested_modules)
    mesh = mesh if mesh is not None else build_mesh(config.sharding, device_type)
    offload = build_offload_policy(config.offload, mesh)
    agreement_group()
    check_same_structure(model)
    unread = take_unread(model)

    applied = AppliedSharding(
        config=config,
        precision=precision,
        plan=plan,
        mesh=mesh,
        activations=activations,
        offload=offload,
        unit_names=tuple((unit, tuple(parameters)) for unit, parameters in unit_parameters(plan)),
        ties=shared_owners(model),
        load_dtypes={name: parameter.dtype for name, parameter in model.named_parameters()},
    )
    held = [_parameter_names(optimizer, model) for optimizer in optimizers]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["params"] = []  # a reference from the optimizer would keep every whole parameter alive until the end
    applied.replaced_model_checkpointing = turn_off_model_checkpointing(model)
    release_frozen_inputs(model)
    apply_activations(model, activations)
    disable_cache_in_training(model)
    norm_ids = {id(module) for _, module in find_norms(model)} if precision.keep_norms_fp32 else set()
    storage = _storage_dtypes(model, precision, norm_ids)
    keep_layout(model)
    _shard_units(model, applied, unread)
    read_shards(model, unread, storage, applied)
    move_quantization_state(model, mesh.device_type)
    prove_agreement(applied.agreement)
    _cast_storage(model, storage)
    _set_prefetch(plan, config)
    for optimizer, names in zip(optimizers, held, strict=True):
        _attach_parameters(optimizer, model, names)
    _keep_class_names(model)
    if hasattr(model, "generate"):
        # Without this, generate() on a PEFT model meets sharded and whole tensors in one operation.
        register_fsdp_forward_method(model, "generate")
    make_save_collective(model, applied)
    install_root_hooks(model, precision.compute, [unit.modules[0] for unit in plan.units])
    install_running_stats(model)
    install_missing_images(model, mesh.device_type)
    setattr(model, _ATTRIBUTE, applied)
    return applied


def get_applied_sharding(model: nn.Module) -> AppliedSharding | None:
    """Return what `apply_fsdp` did to `model`, or None when it was not applied."""
    return getattr(model, _ATTRIBUTE, None)


def _keep_class_names(model: nn.Module) -> None:
    """Take back the `FSDP` that `fully_shard` puts before class names, and the module that it says they are from.

    Trainer and others decide by them: label smoothing shifts the labels of `LlamaForCausalLM` and not of
    `FSDPLlamaForCausalLM`, and a class from outside transformers counts as custom code, whose weights are saved under
    names that `from_pretrained` does not find again (DeepSeek V4).
    """
    for cls in {type(module) for module in model.modules() if isinstance(module, FSDPModule)}:
        original = cls.__bases__[-1]
        cls.__name__ = cls.__qualname__ = original.__name__
        cls.__module__ = original.__module__


# -- units ------------------------------------------------------------------------------------------------------------


def _shard_units(model: nn.Module, applied: AppliedSharding, unread: Collection[str]) -> None:
    root_owned = {parameter for name, parameter in model.named_parameters() if name in applied.plan.root_owned}
    # A frozen scalar needs no reduction, so every rank simply keeps it.
    scalars = {parameter for parameter in model.parameters() if parameter.dim() == 0}
    applied.replicated = tuple(name for name, parameter in model.named_parameters() if parameter.dim() == 0)
    done: set[int] = set()
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()  # fully_shard refuses others
    for unit, names in applied.unit_names:
        tensors = _unit_tensors(model, unit, names, done)
        if to_agree := {name: held for name, held in tensors.items() if name not in unread}:
            agree_on_tensors(to_agree, applied.agreement)
        if not names and unit.kind != "root":
            continue
        modules = list(unit.modules)
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=applied.mesh,
            mp_policy=applied.precision.policy(unit.kind),
            reshard_after_forward=_reshard(unit, applied.config),
            offload_policy=applied.offload,
            ignored_params=scalars if unit.kind == "root" else scalars | root_owned,
        )
        count_missing_gradients: Any = getattr(modules[0], "set_reduce_scatter_unused_params", None)  # torch 2.13
        if count_missing_gradients is not None and is_chosen_by_data(names):
            count_missing_gradients(True, recurse=False)
    for parameter in scalars:
        parameter.data = parameter.data.to(applied.mesh.device_type)


def _reshard(unit: Unit, config: FSDPConfig) -> bool:
    # The root, the head and the norms are needed again as soon as backward starts.
    return config.sharding.reshard_after_forward and unit.kind in ("block", "embedding")


def _unit_tensors(model: nn.Module, unit: Unit, names: tuple[str, ...], done: set[int]) -> dict[str, tuple[Any, str]]:
    """Parameters and buffers to agree on before this unit is sharded: name -> (holder, attribute)."""
    tensors: dict[str, tuple[Any, str]] = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        tensors[name] = (model.get_submodule(path), attribute)
    prefixes = dict(zip(unit.names, unit.modules, strict=True))
    for prefix, module in prefixes.items():
        for path, submodule in module.named_modules():
            for attribute, buffer in submodule.named_buffers(recurse=False):
                if buffer is not None and id(buffer) not in done:
                    done.add(id(buffer))
                    tensors[".".join(part for part in (prefix, path, attribute) if part)] = (submodule, attribute)
            if id(submodule) not in done:
                done.add(id(submodule))
                tensors.update(quantization_tensors(".".join(part for part in (prefix, path) if part), submodule))
            if unit.kind == "root":
                for attribute, parameter in submodule.named_parameters(recurse=False):
                    if parameter.dim() == 0:
                        tensors[".".join(part for part in (path, attribute) if part)] = (submodule, attribute)
    return tensors


# -- storage ----------------------------------------------------------------------------------------------------------


def _storage_dtypes(model: nn.Module, precision: PrecisionTable, norm_ids: set[int]) -> dict[str, torch.dtype]:
    dtypes = {}
    for path, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}" if path else attribute
            dtypes[name] = precision.storage_dtype(parameter, is_norm=id(module) in norm_ids)
    return dtypes


def _cast_storage(model: nn.Module, storage: dict[str, torch.dtype]) -> None:
    """Give every shard its storage dtype: after sharding, so that the larger copy never exists whole on the host."""
    wanted = {id(parameter): storage[name] for name, parameter in model.named_parameters()}

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        dtype = wanted.get(id(tensor), tensor.dtype)
        return tensor.to(dtype) if isinstance(tensor, DTensor) and tensor.dtype != dtype else tensor

    if any(parameter.dtype != wanted[id(parameter)] for parameter in model.parameters()):
        model._apply(cast)


def _set_prefetch(plan: WrapPlan, config: FSDPConfig) -> None:
    """Let every block gather the next `forward_prefetch` and the previous `backward_prefetch` blocks early.

    FSDP2 itself prefetches one unit in backward and none in forward, where the next gather already overlaps unless
    the CPU is late; so those two values need no call.
    """
    if config.sharding.backward_prefetch == 0:
        for module in (unit.modules[0] for unit in plan.units):
            if isinstance(module, FSDPModule):  # torch takes an empty list for its default; itself is gathered already
                module.set_modules_to_backward_prefetch([module])
    for forward, backward in plan.gather_orders:
        for units, num_ahead, is_forward in (
            (forward, config.sharding.forward_prefetch, True),
            (backward, config.sharding.backward_prefetch, False),
        ):
            gathered: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
            for index, unit in enumerate(gathered):
                ahead = gathered[index + 1 : index + 1 + num_ahead]
                if is_forward and ahead:
                    unit.set_modules_to_forward_prefetch(ahead)
                elif not is_forward and num_ahead > 1:
                    unit.set_modules_to_backward_prefetch(ahead)


# -- optimizers -------------------------------------------------------------------------------------------------------


def _parameter_names(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Return the names of `optimizer`'s parameters by group.

    By name and not by data pointer: the empty shards of small parameters all have pointer 0.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if optimizer.state:
        raise ShardingError(
            "the optimizer already has state for parameters that are not sharded yet",
            fix="shard the model before the first optimizer step: call apply_fsdp (or accelerator.prepare) first",
        )
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if strangers:
        raise ShardingError(
            f"the optimizer holds {len(strangers)} parameters that are not in the model "
            f"(shape {list(strangers[0].shape)})",
            fix="build the optimizer from model.parameters() of the model that you train",
        )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _attach_parameters(optimizer: Optimizer, model: nn.Module, held: list[list[str]]) -> None:
    parameters = dict(model.named_parameters())
    for group, names in zip(optimizer.param_groups, held, strict=True):
        group["params"] = [parameters[name] for name in names]
