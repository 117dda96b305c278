"""A plan as one page of HTML that needs no network: what fits, where the memory goes, what was assumed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp.errors import PlanError
from hf_fsdp.plan.candidate import Candidate, Plan
from hf_fsdp.plan.report.charts import draw_map, draw_phases, draw_timeline, require_plotly
from hf_fsdp.plan.report.figures import (
    describe_hardware,
    explain_rejection,
    format_category,
    format_cost,
    format_mfu,
    format_speed,
    format_time,
    time_unit,
)
from hf_fsdp.plan.report.files import DEFAULT_FOLDER, launch_command
from hf_fsdp.plan.report.settings import (
    describe_batch,
    describe_checkpointing,
    describe_job,
    describe_method,
    describe_offload,
    describe_sharding,
)
from hf_fsdp.plan.report.whole_files import write_whole
from hf_fsdp.plan.simulation import CATEGORIES
from hf_fsdp.units import format_bytes, format_count

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TEMPLATE = Path(__file__).with_name("page.html.jinja")
MAX_ROWS = 200


def write_report(plan: Plan, path: str | Path, *, force: bool = False) -> Path:
    """Write the page of a plan and return its path.

    Args:
        plan: what the search found. The memory over time is drawn of the best candidate whose simulation has a
            timeline, so that one is simulated with ``Job.timeline``.
        path: the file; the folders above it are made.
        force: replace the file if it exists.

    Raises:
        PlanError: Plotly is not installed, the file exists, or it cannot be written.

    Example::

        write_report(plan, "plan.html")
        # PosixPath('plan.html')
    """
    path = Path(path)
    if path.is_dir():
        raise PlanError(f"--html {path} is a folder", fix=f"--html {path / 'plan.html'}")
    if path.exists() and not force:
        raise PlanError(f"--html {path} exists and is not overwritten", fix="--force replaces it; or --html ANOTHER")
    text = build_report(plan)
    try:
        write_whole({path: text})
    except OSError as error:
        raise PlanError(
            f"--html {path} cannot be written: {error.strerror or error}", fix="--html a file that this user may write"
        ) from None
    return path


def build_report(plan: Plan) -> str:
    """Return the page of a plan as text; about 5 MB, nearly all of it Plotly's script.

    Raises:
        PlanError: Plotly is not installed.
    """
    require_plotly()
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"bytes": format_bytes, "category": format_category, "count": format_count}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    # The candidate that is shown in detail: the one to run, or the nearest where nothing fits.
    shown = plan.best or next((item for item in plan.candidates if item.simulation is not None), None)
    timed = next((item for item in plan.candidates if item.simulation is not None and item.simulation.timeline), None)
    charts = {
        "timeline": (draw_timeline(timed) if timed else None),
        "phases": (draw_phases(shown) if shown else None),
        "map": draw_map(plan),
    }
    return template.render(
        plan=plan,
        request=plan.request,
        method=describe_method(plan.request.method, plan.num_trained, plan.num_parameters),
        hardware=describe_hardware(plan),
        shown=shown,
        shown_settings=describe_job(shown.job) if shown else "",
        tiles=_tiles(plan, shown),
        timed_settings=describe_job(timed.job) if timed else "",
        charts={name: _embed(name, figure) for name, figure in charts.items()},
        # The script ends where a browser sees "</script"; Plotly's own has none, and a release that had one would
        # not run anywhere. It is the only text that is not escaped, beside the charts, whose JSON is.
        plotly_script=get_plotlyjs() if any(charts.values()) else "",
        categories=[name for name in CATEGORIES if _is_used(name, shown)],
        rows=[_row(plan, item) for item in plan.candidates[:MAX_ROWS]],
        num_left_out=max(0, len(plan.candidates) - MAX_ROWS),
        time_unit=time_unit(plan) if any(format_time(plan, item) for item in plan.candidates) else "",
        has_cost=any(format_cost(plan, item) for item in plan.candidates),
        reserve=_reserve_parts(shown or next(iter(plan.candidates), None)),
        assumptions=_assumptions(shown),
        launch=launch_command(plan, DEFAULT_FOLDER),
        folder=DEFAULT_FOLDER,
    )


def _tiles(plan: Plan, shown: Candidate | None) -> list[tuple[str, str, str]]:
    """Return (what, figure, how it is known) of the headline."""
    if shown is None:
        return []
    tiles = [
        ("peak of one GPU", format_bytes(shown.peak_bytes), "simulated"),
        ("stays free" if shown.fits else "lacks", format_bytes(abs(shown.headroom_bytes)), "of the usable memory"),
    ]
    if speed := format_speed(shown):
        tiles.append(("tokens/s of all GPUs", speed, "estimated"))
    if mfu := format_mfu(shown):
        tiles.append(("MFU", mfu, "estimated"))
    if time := format_time(plan, shown):
        tiles.append((time_unit(plan), time, "estimated"))
    if cost := format_cost(plan, shown):
        tiles.append(("cost", cost, "estimated"))
    return tiles


def _row(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    return {
        "fits": candidate.fits,
        "sharding": describe_sharding(candidate.job),
        "checkpointing": describe_checkpointing(candidate.job.fsdp),
        "offload": describe_offload(candidate.job.fsdp),
        "batch": describe_batch(candidate.job),
        "peak": format_bytes(candidate.peak_bytes) if candidate.peak_bytes else "-",
        "basis": candidate.basis,
        "free": format_bytes(candidate.headroom_bytes),
        "speed": format_speed(candidate),
        "mfu": format_mfu(candidate),
        "time": format_time(plan, candidate),
        "cost": format_cost(plan, candidate),
        "verdict": "fits" if candidate.fits else explain_rejection(candidate),
    }


def _reserve_parts(candidate: Candidate | None) -> list[tuple[str, str, str]]:
    """Return (name, size, how it was reckoned) of what the reserve is made of, and its sum."""
    if candidate is None:
        return []
    parts = [(part.name, format_bytes(part.num_bytes), part.reason) for part in candidate.reserve.parts]
    return [*parts, ("together", format_bytes(candidate.reserve.total_bytes), "")]


def _assumptions(candidate: Candidate | None) -> tuple[str, ...]:
    return () if candidate is None or candidate.speed is None else tuple(candidate.speed.assumptions)


def _is_used(name: str, candidate: Candidate | None) -> bool:
    if candidate is None or candidate.simulation is None:
        return False
    return any(phase.categories.get(name) for phase in candidate.simulation.phases)


def _embed(name: str, figure: Figure | None) -> str:
    """Return a chart as an element and the script that fills it; its JSON cannot end the script it stands in."""
    if figure is None:
        return ""
    import plotly.io

    text = plotly.io.to_html(
        figure,
        full_html=False,
        include_plotlyjs=False,
        div_id=f"chart-{name}",
        config={"responsive": True, "displayModeBar": False},
    )
    return str(text)
