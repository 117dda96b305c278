"""Lives of a training run: two forked processes that train with Trainer, save at every step, and may be killed.

Everything is imported once, and every life is forked from there, so that hundreds of them take minutes. Training is
deterministic: what a life must have after a step, and at its end, is known from a life that nobody killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_fsdp import FSDPCallback, FSDPConfig
from hf_fsdp.errors import HfFsdpError
from hf_fsdp.integrations.optimizers import raw_optimizer
from hf_fsdp.sharding.apply import get_applied_sharding
from tests.chaos.calls import Call, Calls
from tests.distributed.training import QUIET_ARGUMENTS

NUM_RANKS = 2
NUM_STEPS = 5
# A survivor that has not ended by then is counted as one that hangs.
SURVIVOR_SECONDS = 20.0


@dataclass(frozen=True)
class Life:
    """How a life goes.

    Args:
        checkpoint: hf-fsdp's settings: format, async_save.
        resume: as Trainer takes it.
        victim: the rank that is killed, or None for all.
        at_call: it happens at this call of the victim that changes files (rank 0's, when all are killed); None:
            nobody is killed.
        operation: only calls of this kind count; None: all.
        delay: None: the process kills itself before the call, of a write maybe after half of it; else another process
            kills it this many seconds after it got there.
        limit: save_total_limit.
        at_step: the victim kills itself when it begins this step, far from any save.
    """

    checkpoint: dict[str, Any] = field(default_factory=dict)
    resume: str | bool | None = None
    victim: int | None = None
    at_call: int | None = None
    operation: str | None = None
    delay: float | None = None
    limit: int | None = 2
    at_step: int | None = None


@dataclass
class Told:
    """What a life told before it ended.

    Args:
        hashes: step -> hash of the weights and the optimizer's state, by rank; None where a rank did not get there.
        resumed: by rank: step and hash right after resuming.
        losses: of rank 0.
        errors: by rank: how it ended when not well.
        operations: by rank: what each call that changed a file did.
        survivor_seconds: from the kill to the end of the last process.
    """

    hashes: dict[int, list[str | None]]
    resumed: list[tuple[int, str] | None]
    losses: list[float]
    errors: list[str | None]
    operations: list[list[str]]
    survivor_seconds: float

    @property
    def has_ended_well(self) -> bool:
        return not any(self.errors)


def live(life: Life, output_dir: Path, notes: Path) -> Told:
    """Run one life in forked processes.

    Args:
        life: what happens.
        output_dir: of the run; its checkpoints stay there.
        notes: an empty folder for what the processes tell; ``committed.log`` beside it is appended to.
    """
    notes.mkdir(parents=True)
    gc.collect()
    gc.freeze()  # a child's collections need not copy every page that was imported
    processes: list[int] = []
    for rank in range(NUM_RANKS):
        process = os.fork()
        if process == 0:
            _be_rank(rank, life, output_dir, notes)
        with contextlib.suppress(OSError):  # the child does it too, whoever comes first
            os.setpgid(process, processes[0] if processes else process)
        processes.append(process)
    survivor_seconds = _wait(processes, life, notes)
    return _read_notes(notes, survivor_seconds)


def _wait(processes: list[int], life: Life, notes: Path) -> float:
    """Wait for all, kill when it is time; return how long the last one lived after the first death."""
    alive, first_death, kill_at = dict(enumerate(processes)), None, None
    while alive:
        for rank, process in list(alive.items()):
            if os.waitpid(process, os.WNOHANG)[0]:
                del alive[rank]
                if first_death is None:
                    first_death = time.monotonic()
        now = time.monotonic()
        if life.delay is not None and kill_at is None and (notes / "killed.txt").exists():
            kill_at = now + life.delay
        if kill_at is not None and now >= kill_at:
            kill_at = float("inf")
            for rank in alive if life.victim is None else {life.victim} & set(alive):
                os.kill(processes[rank], signal.SIGKILL)
        if first_death is not None and now - first_death > SURVIVOR_SECONDS:
            for process in alive.values():
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)
    assert first_death is not None
    return time.monotonic() - first_death


# -- in a forked process ----------------------------------------------------------------------------------------------


def _be_rank(rank: int, life: Life, output_dir: Path, notes: Path) -> None:
    """Live as one rank, and never return."""
    code = 1
    try:
        with open(notes / f"output-{rank}.txt", "wb", buffering=0) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        dist.init_process_group(
            "gloo",
            init_method=f"file://{notes}/rendezvous",
            rank=rank,
            world_size=NUM_RANKS,
            timeout=timedelta(seconds=60),
        )
        _train(rank, life, output_dir, notes)
        code = 0
    except BaseException as error:
        kind = "ours" if isinstance(error, HfFsdpError) else "other"
        text = f"{kind} {type(error).__name__}: {error}"
        (notes / f"error-{rank}.json").write_text(json.dumps(text))
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)  # a survivor does not wait for anybody


class _Teller(TrainerCallback):
    """Writes down what this rank has after each step and right after resuming."""

    def __init__(self, rank: int, notes: Path):
        self._rank, self._notes = rank, notes

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell("resumed", [state.global_step, state_hash(kwargs["model"], kwargs["optimizer"])])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell("hash", [state.global_step, state_hash(kwargs["model"], kwargs["optimizer"])])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self._tell("loss", [state.global_step, logs["loss"]])

    def _tell(self, what: str, value: Any) -> None:
        append_line(self._notes / f"told-{self._rank}.jsonl", json.dumps([what, *value]))


class _KilledAtStep(TrainerCallback):
    def __init__(self, step: int):
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def append_line(path: Path, text: str) -> None:
    """Append a line by one system call, so that a kill leaves the whole line or none of it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, (text + "\n").encode())
    os.close(descriptor)


