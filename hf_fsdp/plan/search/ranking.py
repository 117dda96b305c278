"""Which of two candidates is better: the faster one; of equally fast ones the one with more room, then the simpler.

Offload has to be clearly faster. It lets a larger micro-batch in, but how much of it hides behind arithmetic is the
least certain part of an estimate, and it needs host memory and a link that other things use too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.plan.candidate import Candidate
from hf_fsdp.plan.search.structures import Structure

# An estimated speed does not tell candidates apart that are closer than this.
SAME_SPEED = 0.03
# More room than this share of the usable memory makes no run safer.
_ENOUGH_ROOM = 0.10
# How much faster a candidate with offload is to be than one without, to come first.
OFFLOAD_MARGIN = 0.15


def worth(tokens_per_second: float, config: FSDPConfig) -> float:
    """Return the speed that counts when candidates are ordered: a lower one than is estimated where it offloads."""
    is_offloaded = config.offload.parameters or config.offload.activations != "none"
    return tokens_per_second / (1 + OFFLOAD_MARGIN) if is_offloaded else tokens_per_second


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A candidate with what it is ordered by.

    Args:
        candidate: how it does.
        structure: which one it is of.
        division: (micro-batch size, micro-batches).
        tokens_per_second: estimated, at the middle of the step times.
    """

    candidate: Candidate
    structure: Structure
    division: tuple[int, int]
    tokens_per_second: float

    @property
    def worth(self) -> float:
        """`worth` of its speed."""
        return worth(self.tokens_per_second, self.structure.config)


def rank(items: Sequence[Ranked]) -> list[Ranked]:
    """Return `items`, best first: groups of the same speed in falling order, within each by room, then simplicity."""
    left = sorted(items, key=lambda item: -item.worth)
    ranked: list[Ranked] = []
    while left:
        bar = left[0].worth * (1 - SAME_SPEED)
        group = [item for item in left if item.worth >= bar]
        left = left[len(group) :]
        ranked += sorted(group, key=_within_group)
    return ranked


def best_of_each(ranked: Sequence[Ranked]) -> tuple[list[Ranked], list[Ranked]]:
    """Return (the best of each structure in order, all others in order)."""
    leaders: list[Ranked] = []
    others: list[Ranked] = []
    seen: set[tuple[str, str, str]] = set()
    for item in ranked:
        (others if item.structure.key in seen else leaders).append(item)
        seen.add(item.structure.key)
    return leaders, others


def _within_group(item: Ranked) -> tuple[float, int, float]:
    candidate = item.candidate
    room = candidate.headroom_bytes / max(1, candidate.usable_bytes)
    return (-round(min(room, _ENOUGH_ROOM), 2), item.structure.complexity, -room)
