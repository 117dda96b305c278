"""Strategies side by side: what DDP, FSDP and FSDP with offload hold, how fast they are, how many rows fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hf_fsdp.errors import PlanError, Problem, nearest_names
from hf_fsdp.plan.candidate import Candidate, PlanRequest
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.search.affine import AffineFit, fit_affine, largest_where
from hf_fsdp.plan.search.batch_size import MOST_ROWS
from hf_fsdp.plan.search.check import check_request
from hf_fsdp.plan.search.divisions import list_divisions
from hf_fsdp.plan.search.evaluation import Evaluation, Simulator, default_simulator
from hf_fsdp.plan.search.structures import build_job, is_padded, with_keys

# What is compared, by name: values of the config that differ. Checkpointing is what the request says, none if nothing.
STRATEGIES: dict[str, dict[str, object]] = {
    "ddp": {},
    "fsdp": {},
    "fsdp-keep": {"sharding.reshard_after_forward": False},
    "fsdp-checkpointing": {"activation_checkpointing.mode": "full"},
    "fsdp-offload": {"offload.parameters": True, "offload.optimizer": True},
    "fsdp-offload-checkpointing": {
        "offload.parameters": True,
        "offload.optimizer": True,
        "activation_checkpointing.mode": "full",
    },
}
DEFAULT_STRATEGIES = ("ddp", "fsdp", "fsdp-offload")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One strategy.

    Args:
        name: of `STRATEGIES`.
        candidate: at its largest micro-batch that divides the global batch, or at one row where none fits; simulated.
        one_row: at micro-batch 1, simulated.
        largest_micro_batch: rows that fit whatever the global batch; 0: not even one. By the line of its simulations.
    """

    name: str
    candidate: Candidate
    one_row: Candidate
    largest_micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Strategies in the order in which they were asked for."""

    request: PlanRequest
    rows: tuple[Compared, ...]
    notes: tuple[str, ...] = ()


def compare(
    request: PlanRequest,
    names: Sequence[str] = DEFAULT_STRATEGIES,
    *,
    simulate: Simulator = default_simulator,
) -> Comparison:
    """Return memory, estimated speed and largest micro-batch of each strategy on the GPUs of `request`.

    Args:
        request: model, GPUs and training. Settings of its config hold for all strategies but where they differ by name.
        names: of `STRATEGIES`, in the order of the table.
        simulate: runs jobs.

    Raises:
        PlanError: unknown strategies or a request that contradicts itself, every problem at once.

    Example::

        for row in compare(request).rows:
            print(row.name, row.candidate.peak_bytes, row.largest_micro_batch)
    """
    problems = check_request(request) + _check_names(names, request)
    if problems:
        raise PlanError(problems)
    evaluation = Evaluation(request, simulate)
    start = 2 if is_padded(request, 2) else 1
    sizes = (start, 4 * start)
    jobs = [_job(request, name, size, 2) for name in names for size in (1, *sizes)]
    results = dict(zip(((name, size) for name in names for size in (1, *sizes)), evaluation.run(jobs), strict=True))
    lines = {name: fit_affine([(size, results[name, size]) for size in sizes]) for name in names}
    most = {name: _most_rows(evaluation, request, name, lines[name], start) for name in names}
    chosen = {name: _division(request, most[name]) for name in names}
    final = evaluation.run([_job(request, name, *chosen[name]) for name in names])
    rows = []
    for name, simulation in zip(names, final, strict=True):
        one = evaluation.candidate(_job(request, name, 1, 2), results[name, 1], "simulated")
        found = evaluation.candidate(_job(request, name, *chosen[name]), simulation, "simulated")
        rows.append(
            Compared(name=name, candidate=found, one_row=one, largest_micro_batch=max(most[name], 1 if one.fits else 0))
        )
    notes = dict.fromkeys(note for simulation in final for note in simulation.notes)
    return Comparison(request=request, rows=tuple(rows), notes=tuple(notes))


def _check_names(names: Sequence[str], request: PlanRequest) -> list[Problem]:
    problems = []
    if not names:
        problems.append(Problem(message="--compare names no strategy", fix=f"--compare {','.join(DEFAULT_STRATEGIES)}"))
    for name in names:
        if name not in STRATEGIES:
            near = nearest_names(name, STRATEGIES) or list(STRATEGIES)
            problems.append(
                Problem(
                    message=f"--compare {name}: no such strategy",
                    near=", ".join(near),
                    fix=f"--compare {near[0]}",
                )
            )
    repeated = sorted({name for name in names if list(names).count(name) > 1})
    if repeated:
        unique = list(dict.fromkeys(names))
        problems.append(
            Problem(message=f"--compare names {', '.join(repeated)} twice", fix=f"--compare {','.join(unique)}")
        )
    if request.num_gpus == 1:
        problems.append(
            Problem(message="--compare on one GPU: nothing is shared out, so nothing differs", fix="--gpus 2 or more")
        )
    return problems


def _job(request: PlanRequest, name: str, micro_batch_size: int, num_micro_batches: int) -> Job:
    keys = STRATEGIES.get(name, {})
    job = build_job(request, with_keys(request.config, keys), micro_batch_size, num_micro_batches)
    return dataclasses.replace(job, strategy="ddp" if name == "ddp" else "fsdp")


def _most_rows(evaluation: Evaluation, request: PlanRequest, name: str, fit: AffineFit, start: int) -> int:
    """Return the largest micro-batch that fits by the line; 0 where not even its first one does."""

    def fits(rows: int) -> bool:
        return evaluation.has_room(_job(request, name, rows, 2), fit.peak_bytes_at(rows))

    return largest_where(fits, smallest=start, largest=MOST_ROWS) or 0


def _division(request: PlanRequest, most: int) -> tuple[int, int]:
    """Return the largest micro-batch of the global batch that is at most `most`, with its accumulation."""
    divisions = list_divisions(request.global_batch_size, request.num_gpus)
    return next((item for item in reversed(divisions) if item[0] <= most), divisions[0])
