"""The seams into Accelerate: four methods that hand over to the backend while one is attached, and to Accelerate else.

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
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.optim import Optimizer

from hf_fsdp.errors import IntegrationError
from hf_fsdp.sharding.apply import get_applied_sharding
from hf_fsdp.sharding.gather import gather_state_dict

_BACKEND = "_hf_fsdp_backend"
_SEAM = "_hf_fsdp_seam"


class Backend(Protocol):
    """What the seams call; `FSDPCallback` brings one."""

    def shard(self, model: nn.Module, optimizers: list[Optimizer], device_type: str) -> None:
        """Shard `model` in place onto `device_type` and give `optimizers` the sharded parameters."""

    def observe_loss(self, loss: torch.Tensor) -> None:
        """Look at a micro-batch's own loss before backward."""


def install_seams() -> None:
    """Put the seams in place, once; before `Accelerator(...)` is built, or CPU runs are no FSDP runs."""
    replace_method(AcceleratorState, "__init__", _init_state)
    replace_method(Accelerator, "prepare", _prepare)
    replace_method(Accelerator, "backward", _backward)
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
    if hasattr(original, _SEAM):
        return

    @functools.wraps(original)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(functools.partial(original, self), self, *args, **kwargs)

    setattr(dispatch, _SEAM, True)
    setattr(cls, name, dispatch)


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
    if len(models) > 1:
        raise IntegrationError(
            f"accelerator.prepare was given {len(models)} models; this release shards one",
            fix="call accelerator.prepare once with the trained model; keep other models unsharded or out of the run",
        )
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise IntegrationError(
            "torch_compile is on; compiling sharded blocks arrives in a later release",
            fix="torch_compile=False (and no dynamo_config in Accelerate's file)",
        )
    # The policy of each unit says what is computed in which dtype; autocast on top would decide a second time.
    accelerator.native_amp = False
    optimizers = [_raw_optimizer(item) for item in args if isinstance(item, Optimizer)]
    for model in models:
        backend.shard(model, optimizers, accelerator.device.type)
        if not any(model is known for known in accelerator._models):
            accelerator._models.append(model)
    # Two passes as in Accelerate: schedulers need their prepared optimizers.
    prepared = [
        item if isinstance(item, nn.Module) else accelerator._prepare_one(item, first_pass=True) for item in args
    ]
    prepared = [item if isinstance(item, nn.Module) else accelerator._prepare_one(item) for item in prepared]
    for item in prepared:
        item._is_accelerate_prepared = True
    return tuple(prepared) if len(prepared) > 1 else prepared[0]


def _backward(original: Callable[..., Any], accelerator: Accelerator, loss: torch.Tensor, **kwargs: Any) -> Any:
    if (backend := active_backend(accelerator.state)) is not None:
        backend.observe_loss(loss)
    return original(loss, **kwargs)


def _get_state_dict(
    original: Callable[..., Any], accelerator: Accelerator, model: nn.Module, unwrap: bool = True
) -> Any:
    applied = get_applied_sharding(model)
    if active_backend(accelerator.state) is None or applied is None:
        return original(model, unwrap)
    return gather_state_dict(model, applied)


def _raw_optimizer(optimizer: Optimizer) -> Optimizer:
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer
