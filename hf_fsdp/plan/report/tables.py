"""The answers that are no ranked plan: the largest batch, the smallest hardware, strategies side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_fsdp.plan.candidate import Candidate, Plan, PlanRequest
from hf_fsdp.plan.report.document import PLAN_VERSION, plan_to_json
from hf_fsdp.plan.report.figures import format_speed
from hf_fsdp.plan.report.section import COMMAND_INDENT, Section
from hf_fsdp.plan.report.settings import describe_checkpointing, describe_job
from hf_fsdp.plan.search.batch_size import LargestBatch, LongestRows
from hf_fsdp.plan.search.compare import Comparison
from hf_fsdp.plan.search.search_command import search_command
from hf_fsdp.plan.search.smallest import SmallestPlan
from hf_fsdp.units import format_bytes

_LABEL = "Memory is simulated, speed is estimated; the reserve for what an allocator does not see is taken off."


def batch_table(request: PlanRequest, batch: LargestBatch, rows: LongestRows) -> Section:
    """Return the table of ``--max-batch``: what fits, and one step above it."""
    found = [
        ("largest micro-batch", f"{batch.micro_batch_size} x {request.max_length:,} tokens", batch.candidate),
        ("  one row more", f"{batch.micro_batch_size + 1} x {request.max_length:,} tokens", batch.above),
        ("longest rows", _length(rows.candidate), rows.candidate),
        ("  the next length", _length(rows.above), rows.above),
    ]
    return Section(
        title=f"{_subject(request)}. {_LABEL}",
        header=("", "BATCH OF ONE GPU", "PEAK", "FREE", "FITS"),
        rows=tuple((name, text, *_memory(item)) for name, text, item in found if item is not None),
        right=(2, 3),
        lines=(
            f"settings: {describe_job(batch.candidate.job)}",
            *_ends(batch, rows),
            *_note_lines(_notes(batch.candidate, rows.candidate)),
        ),
    )


def _length(candidate: Candidate | None) -> str:
    if candidate is None:
        return ""
    batch = candidate.job.batch
    return f"{batch.micro_batch_size} x {batch.num_tokens:,} tokens"


def _ends(batch: LargestBatch, rows: LongestRows) -> list[str]:
    lines = []
    if batch.above is None:
        lines.append(f"the micro-batch was not looked at beyond {batch.micro_batch_size} rows")
    if rows.above is None:
        lines.append(f"{rows.num_tokens:,} tokens are all that the model has positions for")
    return lines


def batch_to_json(request: PlanRequest, batch: LargestBatch, rows: LongestRows) -> dict[str, Any]:
    """Return ``--max-batch`` as plain values."""
    return {
        "kind": "hf-fsdp plan --max-batch",
        "version": PLAN_VERSION,
        "request": _request(request),
        "micro_batch_size": batch.micro_batch_size,
        "num_tokens": rows.num_tokens,
        "largest_batch": _json(request, batch.candidate),
        "one_row_more": _json(request, batch.above),
        "longest_rows": _json(request, rows.candidate),
        "next_length": _json(request, rows.above),
    }


def smallest_table(found: SmallestPlan) -> Section:
    """Return the table of ``--min-gpus``: for each GPU the fewest, least total memory first."""
    rows = []
    for item in found.rows:
        candidate = item.candidate
        fewer = f"{format_bytes(item.fewer.missing_bytes)} short" if item.fewer is not None else "-"
        rows.append(
            (
                f"{item.num_gpus} x {item.request.gpu_name}",
                item.offload,
                format_bytes(candidate.peak_bytes),
                format_bytes(candidate.headroom_bytes),
                format_speed(candidate) or "-",
                fewer,
            )
        )
    request = found.request
    return Section(
        title=f"{request.model.name}, {request.method.name}, rows of {request.max_length:,} tokens, "
        f"{request.global_batch_size} a step: the fewest of each GPU, one row a GPU. {_LABEL}",
        header=("GPUS", "OFFLOAD", "PEAK", "FREE", "TOKENS/S", "HALF AS MANY"),
        rows=tuple(rows),
        right=(2, 3, 4, 5),
        lines=(
            "smallest total memory first; blocks are recomputed in backward",
            *_note_lines((*found.notes, *_notes(*(item.candidate for item in found.rows)))),
            "next  rank all settings on the first of them:",
            f"{' ' * COMMAND_INDENT}{search_command(found.rows[0].request)}",
        ),
    )


def smallest_to_json(found: SmallestPlan) -> dict[str, Any]:
    """Return ``--min-gpus`` as plain values."""
    return {
        "kind": "hf-fsdp plan --min-gpus",
        "version": PLAN_VERSION,
        "request": _request(found.request),
        "rows": [
            {
                "num_gpus": item.num_gpus,
                "gpu": item.request.gpu_name,
                "offload": item.offload,
                "candidate": _json(item.request, item.candidate),
                "half_as_many": _json(item.request, item.fewer),
            }
            for item in found.rows
        ],
        "notes": list(found.notes),
    }


def comparison_table(found: Comparison) -> Section:
    """Return the table of ``--compare``: one row a strategy."""
    rows = []
    for item in found.rows:
        chosen = item.candidate
        rows.append(
            (
                item.name,
                format_bytes(item.one_row.peak_bytes),
                str(item.largest_micro_batch) if item.largest_micro_batch else "none",
                f"{chosen.job.batch.micro_batch_size} x {chosen.job.num_micro_batches}",
                format_bytes(chosen.peak_bytes),
                format_bytes(chosen.simulation.host_bytes)
                if chosen.simulation and chosen.simulation.host_bytes
                else "-",
                (format_speed(chosen) or "-") if chosen.fits else f"lacks {format_bytes(chosen.missing_bytes)}",
            )
        )
    memory = format_bytes(found.request.gpu_memory_bytes)
    return Section(
        title=f"{_subject(found.request)}, {memory} each. {_LABEL}",
        header=("STRATEGY", "ONE ROW", "LARGEST BATCH", "BATCH X STEPS", "PEAK", "HOST", "TOKENS/S"),
        rows=tuple(rows),
        right=(1, 2, 3, 4, 5, 6),
        lines=(
            "one row: at micro-batch 1; peak and host (of one process) and tokens/s (of all GPUs) are of batch x steps",
            f"checkpointing: {describe_checkpointing(found.rows[0].candidate.job.fsdp)}, where no name says otherwise; "
            "--activation-checkpointing sets it",
            *_note_lines(found.notes),
        ),
    )


def comparison_to_json(found: Comparison) -> dict[str, Any]:
    """Return ``--compare`` as plain values."""
    return {
        "kind": "hf-fsdp plan --compare",
        "version": PLAN_VERSION,
        "request": _request(found.request),
        "rows": [
            {
                "strategy": item.name,
                "largest_micro_batch": item.largest_micro_batch,
                "candidate": _json(found.request, item.candidate),
                "one_row": _json(found.request, item.one_row),
            }
            for item in found.rows
        ],
        "notes": list(found.notes),
    }


def _subject(request: PlanRequest) -> str:
    return (
        f"{request.model.name}, {request.method.name}, rows of {request.max_length:,} tokens "
        f"on {request.num_gpus} x {request.gpu_name}"
    )


def _memory(candidate: Candidate) -> tuple[str, str, str]:
    free = candidate.headroom_bytes
    return format_bytes(candidate.peak_bytes), format_bytes(free), "yes" if candidate.fits else "no"


def _notes(*candidates: Candidate) -> tuple[str, ...]:
    notes = (note for item in candidates if item.simulation is not None for note in item.simulation.notes)
    return tuple(dict.fromkeys(notes))


def _note_lines(notes: Sequence[str]) -> list[str]:
    return [f"note  {note}" for note in notes]


def _request(request: PlanRequest) -> Any:
    return _as_plan(request)["request"]


def _json(request: PlanRequest, candidate: Candidate | None) -> Any:
    return None if candidate is None else _as_plan(request, candidate)["candidates"][0]


def _as_plan(request: PlanRequest, *candidates: Candidate) -> dict[str, Any]:
    """The keys of a plan, so that a candidate reads the same wherever it stands."""
    simulation = next((item.simulation for item in candidates), None)
    counts = (simulation.num_parameters, simulation.num_trained) if simulation is not None else (0, 0)
    return plan_to_json(
        Plan(request=request, num_parameters=counts[0], num_trained=counts[1], candidates=tuple(candidates))
    )