def state_hash(model: Any, optimizer: Any) -> str:
    """Return a hash of this rank's part of the weights and of the optimizer's state."""
    digest = xxhash.xxh3_64()
    optimizer = raw_optimizer(optimizer)
    for name, parameter in model.named_parameters():
        tensors = {"": parameter, **optimizer.state.get(parameter, {})}
        for key, value in tensors.items():
            value = value.detach()
            local = value.to_local() if hasattr(value, "to_local") else value
            digest.update(f"{name}{key}{tuple(local.shape)}".encode())
            digest.update(local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def build_trainer(
    output_dir: Path, checkpoint: dict[str, Any], *callbacks: TrainerCallback, **arguments: Any
) -> Trainer:
    """Return a Trainer of a tiny model that saves at every step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.1,
    )
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 61, (24, 8), generator=generator).tolist()
    sharding = FSDPConfig(precision="fp32", checkpoint={"self_test": False, **checkpoint})
    return Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            **{
                "output_dir": str(output_dir),
                **QUIET_ARGUMENTS,
                "max_steps": NUM_STEPS,
                "per_device_train_batch_size": 2,
                "learning_rate": 1e-2,
                "lr_scheduler_type": "linear",
                "save_strategy": "steps",
                "save_steps": 1,
                **sharding.trainer_kwargs(),
                **arguments,
            }
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[FSDPCallback(sharding), *callbacks],
    )


def _train(rank: int, life: Life, output_dir: Path, notes: Path) -> None:
    calls = _watched(rank, life, output_dir, notes)
    callbacks = [_Teller(rank, notes)]
    if rank == life.victim and life.at_step is not None:
        callbacks.append(_KilledAtStep(life.at_step))
    trainer = build_trainer(output_dir, life.checkpoint, *callbacks, save_total_limit=life.limit)
    with calls:
        trainer.train(resume_from_checkpoint=life.resume)
    assert get_applied_sharding(trainer.model) is not None
    (notes / f"done-{rank}.json").write_text(json.dumps([call.operation for call in calls.log]))


def _watched(rank: int, life: Life, output_dir: Path, notes: Path) -> Calls:
    """Return the watch over this rank's calls: it kills at the chosen one, and notes what was committed."""
    chooser = random.Random(life.at_call)
    count = 0

    def is_the_one(operation: str) -> bool:
        if life.operation not in (None, operation):
            return False
        is_watched = rank == (life.victim if life.victim is not None else 0)
        return is_watched and life.at_call is not None and count == life.at_call

    def before(operation: str, path: str) -> None:
        nonlocal count
        if is_the_one(operation):
            append_line(notes / "killed.txt", f"rank {rank} before {operation} of {os.path.relpath(path, output_dir)}")
            if life.delay is None and life.victim is None:
                os.killpg(0, signal.SIGKILL)
            elif life.delay is None:
                os.kill(os.getpid(), signal.SIGKILL)
        count += life.operation in (None, operation)

    half = life.delay is None and chooser.random() < 0.5
    calls = _NotingCalls(output_dir, rank, before, lambda operation, path: half and is_the_one(operation))
    calls.committed = notes.parent / "committed.log"
    return calls


class _NotingCalls(Calls):
    """Notes every change of a checkpoint's name as soon as it is done."""

    committed: Path

    def run(self, operation: str, path: str, do: Callable[[], Any], size: int = 0, target: str = "") -> Any:
        result = super().run(operation, path, do, size, target)
        if operation == "rename":
            append_line(self.committed, f"{os.path.basename(path)} {os.path.basename(target)}")
        return result


# -- what they told ---------------------------------------------------------------------------------------------------


def _read_notes(notes: Path, survivor_seconds: float) -> Told:
    hashes: dict[int, list[str | None]] = {}
    resumed: list[tuple[int, str] | None] = [None] * NUM_RANKS
    losses: dict[int, float] = {}
    errors: list[str | None] = []
    operations: list[list[str]] = []
    for rank in range(NUM_RANKS):
        told = notes / f"told-{rank}.jsonl"
        for line in told.read_text().splitlines() if told.exists() else []:
            what, step, value = json.loads(line)
            if what == "hash":
                hashes.setdefault(step, [None] * NUM_RANKS)[rank] = value
            elif what == "resumed":
                resumed[rank] = (step, value)
            elif rank == 0:
                losses[step] = value
        done, error = notes / f"done-{rank}.json", notes / f"error-{rank}.json"
        if done.exists():
            operations.append(json.loads(done.read_text()))
            errors.append(None)
        else:
            errors.append(json.loads(error.read_text()) if error.exists() else "killed")
    ordered = [losses[step] for step in sorted(losses)]
    return Told(hashes, resumed, ordered, errors, operations, survivor_seconds)


__all__ = ["NUM_RANKS", "NUM_STEPS", "Call", "Life", "Told", "append_line", "build_trainer", "live", "state_hash"]
