"""The search: which ways to run a training fit these GPUs, and which of them is fastest.

A simulation costs seconds, so not everything is simulated. Plain sharding comes first, at two micro-batches each, which
give a line (`affine.py`). Each other structure is looked at only if two bounds, both by arithmetic over what is known,
allow it: the memory that it needs at least, and the speed that it reaches at most. What is recommended at the end is
simulated itself, at its own micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from hf_fsdp.plan.candidate import Candidate, Plan, PlanRequest
from hf_fsdp.plan.search.advice import explain_nothing_fits
from hf_fsdp.plan.search.bounds import Bounds, Excluded
from hf_fsdp.plan.search.check import check_request, refuse
from hf_fsdp.plan.search.evaluation import Evaluation, Simulator, default_simulator
from hf_fsdp.plan.search.expected_speed import expected_speed
from hf_fsdp.plan.search.exploration import Exploration
from hf_fsdp.plan.search.facts import assemble_plan
from hf_fsdp.plan.search.ranking import OFFLOAD_MARGIN, SAME_SPEED, Ranked, best_of_each, rank, worth
from hf_fsdp.plan.search.reasons import explain_fit, explain_rejection
from hf_fsdp.plan.search.structures import Structure, list_structures
from hf_fsdp.plan.search.unexplored import describe_unexplored

# About 1 to 5 seconds of one core each: with those that prove the answer, a minute on two cores.
MAX_EXPLORING = 16
MAX_PROVING = 4
NUM_PROVEN = 3
_PER_WAVE = 3
# A structure that cannot be faster by more than this is not explored: estimates do not tell such differences.
WORTH_A_LOOK = 0.03
NO_FASTER = f"since at most {WORTH_A_LOOK:.0%} faster than #1"
TOO_LITTLE_FOR_OFFLOAD = f"since at most {OFFLOAD_MARGIN:.0%} faster than #1, too little to rely on the host"
AFTER_ENOUGH = f"after {MAX_EXPLORING} simulations"


def search(request: PlanRequest, *, simulate: Simulator = default_simulator, command: str = "") -> Plan:
    """Return the plan of `request`: the ways that fit, best first, and what the others lack.

    Args:
        request: model, GPUs and training; what its config fixes is not varied.
        simulate: runs jobs; a stand-in for tests.
        command: what was typed, for the plan.

    Raises:
        PlanError: the request contradicts itself (every problem at once), or nothing fits, with what would.

    Example::

        plan = search(request)
        plan.best.job.batch.micro_batch_size, plan.best.peak_bytes
    """
    started = time.perf_counter()
    refuse(check_request(request))
    run = Search(request, Evaluation(request, simulate))
    run.explore_all()
    run.prove()
    if not run.fitting():
        raise explain_nothing_fits(run)
    return assemble_plan(run, seconds=time.perf_counter() - started, command=command)


class Search:
    """One search: what was explored so far, what was ruled out and what was left alone.

    Args:
        request: checked.
        evaluation: simulates and estimates.
    """

    def __init__(self, request: PlanRequest, evaluation: Evaluation):
        self.request = request
        self.evaluation = evaluation
        self.explorations: dict[tuple[str, str, str], Exploration] = {}
        self.excluded: list[Excluded] = []
        self.left_alone: dict[tuple[str, str, str], str] = {}
        self.proof_errors: list[float] = []
        self._spent = 0
        self._bounds = Bounds(request, evaluation, self.explorations)

    # -- exploring ----------------------------------------------------------------------------------------------------

    def explore_all(self) -> None:
        """Explore plain sharding, then in waves whatever may be faster or may fit where nothing does."""
        waiting = list_structures(self.request)
        base = _plainest(waiting)
        self._wave([item for item in base if not self._exclude(item)])
        waiting = [item for item in waiting if item not in base]
        while waiting:
            waiting = [item for item in waiting if not self._exclude(item) and not self._leave_alone(item)]
            wave = self._next_wave(waiting)
            if not wave:
                break
            self._wave(wave)
            waiting = [item for item in waiting if item not in wave]
        self.left_alone.update((item.key, AFTER_ENOUGH) for item in waiting)

    def _wave(self, structures: Sequence[Structure]) -> None:
        """Explore `structures` together, in one call of the simulator."""
        new = [Exploration(item, self.request) for item in structures]
        jobs = [exploration.first_jobs() for exploration in new]
        self._spent += sum(len(group) for group in jobs)
        results = iter(self.evaluation.run([job for group in jobs for job in group]))
        for exploration, group in zip(new, jobs, strict=True):
            exploration.take_first([next(results) for _ in group])
            self.explorations[exploration.structure.key] = exploration
        self._look_at_single_rows(new)

    def _look_at_single_rows(self, explorations: Iterable[Exploration]) -> None:
        """Where rows are padded the line knows micro-batches with a mask only; one row has none and needs less."""
        jobs = []
        for exploration in explorations:
            first = exploration.divisions[0]
            if first not in exploration.known_divisions() and not self.fitting_of(exploration):
                jobs.append((exploration, first))
        results = self.evaluation.run([exploration.job(*division) for exploration, division in jobs])
        for (exploration, division), simulation in zip(jobs, results, strict=True):
            exploration.take(division, simulation)

    def _next_wave(self, waiting: Sequence[Structure]) -> list[Structure]:
        room = MAX_EXPLORING - self._spent
        base = list_structures(self.request)[0].offload
        ordered = sorted(
            waiting,
            key=lambda item: (
                item.offload != base,
                item.checkpointing == "every second",  # reckoned from two others, and seldom much faster than both
                -self._bounds.most_tokens_per_second(item),
            ),
        )
        wave: list[Structure] = []
        for item in ordered[:_PER_WAVE]:
            room -= len(Exploration(item, self.request).first_jobs())
            if room >= 0:
                wave.append(item)
        return wave

    def _exclude(self, item: Structure) -> bool:
        """Whether arithmetic says that `item` cannot fit; kept with its reason."""
        floor, reason = self._bounds.least_bytes(item)
        unexplored = Exploration(item, self.request)
        job = unexplored.job(*unexplored.divisions[0])
        if reason is None or self.evaluation.has_room(job, floor):
            return False
        self.excluded.append(Excluded(structure=item, candidate=self.evaluation.excluded(job, floor, reason)))
        return True

    def _leave_alone(self, item: Structure) -> bool:
        """Whether `item` cannot be faster than what fits already; kept with its reason."""
        best = self.best()
        if best is None:
            return False
        most = worth(self._bounds.most_tokens_per_second(item), item.config)
        is_about_offload = item.offload != "none" and best.structure.offload == "none"
        if most > best.worth * (1.0 if is_about_offload else 1 + WORTH_A_LOOK):
            return False
        self.left_alone[item.key] = TOO_LITTLE_FOR_OFFLOAD if is_about_offload else NO_FASTER
        return True

    # -- what fits ----------------------------------------------------------------------------------------------------

    def all_ranked(self) -> list[Ranked]:
        """Return every candidate of every explored structure, in no order."""
        return [
            self._ranked(exploration, division)
            for exploration in self.explorations.values()
            for division in exploration.known_divisions()
        ]

    def fitting(self) -> list[Ranked]:
        """Return the candidates that fit, best first."""
        return rank([item for item in self.all_ranked() if item.candidate.fits])

    def fitting_of(self, exploration: Exploration) -> list[Ranked]:
        """Return the candidates of one structure that fit, best first."""
        items = [self._ranked(exploration, division) for division in exploration.known_divisions()]
        return rank([item for item in items if item.candidate.fits])

    def best(self) -> Ranked | None:
        """Return the best candidate so far."""
        return next(iter(self.fitting()), None)

    def _ranked(self, exploration: Exploration, division: tuple[int, int]) -> Ranked:
        candidate = exploration.candidate(division, self.evaluation)
        assert candidate.simulation is not None
        speed = expected_speed(self.request, candidate.job, candidate.simulation)
        return Ranked(candidate=candidate, structure=exploration.structure, division=division, tokens_per_second=speed)

    # -- proving ------------------------------------------------------------------------------------------------------

    def prove(self) -> None:
        """Simulate the best candidates at their own micro-batch until the first few are all simulated.

        A simulation that is off the line bends it, so the order may change and the next one is looked at.
        """
        last = self.evaluation.num_simulated + MAX_PROVING
        while True:
            wanted = [item for item in self._to_prove() if not self._is_simulated(item)]
            wanted = wanted[: last - self.evaluation.num_simulated]
            if not wanted:
                return
            results = self.evaluation.run([item.candidate.job for item in wanted])
            for item, simulation in zip(wanted, results, strict=True):
                error = self.explorations[item.structure.key].take(item.division, simulation)
                if error is not None:
                    self.proof_errors.append(error)

    def _to_prove(self) -> list[Ranked]:
        leaders, _ = best_of_each(self.fitting())
        return [*self._single_forwards(leaders), *leaders[:NUM_PROVEN]]

    def _single_forwards(self, leaders: Sequence[Ranked]) -> list[Ranked]:
        """Candidates without accumulation that miss by less than the gradients which the line counts too early."""
        best = leaders[0].worth if leaders else 0.0
        found = []
        for item in self.all_ranked():
            if item.division[1] > 1 or item.candidate.fits or item.worth <= best * (1 + SAME_SPEED):
                continue
            simulation = item.candidate.simulation
            gradients = simulation.state_bytes.get("gradients", 0) if simulation is not None else 0
            if item.candidate.missing_bytes <= gradients and not item.candidate.missing_host_bytes:
                found.append(item)
        return rank(found)[:1]

    def _is_simulated(self, item: Ranked) -> bool:
        return self.explorations[item.structure.key].is_simulated(item.division)

    # -- the answer ---------------------------------------------------------------------------------------------------

    def candidates(self) -> list[Candidate]:
        """Return what fits, the best of each structure first, then what does not, least missing first; with reasons."""
        leaders, others = best_of_each(self.fitting())
        best = leaders[0] if leaders else None
        fitting = [explain_fit(self, item, best) for item in (*leaders, *others)]
        misses = [explain_rejection(self, item) for item in self.all_ranked() if not item.candidate.fits]
        misses += [item.candidate for item in self.excluded]
        return fitting + sorted(misses, key=lambda item: (item.missing_bytes, item.missing_host_bytes))

    def notes(self) -> list[str]:
        """Return what was not explored, and why, a line for each reason."""
        told = describe_unexplored(self.request, self.left_alone, known={item.structure.key for item in self.excluded})
        return [f"not explored, {why}: {names}" for why, names in told.items()]


def _plainest(structures: Sequence[Structure]) -> list[Structure]:
    """Plain sharding, from which the others are bounded. Every second layer lies between none and all of them."""
    first = structures[0]
    plain = [item for item in structures if (item.sharding, item.offload) == (first.sharding, first.offload)]
    return [item for item in plain if item.checkpointing != "every second"] or plain
