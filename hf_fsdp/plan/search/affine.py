"""Simulations on a straight line: a few are run, the others lie between or beyond them.

Every tensor of a step has a size of the form a + b·x in the rows of a micro-batch, and in 1/world_size: weights do not
grow with rows, activations do not grow with shards. So does what is held at one operator, and the traffic. The peak
does not: another phase may hold more at another size. The line is therefore drawn through each category of each phase,
and the largest phase is looked for afterwards.

Within one phase the operator of the peak can change as well, where the line becomes steeper. Between two points a line
then says too much, beyond them too little; so whatever is recommended is simulated itself, and `with_point` takes the
result into the fit.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_fsdp.plan.simulation import PhasePeak, Simulation, Work


@dataclass(frozen=True, kw_only=True)
class AffineFit:
    """Straight lines through simulations that differ in one number only.

    Args:
        points: (number, simulation), in rising order of the number; one point says the same everywhere, so ask it
            for its own number only.
    """

    points: tuple[tuple[float, Simulation], ...]

    def simulation_at(self, x: float) -> Simulation:
        """Return the simulation that is expected at `x`; a simulated one where there is one."""
        for known, simulation in self.points:
            if known == x:
                return simulation
        if len(self.points) == 1:
            raise ValueError(f"one point at {self.points[0][0]} says nothing of {x}")
        (x0, first), (x1, second) = self._neighbours(x)
        return _between(first, second, (x - x0) / (x1 - x0))

    def peak_bytes_at(self, x: float) -> int:
        """Return the bytes of the largest phase that are expected at `x`."""
        return self.simulation_at(x).peak.num_bytes

    def is_simulated(self, x: float) -> bool:
        """Whether `x` itself was simulated."""
        return any(known == x for known, _ in self.points)

    def with_point(self, x: float, simulation: Simulation) -> AffineFit:
        """Return the fit with one more simulation, which replaces one of the same number."""
        return fit_affine([point for point in self.points if point[0] != x] + [(x, simulation)])

    def _neighbours(self, x: float) -> tuple[tuple[float, Simulation], tuple[float, Simulation]]:
        """The points around `x`, or the two that are nearest to it where it lies outside."""
        index = bisect_right([known for known, _ in self.points], x)
        index = min(max(index, 1), len(self.points) - 1)
        return self.points[index - 1], self.points[index]


def fit_affine(points: Sequence[tuple[float, Simulation]]) -> AffineFit:
    """Return straight lines through `points`.

    Args:
        points: (number, simulation) in any order, each number once.

    Raises:
        ValueError: no point, a number twice, or simulations of other phases.

    Example::

        fit = fit_affine([(1, one_row), (2, two_rows)])
        fit.simulation_at(8).peak.num_bytes
    """
    ordered = tuple(sorted(points, key=lambda point: point[0]))
    numbers = [number for number, _ in ordered]
    if not ordered or len(set(numbers)) < len(numbers):
        raise ValueError(f"a line needs simulations at different numbers, not at {numbers}")
    phases = {tuple(phase.name for phase in simulation.phases) for _, simulation in ordered}
    if len(phases) > 1:
        raise ValueError(f"simulations of different phases are not on one line: {sorted(phases)}")
    return AffineFit(points=ordered)


def largest_where(fits: Callable[[int], bool], *, smallest: int = 1, largest: int) -> int | None:
    """Return the largest whole number that `fits`, or None where not even `smallest` does.

    Args:
        fits: true up to some number and false from there on, as memory is that grows with rows.
        smallest, largest: the range that is looked at, both included.
    """
    if not fits(smallest):
        return None
    low, high = smallest, smallest
    while high < largest and fits(high):
        low, high = high, min(largest, high * 2)
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def relative_error(expected: Simulation, simulated: Simulation) -> float:
    """Return how far the expected peak is from the simulated one: 0.01 is one percent too much."""
    return expected.peak.num_bytes / simulated.peak.num_bytes - 1


def _between(first: Simulation, second: Simulation, share: float) -> Simulation:
    """Return the simulation at `share` of the way from the first to the second."""

    def line(a: float, b: float) -> float:
        return max(0.0, a + (b - a) * share)

    def whole(a: float, b: float) -> int:
        return round(line(a, b))

    phases = []
    for one, other in zip(first.phases, second.phases, strict=True):
        names = list(dict.fromkeys([*one.categories, *other.categories]))
        parts = {name: whole(one.categories.get(name, 0), other.categories.get(name, 0)) for name in names}
        phases.append(
            PhasePeak(
                name=one.name,
                num_bytes=sum(parts.values()),
                categories=parts,
                host_bytes=whole(one.host_bytes, other.host_bytes),
            )
        )
    work: dict[str, Any] = {
        item.name: line(getattr(first.work, item.name), getattr(second.work, item.name)) for item in _WORK_FIELDS
    }
    states = {name: whole(first.state_bytes[name], second.state_bytes.get(name, 0)) for name in first.state_bytes}
    sizes: dict[str, Any] = {name: whole(getattr(first, name), getattr(second, name)) for name in _SIZES}
    return dataclasses.replace(
        first,
        phases=tuple(phases),
        work=Work(**{**work, "num_tokens": round(work["num_tokens"])}),
        state_bytes=states,
        timeline=(),
        cpu_seconds=0.0,
        **sizes,
    )


_WORK_FIELDS = dataclasses.fields(Work)
_SIZES = ("host_bytes", "load_host_bytes", "checkpoint_bytes", "model_bytes", "largest_unit_bytes")
