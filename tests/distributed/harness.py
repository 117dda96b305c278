"""Runs cases on N real gloo processes: one start for many cases, and each rank forked from a process that has imported
torch and the rest, because those imports are the slow part.

A case is a function ``case(rank, world_size)`` that returns plain values and tensors. All ranks run the same cases in
the same order. When a case raises on one rank, the others may wait in a collective for ever: the spawn is then ended
and started again behind that case, and the case's test gets the failing rank's traceback.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Outcome:
    """What one case gave: a value per rank, or the text of what went wrong."""

    values: list[Any] = field(default_factory=list)
    failure: str | None = None

    def get(self) -> list[Any]:
        """Return the values in rank order, or fail the test with the failing rank's traceback."""
        if self.failure is not None:
            raise AssertionError(self.failure)
        return self.values


def run_cases(
    module: str,
    cases: Sequence[str],
    world_size: int,
    *,
    seconds_per_case: float = 90.0,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Outcome]:
    """Run ``module.CASES[name]`` for every name in `cases` on `world_size` processes.

    Args:
        module: importable from the repository root, with a ``CASES`` mapping of name to function.
        cases: in the order to run.
        world_size: 1 runs without a process group, as a person's single process would.
        seconds_per_case: time limit of one case, the first one's imports included.
        environment: added to the processes' environment. They are then started anew, since libraries read theirs
            when they are imported.
    """
    outcomes: dict[str, Outcome] = {}
    remaining = list(cases)
    while remaining:
        done = _spawn(module, remaining, world_size, seconds_per_case, dict(environment or {}))
        outcomes.update(done)
        remaining = [name for name in remaining if name not in done]
    return outcomes


def _spawn(
    module: str, cases: list[str], world_size: int, seconds_per_case: float, environment: dict[str, str]
) -> dict[str, Outcome]:
    with tempfile.TemporaryDirectory(prefix="hf-fsdp-test-") as folder:
        processes = []
        for rank in range(world_size):
            variables = {**os.environ, **_COMMON_ENVIRONMENT, **_rank_environment(rank, world_size), **environment}
            context = multiprocessing.get_context("spawn") if environment else _forking_context()
            processes.append(context.Process(target=_work, args=(module, Path(folder), cases, variables)))
            with mock.patch.dict(os.environ, variables, clear=True):  # for libraries that a new process imports first
                processes[-1].start()
        try:
            return _collect(processes, cases, Path(folder), world_size, seconds_per_case)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()


def _forking_context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    with mock.patch.dict(os.environ, _COMMON_ENVIRONMENT):
        multiprocessing.forkserver.ensure_running()
    return context


def _collect(
    processes: Sequence[BaseProcess], cases: list[str], folder: Path, world_size: int, seconds_per_case: float
) -> dict[str, Outcome]:
    import torch

    outcomes: dict[str, Outcome] = {}
    for name in cases:
        deadline = time.monotonic() + seconds_per_case
        while True:
            files = [folder / f"{name}-{rank}.pt" for rank in range(world_size)]
            if all(file.exists() for file in files):
                outcomes[name] = Outcome([torch.load(file, weights_only=True) for file in files])
                break
            failed = [folder / f"{name}-{rank}.failed" for rank in range(world_size)]
            died = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
            if any(file.exists() for file in failed) or died or time.monotonic() > deadline:
                time.sleep(0.5)  # let the other ranks write what they saw
                outcomes[name] = Outcome(failure=_explain(name, folder, world_size, died, seconds_per_case))
                return outcomes
            time.sleep(0.02)
    return outcomes


def _explain(name: str, folder: Path, world_size: int, died: list[int], seconds: float) -> str:
    parts = [f"case {name} on {world_size} processes"]
    for rank in range(world_size):
        file = folder / f"{name}-{rank}.failed"
        if file.exists():
            parts.append(f"--- rank {rank} raised:\n{file.read_text()}")
    if len(parts) == 1:
        parts.append(f"ranks {died} died" if died else f"no result within {seconds:.0f} s")
        for rank in range(world_size):
            output = (folder / f"output-{rank}.txt").read_text(errors="replace")
            parts.append(f"--- rank {rank} printed last:\n{output[-3000:]}")
    return "\n".join(parts)


_COMMON_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
    "PYTHONWARNINGS": "default",
}


def _rank_environment(rank: int, world_size: int) -> dict[str, str]:
    if world_size == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        # Accelerate wants them present; the rendezvous itself is a file, so no port is ever used.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }


# -- in the worker ----------------------------------------------------------------------------------------------------


def _work(module: str, folder: Path, cases: list[str], variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(REPOSITORY)
    multiprocessing.set_start_method(None, force=True)  # what a rank starts, it starts as a script of a person does
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    with open(folder / f"output-{rank}.txt", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
    functions: dict[str, Callable[[int, int], Any]] = import_module(module).CASES
    for name in cases:
        environment = dict(os.environ)
        try:
            value = functions[name](rank, world_size)
        except BaseException:
            _write(folder / f"{name}-{rank}.failed", traceback.format_exc())
            os._exit(1)  # no clean-up that could wait for the other ranks
        finally:
            os.environ.clear()
            os.environ.update(environment)
        torch.save(value, folder / f"{name}-{rank}.tmp")
        os.replace(folder / f"{name}-{rank}.tmp", folder / f"{name}-{rank}.pt")
        forget_accelerate()
    if world_size > 1:
        dist.destroy_process_group()


def forget_accelerate() -> None:
    """Reset Accelerate's singletons, so that the next case builds its own; the process group stays."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._shared_state.clear()
    PartialState._shared_state.clear()
    GradientState._shared_state.clear()


def _write(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        path.with_suffix(".partial").write_text(text)
        os.replace(path.with_suffix(".partial"), path)
