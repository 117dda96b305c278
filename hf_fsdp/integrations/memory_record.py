"""What a training was predicted to hold and what it held: in lines for a person, and as a document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_fsdp.integrations.prediction import package_versions
from hf_fsdp.integrations.seen_batches import num_tokens
from hf_fsdp.plan.job import Batch, Job
from hf_fsdp.plan.simulation import Simulation
from hf_fsdp.units import GIB, format_bytes, format_count

_INSTRUMENTS = {"cuda": "torch.cuda.max_memory_allocated", "count": "allocator count", "heap": "heap"}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured, on one process.

    Args:
        kind: of `MemoryMeter`.
        first_step, last_step: that it was measured over, by their numbers in the training.
        by_phase: bytes.
        batch: the largest of these steps.
    """

    kind: str
    first_step: int
    last_step: int
    by_phase: Mapping[str, int]
    batch: Batch | None = None

    @property
    def peak_bytes(self) -> int:
        """The most of all phases."""
        return max(self.by_phase.values(), default=0)

    def __str__(self) -> str:
        steps = f"step {self.first_step}"
        if self.last_step > self.first_step:
            steps = f"steps {self.first_step} to {self.last_step}"
        return f"{size(self.peak_bytes)} ({_INSTRUMENTS[self.kind]}, {steps})"


@dataclass
class MemoryRecord:
    """Predicted and measured memory of one process of a training.

    Args:
        job: what was simulated.
        simulation: its result.
        was_read: it was left in the run's folder by an earlier part of the run.
        measured: what the training really held.
        failure: why there is no prediction.
        doubts: how the simulated model differs from the one that is trained.
    """

    job: Job | None = None
    simulation: Simulation | None = None
    was_read: bool = False
    measured: Measured | None = None
    failure: str | None = None
    doubts: tuple[str, ...] = field(default=())

    @property
    def predicted_bytes(self) -> int | None:
        """The simulated peak on the device."""
        return self.simulation.peak.num_bytes if self.simulation is not None else None

    @property
    def error(self) -> float | None:
        """By what share of the measured peak the prediction is above (positive) or below it."""
        if self.predicted_bytes is None or self.measured is None or not self.measured.peak_bytes:
            return None
        return self.predicted_bytes / self.measured.peak_bytes - 1

    def compare_model(self, num_parameters: int, num_trained: int, num_bytes: int) -> None:
        """Note where the simulated model is not the one that is trained; it was built from the config alone."""
        assert self.simulation is not None
        pairs = (
            ("parameters", self.simulation.num_parameters, num_parameters, format_count),
            ("trained parameters", self.simulation.num_trained, num_trained, format_count),
            ("bytes of parameters on this process", self.simulation.state_bytes["parameters"], num_bytes, size),
        )
        self.doubts = tuple(
            f"the simulated model has {shown(simulated)} {what}, this one {shown(real)}"
            for what, simulated, real, shown in pairs
            if simulated != real
        )

    # -- for a person -------------------------------------------------------------------------------------------------

    def predicted_line(self, batch: str, before: Batch | None = None) -> str:
        """Return the prediction, with the largest parts of its peak.

        Args:
            batch: that it is for, in words.
            before: that an earlier prediction of this training was for, if there was one.
        """
        assert self.simulation is not None and self.predicted_bytes is not None
        peak = self.simulation.peak
        parts = sorted(peak.categories.items(), key=lambda item: -item[1])[:3]
        words = ", ".join(f"{name.replace('_', ' ')} {size(num_bytes)}" for name, num_bytes in parts)
        host = f"; {size(self.simulation.host_bytes)} in host memory" if self.simulation.host_bytes else ""
        origin = "simulated, read from this folder" if self.was_read else "simulated"
        if before is not None and self.job is not None:
            larger = num_tokens(self.job.batch) > num_tokens(before)
            origin += ", again for a larger batch" if larger else ", again for the batch of the measured steps"
        return f"memory: predicted {size(self.predicted_bytes)} ({origin}; {batch}): {words}, in the {peak.name}{host}"

    def closing_lines(self) -> list[str]:
        """Return predicted and measured side by side, and what to know about them."""
        measured = f"measured {self.measured}" if self.measured is not None else "nothing was measured"
        if self.predicted_bytes is None:
            return [f"memory: {measured}; no prediction: {self.failure or 'none was made in time'}"]
        line = f"memory: predicted {size(self.predicted_bytes)} (simulated), {measured}"
        if self.error is not None:
            far = f"{abs(self.error):.1%}"
            line += ": equal to 0.1%" if far == "0.0%" else f": {far} {'over' if self.error >= 0 else 'under'}"
        notes = (*self.doubts, *(self.simulation.notes if self.simulation else ()))
        return [line, *(f"memory: note: {note}" for note in notes)]

    # -- for programs -------------------------------------------------------------------------------------------------

    def numbers(self) -> dict[str, float]:
        """Return the figures for metrics and summaries."""
        found: dict[str, float] = {}
        if self.predicted_bytes is not None:
            found["memory_predicted_bytes"] = self.predicted_bytes
        if self.measured is not None:
            found["memory_measured_bytes"] = self.measured.peak_bytes
        if self.error is not None:
            found["memory_prediction_error"] = self.error
        return found

    def write(self, file: Path) -> None:
        """Write the document; `Prediction` reads it again."""
        predicted = measured = None
        if self.simulation is not None:
            peak = self.simulation.peak
            predicted = {
                "label": "simulated",
                "peak_bytes": peak.num_bytes,
                "phase": peak.name,
                "categories": dict(peak.categories),
                "simulation": self.simulation.to_mapping(),
            }
        if self.measured is not None:
            measured = {
                "label": "measured",
                "instrument": _INSTRUMENTS[self.measured.kind],
                "peak_bytes": self.measured.peak_bytes,
                "by_phase": dict(self.measured.by_phase),
                "first_step": self.measured.first_step,
                "last_step": self.measured.last_step,
            }
        document: dict[str, Any] = {
            "versions": package_versions(),
            "predicted": predicted,
            "measured": measured,
            "error": self.error,
            "failure": self.failure,
            "doubts": list(self.doubts),
            "job": json.loads(self.job.to_json()) if self.job is not None else None,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def size(num_bytes: float) -> str:
    """Return bytes with two decimals from a GiB on: predictions are held against measurements by them."""
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= GIB else format_bytes(num_bytes)
