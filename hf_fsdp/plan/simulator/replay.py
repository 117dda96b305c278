"""From the log of a step to its peaks: what was held in each phase, by category, and along the way."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence

from hf_fsdp.plan.simulation import PhasePeak, TimelinePoint
from hf_fsdp.plan.simulator.phases import HEAD
from hf_fsdp.plan.simulator.tracker import Event, Held

# A page draws no more than this, and a peak between two points must not be lost.
MAX_POINTS = 1200


def categorize(events: Sequence[Event]) -> dict[int, str]:
    """Return the category of every storage in the log, by `id`.

    What nobody named is told by its life: made in a forward and alive when a backward begins, autograd keeps it.
    """
    starts = [
        index for index in range(1, len(events)) if _is_backward(events[index]) and not _is_backward(events[index - 1])
    ]
    return {id(event.held): event.held.category or _by_life(event.held, starts) for event in events}


def _is_backward(event: Event) -> bool:
    return event.phase.startswith("backward")


def _by_life(held: Held, backward_starts: Sequence[int]) -> str:
    if held.made_in.endswith(HEAD):
        return "logits_and_loss"
    if held.made_in.startswith("forward"):
        position = bisect.bisect_left(backward_starts, held.made_at)
        begins = backward_starts[position] if position < len(backward_starts) else None
        is_kept = begins is not None and (held.freed_at is None or held.freed_at > begins)
        return "activations" if is_kept else "temporaries"
    return "activations" if held.recomputed else "temporaries"


Passage = tuple[int, str]  # micro-batch and phase


def find_peaks(events: Sequence[Event], num_before: int) -> dict[Passage, PhasePeak]:
    """Return the peak of every phase of every micro-batch, in the order of the step.

    Micro-batches are kept apart, since the larger of two straight lines is none (see `depth.py`).

    Args:
        events: the log.
        num_before: events that only say what was there when the step began.
    """
    categories = categorize(events)
    held: Counter[str] = Counter()
    total = host = 0
    peaks: dict[Passage, tuple[int, dict[str, int]]] = {}
    host_peaks: dict[Passage, int] = {}
    for index, event in enumerate(events):
        if not event.held.on_device:
            host += event.delta
        else:
            held[categories[id(event.held)]] += event.delta
            total += event.delta
        if index < num_before - 1:
            continue
        place = (event.micro_batch, event.phase if index >= num_before else "start")
        host_peaks[place] = max(host, host_peaks.get(place, 0))
        if place not in peaks or total > peaks[place][0]:
            peaks[place] = (total, {name: size for name, size in held.items() if size})
    return {
        place: PhasePeak(name=place[1], num_bytes=size, categories=parts, host_bytes=host_peaks[place])
        for place, (size, parts) in peaks.items()
        if place[1] != "start"
    }


def draw_timeline(events: Sequence[Event], num_before: int) -> tuple[TimelinePoint, ...]:
    """Return what was held along the step, at most `MAX_POINTS` moments: of each stretch its highest."""
    categories = categorize(events)
    held: Counter[str] = Counter()
    stretch = max(1, (len(events) - num_before) // MAX_POINTS)
    points: list[TimelinePoint] = []
    best: TimelinePoint | None = None
    best_total = total = 0
    for index, event in enumerate(events):
        if event.held.on_device:
            held[categories[id(event.held)]] += event.delta
            total += event.delta
        if index < num_before:
            continue
        if best is None or total > best_total:
            best = TimelinePoint(
                operator=index - num_before, phase=event.phase, categories={k: v for k, v in held.items() if v}
            )
            best_total = total
        if (index - num_before) % stretch == stretch - 1:
            points.append(best)
            best = None
    return tuple(points)
