"""Trainings that get real signals, at one rank only, each as a case on N processes; and one script to be launched."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_fsdp import FSDPCallback, FSDPConfig
from hf_fsdp.integrations.preemption import preemption_of
from tests.distributed.tiny_models import build_model
from tests.distributed.training import QUIET_ARGUMENTS, build_dataset

NUM_STEPS = 8
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    folders = [tempfile.mkdtemp() if rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(folders)
    assert folders[0] is not None
    yield folders[0]
    barrier()
    if rank() == 0:
        shutil.rmtree(folders[0])


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


class SignalAt(TrainerCallback):
    """Sends this process a signal at an event of Trainer, on one rank only."""

    def __init__(self, event: str, *, step: int, on_rank: int, signum: int = signal.SIGUSR1, count: int = 1):
        self.step, self.on_rank, self.signum, self.count = step, on_rank, signum, count
        setattr(self, event, self._send)

    def _send(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if rank() == self.on_rank and state.global_step == self.step:
            self.count -= 1
            if self.count == 0:
                os.kill(os.getpid(), self.signum)
                time.sleep(0.05)  # a thread notes it


class CountPredictions(TrainerCallback):
    def __init__(self) -> None:
        self.count = 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1


def build_trainer(
    folder: str, *callbacks: TrainerCallback, cls: type = Trainer, num_rows: int = 48, **overrides: Any
) -> Trainer:
    world_size = int(os.environ.get("WORLD_SIZE") or 1)  # a launched script has no process group yet
    config = FSDPConfig(precision="fp32", checkpoint={"async_save": overrides.pop("async_save", False)})
    arguments: dict[str, Any] = {
        "output_dir": folder,
        **QUIET_ARGUMENTS,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 4 // world_size,
        "per_device_eval_batch_size": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        **config.trainer_kwargs(),
        **overrides,
    }
    return cls(
        model=build_model("llama", tied=True, dropout=0.1),
        args=TrainingArguments(**arguments),
        train_dataset=build_dataset(num_rows),
        eval_dataset=build_dataset(16),
        callbacks=[FSDPCallback(), *callbacks],
    )


def run(trainer: Trainer, **kwargs: Any) -> dict[str, Any]:
    """Train; return how it ended, what is on disk, and what the process looks like afterwards."""
    handlers = [signal.getsignal(signum) for signum in HANDLED]
    printed, code = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            trainer.train(**kwargs)
        except SystemExit as left:
            code = left.code
    barrier()
    preemption = preemption_of(trainer)
    assert preemption is not None
    return {
        "code": code,
        "step": trainer.state.global_step,
        "saved": saved(trainer.args.output_dir),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "sharded": all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()),
        "num_local": sum(_local_numel(parameter) for parameter in trainer.model.parameters()),
        "num_whole": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "handlers_are_back": handlers == [signal.getsignal(signum) for signum in HANDLED],
        "wakeup": signal.set_wakeup_fd(-1),
        "is_gone": preemption not in trainer.callback_handler.callbacks,
        "lines": [line for line in printed.getvalue().splitlines() if "exit code" in line or "grace" in line],
    }


def saved(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).glob("checkpoint-*"))


def _local_numel(parameter: torch.Tensor) -> int:
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


# -- cases ------------------------------------------------------------------------------------------------------------


def uninterrupted(rank: int, world_size: int) -> dict[str, Any]:
    with shared_folder() as folder:
        return run(build_trainer(folder))


def signal_in_training(rank: int, world_size: int) -> dict[str, Any]:
    with shared_folder() as folder:
        first = run(build_trainer(folder, SignalAt("on_step_begin", step=2, on_rank=world_size - 1)))
        return {"first": first, "resumed": run(build_trainer(folder), resume_from_checkpoint=True)}


def signal_in_accumulation(rank: int, world_size: int) -> dict[str, Any]:
    with shared_folder() as folder:
        sender = SignalAt("on_substep_end", step=2, on_rank=world_size - 1)
        trainer = build_trainer(folder, sender, gradient_accumulation_steps=4)
        return run(trainer)


def signal_in_evaluation(rank: int, world_size: int) -> dict[str, Any]:
    with shared_folder() as folder:
        sender = SignalAt("on_prediction_step", step=2, on_rank=0, signum=signal.SIGTERM, count=3)
        counter = CountPredictions()
        trainer = build_trainer(folder, sender, counter, eval_strategy="steps", eval_steps=2)
        first = run(trainer)
        resumed = run(build_trainer(folder), resume_from_checkpoint=True)
        return {"first": first, "predictions": counter.count, "resumed": resumed}


def signal_at_the_end_of_an_evaluation(rank: int, world_size: int) -> dict[str, Any]:
    """The last prediction step has nobody behind it that could read the agreement."""
    with shared_folder() as folder:
        sender = SignalAt("on_prediction_step", step=2, on_rank=0, count=16 // world_size - 1)
        return run(build_trainer(folder, sender, eval_strategy="steps", eval_steps=2))


def signal_after_a_scheduled_save(rank: int, world_size: int) -> dict[str, Any]:
    """The step is saved already when the evaluation at the end of its epoch is left."""
    with shared_folder() as folder:
        sender, counter = SignalAt("on_epoch_end", step=3, on_rank=0), CountPredictions()
        trainer = build_trainer(
            folder, sender, counter, num_rows=12, save_strategy="steps", save_steps=3, eval_strategy="epoch"
        )
        return {**run(trainer), "predictions": counter.count}


def signal_under_save_only_model(rank: int, world_size: int) -> dict[str, Any]:
    """What is saved for a stop is whole, also where a checkpoint of the model only is there of its step."""
    found = {}
    for name, steps in {"between": 8, "same": 1}.items():
        with shared_folder() as folder:
            sender = SignalAt("on_step_begin", step=2, on_rank=0)
            arguments = {"save_strategy": "steps", "save_steps": steps, "save_only_model": True}
            first = run(build_trainer(folder, sender, **arguments))
            resumed = run(build_trainer(folder, save_only_model=True), resume_from_checkpoint="auto")
            found[name] = {"first": first, "resumed": resumed}
    return found


def signal_behind_an_async_save(rank: int, world_size: int) -> dict[str, Any]:
    with shared_folder() as folder:
        sender = SignalAt("on_step_begin", step=1, on_rank=0)
        trainer = build_trainer(folder, sender, async_save=True, save_strategy="steps", save_steps=1)
        return {"first": run(trainer), "resumed": run(build_trainer(folder), resume_from_checkpoint=True)}


def signal_in_setup(rank: int, world_size: int) -> dict[str, Any]:
    class Slow(Trainer):
        def get_train_dataloader(self) -> Any:
            if rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
            return super().get_train_dataloader()

    with shared_folder() as folder:
        return run(build_trainer(folder, cls=Slow))


def signal_before_the_first_step(rank: int, world_size: int) -> dict[str, Any]:
    with shared_folder() as folder:
        at_start = run(build_trainer(folder, SignalAt("on_epoch_begin", step=0, on_rank=world_size - 1)))
        sender = SignalAt("on_prediction_step", step=0, on_rank=0, count=2)
        counter = CountPredictions()
        trainer = build_trainer(folder, sender, counter, eval_on_start=True, eval_strategy="steps", eval_steps=50)
        return {"at_start": at_start, "evaluating": run(trainer), "predictions": counter.count}


def signal_in_the_last_step(rank: int, world_size: int) -> dict[str, Any]:
    with shared_folder() as folder:
        first = run(build_trainer(folder, SignalAt("on_step_begin", step=NUM_STEPS - 1, on_rank=0)))
        return {"first": first, "resumed": run(build_trainer(folder), resume_from_checkpoint=True)}


def signal_too_late(rank: int, world_size: int) -> dict[str, Any]:
    """After the last step nobody agrees any more: the signal goes to the handler that was there before."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: got.append(signum))
    try:
        with shared_folder() as folder:
            result = run(build_trainer(folder, SignalAt("on_train_end", step=NUM_STEPS, on_rank=0)))
    finally:
        signal.signal(signal.SIGUSR1, before)
    return {**result, "got": [int(signum) for signum in got]}


