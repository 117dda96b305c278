"""Why a candidate is what it is, in sentences with numbers: what each choice saves, what the next step would need."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hf_fsdp.plan.candidate import Candidate
from hf_fsdp.plan.report.settings import describe_checkpointing, describe_offload, describe_sharding
from hf_fsdp.plan.search.affine import largest_where
from hf_fsdp.plan.search.expected_speed import expected_speed
from hf_fsdp.plan.search.exploration import Exploration
from hf_fsdp.plan.search.ranking import SAME_SPEED, Ranked
from hf_fsdp.units import format_bytes

if TYPE_CHECKING:
    from hf_fsdp.plan.search.search import Search

# Looked at beyond the global batch, so that a person learns what the memory would allow.
_MANY_ROWS = 4096


def explain_fit(run: Search, item: Ranked, best: Ranked | None) -> Candidate:
    """Return the candidate of `item` with its reasons.

    Args:
        run: the finished search.
        item: a candidate that fits.
        best: the first of all.
    """
    reasons = [_memory(item.candidate), *_choices(run, item), *_micro_batch(run, item)]
    if best is not None and best is not item and best.tokens_per_second:
        slower = 1 - item.tokens_per_second / best.tokens_per_second
        if slower > SAME_SPEED:
            reasons.append(f"it is estimated {slower:.0%} slower than #1")
        elif slower < -SAME_SPEED:
            reasons.append(f"it is estimated {-slower:.0%} faster than #1, too little to rely on the host")
        else:
            reasons.append("it is estimated as fast as #1, which has more room or is simpler")
    return dataclasses.replace(item.candidate, why=tuple(reasons))


def explain_rejection(run: Search, item: Ranked) -> Candidate:
    """Return the candidate of `item`, which does not fit, with its reasons."""
    candidate = item.candidate
    exploration = run.explorations[item.structure.key]
    reasons = []
    if candidate.missing_bytes and candidate.simulation is not None:
        peak = candidate.simulation.peak
        name, size = max(peak.categories.items(), key=lambda part: part[1])
        reasons.append(
            f"it lacks {format_bytes(candidate.missing_bytes)} on each GPU in {peak.name}; "
            f"{name.replace('_', ' ')} take {format_bytes(size)} of {format_bytes(peak.num_bytes)}"
        )
    if candidate.missing_host_bytes:
        reasons.append(
            f"it lacks {format_bytes(candidate.missing_host_bytes)} of host memory on each machine: "
            f"{format_bytes(candidate.host_bytes)} of {format_bytes(candidate.host_limit_bytes or 0)}"
        )
    most = find_most_rows(run, exploration)
    if candidate.missing_bytes and most is not None:
        reasons.append(f"the largest micro-batch that fits is {most}" if most else "not even one row fits")
    return dataclasses.replace(candidate, why=tuple(reasons))


def find_most_rows(run: Search, exploration: Exploration) -> int | None:
    """Return the largest micro-batch that fits under accumulation by the line, 0: none; None: there is no line."""
    start = exploration.smallest_on_line
    if start is None:
        return None

    def fits(rows: int) -> bool:
        peak = exploration.peak_bytes_at(rows)
        return peak is not None and run.evaluation.has_room(exploration.job(rows, 2), peak)

    found = largest_where(fits, smallest=start, largest=_MANY_ROWS)
    if found is not None:
        return found
    return 1 if start > 1 and run.fitting_of(exploration) else 0


# -- what was chosen --------------------------------------------------------------------------------------------------


def _memory(candidate: Candidate) -> str:
    assert candidate.simulation is not None
    peak = candidate.simulation.peak
    return (
        f"{format_bytes(peak.num_bytes)} at the peak ({peak.name}) leave {format_bytes(candidate.headroom_bytes)} of "
        f"the {format_bytes(candidate.usable_bytes)} that are usable on each GPU"
    )


def _choices(run: Search, item: Ranked) -> Iterator[str]:
    """Compare each choice with the plainer one: how much it lacks, or how much slower it would be."""
    sharding, checkpointing, offload = item.structure.key
    config = item.structure.config
    if checkpointing != "none":
        told = _instead(run, item, (sharding, "none", offload), "without it")
        if told := told or _as_config_says(run, "activation_checkpointing."):
            yield f"checkpointing {describe_checkpointing(config)}: {told}"
    elif (other := _instead(run, item, (sharding, "full", offload), "with checkpointing full")) and "slower" in other:
        yield f"checkpointing none: {other}"
    if offload != "none":
        told = _instead(run, item, (sharding, checkpointing, "none"), "without offload")
        if told := told or _as_config_says(run, "offload."):
            yield f"{describe_offload(config)} in host memory: {told}"
        if item.candidate.host_limit_bytes is None:
            need = format_bytes(item.candidate.host_bytes)
            yield f"it takes {need} of host memory on each machine, which was not given and so not checked"
    yield from _sharding(run, item)


def _sharding(run: Search, item: Ranked) -> Iterator[str]:
    sharding, checkpointing, offload = item.structure.key
    if sharding == "sharded":
        other, words = "kept", "with weights kept gathered"
    elif sharding.startswith("copies"):
        other, words = sharding.removeprefix("copies").strip() or "sharded", "with one copy over all machines"
    else:
        other, words = "sharded", "with weights freed after each forward"
    if told := _instead(run, item, (other, checkpointing, offload), words):
        yield f"{describe_sharding(item.candidate.job)}: {told}"


def _as_config_says(run: Search, section: str) -> str | None:
    return "as the config says" if any(key.startswith(section) for key in run.request.config.said) else None


def _instead(run: Search, item: Ranked, key: tuple[str, str, str], words: str) -> str | None:
    """Return what another structure would mean at the same micro-batch; None where nothing is known of it."""
    other = run.explorations.get(key)
    if other is None:
        for excluded in run.excluded:
            if excluded.structure.key == key:
                lacks = format_bytes(excluded.candidate.missing_bytes)
                return f"{words} each GPU lacks at least {lacks} ({excluded.candidate.pruned})"
        return None
    if item.division not in other.known_divisions():
        return None
    candidate = other.candidate(item.division, run.evaluation)
    rows = item.division[0]
    if candidate.missing_bytes:
        more = candidate.peak_bytes - item.candidate.peak_bytes
        needs = f"{words} micro-batch {rows} needs {format_bytes(candidate.peak_bytes)}"
        beyond = f"{format_bytes(more)} more and {format_bytes(candidate.missing_bytes)} too much"
        smaller = run.fitting_of(other)
        if not smaller:
            return f"{needs}, {beyond}"
        share = smaller[0].tokens_per_second / max(item.tokens_per_second, 1e-9) - 1
        return f"{needs}, {beyond}; micro-batch {smaller[0].division[0]} fits and is estimated {_faster(share)}"
    if candidate.missing_host_bytes:
        return f"{words} the host of each machine lacks {format_bytes(candidate.missing_host_bytes)}"
    assert candidate.simulation is not None
    speed = expected_speed(run.request, candidate.job, candidate.simulation)
    share = speed / max(item.tokens_per_second, 1e-9) - 1
    more = candidate.peak_bytes - item.candidate.peak_bytes
    size = f"{format_bytes(abs(more))} {'more' if more > 0 else 'less'}" if more else "as much"
    return f"{words} the step needs {size} and is estimated {_faster(share)}"


def _faster(share: float) -> str:
    if abs(share) <= SAME_SPEED:
        return "as fast"
    return f"{abs(share):.0%} {'faster' if share > 0 else 'slower'}"


def _micro_batch(run: Search, item: Ranked) -> Iterator[str]:
    """Say why the micro-batch is not larger."""
    exploration = run.explorations[item.structure.key]
    larger = [division for division in exploration.known_divisions() if division[0] > item.division[0]]
    rows = item.division[0]
    if not larger:
        total = run.request.global_batch_size
        yield f"micro-batch {rows} is all that a global batch of {total} leaves each of {run.request.num_gpus} GPUs"
        return
    candidate = exploration.candidate(larger[0], run.evaluation)
    if candidate.missing_bytes:
        yield f"micro-batch {larger[0][0]} would lack {format_bytes(candidate.missing_bytes)} on each GPU"
        return
    assert candidate.simulation is not None
    speed = expected_speed(run.request, candidate.job, candidate.simulation)
    share = speed / max(item.tokens_per_second, 1e-9) - 1
    yield f"micro-batch {larger[0][0]} fits too, leaves less room and is estimated {_faster(share)}"
