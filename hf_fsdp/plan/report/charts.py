"""The three charts of a plan's page, as Plotly figures without colours of their own for text and paper."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hf_fsdp.errors import PlanError
from hf_fsdp.plan.candidate import Candidate, Plan
from hf_fsdp.plan.report.figures import explain_rejection, format_category, format_phase, format_speed
from hf_fsdp.plan.report.settings import describe_job
from hf_fsdp.plan.simulation import CATEGORIES, PhasePeak, TimelinePoint
from hf_fsdp.units import GIB, format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Middle tones, so that they stand out from white and from black; neighbours in the stack differ in hue and lightness.
COLOURS = {
    "parameters": "#3b78c4",
    "gradients": "#e08a2e",
    "optimizer": "#4fa356",
    "unsharded": "#8fb8e8",
    "reduce_buffers": "#c2554f",
    "activations": "#9a6fc0",
    "logits_and_loss": "#d98cb8",
    "temporaries": "#8a8f98",
    "inputs": "#b9b04a",
    "buffers": "#57b5b0",
}
FITS_COLOUR, LACKS_COLOUR, LIMIT_COLOUR = "#4fa356", "#c2554f", "#d0433a"
MAX_POINTS = 600


def require_plotly() -> None:
    """Raise a `PlanError` that says what to install where Plotly is missing."""
    try:
        import plotly.graph_objects  # noqa: F401
    except ImportError:
        raise PlanError(
            "--html draws its charts with Plotly, which is not installed",
            fix='pip install "hf-fsdp[report]"   # or --json, which needs nothing',
        ) from None


def draw_timeline(candidate: Candidate) -> Figure | None:
    """Return what one GPU holds over the step, stacked by category; None where no timeline was kept."""
    import plotly.graph_objects as go

    if candidate.simulation is None or not candidate.simulation.timeline:
        return None
    timeline = candidate.simulation.timeline
    points = thin_out(timeline)
    figure = go.Figure()
    for name in _present([point.categories for point in points]):
        figure.add_scatter(
            x=[point.operator for point in points],
            y=[round(point.categories.get(name, 0) / GIB, 4) for point in points],
            name=format_category(name),
            mode="lines",
            line={"width": 0, "shape": "hv", "color": COLOURS[name]},
            fillcolor=COLOURS[name],
            stackgroup="bytes",
            hovertemplate="%{y:.2f} GiB",
        )
    for start, end, name in _spans(timeline):
        figure.add_vline(x=start, line={"width": 1, "dash": "dot", "color": "#8a8f98"})
        if end - start > (timeline[-1].operator - timeline[0].operator) / 12:  # else its name has no room
            figure.add_annotation(x=(start + end) / 2, y=1, yref="paper", yanchor="bottom", text=name, showarrow=False)
    _add_limit(figure, candidate)
    figure.update_layout(hovermode="x unified")
    return _finish(figure, x="operators of the step, in order", y="GiB of one GPU, simulated")


def draw_phases(candidate: Candidate) -> Figure | None:
    """Return the peak of each phase, stacked by category; None without a simulation."""
    import plotly.graph_objects as go

    if candidate.simulation is None:
        return None
    phases: Sequence[PhasePeak] = candidate.simulation.phases
    figure = go.Figure()
    for name in _present([phase.categories for phase in phases]):
        figure.add_bar(
            y=[html.escape(phase.name) for phase in phases],
            x=[round(phase.categories.get(name, 0) / GIB, 4) for phase in phases],
            name=format_category(name),
            orientation="h",
            marker={"color": COLOURS[name]},
            hovertemplate="%{x:.2f} GiB",
        )
    figure.add_vline(x=candidate.usable_bytes / GIB, line={"width": 2, "dash": "dash", "color": LIMIT_COLOUR})
    figure.update_layout(barmode="stack", hovermode="y unified")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return _finish(figure, x="GiB of one GPU at its peak, simulated", y="")


def draw_map(plan: Plan) -> Figure | None:
    """Return the candidates by speed and peak; None where none of them has a speed."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for fits, name, colour in ((True, "fits", FITS_COLOUR), (False, "does not fit", LACKS_COLOUR)):
        group = [item for item in plan.candidates if item.fits == fits and item.speed is not None]
        if not group:
            continue
        ends = [(item.speed.low_tokens_per_second, item.speed.high_tokens_per_second) for item in group if item.speed]
        figure.add_scatter(
            x=[(low + high) / 2 for low, high in ends],
            y=[item.peak_bytes / GIB for item in group],
            error_x={"type": "data", "array": [(high - low) / 2 for low, high in ends], "thickness": 1},
            mode="markers",
            name=name,
            marker={"size": 11, "color": colour, "symbol": "circle" if fits else "x"},
            text=[_hover(item) for item in group],
            hovertemplate="%{text}<extra></extra>",
        )
    if not figure.data:
        return None
    # What is usable differs a little, since the reserve grows with the peak: the line is that of the one to run.
    _limit_line(figure, (plan.best or plan.candidates[0]).usable_bytes)
    return _finish(figure, x="tokens/s of all GPUs, estimated", y="GiB of one GPU at its peak, simulated")


