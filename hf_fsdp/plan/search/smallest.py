"""The inverse question: the fewest and smallest GPUs that train a model.

What one GPU holds is on a line in 1/GPUs, since only shards depend on their number, so two simulations of a structure
answer for every number and every kind of GPU. The answers, and the next smaller numbers, are then simulated themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hf_fsdp.config.gpus import GPUS, Gpu
from hf_fsdp.errors import PlanError, Problem
from hf_fsdp.plan.candidate import Candidate, PlanRequest
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.search.affine import AffineFit, fit_affine
from hf_fsdp.plan.search.bounds import estimate_state_bytes
from hf_fsdp.plan.search.check import check_request, refuse
from hf_fsdp.plan.search.evaluation import Evaluation, Simulator, default_simulator
from hf_fsdp.plan.search.kinds import first_with_bf16, for_kinds, is_auto, needs_bf16
from hf_fsdp.plan.search.placement import place_gpus
from hf_fsdp.plan.search.structures import Structure, build_job, leanest_structure, list_structures
from hf_fsdp.plan.simulation import Simulation

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_LINE_COUNTS = (2, 32)
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class SmallestHardware:
    """The fewest GPUs of one kind.

    Args:
        request: of these GPUs; what `search` takes for the whole plan.
        candidate: one row a GPU, simulated.
        fewer: the next smaller number, simulated, which does not fit; None where there is none.
        offload: ``none``, or what is kept in host memory.
    """

    request: PlanRequest
    candidate: Candidate
    fewer: Candidate | None
    offload: str

    @property
    def num_gpus(self) -> int:
        """How many."""
        return self.request.num_gpus

    @property
    def total_gib(self) -> float:
        """Memory of all these GPUs together: what is compared over kinds."""
        gpu = self.request.gpus.gpu
        assert gpu is not None
        return self.num_gpus * gpu.usable_gib


@dataclass(frozen=True, kw_only=True)
class SmallestPlan:
    """What `find_smallest` found.

    Args:
        request: what was asked; its GPUs say nothing.
        rows: without offload first, then least total memory, then fewest GPUs. With offload only where that
            needs fewer GPUs of the same kind.
        notes: kinds of GPU that were left out, and why.
        num_simulated: simulations in all.
    """

    request: PlanRequest
    rows: tuple[SmallestHardware, ...]
    notes: tuple[str, ...] = ()
    num_simulated: int = 0


def find_smallest(
    request: PlanRequest, *, gpus: Sequence[Gpu] = GPUS, simulate: Simulator = default_simulator
) -> SmallestPlan:
    """Return, for each kind of GPU, the fewest that hold a step of one row each, with and without offload.

    Args:
        request: model, method, length and global batch; its `gpus` are not looked at. What its config leaves open is
            decided for memory: everything is recomputed, and offload is a row of its own.
        gpus: kinds to consider.
        simulate: runs jobs.

    Raises:
        PlanError: the request contradicts itself, or no number of any of them does.

    Example::

        find_smallest(request).rows[0].request.gpu_name
        # 'L4-24G'
    """
    refuse(check_smallest(request, gpus))
    counts = _counts(request)
    usable = [gpu for gpu in gpus if gpu.has_bf16 or not needs_bf16(request)]
    left_out = [gpu.name for gpu in gpus if gpu not in usable]
    evaluation = Evaluation(request, simulate)
    rows: list[SmallestHardware] = []
    for is_half in (False, True):
        kinds = [gpu for gpu in usable if (not gpu.has_bf16 and is_auto(request)) == is_half]
        if kinds:
            rows += _Smallest(for_kinds(request, is_half), kinds, counts, evaluation).rows()
    if not rows:
        raise PlanError(
            f"{request.model.name} ({request.method.name}, rows of {request.max_length} tokens) fits on no number of "
            f"GPUs up to {counts[-1]} that divides a global batch of {request.global_batch_size}",
            fix=f"--max-length {max(1, request.max_length // 2)}, or a larger --global-batch-size",
        )
    notes = [f"not considered, since they do not compute in bfloat16: {', '.join(left_out)}"] if left_out else []
    ordered = sorted(_worthwhile(rows), key=lambda row: (row.offload != "none", row.total_gib, row.num_gpus))
    return SmallestPlan(
        request=request, rows=tuple(ordered), notes=tuple(notes), num_simulated=evaluation.num_simulated
    )


def check_smallest(request: PlanRequest, gpus: Sequence[Gpu] = GPUS) -> list[Problem]:
    """Return every problem of `request`, whose GPUs are not looked at."""
    some = max((count for count in _counts(request) if count <= 8), default=1)
    return check_request(_placed(request, some, first_with_bf16(gpus)))


def _counts(request: PlanRequest) -> list[int]:
    """Numbers of GPUs that the global batch can be spread over."""
    total = request.global_batch_size
    return [count for count in COUNTS if count <= total and total % count == 0]


class _Smallest:
    """All kinds of GPU that share a precision, hence their simulations."""

    def __init__(self, request: PlanRequest, kinds: Sequence[Gpu], counts: Sequence[int], evaluation: Evaluation):
        self._request = request
        self._kinds = kinds
        self._counts = counts
        self._evaluation = evaluation
        self._structures = _leanest_of_each_offload(_placed(request, 8, kinds[0]))

    def rows(self) -> list[SmallestHardware]:
        rows = []
        for structure in self._structures:
            rows += self._rows_of(structure)
        return rows

    def _rows_of(self, structure: Structure) -> list[SmallestHardware]:
        counts = [count for count in self._counts if count > 1 or structure.offload == "none"]
        fit, proven = self._first(structure, counts)
        answers: dict[str, int] = {}
        for _ in range(_ROUNDS):
            answers = {
                gpu.name: found for gpu in self._kinds if (found := self._fewest(structure, fit, proven, gpu, counts))
            }
            wanted = {count for found in answers.values() for count in self._with_next_smaller(found, counts)}
            new = sorted(wanted - set(proven))
            if not new:
                break
            jobs = [self._job(structure, count) for count in new]
            proven.update(zip(new, self._evaluation.run(jobs), strict=True))
        return [
            self._row(structure, gpu, answers[gpu.name], proven, counts) for gpu in self._kinds if gpu.name in answers
        ]

    def _first(self, structure: Structure, counts: Sequence[int]) -> tuple[AffineFit, dict[int, Simulation]]:
        """The line of sharded numbers, and a single GPU, which shards nothing and so lies on no line."""
        jobs = [
            build_job(_placed(self._request, count, self._kinds[0]), structure.config, 1, 2) for count in _LINE_COUNTS
        ]
        single = [self._job(structure, 1)] if self._may_do_alone(counts) else []
        near, far, *alone = self._evaluation.run([*jobs, *single])
        fit = fit_affine([(1 / _LINE_COUNTS[0], near), (1 / _LINE_COUNTS[1], far)])
        total = self._request.global_batch_size
        known = {count: one for count, one in zip(_LINE_COUNTS, (near, far), strict=True) if total >= 2 * count}
        return fit, {**known, 1: alone[0]} if alone else known

    def _may_do_alone(self, counts: Sequence[int]) -> bool:
        states = estimate_state_bytes(self._request, 1) or 0
        return 1 in counts and states <= max(gpu.usable_bytes for gpu in self._kinds)

    def _fewest(
        self,
        structure: Structure,
        fit: AffineFit,
        proven: dict[int, Simulation],
        gpu: Gpu,
        counts: Sequence[int],
    ) -> int | None:
        """The fewest GPUs of this kind, by simulations where there are some and by the line elsewhere."""
        for count in counts:
            if count == 1 and 1 not in proven:
                continue
            peak = proven[count] if count in proven else fit.simulation_at(1 / count)
            evaluation = Evaluation(_placed(self._request, count, gpu), self._evaluation.run)
            if evaluation.candidate(self._job(structure, count), peak, "extended").fits:
                return count
        return None

    def _with_next_smaller(self, count: int, counts: Sequence[int]) -> list[int]:
        smaller = [number for number in counts if number < count and number > 1]
        return [count, *smaller[-1:]]

    def _row(
        self, structure: Structure, gpu: Gpu, count: int, proven: dict[int, Simulation], counts: Sequence[int]
    ) -> SmallestHardware:
        def candidate(number: int) -> Candidate:
            request = _placed(self._request, number, gpu)
            job = self._job(structure, number)
            return Evaluation(request, self._evaluation.run).candidate(job, proven[number], "simulated")

        smaller = [number for number in counts if number < count]
        return SmallestHardware(
            request=_placed(self._request, count, gpu),
            candidate=candidate(count),
            fewer=candidate(smaller[-1]) if smaller and smaller[-1] in proven else None,
            offload=structure.offload,
        )

    def _job(self, structure: Structure, count: int) -> Job:
        """One row a GPU. Accumulated, unless the global batch leaves each GPU one row."""
        request = _placed(self._request, count, self._kinds[0])
        forwards = 1 if request.global_batch_size == count else 2
        return build_job(request, structure.config, 1, forwards)


def _worthwhile(rows: Sequence[SmallestHardware]) -> list[SmallestHardware]:
    """Offload is slow: it is an answer only where it needs fewer GPUs of the same kind."""
    plain = {row.request.gpu_name: row.num_gpus for row in rows if row.offload == "none"}
    return [
        row for row in rows if row.offload == "none" or row.num_gpus < plain.get(row.request.gpu_name, COUNTS[-1] + 1)
    ]


def _leanest_of_each_offload(request: PlanRequest) -> list[Structure]:
    """Without offload, and with the most of it that the config leaves open."""
    first = leanest_structure(request)
    same = [item for item in list_structures(request) if item.sharding == first.sharding]
    last = [item for item in same if item.offload != first.offload][-1:]
    return [first, *last]


def _placed(request: PlanRequest, count: int, gpu: Gpu) -> PlanRequest:
    return dataclasses.replace(request, gpus=place_gpus(count, gpu), gpu_memory_bytes=gpu.usable_bytes)
