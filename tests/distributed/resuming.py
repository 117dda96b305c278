"""Runs that a checkpoint cuts in two, and what they are compared by with the same runs without a break."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_fsdp import FSDPCallback, FSDPConfig
from hf_fsdp.integrations.optimizers import raw_optimizer
from hf_fsdp.sharding.mesh import agree_all, rank
from tests.distributed.harness import forget_accelerate
from tests.distributed.training import QUIET_ARGUMENTS, build_dataset, whole

Outcome = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A run, by what every life of its processes builds anew.

    Args:
        model: builds the model, the same in every process.
        config: of `FSDPConfig`.
        arguments: of `TrainingArguments`, beside the quiet ones.
        trainer: further arguments of the Trainer, built anew: callbacks, optimizers, compute_metrics.
        dataset: builds the training data.
        num_steps: of the whole run.
        save_step: where it is cut.
        global_batch: samples in a micro-batch over all processes.
        prepare: called with the Trainer before it trains.
        trainer_class: with the class of its arguments.
    """

    model: Callable[[], nn.Module]
    config: dict[str, Any] = field(default_factory=lambda: {"precision": "fp32"})
    arguments: dict[str, Any] = field(default_factory=dict)
    trainer: Callable[[nn.Module], dict[str, Any]] = lambda model: {}
    dataset: Callable[[], Any] = lambda: build_dataset(32)
    num_steps: int = 4
    save_step: int = 2
    global_batch: int = 4
    prepare: Callable[[Trainer], None] = lambda trainer: None
    trainer_class: tuple[type, type] = (Trainer, TrainingArguments)


@dataclass
class Life:
    """What one training of a `Kind` left: by step what was logged, and everything at its end."""

    trainer: Any
    logs: dict[int, tuple[float, ...]]
    evaluations: dict[int, float]
    samples: dict[int, list[int]]
    printed: str
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    groups: list[dict[str, Any]]

    @property
    def lines(self) -> list[str]:
        """What this package said about the resume, on rank 0."""
        return [line.removeprefix("hf-fsdp: ") for line in self.printed.splitlines() if "resume: " in line]


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """A folder that all ranks share, and that is gone afterwards."""
    folder = str(agree_all(tempfile.mkdtemp(prefix="hf-fsdp-resume-") if rank() == 0 else None)[0])
    try:
        yield folder
    finally:
        agree_all("done")
        if rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def build_trainer(kind: Kind, folder: str, world_size: int, **overrides: Any) -> Any:
    """Build the Trainer of one life of `kind`."""
    forget_accelerate()
    config = FSDPConfig(**{**kind.config, **overrides.pop("config", {})})
    make_trainer, make_arguments = kind.trainer_class
    settings: dict[str, Any] = {
        "output_dir": folder,
        **QUIET_ARGUMENTS,
        "max_steps": kind.num_steps,
        "per_device_train_batch_size": kind.global_batch // world_size,
        "max_grad_norm": 1.0,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "optim": "adamw_torch",
        **kind.arguments,
        **overrides,
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    model = kind.model()
    extra = kind.trainer(model)
    callbacks = [FSDPCallback(config), *extra.pop("callbacks", ())]
    return make_trainer(
        model=model,
        args=make_arguments(**settings, **config.trainer_kwargs()),
        **{"train_dataset": kind.dataset(), **extra},
        callbacks=callbacks,
    )


def live(
    kind: Kind, folder: str, world_size: int, resume: Any = None, ends_at: int | None = None, **overrides: Any
) -> Life:
    """Train `kind` in `folder` from `resume` on; `ends_at` is where it is stopped, as by a crash. Collective."""
    watch = _Watch(ends_at)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer = build_trainer(kind, folder, world_size, **overrides)
        trainer.add_callback(watch)
        kind.prepare(trainer)
        trainer.train(resume_from_checkpoint=resume)
    model, optimizer = trainer.model, raw_optimizer(trainer.optimizer)
    return Life(
        trainer=trainer,
        logs=watch.logs,
        evaluations=watch.evaluations,
        samples=watch.samples,
        printed=printed.getvalue(),
        weights={name: whole(value).clone() for name, value in _named(model) if not _is_packed(value)},
        optimizer=dict(_optimizer_state(model, optimizer)),
        groups=[{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
    )


def saving(step: int) -> dict[str, Any]:
    """The arguments that save every `step` steps."""
    return {"save_strategy": "steps", "save_steps": step}


def on_rank_0(do: Callable[[], Any]) -> None:
    """Run `do` on one rank while the others wait."""
    if rank() == 0:
        do()
    agree_all("done")


class _Watch(TrainerCallback):
    """Keeps what is logged, and which samples every step was taken on, in the order of the global batch."""

    def __init__(self, ends_at: int | None = None) -> None:
        self.ends_at = ends_at
        self.logs: dict[int, tuple[float, ...]] = {}
        self.samples: dict[int, list[int]] = {}
        self.evaluations: dict[int, float] = {}
        self._seen: list[list[int]] = []
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._hook = model.register_forward_pre_hook(self._look, with_kwargs=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hook.remove()

    def _look(self, module: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        if module.training and (ids := inputs.get("input_ids")) is not None:
            self._seen.append([hash(tuple(token for token in row if token)) for row in ids.tolist()])  # 0 is padding

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.ends_at:
            control.should_training_stop = True
        everyone = agree_all(self._seen)
        self.samples[state.global_step] = [
            sample for micro_batches in zip(*everyone, strict=True) for part in micro_batches for sample in part
        ]
        self._seen = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            values = (logs["loss"], float(logs.get("grad_norm") or 0.0), logs["learning_rate"])
            self.logs[state.global_step] = values
        if "eval_loss" in logs:
            self.evaluations[state.global_step] = logs["eval_loss"]


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if buffer is not None)


def _is_packed(value: torch.Tensor) -> bool:
    return value.dtype == torch.uint8 or hasattr(value, "quant_state")


def _optimizer_state(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}", whole(value).clone()
