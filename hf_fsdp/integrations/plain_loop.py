"""Plain Accelerate loops: `build_accelerator` in the place of `Accelerator(...)`, and the loop stays as it was."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.optim import Optimizer

from hf_fsdp.config.environment import from_accelerate_environment, is_fsdp_launch
from hf_fsdp.config.precedence import Stated, merge
from hf_fsdp.config.schema import FSDPConfig, single_process_refused
from hf_fsdp.config.validate import note_config
from hf_fsdp.errors import IntegrationError, ShardingError
from hf_fsdp.integrations import accelerate as seams
from hf_fsdp.integrations.backend import TrainingBackend, has_learning_rate
from hf_fsdp.integrations.fork import check_fork
from hf_fsdp.integrations.launch import launch_environment
from hf_fsdp.monitor.first_step import StepMonitor
from hf_fsdp.policies.precision import resolve_precision
from hf_fsdp.sharding.apply import get_applied_sharding

# Accelerate's words for a precision, in ours.
_PRESETS = {"no": "fp32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"}
# A look at whether the gradients are finite waits for the device, so it is not taken at every step.
_STEPS_BETWEEN_CHECKS = 10


def build_accelerator(config: FSDPConfig | None = None, **arguments: Any) -> Accelerator:
    """Build an `Accelerator` whose `prepare` shards by this package: for loops of your own, without a Trainer.

    Everything after it stays as it was: ``prepare``, ``accumulate``, ``backward``, ``clip_grad_norm_``,
    ``gather_for_metrics``, ``save_state``, ``load_state``, ``get_state_dict``, ``save_model``. Several models in
    ``prepare`` are each sharded, with an optimizer of their own or, when only run, without; a model that
    `apply_fsdp` has sharded already is taken as it is. Works on CPU too.

    Args:
        config: the sharding config; it wins over ``mixed_precision=`` and over Accelerate's launch file.
        **arguments: `Accelerator`'s own. ``mixed_precision`` is understood as ``precision``.

    Returns:
        The accelerator. In a single process it is a plain one and says so, or is refused under
        ``sharding.require_sharding``.

    Raises:
        HfFsdpError: settings that cannot work; ``prepare`` raises it when the model is not sharded as asked.

    Example:
        >>> from hf_fsdp import FSDPConfig, build_accelerator
        >>> accelerator = build_accelerator(FSDPConfig(precision="fp32"))  # doctest: +SKIP
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
    """
    check_fork()
    seams.install_seams()
    environment = launch_environment()
    config = config or FSDPConfig()
    if int(os.environ.get("WORLD_SIZE") or 1) <= 1:
        return _build_single(config, arguments)
    for name in ("fsdp_plugin", "deepspeed_plugin", "parallelism_config"):
        if arguments.get(name) is not None:
            raise IntegrationError(
                f"build_accelerator was given {name}, and it builds the sharding from its FSDPConfig",
                fix=f"leave {name} out; sharding, precision and offload are keys of FSDPConfig",
            )
    merged = merge(config, _stated(arguments), from_accelerate_environment(environment))
    config = merged.config
    if AcceleratorState._shared_state and getattr(AcceleratorState(), "fsdp_plugin", None) is None:
        raise IntegrationError(
            "an Accelerator without FSDP exists in this process already, and Accelerate keeps its state",
            fix="call build_accelerator first, and only it; or AcceleratorState._reset_state() before it",
        )
    if not torch.accelerator.is_available():
        arguments.setdefault("cpu", True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=False)
    # Each unit's policy decides dtypes; Accelerate's precision would add autocast and a scaler of its own.
    accelerator = Accelerator(**{**arguments, "mixed_precision": "no", "fsdp_plugin": plugin})
    if not is_fsdp_launch(environment):
        # Building the plugin has set it; left there, a later Accelerator without FSDP would get one.
        os.environ.pop("ACCELERATE_USE_FSDP", None)
    seams.set_sync_each_batch(config.sharding.sync_each_batch)
    seams.set_checkpoint_format(config.checkpoint.format)
    backend = _LoopBackend(config, accelerator)
    seams.attach_backend(backend)
    backend.say(*merged.overrides, *note_config(config))
    return accelerator


def _build_single(config: FSDPConfig, arguments: dict[str, Any]) -> Accelerator:
    if config.sharding.require_sharding:
        raise ShardingError(single_process_refused(config.sources.get("sharding.require_sharding")))
    print("hf-fsdp: one process, so the model is trained unsharded and fsdp settings do not apply")
    return Accelerator(**arguments)


def _stated(arguments: dict[str, Any]) -> dict[str, Stated]:
    precision = arguments.get("mixed_precision")
    if precision is None:
        return {}
    source = f"build_accelerator(mixed_precision={str(precision)!r})"
    preset = _PRESETS.get(str(precision))
    if preset is None:
        raise IntegrationError(
            f"mixed_precision={str(precision)!r} is not a precision of sharded training here",
            near=", ".join(_PRESETS),
            fix='build_accelerator(FSDPConfig(precision="bf16-mixed"))',
        )
    return {"precision.preset": Stated(preset, source, typed=True)}


class _LoopBackend(TrainingBackend):
    """What the seams call for a plain loop: no Trainer tells it about steps, so it watches the optimizers."""

    def __init__(self, config: FSDPConfig, accelerator: Accelerator):
        accumulation = accelerator.gradient_accumulation_steps
        folder = Path(accelerator.project_dir or ".")
        super().__init__(config, folder, is_printer=accelerator.is_main_process, accumulates=accumulation > 1)
        self._watches: dict[int, _StepWatch] = {}
        self._num_tried: dict[int, int] = {}
        self._loop = accelerator

    def shard(self, model: nn.Module, optimizers: list[Optimizer], device_type: str) -> None:
        applied = get_applied_sharding(model)
        wanted = resolve_precision(self._config.precision).preset
        if applied is not None and applied.precision.preset != wanted:
            raise IntegrationError(
                f"{type(model).__name__} was sharded by apply_fsdp in {applied.precision.preset}, "
                f"and this accelerator was built for {wanted}",
                fix="give apply_fsdp and build_accelerator the same FSDPConfig, or leave apply_fsdp out",
            )
        super().shard(model, optimizers, device_type)
        for optimizer in optimizers:
            if id(optimizer) not in self._watches:
                self._watches[id(optimizer)] = _StepWatch(self, model, optimizer)

    def _step_of(self, optimizer: AcceleratedOptimizer) -> int:
        self._num_tried[id(optimizer)] = step = self._num_tried.get(id(optimizer), 0) + 1
        return step

    def observe_loss(self, loss: torch.Tensor) -> None:
        if self._loop.scaler is None:  # with a scaler a loss that is not finite is skipped by design
            for watch in self._watches.values():
                watch.monitor.observe_loss(loss)


@dataclass(eq=False)
class _StepWatch:
    """Looks at gradients before a step and at what the first step did, as `FSDPCallback` does under Trainer."""

    backend: _LoopBackend
    model: nn.Module
    optimizer: Optimizer
    monitor: StepMonitor = field(default_factory=StepMonitor)
    step: int = 0
    is_first: bool = True

    def __post_init__(self) -> None:
        self.optimizer.register_step_pre_hook(self._before_step)
        self.optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.step += 1
        self.monitor.close_step(self.step)
        if self.step % _STEPS_BETWEEN_CHECKS in (0, 1):
            self.monitor.check_finite(self.model, self.step)
        if self.is_first and has_learning_rate(self.optimizer):
            self.monitor.before_step(self.model)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.is_first and has_learning_rate(self.optimizer):
            self.is_first = False
            report = self.monitor.after_step(self.model, self.optimizer)
            self.backend.say(*(f"warning: {line}" for line in report.lines()))
