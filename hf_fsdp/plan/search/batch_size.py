"""The largest micro-batch for a length, and the longest rows for a micro-batch; both end at two simulations.

Rows: the peak is on a line (`affine.py`). Length: a mask and scores of attention grow with its square, so no line is
drawn; the search is by simulations, with a secant through the last two as the guess.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from hf_fsdp.errors import PlanError, Problem
from hf_fsdp.plan.candidate import Candidate, PlanRequest
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.models.positions import max_positions
from hf_fsdp.plan.search.affine import AffineFit, fit_affine, largest_where
from hf_fsdp.plan.search.check import check_request, picture_tokens, refuse
from hf_fsdp.plan.search.evaluation import Evaluation, Simulator, default_simulator
from hf_fsdp.plan.search.structures import Structure, build_job, is_padded, leanest_structure
from hf_fsdp.units import format_bytes

MOST_ROWS = 4096
LENGTH_STEP = 128  # rows of a length that kernels like
_MOST_SIMULATIONS = 16


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest micro-batch at one length.

    Args:
        micro_batch_size: rows.
        candidate: of that micro-batch, simulated.
        above: of one row more, simulated, which does not fit; None where the global batch or `MOST_ROWS` ends it.
    """

    micro_batch_size: int
    candidate: Candidate
    above: Candidate | None


@dataclass(frozen=True, kw_only=True)
class LongestRows:
    """The longest rows at one micro-batch.

    Args:
        num_tokens: a multiple of `LENGTH_STEP`, or the model's positions.
        candidate: of that length, simulated.
        above: of the next length, simulated, which does not fit; None where the model's positions end it.
    """

    num_tokens: int
    candidate: Candidate
    above: Candidate | None