def error_in_training(rank: int, world_size: int) -> dict[str, Any]:
    class Fail(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise ValueError("wrong")

    before = [signal.getsignal(signum) for signum in HANDLED]  # SIGINT is ignored in a background job
    with shared_folder() as folder:
        trainer = build_trainer(folder, Fail())
        with contextlib.suppress(ValueError):
            return run(trainer)
        barrier()
        handlers = [signal.getsignal(signum) for signum in HANDLED]
        second = run(build_trainer(folder))
        return {"are_back": handlers == before, **second}


def resumed_run(rank: int, world_size: int) -> dict[str, Any]:
    """Go on with a run that a launcher's processes were stopped in."""
    return run(build_trainer(os.environ["PREEMPTED_RUN"]), resume_from_checkpoint=True)


def short_grace(rank: int, world_size: int) -> dict[str, Any]:
    with shared_folder() as folder:
        sender = SignalAt("on_step_begin", step=2, on_rank=world_size - 1)
        trainer = build_trainer(folder, sender, save_strategy="steps", save_steps=2, save_total_limit=1)
        preemption = preemption_of(trainer)
        assert preemption is not None
        preemption.configured_grace = 20.0
        if rank == 0:  # the rank that knows of it is not the one that got the signal
            preemption.record_save(100.0)
        first = run(trainer)
        files = {
            name: sorted(str(path.relative_to(folder)) for path in Path(folder, name).rglob("*") if path.is_file())
            for name in saved(folder)
        }
        resumed = run(build_trainer(folder), resume_from_checkpoint=True)
        return {"first": first, "files": files, "only_model": preemption.saves_only_model, "resumed": resumed}


CASES: dict[str, Callable[[int, int], Any]] = {
    case.__name__: case
    for case in (
        uninterrupted,
        signal_in_training,
        signal_in_accumulation,
        signal_in_evaluation,
        signal_at_the_end_of_an_evaluation,
        signal_after_a_scheduled_save,
        signal_under_save_only_model,
        signal_behind_an_async_save,
        signal_in_setup,
        signal_before_the_first_step,
        signal_in_the_last_step,
        signal_too_late,
        error_in_training,
        resumed_run,
        short_grace,
    )
}


# -- a script of its own, for launchers -------------------------------------------------------------------------------


class Progress(TrainerCallback):
    """Leaves a file for each step, so that a test knows when to send a signal, and takes its time."""

    def __init__(self, folder: str, seconds: float):
        self.folder, self.seconds = Path(folder), seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if rank() == 0:
            (self.folder / f"step-{state.global_step}").touch()
        time.sleep(self.seconds)


def main() -> None:
    """Train, or go on from the newest checkpoint when told so; write the losses when `train()` returns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--step_seconds", type=float, default=0.0)
    parser.add_argument("--resume_from_checkpoint", choices=["auto"])
    asked = parser.parse_args()
    Path(asked.output_dir).mkdir(exist_ok=True)
    progress = Progress(asked.output_dir, asked.step_seconds)
    trainer = build_trainer(asked.output_dir, progress, dataloader_num_workers=1)
    trainer.train(resume_from_checkpoint=asked.resume_from_checkpoint)
    if rank() == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        (Path(asked.output_dir) / "result.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
