"""Jobs in, simulations out: each worker is a process of its own, since the simulated device changes torch for good."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import psutil

from hf_fsdp.errors import PlanError, Problem
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.simulation import Simulation

# What a worker takes at most (measured: 0.7 GiB, torch, transformers and PEFT imported), with some room.
_WORKER_BYTES = 10**9
_DEFAULT_SECONDS = 600.0


def _worker_program() -> str:
    """Return what a worker runs: with this process's own search path, since `-m` would put the current folder first,
    where a `json.py` or a `tokenizers.py` of somebody else would be run in place of the real one."""
    return f"import sys; sys.path[:] = {sys.path!r}; from hf_fsdp.plan.worker import main; main()"


class _Worker:
    """One process and the pipe to it."""

    def __init__(self) -> None:
        # A file and not a pipe: nobody reads it while the worker writes, and a full pipe would stop it.
        self._errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONWARNINGS": "ignore",
        }
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)  # the caller's own group is none of the worker's business
        self._process = subprocess.Popen(
            [sys.executable, "-c", _worker_program()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self._is_ready = False
        self._was_stopped = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, job: Job) -> dict[str, Any]:
        """Send a job and wait for its answer.

        Raises:
            PlanError: the worker has died.
        """
        assert self._process.stdin is not None
        timer = threading.Timer(_DEFAULT_SECONDS, self._stop)
        timer.start()
        try:
            if not self._is_ready:
                self._read()
                self._is_ready = True
            self._process.stdin.write(job.to_json() + "\n")
            self._process.stdin.flush()
            return self._read()
        except BrokenPipeError:
            raise self._death() from None
        finally:
            timer.cancel()

    def _stop(self) -> None:
        self._was_stopped = True
        self._process.kill()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._death()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _death(self) -> PlanError:
        code = self._process.wait()
        if self._was_stopped:
            return PlanError(
                f"one step of these settings was not simulated within {_DEFAULT_SECONDS:.0f} seconds, and was stopped",
                fix="--max-length 256, or a config.json with fewer layers: some models (state spaces without their "
                "kernels) loop over tokens, and take as long for each as for a layer",
            )
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()[-3:]
        said = "; ".join(lines) or "it said nothing"
        hint = (
            "free some memory: a worker needs about 1 GB" if code == -9 else "report it with the command that you ran"
        )
        return PlanError(f"a process of the planner ended with code {code}: {said}", fix=hint)

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # it died with a job half written
                    stream.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


class Service:
    """Workers that are kept from one call to the next; imports cost more than a simulation.

    Use it as a context manager, or through `simulate`, which keeps one for the life of the process.
    """

    def __init__(self, num_workers: int | None = None):
        self._num_workers = num_workers or _default_workers()
        self._idle: list[_Worker] = []
        self._done: dict[str, Simulation] = {}
        self._lock = threading.Lock()

    def simulate(self, jobs: Sequence[Job]) -> list[Simulation]:
        """Return the simulations of `jobs`, in their order; a job that was simulated before is not run again.

        Raises:
            PlanError: the first job that cannot be simulated, with its reason.
        """
        keys = [job.to_json() for job in jobs]
        todo = {key: job for key, job in zip(keys, jobs, strict=True) if key not in self._done}
        if todo:
            with ThreadPoolExecutor(min(self._num_workers, len(todo))) as pool:
                for key, result in zip(todo, pool.map(self._run, todo.values()), strict=True):
                    self._done[key] = result
        return [self._done[key] for key in keys]

    def _run(self, job: Job) -> Simulation:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        worker = worker or _Worker()
        try:
            answer = worker.ask(job)
        except BaseException:
            worker.close()
            raise
        with self._lock:
            self._idle.append(worker)
        return _read_answer(answer, job)

    def close(self) -> None:
        """End the workers."""
        with self._lock:
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *args: Any) -> None:
        self.close()


def _read_answer(answer: dict[str, Any], job: Job) -> Simulation:
    if "simulation" in answer:
        return Simulation.from_mapping(answer["simulation"])
    if "problems" in answer:
        raise PlanError([Problem(**problem) for problem in answer["problems"]])
    raise PlanError(
        f"{job.model.name} cannot be simulated with these settings: {answer['crash'].splitlines()[0]}",
        fix="a step without these settings may be simulated: leave one out at a time; and please report the model\n"
        + answer["trace"].strip().splitlines()[-2].strip(),
    )


def _default_workers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(psutil.virtual_memory().available // _WORKER_BYTES), 2))


_service: Service | None = None


def simulate(jobs: Sequence[Job], *, num_workers: int | None = None) -> list[Simulation]:
    """Simulate `jobs` and return their results in the same order.

    Args:
        jobs: any number; those that differ in nothing are simulated once.
        num_workers: processes, kept until this one ends; default: two, fewer without the cores or the memory.

    Raises:
        PlanError: the first job that cannot be simulated, with its reason.
    """
    global _service
    if _service is None:
        _service = Service(num_workers)
        atexit.register(_service.close)
    return _service.simulate(jobs)
