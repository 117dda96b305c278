"""What one step holds, phase by phase, and what the plan of a single run looks like on a terminal."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator

from hf_fsdp.plan.candidate import Candidate, Plan
from hf_fsdp.plan.report.figures import (
    format_category,
    format_cost,
    format_days,
    format_mfu,
    format_range,
    format_speed,
)
from hf_fsdp.plan.report.section import Section, break_command, fold_section, indent_lines
from hf_fsdp.plan.report.settings import describe_job
from hf_fsdp.plan.report.view import DEFAULT_WIDTH, view_plan
from hf_fsdp.plan.search.search_command import search_command
from hf_fsdp.plan.simulation import CATEGORIES, PhasePeak, Simulation
from hf_fsdp.units import format_bytes

_NUM_PHASES = 5
_NUM_PARTS = 3


def view_phases(simulation: Simulation, title: str = "The largest phases of the step, simulated") -> Section:
    """Return a table of the phases that hold most, in the order of the step, with what they are made of.

    Args:
        simulation: of one step.
        title: above the table.
    """
    largest = sorted(simulation.phases, key=lambda phase: -phase.num_bytes)[:_NUM_PHASES]
    shown = [phase for phase in simulation.phases if phase in largest]
    return Section(
        title=title,
        header=("PHASE", "HELD", "MOST OF IT"),
        rows=tuple((phase.name, format_bytes(phase.num_bytes), _most_of(phase)) for phase in shown),
        right=(1,),
    )


def _most_of(phase: PhasePeak) -> str:
    parts = sorted(phase.categories.items(), key=lambda part: -part[1])[:_NUM_PARTS]
    return ", ".join(f"{format_category(name)} {format_bytes(size)}" for name, size in parts if size)


def view_run(plan: Plan, path: str, *, width: int = DEFAULT_WIDTH, why: bool = False) -> list[Section]:
    """Return the sections of the plan of one run config: whether it fits, what it holds, and what comes next.

    Args:
        plan: of `plan_recipe_run`; its only candidate is shown.
        path: of the run config, as typed.
        width: columns of the terminal.
        why: add what is kept back of each GPU, and from what that was reckoned.
    """
    candidate = plan.candidates[0]
    simulation = candidate.simulation
    assert simulation is not None
    whole = view_plan(plan, width=width)
    reserve = [f"{format_bytes(part.num_bytes)} {part.name}: {part.reason}" for part in candidate.reserve.parts]
    sections = [
        Section(title=f"{path} as it stands: {_verdict(candidate)}", lines=indent_lines(list(_facts(plan, candidate)))),
        _peak(simulation),
        view_phases(simulation),
        *([Section(title="Reserve of each GPU, estimated", lines=indent_lines(reserve))] if why else []),
    ]
    last = fold_section(Section(lines=tuple(_next_lines(plan, path, width))), width)
    return [whole[0], *(fold_section(section, width) for section in sections), whole[-2], last]


def _verdict(candidate: Candidate) -> str:
    if candidate.fits:
        return f"it fits, {format_bytes(candidate.headroom_bytes)} of each GPU stay free"
    parts = []
    if candidate.missing_bytes:
        parts.append(f"{format_bytes(candidate.missing_bytes)} on each GPU")
    if candidate.missing_host_bytes:
        parts.append(f"{format_bytes(candidate.missing_host_bytes)} of host memory on each machine")
    return f"it does not fit, it lacks {' and '.join(parts)}"


def _facts(plan: Plan, candidate: Candidate) -> Iterator[str]:
    simulation = candidate.simulation
    assert simulation is not None
    yield describe_job(candidate.job)
    yield (
        f"{format_bytes(candidate.peak_bytes)} a GPU at the peak ({simulation.peak.name}), simulated; "
        f"{format_bytes(candidate.usable_bytes)} are usable"
    )
    if simulation.host_bytes:
        yield f"{format_bytes(candidate.host_bytes)} of host memory on each machine, simulated"
    if speed := candidate.speed:
        seconds = format_range(speed.low_step_seconds, speed.high_step_seconds)
        yield f"{format_speed(candidate)} tokens/s, {seconds} s a step, MFU {format_mfu(candidate)}, estimated"
    if days := format_days(plan, candidate):
        cost = format_cost(plan, candidate)
        yield f"{days} days{f', cost {cost}' if cost else ''}, estimated"
    if simulation.checkpoint_bytes:
        yield (
            f"on disk a checkpoint takes {format_bytes(simulation.checkpoint_bytes)}, the saved model "
            f"{format_bytes(simulation.model_bytes)}, by arithmetic"
        )


def _peak(simulation: Simulation) -> Section:
    peak = simulation.peak
    parts = [(name, peak.categories.get(name, 0)) for name in CATEGORIES]
    shown = [(name, size) for name, size in parts if size * 200 >= peak.num_bytes > 0]
    rows = [(format_category(name), format_bytes(size)) for name, size in shown]
    if rest := peak.num_bytes - sum(size for _, size in shown):
        rows.append(("all other", format_bytes(rest)))
    rows.append(("peak", format_bytes(peak.num_bytes)))
    return Section(title="One GPU at its peak, simulated", header=("", "HELD"), rows=tuple(rows), right=(1,))


def _next_lines(plan: Plan, path: str, width: int) -> Iterator[str]:
    request = plan.request
    if plan.fitting:
        script = f"recipes/{'vlm' if request.num_images else 'text'}/train.py"
        words = ["torchrun", "--nproc_per_node", str(request.gpus.count)]
        if request.num_machines > 1:
            words += ["--nnodes", str(request.num_machines), "--node_rank", "RANK", "--master_addr", "MACHINE_0"]
        yield "next  start it:"
        yield from break_command(shlex.join([*words, script, path]), width)
        yield "      or let the search look for a faster way:"
    else:
        yield "next  let the search look for a way that fits:"
    # A file that fixes one row a micro-batch says nothing of how more of them are filled.
    searched = dataclasses.replace(request, padded=not request.packing)
    yield from break_command(search_command(searched), width)
