"""What one step holds, phase by phase, and what the plan of a single run looks like on a terminal."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path

from hf_fsdp.plan.candidate import Candidate, Plan, PlanRequest
from hf_fsdp.plan.report.figures import (
    format_category,
    format_cost,
    format_mfu,
    format_range,
    format_speed,
    format_time,
    time_unit,
)
from hf_fsdp.plan.report.files import LAUNCH_FILE
from hf_fsdp.plan.report.notes import count_note
from hf_fsdp.plan.report.run_file import DATA_PLACEHOLDER
from hf_fsdp.plan.report.section import Section, break_command, fold_section, indent_lines
from hf_fsdp.plan.report.settings import describe_job
from hf_fsdp.plan.report.view import DEFAULT_WIDTH, view_plan
from hf_fsdp.plan.search.recipe_run import peek
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
        why: add what is kept back of each GPU and from what that was reckoned, and on what the speed rests.
    """
    candidate = plan.candidates[0]
    simulation = candidate.simulation
    assert simulation is not None
    whole = view_plan(plan, width=width)
    reserve = [f"{format_bytes(part.num_bytes)} {part.name}: {part.reason}" for part in candidate.reserve.parts]
    assumed = candidate.speed.assumptions if candidate.speed is not None else ()
    sections = [
        Section(title=f"{path} as it stands: {_verdict(candidate)}", lines=indent_lines(list(_facts(plan, candidate)))),
        _peak(simulation),
        view_phases(simulation),
        *([Section(title="Reserve of each GPU, estimated", lines=indent_lines(reserve))] if why else []),
        *([Section(title="The speed assumes", lines=indent_lines(assumed))] if why and assumed else []),
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
    if time := format_time(plan, candidate):
        cost = format_cost(plan, candidate)
        yield f"{time} {time_unit(plan)}{f', cost {cost}' if cost else ''}, estimated"
    if candidate.speed and (note := count_note(plan.request)):
        yield note
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
        yield "next  start it:"
        yield from break_command(shlex.join(_start_words(request, path)), width)
        yield "      or let the search look for a faster way:"
    else:
        yield "next  let the search look for a way that fits:"
    # A file that fixes one row a micro-batch says nothing of how more of them are filled.
    searched = dataclasses.replace(request, padded=not request.packing)
    yield from break_command(shlex.join([*shlex.split(search_command(searched)), *_asked_words(request)]), width)


def _start_words(request: PlanRequest, path: str) -> list[str]:
    """Return the command that starts the run, in a checkout of the repository."""
    script = f"recipes/{'vlm' if request.num_images else 'text'}/train.py"
    data = [] if peek(Path(path)).get("dataset_name") else ["--dataset_name", DATA_PLACEHOLDER]
    return [*_launcher(request, Path(path).with_name(LAUNCH_FILE)), script, path, *data]


def _launcher(request: PlanRequest, launch_file: Path) -> list[str]:
    launch = peek(launch_file)
    # A launch file of other hardware would start another run than the one that was planned here.
    if (launch.get("num_processes"), launch.get("num_machines", 1)) == (request.num_gpus, request.num_machines):
        rank = ["--machine_rank", "RANK", "--main_process_ip", "ADDRESS_OF_MACHINE_0"]
        return ["accelerate", "launch", "--config_file", str(launch_file), *(rank if request.num_machines > 1 else [])]
    if request.num_gpus == 1:
        return ["python"]
    rank = ["--nnodes", str(request.num_machines), "--node_rank", "RANK", "--master_addr", "MACHINE_0"]
    return ["torchrun", "--nproc_per_node", str(request.gpus.count), *(rank if request.num_machines > 1 else [])]


def _asked_words(request: PlanRequest) -> Iterator[str]:
    """Yield what was typed beside the file; the search is to answer it too."""
    if request.host_memory_bytes is not None:
        yield from ("--host-memory", f"{request.host_memory_bytes // 2**20}MiB")
    if request.price_per_gpu_hour is not None:
        yield from ("--price", f"{request.price_per_gpu_hour:.12g}")
    if request.training_tokens is not None:
        yield from ("--tokens", str(request.training_tokens))
