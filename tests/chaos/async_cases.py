"""Saves behind training, on two processes: what fails, what is slow, and what training does meanwhile."""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import Trainer, TrainerCallback

from hf_fsdp.checkpoint import background
from hf_fsdp.checkpoint.host_copy import HostCopy
from hf_fsdp.sharding.mesh import agree_all
from tests.chaos.calls import Calls
from tests.chaos.lives import build_trainer
from tests.chaos.saving import failing, fingerprint, finish, names, quietly, refused, shared_folder, slow


class Watch(TrainerCallback):
    """Notes at every step how many saves are in flight, and may raise."""

    def __init__(self, fail_after: int | None = None):
        self.in_flight: list[int] = []
        self._fail_after = fail_after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        threads = [thread for thread in threading.enumerate() if thread.name == "hf-fsdp-save"]
        self.in_flight.append(len(threads))
        if state.global_step == self._fail_after:
            raise KeyError("the script's own error")


def async_failure(rank: int, world_size: int) -> dict[str, Any]:
    """A write behind training fails on one rank: an error at a later step, at the same one on all ranks."""
    with shared_folder() as folder:
        results = {}
        for what, step, num_steps in (("in training", 2, 60), ("at its end", 5, 5)):
            run = folder / what.replace(" ", "-")
            trainer = build_trainer(run, {"async_save": True}, save_steps=step, max_steps=num_steps)
            if num_steps > step:
                trainer.args.save_steps = trainer.state.save_steps = step
                trainer.add_callback(SaveOnly(step))
            with failing(run, rank, 1, "write", "optimizer/shard-00002", errno.ENOSPC) as hits:
                found = refused(functools.partial(quietly, trainer.train))
            results[what] = {
                **found,
                "steps": agree_all(trainer.state.global_step),
                "hits": sum(agree_all(len(hits))),
                "names": [name for name in names(run) if "checkpoint" in name or "fsdp" in name],
            }
        return results


class SaveOnly(TrainerCallback):
    """Leaves one save of those that are due."""

    def __init__(self, step: int):
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == self._step


def async_in_flight(rank: int, world_size: int) -> dict[str, Any]:
    """Slow saves at every step: one at a time, all of them committed, the last one when training returns."""
    with shared_folder() as folder:
        watch = Watch()
        trainer = build_trainer(folder / "run", {"async_save": True}, watch, max_steps=4)
        with Calls(folder / "run", rank, slow(0.2, "model/shard")) as calls:
            quietly(trainer.train)
        renames = [Path(call.target).name for call in calls.log if call.operation == "rename"]
        return {"in_flight": watch.in_flight, "names": names(folder / "run"), "renames": agree_all(renames)[0]}


def async_and_an_error(rank: int, world_size: int) -> dict[str, Any]:
    """The script fails while a save is in flight: the process gives it time to end, and it is committed."""
    with shared_folder() as folder:
        trainer = build_trainer(folder / "run", {"async_save": True}, Watch(fail_after=3), save_steps=2)
        with Calls(folder / "run", rank, slow(0.5, "model/shard")):
            raised = False
            try:
                quietly(trainer.train)
            except KeyError:
                raised = True
            before = os.path.exists(folder / "run/checkpoint-2")
            background._join_threads()  # what the interpreter calls at its exit
            finish(trainer)
        return {"raised": raised, "before": before, "names": names(folder / "run")}


# -- the copy that runs beside the next forward and backward -----------------------------------------------------------


class SlowCopies:
    """Makes every copy wait, and notes whether it had ended when a step began and after the optimizer took it."""

    def __init__(self, seconds: float = 0.3):
        self.ended: dict[str, list[bool]] = {"step begins": [], "optimizer stepped": []}
        self._copies: list[HostCopy] = []
        self._seconds = seconds

    def __enter__(self) -> SlowCopies:
        original, slow_copies = HostCopy._copy_waiting, self

        def copy_slowly(copy: HostCopy) -> None:
            slow_copies._copies.append(copy)
            time.sleep(slow_copies._seconds)
            original(copy)

        self._patch = mock.patch.object(HostCopy, "_copy_waiting", copy_slowly)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()

    def note(self, when: str) -> None:
        self.ended[when] += [copy._ended.is_set() for copy in self._copies[-1:]]


class StepBegins(TrainerCallback):
    """Calls a function when a step begins that has another one before it."""

    def __init__(self, do: Callable[[Any], None]):
        self._do = do

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step:
            time.sleep(0.1)  # the thread of the save has begun to copy
            self._do(model)


class OptimizerStepped(TrainerCallback):
    """Calls a function after each step of the optimizer."""

    def __init__(self, do: Callable[[Any], None]):
        self._do = do

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._do(model)


def trainer_that_counts_forwards(run: Path, *callbacks: TrainerCallback, **checkpoint: Any) -> Trainer:
    """Return a Trainer of a model with a buffer that every forward changes."""
    trainer = build_trainer(run, checkpoint, *callbacks, max_steps=3)
    trainer.model.register_buffer("forwards", torch.zeros(3))
    trainer.model.register_forward_pre_hook(_count_forward)
    return trainer


def _count_forward(model: Any, inputs: Any) -> None:
    model.forwards.add_(1)


def slow_copy(rank: int, world_size: int) -> dict[str, Any]:
    """The next step runs while weights are copied; its optimizer waits, and what is saved is of the step it is of."""
    with shared_folder() as folder:
        quietly(trainer_that_counts_forwards(folder / "sync").train)
        with SlowCopies() as copies:
            trainer = trainer_that_counts_forwards(
                folder / "async", StepBegins(lambda model: copies.note("step begins")), async_save=True
            )
            trainer.add_callback(OptimizerStepped(lambda model: copies.note("optimizer stepped")))
            quietly(trainer.train)
        tensors = {}
        for kind in ("sync", "async"):
            files = fingerprint(folder / kind)
            tensors[kind] = {name: digest for name, digest in files.items() if name.endswith(".safetensors")}
        return {"ended": copies.ended, "sync": tensors["sync"], "async": tensors["async"]}


def changed_meanwhile(rank: int, world_size: int) -> dict[str, Any]:
    """A callback changes weights while they are copied: the save is refused, earlier ones stay."""
    with shared_folder() as folder:

        def change(model: Any) -> None:
            if trainer.state.global_step == 2:
                with torch.no_grad():
                    next(model.parameters()).mul_(2)

        with SlowCopies():
            trainer = build_trainer(folder / "run", {"async_save": True}, StepBegins(change), max_steps=3)
            found = refused(functools.partial(quietly, trainer.train))
        return {**found, "names": names(folder / "run")}


def no_memory_for_the_copy(rank: int, world_size: int) -> dict[str, Any]:
    """One rank has no memory for the copy: every rank's error, and the ranks stay in step."""
    with shared_folder() as folder:
        trainer = build_trainer(folder / "run", {"async_save": True}, max_steps=2)

        def fail(copy: HostCopy) -> None:
            raise MemoryError("no memory")

        with mock.patch.object(HostCopy, "_copy_waiting", fail if rank == 1 else HostCopy._copy_waiting):
            found = refused(functools.partial(quietly, trainer.train))
        again = build_trainer(folder / "again", {"async_save": True}, max_steps=1)
        quietly(again.train)
        return {**found, "names": names(folder / "run"), "again": names(folder / "again")}


CASES: dict[str, Callable[[int, int], Any]] = {
    case.__name__: case
    for case in (
        async_failure,
        async_in_flight,
        async_and_an_error,
        slow_copy,
        changed_meanwhile,
        no_memory_for_the_copy,
    )
}