def find_max_batch(
    request: PlanRequest, structure: Structure | None = None, *, simulate: Simulator = default_simulator
) -> LargestBatch:
    """Return the largest micro-batch of rows of ``request.max_length`` tokens, whatever the global batch.

    Args:
        request: model, GPUs, method and length.
        structure: sharding, checkpointing and offload; None: the leanest without offload that the config leaves open.
        simulate: runs jobs.

    Raises:
        PlanError: not even one row fits, with what it lacks; or the request contradicts itself.
    """
    refuse(check_batch(request))
    evaluation = Evaluation(request, simulate)
    config = (structure or leanest_structure(request)).config
    start = 2 if is_padded(request, 2) else 1

    def job(rows: int) -> Job:
        return build_job(request, config, rows, 2)

    sizes = (start, 4 * start)
    fit = fit_affine(list(zip(sizes, evaluation.run([job(size) for size in sizes]), strict=True)))
    for _ in range(_MOST_SIMULATIONS // 2):
        rows = _largest_rows(evaluation, fit, job, start)
        wanted = [size for size in (rows, rows + 1) if start <= size <= MOST_ROWS]
        for size, simulation in zip(wanted, evaluation.run([job(size) for size in wanted]), strict=True):
            fit = fit.with_point(size, simulation)
        if _largest_rows(evaluation, fit, job, start) == rows:
            break
    return _largest_batch(evaluation, job, rows)


def _largest_rows(evaluation: Evaluation, fit: AffineFit, job: Callable[[int], Job], start: int) -> int:
    found = largest_where(
        lambda rows: evaluation.has_room(job(rows), fit.peak_bytes_at(rows)), smallest=start, largest=MOST_ROWS
    )
    return start - 1 if found is None else found


def _largest_batch(evaluation: Evaluation, job: Callable[[int], Job], rows: int) -> LargestBatch:
    def candidate(size: int) -> Candidate:
        return evaluation.candidate(job(size), evaluation.run([job(size)])[0], "simulated")

    if rows >= 1 and (found := candidate(rows)).fits:
        above = candidate(rows + 1) if rows < MOST_ROWS else None
        return LargestBatch(micro_batch_size=rows, candidate=found, above=above)
    raise _one_row_too_many(evaluation.request, candidate(max(rows, 1)))


def find_longest_rows(
    request: PlanRequest,
    micro_batch_size: int = 1,
    structure: Structure | None = None,
    *,
    simulate: Simulator = default_simulator,
) -> LongestRows:
    """Return the longest rows of which `micro_batch_size` fit, up to the positions of the model.

    Args:
        request: model, GPUs and method; its `max_length` is where the search begins.
        micro_batch_size: rows of one forward.
        structure: as in `find_max_batch`.
        simulate: runs jobs.

    Raises:
        PlanError: not even `LENGTH_STEP` tokens fit, with what they lack; or the request contradicts itself.
    """
    refuse(check_batch(request, micro_batch_size))
    search = _LengthSearch(request, micro_batch_size, (structure or leanest_structure(request)), simulate)
    return search.answer()


class _LengthSearch:
    """Finds the largest number of steps of `LENGTH_STEP` tokens that fits, by few simulations."""

    def __init__(self, request: PlanRequest, rows: int, structure: Structure, simulate: Simulator):
        self._request = request
        self._rows = rows
        self._structure = structure
        self._evaluation = Evaluation(request, simulate)
        self._positions = max_positions(request.model) or 1 << 20
        # Rows that cannot hold their pictures are no step; the request's own length can.
        pictures = picture_tokens(build_job(request, self._structure.config, 1, 1))
        self._least = max(1, math.ceil(pictures / LENGTH_STEP))

    def answer(self) -> LongestRows:
        most = max(1, math.ceil(self._positions / LENGTH_STEP))
        low, high = self._least - 1, most + 1  # steps that fit, steps that do not
        guess = min(most, max(self._least, self._request.max_length // LENGTH_STEP))
        while high - low > 1:
            if self._fits(guess):
                low = guess
            else:
                high = guess
            guess = self._next(low, high, most)
        if low < self._least:
            raise _one_row_too_many(self._request, self._candidate(self._least))
        above = self._candidate(high) if high <= most else None
        return LongestRows(num_tokens=self._tokens(low), candidate=self._candidate(low), above=above)

    def _next(self, low: int, high: int, most: int) -> int:
        """The next number of steps to simulate: where a straight line through what is known meets the limit."""
        if high > most:  # nothing known is too long: stretch by what is used of the memory so far
            candidate = self._candidate(max(low, self._least))
            stretch = min(8.0, max(1.3, candidate.usable_bytes / max(candidate.peak_bytes, 1)))
            return min(most, max(low + 1, int(low * stretch)))
        if low < self._least:
            return max(self._least, high // 2)
        below, above = self._candidate(low), self._candidate(high)
        rise = above.peak_bytes - below.peak_bytes
        share = below.headroom_bytes / rise if rise > 0 else 0.5
        step = math.floor((high - low) * share)
        return min(high - 1, max(low + 1, low + step))

    def _tokens(self, steps: int) -> int:
        return min(steps * LENGTH_STEP, self._positions)

    def _fits(self, steps: int) -> bool:
        return self._candidate(steps).fits

    def _candidate(self, steps: int) -> Candidate:
        request = dataclasses.replace(self._request, max_length=self._tokens(steps))
        job = build_job(request, self._structure.config, self._rows, 2)
        return self._evaluation.candidate(job, self._evaluation.run([job])[0], "simulated")


def check_batch(request: PlanRequest, micro_batch_size: int = 1) -> list[Problem]:
    """Return every problem of `request`, whose global batch is not part of this question."""
    problems = check_request(dataclasses.replace(request, global_batch_size=max(1, request.num_gpus)))
    if not 1 <= micro_batch_size <= MOST_ROWS:
        problems.append(
            Problem(
                message=f"--micro-batch-size {micro_batch_size} is no number of rows from 1 to {MOST_ROWS}",
                fix="--micro-batch-size 1",
            )
        )
    return problems


def _one_row_too_many(request: PlanRequest, candidate: Candidate) -> PlanError:
    rows, length = candidate.job.batch.micro_batch_size, candidate.job.batch.num_tokens
    return PlanError(
        f"{rows} row{'s' if rows > 1 else ''} of {length} tokens of {request.model.name} ({request.method.name}) need "
        f"{format_bytes(candidate.peak_bytes)} on each of {request.num_gpus} x {request.gpu_name}: "
        f"{format_bytes(candidate.missing_bytes)} too many",
        fix="hf-fsdp plan without --max-batch: it searches offload too, and says which hardware would do",
    )
