"""What a plan looks like on a terminal: sections of lines and tables, for whoever prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hf_fsdp.plan.candidate import Candidate, Plan
from hf_fsdp.plan.report.figures import (
    HOST_TITLE,
    describe_basis,
    describe_hardware,
    explain_rejection,
    format_category,
    format_cost,
    format_mfu,
    format_peak,
    format_phase,
    format_range,
    format_size,
    format_speed,
    format_time,
    time_unit,
)
from hf_fsdp.plan.report.files import DEFAULT_FOLDER, launch_command
from hf_fsdp.plan.report.notes import count_note, memory_only_note, speed_notes
from hf_fsdp.plan.report.section import Section, break_command, fold_section, indent_lines
from hf_fsdp.plan.report.settings import (
    describe_batch,
    describe_checkpointing,
    describe_job,
    describe_method,
    describe_offload,
    describe_sharding,
)
from hf_fsdp.plan.simulation import CATEGORIES, PhasePeak
from hf_fsdp.units import format_bytes, format_count

DEFAULT_WIDTH = 120
_EXTENDED = "~ extended along the line through simulated micro-batches of the same settings"
_GAP = 2  # what rich puts between two columns


@dataclass(frozen=True)
class _Column:
    """A column of the ranked table; one with the highest `spare` is the first to go where there is no room."""

    title: str
    text: Callable[[Plan, Candidate], str]
    right: bool = True
    spare: int = 0


def view_plan(
    plan: Plan, *, width: int = DEFAULT_WIDTH, limit: int = 5, why: bool = False, is_written: bool = False
) -> list[Section]:
    """Return the sections of a plan, top to bottom, none wider than `width` where its text allows.

    Args:
        plan: what the search found.
        width: columns of the terminal; tables leave out their least needed columns below that, or are written as lines.
        limit: how many fitting candidates are shown, and how many that do not fit.
        why: add the sentences that explain each choice.
        is_written: its files are written, so whoever writes them says how they are started.

    Example::

        for section in view_plan(plan):
            print(section.title, *section.lines, sep="\\n")
    """
    sections = [Section(lines=tuple(_header_lines(plan)))]
    shown = plan.fitting[:limit]
    if shown:
        sections += [_ranked(plan, shown, width), _memory(shown)]
    if plan.rejected:
        sections.append(_rejected(plan, limit))
    if why:
        sections += [
            Section(title=f"Why #{rank}: {describe_job(item.job)}", lines=indent_lines(item.why))
            for rank, item in enumerate(shown, start=1)
            if item.why
        ]
        sections += [*_reserve(plan), *_assumptions(plan)]
    sections += [Section(lines=tuple(_closing_lines(plan)))]
    sections += [Section(lines=() if is_written else tuple(_next_lines(plan, width)))]
    return [fold_section(section, width) for section in sections]


# ---- the top ------------------------------------------------------------------------------------------


def _header_lines(plan: Plan) -> Iterator[str]:
    request = plan.request
    blocks = f", {plan.num_layers} blocks" if plan.num_layers else ""
    method = describe_method(request.method, plan.num_trained, plan.num_parameters)
    yield f"{request.model.name}: {format_count(plan.num_parameters)} parameters{blocks}; {method}"
    rows = "packed rows" if request.packing else "rows"
    yield (
        f"{request.global_batch_size} {rows} of {request.max_length:,} tokens a step, {request.precision}, "
        f"{request.optimizer}, attention by {request.attention}"
    )
    yield describe_hardware(plan)


# ---- what fits ----------------------------------------------------------------------------------------


def _ranked(plan: Plan, shown: Sequence[Candidate], width: int) -> Section:
    known = [column for column in _COLUMNS if any(column.text(plan, item) for item in shown)]
    columns = list(known)
    table = _texts(plan, shown, columns)
    while _width_of(table) > width and any(column.spare for column in columns):
        columns.remove(max(columns, key=lambda column: column.spare))
        table = _texts(plan, shown, columns)
    count = f"the best {len(shown)} of {len(plan.fitting)}" if len(shown) < len(plan.fitting) else f"{len(shown)}"
    title = f"Fits: {count}. {describe_basis(plan, shown)}"
    counted = [note for note in (count_note(plan.request),) if note and any(item.speed for item in shown)]
    if _width_of(table) > width:  # a narrow window: a line a candidate, which the terminal breaks where it must
        lines = tuple(
            f"#{rank} {describe_job(item.job)}: " + _facts(plan, item) for rank, item in enumerate(shown, start=1)
        )
        spare = [column for column in known if column.spare]
        return Section(title=title, lines=(*lines, *counted, *_elsewhere(spare)))
    gone = [column for column in known if column not in columns]
    lacks_asked = any(column.title in _ASKED for column in gone)
    asked = [
        f"#{rank} {text}" for rank, item in enumerate(shown, start=1) if lacks_asked and (text := _asked(plan, item))
    ]
    extended = [_EXTENDED] if any(item.basis == "extended" for item in shown) else []
    return Section(
        title=title,
        header=table[0],
        rows=tuple(table[1:]),
        right=tuple(index + 1 for index, column in enumerate(columns) if column.right),
        lines=(*asked, *extended, *counted, *_elsewhere(gone)),
    )


def _elsewhere(gone: Sequence[_Column]) -> list[str]:
    """Return where to find the columns that had no room; what was asked for is told in lines, so not among them."""
    names = [column.title.split("\n")[0] for column in gone if column.title not in _ASKED]
    if not names:
        return []
    *others, last = names
    return [f"{', '.join(others) + ' and ' if others else ''}{last}: --json, or a wider terminal"]


def _texts(plan: Plan, shown: Sequence[Candidate], columns: Sequence[_Column]) -> list[tuple[str, ...]]:
    rows = [(f"{rank}", *(column.text(plan, item) for column in columns)) for rank, item in enumerate(shown, start=1)]
    titles = (f"TIME\n{time_unit(plan)}" if column.title == "TIME" else column.title for column in columns)
    return [("#", *titles), *rows]


def _width_of(table: Sequence[Sequence[str]]) -> int:
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in zip(*table, strict=True)]
    return sum(widths) + _GAP * (len(widths) - 1)


def _facts(plan: Plan, candidate: Candidate) -> str:
    facts = [f"{format_peak(candidate)} {candidate.basis}", f"{format_size(candidate.headroom_bytes)} free"]
    if speed := format_speed(candidate):
        facts.append(f"{speed} tokens/s estimated")
    facts += [text for text in (_asked(plan, candidate),) if text]
    return ", ".join(facts)


def _asked(plan: Plan, candidate: Candidate) -> str:
    """Return time and cost in words, where they were asked for."""
    time, cost = format_time(plan, candidate), format_cost(plan, candidate)
    return ", ".join(
        text for text in (f"{time} {time_unit(plan)}" if time else "", f"cost {cost}" if cost else "") if text
    )


def _seconds(plan: Plan, candidate: Candidate) -> str:
    speed = candidate.speed
    return "" if speed is None else format_range(speed.low_step_seconds, speed.high_step_seconds)


def _host(plan: Plan, candidate: Candidate) -> str:
    return format_size(candidate.host_bytes) if describe_offload(candidate.job.fsdp) != "none" else ""


_ASKED = ("TIME", "COST")  # told line by line where their columns have no room
_COLUMNS = (
    _Column("SHARDING", lambda plan, item: describe_sharding(item.job), right=False),
    _Column("CHECKPOINTING", lambda plan, item: describe_checkpointing(item.job.fsdp), right=False),
    _Column("OFFLOAD", lambda plan, item: describe_offload(item.job.fsdp), right=False),
    _Column("BATCH", lambda plan, item: describe_batch(item.job), right=False),
    _Column("PEAK\nsimulated", lambda plan, item: format_peak(item)),
    _Column("FREE", lambda plan, item: format_size(item.headroom_bytes)),
    _Column(HOST_TITLE, _host, spare=1),
    _Column("TOKENS/S\nestimated", lambda plan, item: format_speed(item)),
    _Column("STEP\nseconds", _seconds, spare=3),
    _Column("MFU", lambda plan, item: format_mfu(item), spare=2),
    _Column("TIME", format_time, spare=1),
    _Column("COST", format_cost, spare=1),
)


def _memory(shown: Sequence[Candidate]) -> Section:
    """Return where the memory goes: a row a category, a column a candidate."""
    peaks = [item.simulation.peak for item in shown if item.simulation is not None]
    names = [name for name in CATEGORIES if any(_matters(peak, name) for peak in peaks)]
    rows = [(format_category(name), *(format_size(peak.categories.get(name, 0)) for peak in peaks)) for name in names]
    rest = [peak.num_bytes - sum(peak.categories.get(name, 0) for name in names) for peak in peaks]
    if any(rest):
        rows.append(("all other", *(format_size(num_bytes) for num_bytes in rest)))
    rows.append(("peak", *(format_size(peak.num_bytes) for peak in peaks)))
    rows.append(("reached in", *(format_phase(peak.name) for peak in peaks)))
    return Section(
        title="One GPU at its peak, simulated",
        header=("", *(f"#{rank}" for rank in range(1, len(peaks) + 1))),
        rows=tuple(rows),
        right=tuple(range(1, len(peaks) + 1)),
    )


def _matters(peak: PhasePeak, name: str) -> bool:
    """Whether a category is worth a row: half a percent of the peak."""
    return peak.categories.get(name, 0) * 200 >= peak.num_bytes > 0


def _reserve(plan: Plan) -> list[Section]:
    """Return what is kept back on each GPU, and from what that was reckoned."""
    first = plan.best or next(iter(plan.candidates), None)
    if first is None:
        return []
    lines = [f"{format_bytes(part.num_bytes)} {part.name}: {part.reason}" for part in first.reserve.parts]
    return [Section(title="Reserve of each GPU, estimated, beside the simulated peak", lines=indent_lines(lines))]


def _assumptions(plan: Plan) -> list[Section]:
    """Return on what the speed of the first plan rests."""
    if plan.best is None or plan.best.speed is None:
        return []
    return [Section(title="The speed of #1 assumes", lines=indent_lines(plan.best.speed.assumptions))]


# ---- what does not fit, and the end -------------------------------------------------------------------


def _rejected(plan: Plan, limit: int) -> Section:
    lines = [f"{describe_job(item.job)}: {explain_rejection(item)}" for item in plan.rejected[:limit]]
    if len(plan.rejected) > limit:
        lines.append(f"and {len(plan.rejected) - limit} more, which lack more")
    nothing = "" if plan.fitting else "Nothing fits. "
    return Section(title=f"{nothing}Does not fit, nearest first", lines=indent_lines(lines))


def _closing_lines(plan: Plan) -> Iterator[str]:
    assumed = speed_notes((plan.request, item) for item in plan.candidates)
    yield from (f"note  {note}" for note in (*plan.notes, *assumed, *memory_only_note(plan)))
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    took = f"in {plan.seconds:.0f} s" if plan.seconds else ""
    if facts := " ".join(text for text in (f"with {versions}" if versions else "", took) if text):
        yield f"simulated {facts}; no GPU was used and no weights were read"
    yield from (f"checked  {text}" for text in plan.verified)


def _next_lines(plan: Plan, width: int) -> Iterator[str]:
    command = plan.command or "hf-fsdp plan ..."
    if plan.best is None:
        yield "next  fewer tokens (--max-length), LoRA (--method lora), more GPUs, or let it say which GPUs do it:"
        yield from break_command(f"{command} --min-gpus", width)
        return
    yield "next  write the files of #1, then start it:"
    yield from break_command(f"{command} --write {DEFAULT_FOLDER}", width)
    yield from break_command(launch_command(plan, DEFAULT_FOLDER), width)
