"""A plan on the terminal: its sections, in the width that there is."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hf_fsdp.cli.terminal import print_table, say

if TYPE_CHECKING:
    from hf_fsdp.plan.candidate import Plan
    from hf_fsdp.plan.report.section import Section


def print_plan(plan: Plan, *, why: bool = False, limit: int = 5, is_written: bool = False) -> None:
    """Print a plan, as wide as the terminal, or 120 columns where nobody looks.

    Args:
        plan: what the search found.
        why: add the sentences that explain each choice, and the phases of the first one.
        limit: how many candidates that fit are shown, and how many that do not.
        is_written: its files are written, so it does not say how to write them.
    """
    from hf_fsdp.plan.report.run_view import view_phases
    from hf_fsdp.plan.report.view import view_plan

    sections = view_plan(plan, width=_width(), limit=limit, why=why, is_written=is_written)
    if why and plan.best is not None and plan.best.simulation is not None:
        sections[-2:-2] = [view_phases(plan.best.simulation, "The largest phases of #1, simulated")]
    print_sections(sections)


def print_run(plan: Plan, path: str, *, why: bool = False) -> None:
    """Print the plan of one run config.

    Args:
        plan: of `plan_recipe_run`.
        path: of the run config, as typed.
        why: add the reserve of each GPU, part by part.
    """
    from hf_fsdp.plan.report.run_view import view_run

    print_sections(view_run(plan, path, width=_width(), why=why))


def print_sections(sections: Iterable[Section]) -> None:
    """Print sections with an empty line between them."""
    for place, section in enumerate(sections):
        if place:
            say("")
        if section.title:
            say(section.title)
        if section.header:
            print_table(section.header, section.rows, section.right)
        for line in section.lines:
            say(line)


def _width() -> int:
    from hf_fsdp.plan.report.view import DEFAULT_WIDTH

    is_seen = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if is_seen else DEFAULT_WIDTH
