"""What `hf-fsdp plan` prints and writes: plans, tables, JSON, a page, files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_fsdp.cli.plan_flags import Options
from hf_fsdp.cli.terminal import print_json, print_table, say
from hf_fsdp.errors import PlanError, Problem

if TYPE_CHECKING:
    from hf_fsdp.plan.candidate import Plan, PlanRequest
    from hf_fsdp.plan.report.section import Section


def check_outputs(options: Options) -> list[Problem]:
    """Return what is in the way of the files that were asked for; told before a minute's search and not after."""
    from hf_fsdp.plan.report.whole_files import find_obstacle

    problems = []
    if options["html"] is not None:
        page = Path(options["html"])
        if page.is_dir():
            problems.append(Problem(message=f"--html {page} is a folder", fix=f"--html {page / 'plan.html'}"))
        elif page.exists() and not options["force"]:
            problems.append(
                Problem(
                    message=f"--html {page} exists and is not overwritten", fix="--force replaces it; or --html ANOTHER"
                )
            )
        elif obstacle := find_obstacle(page.parent):
            problems.append(Problem(message=f"--html {page}: {obstacle}", fix="--html a file that can be written"))
        problems += _check_plotly()
    if options["write"] is not None:
        problems += _check_folder(Path(options["write"]), options["force"])
    return problems


def _check_plotly() -> list[Problem]:
    from hf_fsdp.plan.report.charts import require_plotly

    try:
        require_plotly()
    except PlanError as error:
        return list(error.problems)
    return []


def _check_folder(folder: Path, force: bool) -> list[Problem]:
    from hf_fsdp.plan.report.files import CONFIG_FILE, LAUNCH_FILE, PLAN_FILE, RUN_FILE
    from hf_fsdp.plan.report.whole_files import find_obstacle

    if folder.exists() and not folder.is_dir():
        return [Problem(message=f"--write {folder} is not a folder", fix="--write another name")]
    if obstacle := find_obstacle(folder):
        return [Problem(message=f"--write {folder}: {obstacle}", fix="--write a folder that can be written")]
    taken = [folder / name for name in (LAUNCH_FILE, CONFIG_FILE, RUN_FILE, PLAN_FILE) if (folder / name).exists()]
    if others := [path for path in taken if not path.is_file()]:
        names = ", ".join(str(path) for path in others)
        return [
            Problem(message=f"--write {folder}: {names} cannot be replaced by a file", fix="--write another folder")
        ]
    if force or not taken:
        return []
    names = ", ".join(str(path) for path in taken)
    return [
        Problem(
            message=f"--write {folder}: {names} exist and are not overwritten",
            fix="--force replaces them; or --write another folder",
        )
    ]


def show_plan(plan: Plan, options: Options, *, is_run: bool = False) -> None:
    """Print a plan and write what was asked for.

    Args:
        plan: of a search, or of one run config.
        options: of the command.
        is_run: whether it is that of a run config.
    """
    if not is_run and (options["html"] or options["exact"]):
        plan = _with_whole_step(plan, timeline=bool(options["html"]))
    written, failure = [], None
    try:
        written = _write_files(plan, options)  # before it is printed, since a reader may stop reading (`| head`)
    except PlanError as error:
        failure = error  # a search of a minute is shown all the same
    if options["as_json"]:
        from hf_fsdp.plan.report.document import plan_to_json

        print_json(plan_to_json(plan))
    elif is_run:
        from hf_fsdp.cli.plan_view import print_run

        print_run(plan, options["model"], why=options["why"])
    else:
        from hf_fsdp.cli.plan_view import print_plan

        print_plan(
            plan, why=options["why"], limit=options["top"], is_written=bool(options["write"]) and failure is None
        )
    for line in written:
        _tell(line, options)
    if failure is not None:
        raise failure


def _write_files(plan: Plan, options: Options) -> list[str]:
    """Write what was asked for; return what to say of it."""
    lines = []
    if options["html"]:
        from hf_fsdp.plan.report.page import write_report

        lines.append(f"wrote {write_report(plan, options['html'], force=options['force'])}")
    if options["write"]:
        from hf_fsdp.plan.report.files import write_plan

        written = write_plan(plan, options["write"], rank=options["pick"], force=options["force"])
        lines += [f"wrote {path}" for path in written.paths]
        lines.append(f"run   {written.command}")
    return lines


def _tell(text: str, options: Options) -> None:
    """Say it where it does not get into the JSON."""
    typer.echo(text, err=options["as_json"])


def _with_whole_step(plan: Plan, *, timeline: bool) -> Plan:
    """Return `plan` with its best candidate simulated layer by layer, which a timeline needs."""
    from hf_fsdp.plan.search.evaluation import Evaluation

    best = plan.best
    assert best is not None  # a search without one has raised
    evaluation = Evaluation(plan.request)
    simulation = evaluation.run([dataclasses.replace(best.job, exact=True, timeline=timeline)])[0]
    whole = dataclasses.replace(evaluation.candidate(best.job, simulation, "simulated"), why=best.why)
    candidates = tuple(whole if item is best else item for item in plan.candidates)
    note = "#1 was simulated with all of its layers, the others with a few of them"
    return dataclasses.replace(plan, candidates=candidates, verified=(*plan.verified, note))


def show_max_batch(request: PlanRequest, options: Options) -> None:
    """Find and print the largest micro-batch, and the longest rows of one."""
    from hf_fsdp.plan.report.tables import batch_table, batch_to_json
    from hf_fsdp.plan.search.batch_size import find_longest_rows, find_max_batch

    batch = find_max_batch(request)
    rows = find_longest_rows(request, options["micro_batch_size"])
    _show(options, batch_to_json(request, batch, rows), batch_table(request, batch, rows))


def show_smallest(request: PlanRequest, options: Options) -> None:
    """Find and print the smallest hardware."""
    from hf_fsdp.plan.report.tables import smallest_table, smallest_to_json
    from hf_fsdp.plan.search.smallest import find_smallest

    found = find_smallest(request)
    if options["gpus"] is not None or options["gpu_memory"] is not None:
        note = f"--gpus {options['gpus']} was not looked at: --min-gpus looks at every kind that is known"
        found = dataclasses.replace(found, notes=(note, *found.notes))
    _show(options, smallest_to_json(found), smallest_table(found))


def show_comparison(request: PlanRequest, names: tuple[str, ...], options: Options) -> None:
    """Compare strategies and print them."""
    from hf_fsdp.plan.report.tables import comparison_table, comparison_to_json
    from hf_fsdp.plan.search.compare import compare

    found = compare(request, names)
    _show(options, comparison_to_json(found), comparison_table(found))


def _show(options: Options, data: Any, table: Section) -> None:
    if options["as_json"]:
        print_json(data)
        return
    say(table.title)
    print_table(table.header, table.rows, table.right)
    for line in table.lines:
        say(line)
