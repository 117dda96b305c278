"""The seams into Accelerate: methods that hand over to the backend while one is attached, and to Accelerate else.

Why seams at all: Accelerate drops FSDP on CPU, wants an optimizer beside every model, maps parameters by data
pointer, and sets its own precision. A `TrainerCallback` is not given the trainer, so the only place through which
Trainer, its subclasses and plain Accelerate loops all pass is `Accelerator.prepare`.

Every name used here is pinned by `tests/unit/test_seams.py`, which fails when upstream moves it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.optim import Optimizer

from hf_fsdp.errors import IntegrationError
from hf_fsdp.integrations.loss_scaling import install_state_seam, unscale_gradients
from hf_fsdp.integrations.optimizers import raw_optimizer
from hf_fsdp.sharding.apply import get_applied_sharding
from hf_fsdp.sharding.gather import gather_state_dict

_BACKEND = "_hf_fsdp_backend"
_SEAM = "_hf_fsdp_seam"


class Backend(Protocol):
    """What the seams call; `FSDPCallback` brings one."""

    def shard(self, model: nn.Module, optimizers: list[Optimizer], device_type: str) -> None:
        """Shard `model` in place onto `device_type` and give `optimizers` the sharded parameters."""

    def shard_frozen(self, model: nn.Module, device_type: str) -> None:
        """Shard a model that is only run: a reference, a teacher, a reward model."""

    def set_scaler(self, accelerator: Accelerator, optimizers: list[Optimizer]) -> None:
        """Give `accelerator` the loss scaler that the precision asks for, or none."""

    def after_scaled_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Look at a step that was tried under loss scaling."""

    def observe_loss(self, loss: torch.Tensor) -> None:
        """Look at a micro-batch's own loss before backward."""


def install_seams() -> None:
    """Put the seams in place, once; before `Accelerator(...)` is built, or CPU runs are no FSDP runs."""
    replace_method(AcceleratorState, "__init__", _init_state)
    replace_method(Accelerator, "prepare", _prepare)
    replace_method(Accelerator, "prepare_model", _prepare_model)
    replace_method(Accelerator, "clip_grad_norm_", _clip_grad_norm)
    replace_method(Accelerator, "backward", _backward)
    replace_method(Accelerator, "unscale_gradients", _unscale_gradients)
    replace_method(AcceleratedOptimizer, "step", _optimizer_step)
    install_state_seam()
    replace_method(Accelerator, "get_state_dict", _get_state_dict)


def attach_backend(backend: Backend) -> None:
    """Make `backend` the one in force for the accelerator that exists now."""
    setattr(AcceleratorState().fsdp_plugin, _BACKEND, backend)


def active_backend(state: AcceleratorState | None = None) -> Backend | None:
    """Return the attached backend, or None when stock Accelerate is in force."""
    state = state or AcceleratorState()
    return getattr(getattr(state, "fsdp_plugin", None), _BACKEND, None)


def current_plugin() -> Any | None:
    """Return the FSDP plugin of the accelerator that exists now, or None when FSDP is off."""
    if not AcceleratorState._shared_state:
        return None
    return getattr(AcceleratorState(), "fsdp_plugin", None)


def set_checkpoint_format(format: str) -> None:
    """Make Trainer's checkpoints `full` or `sharded`, whatever the plugin was built with."""
    plugin = current_plugin()
    assert plugin is not None
    # Both are kept from the earlier type and would contradict the new one.
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type("FULL_STATE_DICT" if format == "full" else "SHARDED_STATE_DICT")


def set_sync_each_batch(enabled: bool) -> None:
    """Say whether every micro-batch reduces its gradients (Trainer asks this before it enters `no_sync`)."""
    GradientState().plugin_kwargs["sync_each_batch"] = enabled


def check_parallelism() -> str | None:
    """Return a kind of parallelism that is on and that this release does not shard under, or None."""
    config = getattr(AcceleratorState(), "parallelism_config", None)
    if config is None:
        return None
    sizes = {"tp_size": config.tp_size, "cp_size": config.cp_size, "sp_size": getattr(config, "sp_size", 1)}
    on = [f"{name}={size}" for name, size in sizes.items() if (size or 1) > 1]
    return ", ".join(on) or None


def replace_method(cls: type, name: str, replacement: Callable[..., Any]) -> None:
    """Let ``replacement(original, self, ...)`` answer for ``cls.name``, once however often this is called."""
    original = getattr(cls, name)
    if is_seam(original):
        return

    @functools.wraps(original)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(functools.partial(original, self), self, *args, **kwargs)

    mark_seam(dispatch)
    setattr(cls, name, dispatch)


def mark_seam(function: Callable[..., Any]) -> None:
    """Remember that `function` hands over already."""
    setattr(function, _SEAM, True)


def is_seam(function: Any) -> bool:
    """Return whether `function` was put in place by this package."""
    return hasattr(function, _SEAM)


