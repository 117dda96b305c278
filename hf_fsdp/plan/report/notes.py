"""What a reader must know before believing a speed: what it counts, what it assumes, and why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hf_fsdp.plan.candidate import Candidate, Plan, PlanRequest
from hf_fsdp.plan.search.expected_speed import REFERENCE_GPU


def count_note(request: PlanRequest) -> str:
    """Return what a token is in a speed where rows may be shorter than they are planned; nothing for packed rows."""
    if not request.padded:
        return ""
    counted = "tokens/s counts" if request.training_tokens is None else "tokens/s, time and cost count"
    return f"rows are taken as full: {counted} every position of them, padding too"


def speed_notes(rows: Iterable[tuple[PlanRequest, Candidate]]) -> Iterator[str]:
    """Yield what decides the speeds of `rows` and is only assumed: the network, and what is not counted.

    Args:
        rows: what was asked and what was found, of all that is shown; those without a speed say nothing.
    """
    timed = [request for request, candidate in rows if candidate.speed is not None]
    networks = {
        request.gpus.gpu.name: request.gpus.gpu.network_gb_per_s
        for request in timed
        if request.num_machines > 1 and request.gpus.gpu is not None
    }
    if networks:
        rates = ", ".join(f"{rate:g} GB/s ({name})" for name, rate in networks.items())
        yield f"assumed network of a machine, each way: {rates}; a cloud's may be a quarter of that, and slow this down"
    if any(request.method.name == "qlora" for request in timed):
        yield (
            "the unpacking of 4-bit weights before each use is not in the speed; it costs most with few tokens a "
            "micro-batch"
        )


def memory_only_note(plan: Plan) -> Iterator[str]:
    """Yield why a plan has no speed where its GPU has no name, and by what its candidates are ordered then."""
    if plan.request.gpus.gpu is None:
        order = f"; ordered as on {REFERENCE_GPU}" if len(plan.fitting) > 1 else ""
        yield f"only the memory of this GPU is known: no speed, time or cost{order}"
