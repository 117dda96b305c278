"""Short trainings whose real peaks the simulator must give: the small form of `benchmarks/plan_accuracy.py`."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.plan_accuracy_cases import Case, build_rows
from benchmarks.plan_accuracy_run import train
from hf_fsdp.monitor.heap import HeapCount
from hf_fsdp.monitor.memory import MemoryMeter

NUM_STEPS = 3
RUNS: dict[str, Case] = {
    case.name: case
    for case in (
        Case(name="full", family="llama-small", num_tokens=256),
        Case(name="full-kept-accumulated", family="llama-small", num_tokens=128, accumulation=2, reshard=False),
        Case(name="lora-checkpointed", family="llama-small", method="lora", checkpointing=True, num_tokens=256),
    )
}
# Of tokens enough that what is no tensor in the heap is small beside them.
HEAP_RUN = Case(name="heap", family="llama-small", checkpointing=True, micro_batch=4, num_tokens=1024)


def _measure(case: Case, kind: str) -> dict[str, Any]:
    rows = build_rows(case, NUM_STEPS)
    gc.collect()
    meter = MemoryMeter(kind, baseline_bytes=sum(HeapCount().in_use()) if kind == "heap" else 0)
    with tempfile.TemporaryDirectory() as folder:
        model = train(case, rows, meter, NUM_STEPS, Path(folder))
    return {
        "steady_peak": meter.steady_peak_bytes,
        "steps": [dict(step.by_phase) for step in meter.steps],
        "at_rest": [step.at_rest_bytes for step in meter.steps],
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _case(case: Case, *kinds: str) -> Callable[[int, int], dict[str, Any]]:
    return lambda rank, world_size: {kind: _measure(case, kind) for kind in kinds}


CASES: dict[str, Callable[[int, int], dict[str, Any]]] = {
    **{name: _case(case, "count") for name, case in RUNS.items()},
    HEAP_RUN.name: _case(HEAP_RUN, "heap"),
}