def _init_state(original: Callable[..., Any], state: AcceleratorState, *args: Any, **kwargs: Any) -> None:
    """Keep the FSDP plugin on CPU, where Accelerate drops it and would train DDP without a word.

    `PartialState` must say FSDP too: without it training is sharded, but saving takes the DDP path.
    """
    original(*args, **kwargs)
    plugin = kwargs.get("fsdp_plugin")
    if plugin is None or state.distributed_type != DistributedType.MULTI_CPU:
        return
    if plugin.fsdp_version != 2:
        return  # FSDP1 does not run on CPU: stock behaviour stays what it is
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def _prepare(original: Callable[..., Any], accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
    """Shard models once, by the backend; let Accelerate prepare everything else."""
    backend = active_backend(accelerator.state)
    models = [item for item in args if isinstance(item, nn.Module)]
    if backend is None or not (models or any(isinstance(item, Optimizer) for item in args)):
        return original(*args, **kwargs)
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise IntegrationError(
            "the accelerator is told to compile the whole model, gathers and all (dynamo_backend)",
            fix="compile: blocks in FSDPConfig, and no dynamo_backend, dynamo_plugin or dynamo_config",
        )
    # The policy of each unit says what is computed in which dtype; autocast on top would decide a second time.
    accelerator.native_amp = False
    optimizers = [raw_optimizer(item) for item in args if isinstance(item, Optimizer)]
    backend.set_scaler(accelerator, optimizers)
    for model, own in _optimizers_of(models, optimizers):
        backend.shard(model, own, accelerator.device.type)
        if not any(model is known for known in accelerator._models):
            accelerator._models.append(model)
    # Two passes as in Accelerate: schedulers need their prepared optimizers.
    prepared = [
        item if isinstance(item, nn.Module) else accelerator._prepare_one(item, first_pass=True) for item in args
    ]
    prepared = [item if isinstance(item, nn.Module) else accelerator._prepare_one(item) for item in prepared]
    for item in prepared:
        item._is_accelerate_prepared = True
    _order_models(accelerator)
    return tuple(prepared) if len(prepared) > 1 else prepared[0]


def _optimizers_of(models: list[nn.Module], optimizers: list[Optimizer]) -> list[tuple[nn.Module, list[Optimizer]]]:
    """Return each model with the optimizers that train it; found before any model is changed."""
    if len(models) < 2:
        return [(model, optimizers) for model in models]
    ids = [{id(parameter) for parameter in model.parameters()} for model in models]
    owned: list[tuple[nn.Module, list[Optimizer]]] = [(model, []) for model in models]
    for optimizer in optimizers:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owners = [index for index, known in enumerate(ids) if held & known]
        if len(owners) > 1:
            names = " and ".join(type(models[index]).__name__ for index in owners)
            raise IntegrationError(
                f"one {type(optimizer).__name__} holds parameters of {len(owners)} models ({names}); "
                "its state could not be saved or loaded per model",
                fix="one optimizer for each model, or one nn.Module that has both models as children",
            )
        if not owners:
            raise IntegrationError(
                f"{type(optimizer).__name__} holds no parameter of the {len(models)} models given with it",
                fix="build it from model.parameters() of a model in the same accelerator.prepare(...) call",
            )
        owned[owners[0]][1].append(optimizer)
    return owned


def _order_models(accelerator: Accelerator) -> None:
    """Put the model of the first optimizer first: Accelerate saves and loads optimizer i with model i."""
    if len(accelerator._models) < 2:
        return
    order: dict[int, int] = {}
    for index, optimizer in enumerate(accelerator._optimizers):
        for group in raw_optimizer(optimizer).param_groups:
            order.update((id(parameter), index) for parameter in group["params"])
    last = len(accelerator._optimizers)
    accelerator._models.sort(key=lambda model: min((order.get(id(p), last) for p in model.parameters()), default=last))


def _prepare_model(
    original: Callable[..., Any],
    accelerator: Accelerator,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> Any:
    """Shard a model that comes alone: as a frozen one when it is only to be run, as in `prepare` else.

    A frozen one is not listed among Accelerate's models: it is neither trained nor saved, and Trainer takes an entry
    in that list for the trained model.
    """
    backend = active_backend(accelerator.state)
    if backend is None:
        return original(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
    if not evaluation_mode:
        return accelerator.prepare(model)
    backend.shard_frozen(model, accelerator.device.type)
    return model


def _clip_grad_norm(
    original: Callable[..., Any], accelerator: Accelerator, parameters: Any, max_norm: float, norm_type: float = 2
) -> Any:
    """Clip what was asked for: Accelerate compares lists of tensors by value, which raises with several models."""
    if active_backend(accelerator.state) is None or len(accelerator._models) < 2:
        return original(parameters, max_norm, norm_type=norm_type)
    accelerator.unscale_gradients()
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return accelerator._clip_grad_norm_dtensor_aware(parameters, max_norm, norm_type=norm_type)


def _backward(original: Callable[..., Any], accelerator: Accelerator, loss: torch.Tensor, **kwargs: Any) -> Any:
    if (backend := active_backend(accelerator.state)) is not None:
        backend.observe_loss(loss)
    return original(loss, **kwargs)


def _optimizer_step(original: Callable[..., Any], optimizer: AcceleratedOptimizer, closure: Any = None) -> Any:
    """Tell the backend of a step that a scaler may have skipped: torch's hooks run only for steps that are taken."""
    result = original(closure)
    if optimizer.scaler is not None and optimizer.gradient_state.sync_gradients:
        if (backend := active_backend(optimizer.accelerator_state)) is not None:
            backend.after_scaled_step(optimizer)
    return result


def _unscale_gradients(original: Callable[..., Any], accelerator: Accelerator, optimizer: Any = None) -> Any:
    if active_backend(accelerator.state) is None:
        return original(optimizer)
    return unscale_gradients(original, accelerator, optimizer)


def _get_state_dict(
    original: Callable[..., Any], accelerator: Accelerator, model: nn.Module, unwrap: bool = True
) -> Any:
    applied = get_applied_sharding(model)
    if active_backend(accelerator.state) is None or applied is None:
        return original(model, unwrap)
    return gather_state_dict(model, applied)
