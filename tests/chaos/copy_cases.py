"""The copy beside training on two processes: others that step, hook in or move weights, and what is saved."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_fsdp import FSDPCallback, FSDPConfig
from tests.chaos.async_cases import SlowCopies, StepBegins, Watch
from tests.chaos.calls import Calls
from tests.chaos.lives import build_trainer
from tests.chaos.saving import fingerprint, finish, names, quietly, refused, shared_folder, slow
from tests.distributed.training import QUIET_ARGUMENTS

# What a run is like: settings of hf-fsdp, of its checkpoints, of Trainer, and whether adapters are trained.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], bool]] = {
    "accumulation": ({}, {}, {"gradient_accumulation_steps": 2}, False),
    "offloaded, full": ({"offload": "parameters"}, {"format": "full"}, {}, False),
    "bf16-true, sgd": ({"precision": "bf16-true"}, {}, {"optim": "sgd"}, False),
    "adapters": ({"precision": "bf16-mixed"}, {}, {}, True),
    "model only, full": ({}, {"format": "full"}, {"save_only_model": True}, False),
}


def same_as_at_once(rank: int, world_size: int) -> dict[str, Any]:
    """Every kind of run saves behind training what it saves at once."""
    results = {}
    with shared_folder() as folder:
        for index, (what, (settings, checkpoint, arguments, is_lora)) in enumerate(RUNS.items()):
            tensors = []
            for is_async in (False, True):
                run = folder / f"{index}-{is_async}"
                trainer = _trainer(run, settings, {**checkpoint, "async_save": is_async}, arguments, is_lora)
                with SlowCopies(0.05):
                    quietly(trainer.train)
                assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
                files = fingerprint(run)
                tensors.append({name: digest for name, digest in files.items() if name.endswith(".safetensors")})
            results[what] = tensors
    return results


def _trainer(
    run: Path, settings: dict[str, Any], checkpoint: dict[str, Any], arguments: dict[str, Any], is_lora: bool
) -> Trainer:
    sharding = FSDPConfig(**{"precision": "fp32", **settings}, checkpoint={"self_test": False, **checkpoint})
    plain = build_trainer(run, {}, save_strategy="no")
    model = plain.model
    if is_lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    args = TrainingArguments(
        **{
            **QUIET_ARGUMENTS,
            "output_dir": str(run),
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "save_strategy": "steps",
            "save_steps": 1,
            **sharding.trainer_kwargs(),
            **arguments,
        }
    )
    return Trainer(model=model, args=args, train_dataset=plain.train_dataset, callbacks=[FSDPCallback(sharding)])


def another_hook(rank: int, world_size: int) -> dict[str, Any]:
    """Somebody hooks all optimizers while a save is in flight: the next step calls that hook too."""
    stepped: list[str] = []
    hooks: list[Any] = []

    def note(optimizer: Any, *_: Any) -> None:
        stepped.append(type(optimizer).__name__)

    def hook(model: Any) -> None:
        if not hooks:
            hooks.append(
                register_optimizer_step_pre_hook(lambda optimizer, *_: stepped.append(type(optimizer).__name__))
            )

    with shared_folder() as folder, SlowCopies():
        trainer = build_trainer(folder / "run", {"async_save": True}, StepBegins(hook), max_steps=3)
        try:
            quietly(trainer.train)
        finally:
            hooks[0].remove()
        return {"stepped": stepped, "names": names(folder / "run")}


def a_trainer_after_another(rank: int, world_size: int) -> dict[str, Any]:
    """A run ends by the script's error with a save in flight, and the process trains another model at once."""
    with shared_folder() as folder:
        first = build_trainer(folder / "first", {"async_save": True}, Watch(fail_after=3), save_steps=2)
        second = build_trainer(folder / "second", {"async_save": True}, max_steps=2)
        with Calls(folder / "first", rank, slow(1.0 if rank == 1 else 0.1, "model/shard")):
            found = {}
            try:
                quietly(first.train)
            except KeyError as error:
                found["error"] = str(error)
            quietly(second.train)
            finish(first)
        return {**found, "first": names(folder / "first"), "second": names(folder / "second")}


class MovesWeights(torch.optim.SGD):
    """Has other weights for training than for evaluation, as schedule-free optimizers do."""

    def train(self) -> None:
        self._scale(2.0)

    def eval(self) -> None:
        self._scale(0.5)

    @torch.no_grad()
    def _scale(self, by: float) -> None:
        if self.param_groups[0].get("scale", 1.0) * by not in (1.0, 2.0):
            return
        self.param_groups[0]["scale"] = self.param_groups[0].get("scale", 1.0) * by
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(by)


class Evaluates(TrainerCallback):
    """Evaluates after every step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = True


def optimizer_with_two_modes(rank: int, world_size: int) -> dict[str, Any]:
    """An optimizer moves weights when training goes on after an evaluation: the save between them is right."""
    tensors = []
    with shared_folder() as folder:
        for is_async in (False, True):
            run = folder / str(is_async)
            trainer = build_trainer(run, {"async_save": is_async}, Evaluates(), max_steps=3)
            trainer.eval_dataset = trainer.train_dataset
            trainer.optimizer_cls_and_kwargs = (MovesWeights, {"lr": 0.01})
            with SlowCopies():
                quietly(trainer.train)
            files = fingerprint(run)
            tensors.append({name: digest for name, digest in files.items() if name.endswith(".safetensors")})
    return {"at once": tensors[0], "behind": tensors[1]}


def no_thread(rank: int, world_size: int) -> dict[str, Any]:
    """The system gives one rank no thread: its save holds training, and is committed."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "hf-fsdp-save" and rank == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    with shared_folder() as folder:
        trainer = build_trainer(folder / "run", {"async_save": True}, max_steps=3)
        with mock.patch.object(threading.Thread, "start", refuse):
            quietly(trainer.train)
        return {"names": names(folder / "run")}


def local_change(rank: int, world_size: int) -> dict[str, Any]:
    """A callback changes this rank's part of a weight while it is copied: the save is refused."""

    def change(model: Any) -> None:
        if trainer.state.global_step == 2:
            parameter = next(model.parameters())
            with torch.no_grad():
                parameter.to_local().mul_(2)

    with shared_folder() as folder, SlowCopies():
        trainer = build_trainer(folder / "run", {"async_save": True}, StepBegins(change), max_steps=3)
        found = refused(functools.partial(quietly, trainer.train))
        return {**found, "names": names(folder / "run")}


CASES: dict[str, Callable[[int, int], Any]] = {
    case.__name__: case
    for case in (
        same_as_at_once,
        another_hook,
        a_trainer_after_another,
        optimizer_with_two_modes,
        no_thread,
        local_change,
    )
}
