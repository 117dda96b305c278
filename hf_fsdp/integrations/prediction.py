"""A simulation behind a training that goes on: asked for, looked at when it is there, never waited for by a step."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hf_fsdp.errors import HfFsdpError
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.service import Service
from hf_fsdp.plan.simulation import Simulation

_PACKAGES = ("hf-fsdp", "torch", "transformers", "peft", "trl")


@dataclass(frozen=True)
class Answer:
    """What became of one question.

    Args:
        job: what was asked.
        simulation: None where there is a problem.
        problem: why it cannot be simulated.
        was_read: from the run's folder, where an earlier part of the run had left it.
    """

    job: Job
    simulation: Simulation | None = None
    problem: str | None = None
    was_read: bool = False


class Prediction:
    """Simulates one job at a time, in a process of its own that a thread beside the training waits for.

    Args:
        file: an earlier run's `memory.json`. What it says of the very same job, under the same versions, is read and
            not simulated again.

    Example:
        >>> prediction = Prediction()
        >>> prediction.asked, prediction.is_pending, prediction.take()
        (None, False, None)
        >>> prediction.close()
    """

    def __init__(self, file: Path | None = None):
        self.asked: Job | None = None
        self._answer: Answer | None = None
        self._known = _read(file)
        self._service: Service | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_pending(self) -> bool:
        """Whether an answer is on its way."""
        return self._thread is not None and self._thread.is_alive()

    def ask(self, job: Job) -> None:
        """Begin to simulate `job`; an answer that nobody took is forgotten. Not while one is pending."""
        self.asked, self._answer = job, None
        if (known := self._known.get(job.to_json())) is not None:
            self._answer = Answer(job, known, was_read=True)
            return
        # A daemon: a training that fails must not wait for it.
        self._thread = threading.Thread(target=self._simulate, args=(job,), name="hf-fsdp-plan", daemon=True)
        self._thread.start()

    def take(self) -> Answer | None:
        """Return the answer, once; None while there is none."""
        if self.is_pending:
            return None
        answer, self._answer = self._answer, None
        return answer

    def wait(self, seconds: float) -> None:
        """Wait until nothing is pending, at most so long."""
        if self._thread is not None:
            self._thread.join(seconds)

    def close(self) -> None:
        """End the simulating process; one that is busy ends when it has answered."""
        self._is_closed = True
        if not self.is_pending and self._service is not None:
            self._service.close()

    def _simulate(self, job: Job) -> None:
        try:
            if self._service is None:
                self._service = Service(num_workers=1)
            self._answer = Answer(job, self._service.simulate([job])[0])
        except HfFsdpError as error:
            self._answer = Answer(job, problem="; ".join(problem.message for problem in error.problems))
        except Exception as error:  # no failure of a forecast may become one of the training
            self._answer = Answer(job, problem=f"{type(error).__name__}: {error}")
        if self._is_closed and self._service is not None:
            self._service.close()


def package_versions() -> dict[str, str]:
    """Return the versions that a simulation depends on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _read(file: Path | None) -> dict[str, Simulation]:
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
        if document.get("versions") != package_versions():
            return {}
        job = Job.from_json(json.dumps(document["job"]))
        return {job.to_json(): Simulation.from_mapping(document["predicted"]["simulation"])}
    except (OSError, ValueError, KeyError, TypeError, HfFsdpError):
        return {}  # no file, or one of another make: the simulation is run
