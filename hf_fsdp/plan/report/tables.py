"""The answers that are no ranked plan: the largest batch, the smallest hardware, strategies side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hf_fsdp.plan.candidate import Candidate, Plan, PlanRequest
from hf_fsdp.plan.report.document import PLAN_VERSION, plan_to_json
from hf_fsdp.plan.report.figures import HOST_TITLE, format_speed
from hf_fsdp.plan.report.notes import count_note, speed_notes
from hf_fsdp.plan.report.section import COMMAND_INDENT, Section
from hf_fsdp.plan.report.settings import describe_checkpointing, describe_job, describe_offload
from hf_fsdp.plan.search.batch_size import LargestBatch, LongestRows
from hf_fsdp.plan.search.compare import Comparison
from hf_fsdp.plan.search.search_command import search_command
from hf_fsdp.plan.search.smallest import SmallestPlan
from hf_fsdp.units import format_bytes

_RESERVE = "the reserve for what an allocator does not see is taken off."


def batch_table(request: PlanRequest, batch: LargestBatch, rows: LongestRows) -> Section:
    """Return the table of ``--max-batch``: what fits, and one step above it."""
    found = [
        ("largest micro-batch", f"{batch.micro_batch_size} x {request.max_length:,} tokens", batch.candidate),
        ("  one row more", f"{batch.micro_batch_size + 1} x {request.max_length:,} tokens", batch.above),
        ("longest rows", _length(rows.candidate), rows.candidate),
        ("  the next length", _length(rows.above), rows.above),
    ]
    return Section(
        title=f"{_subject(request)}. Memory is simulated; {_RESERVE}",
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
                _hardware(item.request),
                item.offload,
                format_bytes(candidate.peak_bytes),
                format_bytes(candidate.headroom_bytes),
                _host(candidate),
                format_speed(candidate) or "-",
                fewer,
            )
        )
    request = found.request
    answers = [(item.request, item.candidate) for item in found.rows]
    return Section(
        title=f"{request.model.name}, {request.method.name}, rows of {request.max_length:,} tokens, "
        f"{request.global_batch_size} a step: the fewest of each GPU, one row a GPU. {_label(answers)}",
        header=("GPUS", "OFFLOAD", "PEAK", "FREE", HOST_TITLE, "TOKENS/S", "HALF AS MANY"),
        rows=tuple(rows),
        right=(2, 3, 4, 5, 6),
        lines=(
            "smallest total memory first; blocks are recomputed in backward",
            *_note_lines(found.notes),
            *_note_lines(_notes_by_row({_hardware(item.request): item.candidate for item in found.rows})),
            *_note_lines(_speed_notes(answers)),
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
                _host(chosen),
                (format_speed(chosen) or "-") if chosen.fits else f"lacks {format_bytes(chosen.missing_bytes)}",
            )
        )
    memory = format_bytes(found.request.gpu_memory_bytes)
    answers = [(found.request, item.candidate) for item in found.rows]
    return Section(
        title=f"{_subject(found.request)}, {memory} each. {_label(answers)}",
        header=("STRATEGY", "ONE ROW", "LARGEST BATCH", "BATCH X STEPS", "PEAK", HOST_TITLE, "TOKENS/S"),
        rows=tuple(rows),
        right=(1, 2, 3, 4, 5, 6),
        lines=(
            "one row: at micro-batch 1; peak, host and tokens/s (of all GPUs) are of batch x steps",
            f"checkpointing: {describe_checkpointing(found.rows[0].candidate.job.fsdp)}, where no name says otherwise; "
            "--activation-checkpointing sets it",
            *_note_lines(_notes_by_row({item.name: item.candidate for item in found.rows})),
            *_note_lines(_speed_notes(answers)),
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


def _hardware(request: PlanRequest) -> str:
    machines = f" ({request.num_machines} machines)" if request.num_machines > 1 else ""
    return f"{request.num_gpus} x {request.gpu_name}{machines}"


def _host(candidate: Candidate) -> str:
    """Return what the host of one machine holds, where something is kept there."""
    return format_bytes(candidate.host_bytes) if describe_offload(candidate.job.fsdp) != "none" else "-"


def _label(answers: Sequence[tuple[PlanRequest, Candidate]]) -> str:
    speed = ", speed is estimated" if any(candidate.speed for _, candidate in answers) else ""
    return f"Memory is simulated{speed}; {_RESERVE}"


def _speed_notes(answers: Sequence[tuple[PlanRequest, Candidate]]) -> Iterator[str]:
    counted = dict.fromkeys(count_note(request) for request, candidate in answers if candidate.speed)
    yield from (note for note in counted if note)
    yield from speed_notes(answers)
    if any(request.gpus.gpu is None for request, _ in answers):
        yield "only the memory of this GPU is known, so no speed"


def _memory(candidate: Candidate) -> tuple[str, str, str]:
    free = candidate.headroom_bytes
    return format_bytes(candidate.peak_bytes), format_bytes(free), "yes" if candidate.fits else "no"


def _notes(*candidates: Candidate) -> tuple[str, ...]:
    notes = (note for item in candidates if item.simulation is not None for note in item.simulation.notes)
    return tuple(dict.fromkeys(notes))


def _notes_by_row(rows: Mapping[str, Candidate]) -> Iterator[str]:
    """Yield the notes of the simulations, each after the rows that it is about where it is not about all."""
    about: dict[str, list[str]] = {}
    for name, candidate in rows.items():
        for note in _notes(candidate):
            about.setdefault(note, []).append(name)
    for note, names in about.items():
        yield note if len(names) == len(rows) else f"{', '.join(names)}: {note}"


def _note_lines(notes: Iterable[str]) -> list[str]:
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