def thin_out(timeline: Sequence[TimelinePoint], limit: int = MAX_POINTS) -> list[TimelinePoint]:
    """Return at most about `limit` points, in order, among them the highest of every stretch and each phase's first.

    A real step has tens of thousands of operators; a chart is a thousand pixels wide. The highest point of a stretch
    stays, so the peak of the chart is the peak of the step.
    """
    if len(timeline) <= limit:
        return list(timeline)
    size = -(-len(timeline) // (limit // 2))
    kept: set[int] = {0, len(timeline) - 1}
    for start in range(0, len(timeline), size):
        stretch = range(start, min(start + size, len(timeline)))
        totals = {index: sum(timeline[index].categories.values()) for index in stretch}
        kept |= {max(totals, key=totals.__getitem__), min(totals, key=totals.__getitem__)}
    kept |= {
        index for index in range(1, len(timeline)) if _phase(timeline[index].phase) != _phase(timeline[index - 1].phase)
    }
    return [timeline[index] for index in sorted(kept)]


def _phase(name: str) -> str:
    return format_phase(name)


def _spans(timeline: Sequence[TimelinePoint]) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and name of each stretch of one phase."""
    start = timeline[0]
    for before, point in zip(timeline, timeline[1:], strict=False):
        if _phase(point.phase) != _phase(start.phase):
            yield start.operator, before.operator, html.escape(_phase(start.phase))
            start = point
    yield start.operator, timeline[-1].operator, html.escape(_phase(start.phase))


def _present(all_categories: Sequence[Any]) -> list[str]:
    return [name for name in CATEGORIES if any(categories.get(name) for categories in all_categories)]


def _hover(candidate: Candidate) -> str:
    lines = [describe_job(candidate.job).replace("; ", "\n"), f"{format_bytes(candidate.peak_bytes)} at the peak"]
    lines.append(f"{format_speed(candidate)} tokens/s, estimated")
    lines.append("fits" if candidate.fits else explain_rejection(candidate))
    return html.escape("\n".join(lines)).replace("\n", "<br>")


def _add_limit(figure: Figure, candidate: Candidate) -> None:
    _limit_line(figure, candidate.usable_bytes)


def _limit_line(figure: Figure, num_bytes: int) -> None:
    figure.add_hline(
        y=num_bytes / GIB,
        line={"width": 2, "dash": "dash", "color": LIMIT_COLOUR},
        annotation_text=f"usable: {format_bytes(num_bytes)}",
        annotation_position="top right",
    )


def _finish(figure: Figure, *, x: str, y: str) -> Figure:
    """Set what all charts share: no paper of their own, so that the page's light or dark one shows through."""
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 56, "r": 12, "t": 28, "b": 48},
        height=440,
        font={"family": "system-ui, sans-serif", "size": 12},
        legend={"orientation": "h", "y": -0.2, "x": 0},
        showlegend=True,
    )
    figure.update_xaxes(title_text=x, zeroline=False)
    figure.update_yaxes(title_text=y, zeroline=False, rangemode="tozero")
    return figure
