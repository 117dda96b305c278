"""The figures of a plan in words: sizes, ranges of an estimate, what is lacking; the same on a terminal and a page."""

from __future__ import annotations

from collections.abc import Sequence

from hf_fsdp.plan.candidate import Candidate, Plan
from hf_fsdp.units import format_bytes

# Above a column of host memory, in every table: the plan's, --min-gpus and --compare.
HOST_TITLE = "HOST\na machine"
_HOURS = {"days": 24.0, "hours": 1.0, "minutes": 1 / 60}


def describe_hardware(plan: Plan) -> str:
    """Return the line ``8 x A100-80G: 80.0 GiB each - 3.5 GiB reserve = 76.5 GiB usable``."""
    request = plan.request
    machines = f" on {request.num_machines} machines" if request.num_machines > 1 else ""
    line = f"{request.num_gpus} x {request.gpu_name}{machines}: {format_bytes(request.gpu_memory_bytes)} each"
    first = plan.best or next(iter(plan.candidates), None)
    if first is None:
        return line
    reserve = f"{format_bytes(first.reserve.total_bytes)} reserve (estimated)"
    return f"{line} - {reserve} = {format_bytes(first.usable_bytes)} usable"


def describe_basis(plan: Plan, shown: Sequence[Candidate]) -> str:
    """Return how the figures are known, of those that there are: ``Memory is simulated; speed ... is estimated.``"""
    estimated = [
        name
        for name, has in (
            ("speed (of all GPUs together)", any(format_speed(item) for item in shown)),
            ("time", any(format_time(plan, item) for item in shown)),
            ("cost", any(format_cost(plan, item) for item in shown)),
        )
        if has
    ]
    if not estimated:
        return "Memory is simulated."
    *others, last = estimated
    words = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return f"Memory is simulated; {words} estimated."


def format_speed(candidate: Candidate) -> str:
    """Return ``21,000-26,500`` tokens a second of all GPUs, or nothing where there is no estimate."""
    if candidate.speed is None:
        return ""
    return format_range(candidate.speed.low_tokens_per_second, candidate.speed.high_tokens_per_second)


def format_mfu(candidate: Candidate) -> str:
    """Return ``38-47 %``, or nothing where there is no estimate."""
    speed = candidate.speed
    return "" if speed is None else f"{speed.low_mfu * 100:.0f}-{speed.high_mfu * 100:.0f} %"


def time_unit(plan: Plan) -> str:
    """Return the unit in which the times of a plan are told: one for all of them, in which the first has digits."""
    costs = (plan.estimate_cost(item) for item in plan.candidates)
    hours = next((cost.high_hours for cost in costs if cost is not None), 0.0)
    return "days" if hours >= 48 else "hours" if hours >= 1 else "minutes"


def format_time(plan: Plan, candidate: Candidate) -> str:
    """Return the time of the whole training in `time_unit`, or nothing where it was not asked for."""
    cost = plan.estimate_cost(candidate)
    if cost is None:
        return ""
    size = _HOURS[time_unit(plan)]
    return format_range(cost.low_hours / size, cost.high_hours / size)


def format_cost(plan: Plan, candidate: Candidate) -> str:
    """Return the price of the whole training, in the currency of its price, or nothing where none was given."""
    cost = plan.estimate_cost(candidate)
    if cost is None or cost.low_cost is None or cost.high_cost is None:
        return ""
    return format_range(cost.low_cost, cost.high_cost)


def format_range(low: float, high: float) -> str:
    """Return both ends with as many digits as a range of this kind can mean: three."""

    def digits(value: float) -> str:
        if value >= 1000:
            return f"{round(value, -(len(str(int(value))) - 3)):,.0f}"
        return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"

    return digits(low) if digits(low) == digits(high) else f"{digits(low)}-{digits(high)}"


def format_size(num_bytes: float) -> str:
    """Return a size, or a dash for nothing."""
    return format_bytes(num_bytes) if num_bytes else "-"


def format_peak(candidate: Candidate) -> str:
    """Return the peak, with a ``~`` before one that was not simulated itself."""
    return f"{'' if candidate.basis == 'simulated' else '~'}{format_size(candidate.peak_bytes)}"


def format_category(name: str) -> str:
    """Return a category as a person reads it: ``logits and loss``."""
    return name.replace("_", " ")


def format_phase(name: str) -> str:
    """Return a phase in few letters: ``backward`` of ``backward: language, last layer``."""
    return name.partition(":")[0]


def explain_rejection(candidate: Candidate) -> str:
    """Return why a candidate cannot run: what it needs, where that figure comes from, and what is lacking."""
    reasons = []
    if candidate.simulation is not None:
        peak = candidate.simulation.peak
        reasons.append(f"{format_bytes(peak.num_bytes)} in {format_phase(peak.name)}, {candidate.basis}")
    elif candidate.floor_bytes:
        reasons.append(f"at least {format_bytes(candidate.floor_bytes)} by arithmetic")
    if candidate.pruned:
        reasons.append(candidate.pruned)
    if candidate.missing_bytes:
        reasons.append(f"lacks {format_bytes(candidate.missing_bytes)} a GPU")
    if candidate.missing_host_bytes:
        reasons.append(f"lacks {format_bytes(candidate.missing_host_bytes)} of host memory a machine")
    return "; ".join(reasons)
