"""Resuming on another number of processes. Every case is one life of a run, on as many processes as its name says.

Starting processes is the slow part, so four are started once: a case on fewer of them gives these a process group of
their own, and the others wait for its end.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.utils.data import WeightedRandomSampler
from transformers import Trainer, TrainingArguments

from hf_fsdp.sharding.mesh import agree_all
from tests.distributed.resume_compare import cut_in_two, held
from tests.distributed.resume_models import llama, lora
from tests.distributed.resuming import Kind, Life, Outcome, live, saving
from tests.distributed.training import build_dataset


class EvenlyWeightedTrainer(Trainer):
    """Draws samples with replacement, by a sampler without a generator."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return WeightedRandomSampler([1.0] * 48, 48)


WORLD_SIZE = 4
SAVE_STEP, NUM_STEPS = 3, 6
# Four steps an epoch, so that the cut is in the middle of the first one and the end in that of the second; logged every
# second step, so that the cut is in the middle of a logging interval too.
_SHARED: dict[str, Any] = {
    "dataset": lambda: build_dataset(48),
    "arguments": {"logging_steps": 2},
    "num_steps": NUM_STEPS,
    "save_step": SAVE_STEP,
    "global_batch": 12,
}
FULL = Kind(model=llama(), **_SHARED)
# A rank of two has fewer rows than four processes: two of them hold nothing of it.
LORA = Kind(model=lora(r=2, dropout=0.0), **_SHARED)
# Everything at once that makes another number of processes see other samples, or draw otherwise.
UNEVEN = Kind(
    model=llama(dropout=0.1),
    dataset=lambda: build_dataset(50),
    arguments={"train_sampling_strategy": "group_by_length"},
    num_steps=2,
    save_step=1,
    global_batch=12,
)
# Cut in the second epoch, whose order a sampler of its own has drawn.
WEIGHTED = replace(FULL, trainer_class=(EvenlyWeightedTrainer, TrainingArguments), num_steps=7, save_step=5)
HYBRID = {"sharding": {"dp_replicate_size": 2}}
_rendezvous = itertools.count()


def on(num_processes: int, do: Callable[[int, int], Outcome]) -> Callable[[int, int], Outcome]:
    """A case on `num_processes` of all; the others return nothing."""

    def case(rank: int, world_size: int) -> Outcome:
        assert world_size == WORLD_SIZE
        folder()  # while all are together
        if num_processes == world_size:
            return do(rank, world_size)
        with _smaller_group(rank, num_processes) as is_in:
            return do(rank, num_processes) if is_in else {}

    return case


@contextmanager
def _smaller_group(rank: int, num_processes: int) -> Iterator[bool]:
    dist.destroy_process_group()
    together, apart = (f"file://{folder()}/rendezvous-{next(_rendezvous)}" for _ in range(2))
    # As a launcher sets them; the harness takes them back after the case.
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if num_processes == 1:
        for name in names:
            del os.environ[name]
    else:
        os.environ.update(WORLD_SIZE=str(num_processes), LOCAL_WORLD_SIZE=str(num_processes))
    is_in = rank < num_processes
    if is_in and num_processes > 1:
        dist.init_process_group("gloo", init_method=apart, rank=rank, world_size=num_processes)
    try:
        yield is_in
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    patience = timedelta(seconds=300)  # the others wait here from the beginning
    dist.init_process_group("gloo", init_method=together, rank=rank, world_size=WORLD_SIZE, timeout=patience)


@functools.cache
def folder() -> str:
    """The folder that all runs of this launch are saved in."""
    path = str(agree_all(tempfile.mkdtemp(prefix="hf-fsdp-worlds-") if dist.get_rank() == 0 else None)[0])
    if dist.get_rank() == 0:
        atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def save(kind: Kind, name: str, **overrides: Any) -> Callable[[int, int], Outcome]:
    """The whole run, saved on its way into the folder `name`."""

    def do(rank: int, world_size: int) -> Outcome:
        return _observe(live(kind, f"{folder()}/{name}", world_size, **saving(kind.save_step), **overrides))

    return do


def resume(kind: Kind, name: str, **overrides: Any) -> Callable[[int, int], Outcome]:
    """The rest of the run that was saved as `name`."""

    def do(rank: int, world_size: int) -> Outcome:
        checkpoint = f"{folder()}/{name}/checkpoint-{kind.save_step}"
        return _observe(live(kind, f"{folder()}/again", world_size, resume=checkpoint, **overrides))

    return do


def _observe(life: Life) -> Outcome:
    return {
        "logs": life.logs,
        "samples": life.samples,
        "weights": life.weights,
        "lines": life.lines,
        **held(life.trainer.model),
    }


# In this order: each reads what an earlier one saved.
CASES: dict[str, Callable[[int, int], Any]] = {
    "1 to the bit": on(1, cut_in_two(FULL)),
    "3 to the bit": on(3, cut_in_two(FULL)),
    "1": on(1, save(FULL, "1")),
    "2": on(2, save(FULL, "2")),
    "4": on(4, save(FULL, "4")),
    "2x2": on(4, save(FULL, "2x2", config=HYBRID)),
    "2 LoRA": on(2, save(LORA, "lora")),
    "2 weighted": on(2, save(WEIGHTED, "weighted")),
    "2 uneven": on(2, save(UNEVEN, "uneven")),
    "1 to 2": on(2, resume(FULL, "1")),
    "2 to 1": on(1, resume(FULL, "2")),
    "2 to 4": on(4, resume(FULL, "2")),
    "4 to 2x2": on(4, resume(FULL, "4", config=HYBRID)),
    "2x2 to 3": on(3, resume(FULL, "2x2")),
    "2 to 4 LoRA": on(4, resume(LORA, "lora")),
    "2 to 1 weighted": on(1, resume(WEIGHTED, "weighted")),
    "2 to 4 uneven": on(4, resume(UNEVEN, "uneven", seed=7, gradient_accumulation_steps=2)),
}
