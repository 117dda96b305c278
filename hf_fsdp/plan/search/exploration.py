"""One structure at every micro-batch of its global batch, from few simulations."""

from __future__ import annotations

from hf_fsdp.plan.candidate import Candidate, PlanRequest
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.search.accumulation import MICRO_BATCHES_TO_SIMULATE, lengthen_step
from hf_fsdp.plan.search.affine import AffineFit, fit_affine, relative_error
from hf_fsdp.plan.search.divisions import list_divisions
from hf_fsdp.plan.search.evaluation import Evaluation
from hf_fsdp.plan.search.structures import Structure, build_job, is_padded
from hf_fsdp.plan.simulation import Simulation

# Rows that the line is drawn through: far enough apart to see a slope, small enough to lie below most answers.
_FAR_SIZE = 4


class Exploration:
    """What is known of one structure.

    The line is of steps with accumulation, and where rows are padded of micro-batches with a mask. A step of a single
    micro-batch holds less than the line says, since it has no gradients before its backward.

    Args:
        structure: what is explored.
        request: gives the global batch, hence the possible micro-batches.
    """

    def __init__(self, structure: Structure, request: PlanRequest):
        self.structure = structure
        self.request = request
        self.divisions = list_divisions(request.global_batch_size, request.num_gpus)
        self.largest_error = 0.0
        self._fit: AffineFit | None = None
        self._exact: dict[tuple[int, int], Simulation] = {}

    # -- what to simulate ---------------------------------------------------------------------------------------------

    def first_jobs(self) -> list[Job]:
        """Return the jobs that the line needs, or all of them where there are but two."""
        if len(self.divisions) <= 2:
            return [self.job(*division) for division in self.divisions]
        return [self.job(size, MICRO_BATCHES_TO_SIMULATE) for size in self._line_sizes()]

    def job(self, micro_batch_size: int, num_micro_batches: int) -> Job:
        """Return the job of one micro-batch size."""
        return build_job(self.request, self.structure.config, micro_batch_size, num_micro_batches)

    def _line_sizes(self) -> tuple[int, ...]:
        return (2 if is_padded(self.request, 2) else 1, _FAR_SIZE)

    # -- what was simulated -------------------------------------------------------------------------------------------

    def take_first(self, simulations: list[Simulation]) -> None:
        """Take the simulations of `first_jobs` in."""
        if len(self.divisions) <= 2:
            self._exact.update(zip(self.divisions, simulations, strict=True))
        else:
            sizes = [float(size) for size in self._line_sizes()]
            self._fit = fit_affine(list(zip(sizes, simulations, strict=True)))

    def take(self, division: tuple[int, int], simulation: Simulation) -> float | None:
        """Take the simulation of a whole candidate in; return by how much the line was off, if it spoke of it."""
        expected = self._on_line(division) if self._is_on_line(division) and division not in self._exact else None
        self._exact[division] = simulation
        if expected is None or division[1] < MICRO_BATCHES_TO_SIMULATE:
            return None
        assert self._fit is not None
        error = relative_error(expected, simulation)
        self.largest_error = max(self.largest_error, abs(error))
        short = lengthen_step(simulation, self.job(division[0], MICRO_BATCHES_TO_SIMULATE), simulated=division[1])
        self._fit = self._fit.with_point(division[0], short)
        return error

    # -- what is known ------------------------------------------------------------------------------------------------

    def known_divisions(self) -> list[tuple[int, int]]:
        """Return the divisions that something can be said of."""
        return [division for division in self.divisions if division in self._exact or self._is_on_line(division)]

    def simulation(self, division: tuple[int, int]) -> Simulation:
        """Return the simulation of one division, or what the line says."""
        return self._exact[division] if division in self._exact else self._on_line(division)

    def is_simulated(self, division: tuple[int, int]) -> bool:
        """Whether this very candidate was simulated (any more than two micro-batches repeat the second)."""
        if division in self._exact:
            return True
        accumulates = division[1] >= MICRO_BATCHES_TO_SIMULATE
        return self._fit is not None and accumulates and self._fit.is_simulated(division[0])

    def candidate(self, division: tuple[int, int], evaluation: Evaluation) -> Candidate:
        """Return how one division does."""
        basis = "simulated" if self.is_simulated(division) else "extended"
        return evaluation.candidate(self.job(*division), self.simulation(division), basis)

    @property
    def smallest_on_line(self) -> int | None:
        """The smallest micro-batch that the line speaks of; None where there is no line."""
        return None if self._fit is None else self._line_sizes()[0]

    def peak_bytes_at(self, micro_batch_size: int) -> int | None:
        """Return the peak with so many rows under accumulation; None where there is no line."""
        return None if self._fit is None else self._fit.peak_bytes_at(micro_batch_size)

    def _is_on_line(self, division: tuple[int, int]) -> bool:
        return self._fit is not None and division[0] >= self._line_sizes()[0]

    def _on_line(self, division: tuple[int, int]) -> Simulation:
        assert self._fit is not None
        expected = self._fit.simulation_at(division[0])
        return lengthen_step(expected, self.job(*division), simulated=MICRO_BATCHES_TO_SIMULATE)
