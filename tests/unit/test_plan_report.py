"""The page and the JSON of a plan: every figure is in them, nothing from outside gets out of its place."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.errors import PlanError
from hf_fsdp.plan.candidate import Plan
from hf_fsdp.plan.report import charts
from hf_fsdp.plan.report import page as page_module
from hf_fsdp.plan.report.charts import thin_out
from hf_fsdp.plan.report.document import PLAN_VERSION, plan_to_json
from hf_fsdp.plan.simulation import CATEGORIES, Simulation
from hf_fsdp.units import GIB
from tests.unit.small_plans import LLAMA, candidate, plan, simulation, some_speed

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "docs" / "plan.schema.json").read_text(encoding="utf-8"))
HOSTILE = "</script><script>alert('x')</script>\"><img src=x onerror=alert(1)>{{ 7*7 }}"
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
CHECKED = {"type", "required", "properties", "additionalProperties", "items", "enum", "const", "minimum", "anyOf"}
CHECKED |= {"$ref", "minItems", "maxItems"}
SAID_ONLY = {"description", "title", "$schema", "$defs"}


def problems(value: Any, schema: dict[str, Any], where: str = "plan") -> list[str]:
    """Return where `value` breaks `schema`; knows the words of JSON Schema that ours uses, and refuses any other."""
    assert not set(schema) - CHECKED - SAID_ONLY, f"{where}: this check does not know {set(schema) - CHECKED}"
    if "$ref" in schema:
        return problems(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], where)
    if "anyOf" in schema:
        found = [problems(value, choice, where) for choice in schema["anyOf"]]
        return [] if [] in found else min(found, key=len)
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", [])
    if kinds and not any(_is_a(value, kind) for kind in kinds):
        return [f"{where} is {value!r} and no {' or '.join(kinds)}"]
    found = []
    if "const" in schema and value != schema["const"] or "enum" in schema and value not in schema["enum"]:
        found.append(f"{where} is {value!r}")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{where} is {value}")
    if isinstance(value, dict):
        return found + _object_problems(value, schema, where)
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            found.append(f"{where} has {len(value)} entries")
        for index, item in enumerate(value):
            found += problems(item, schema.get("items", {}), f"{where}[{index}]")
    return found


def _is_a(value: Any, kind: str) -> bool:
    if kind == "null":
        return value is None
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _object_problems(value: dict[str, Any], schema: dict[str, Any], where: str) -> list[str]:
    known, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    found = [f"{where}.{key} is missing" for key in schema.get("required", []) if key not in value]
    for key, item in value.items():
        if key in known:
            found += problems(item, known[key], f"{where}.{key}")
        elif more is False:
            found.append(f"{where}.{key} is not in the schema")
        elif isinstance(more, dict):
            found += problems(item, more, f"{where}.{key}")
    return found


def whole_plan() -> Plan:
    """With everything that a plan can have: days, cost, a timeline, several kinds of candidates."""
    return plan(
        candidate(60.0, num_points=50),
        dataclasses.replace(candidate(52.2, offload="parameters", speed=some_speed(0.5)), basis="extended"),
        candidate(96.5, micro=8, steps=1, activation_checkpointing="none"),
        candidate(None, pruned="parameters alone are more", floor_gib=100.4, steps=1),
        dataclasses.replace(candidate(50.0, speed=None), host_bytes=600 * GIB, host_limit_bytes=512 * GIB),
        price_per_gpu_hour=2.5,
        training_tokens=10**9,
    )


# ---- JSON ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [plan(), whole_plan(), dataclasses.replace(plan(), candidates=(), num_layers=None)])
def test_the_json_keeps_to_its_schema(found: Plan) -> None:
    document = json.loads(json.dumps(plan_to_json(found), allow_nan=False))
    assert problems(document, SCHEMA) == []
    assert document["version"] == PLAN_VERSION == SCHEMA["properties"]["version"]["const"]


def test_the_schema_is_one_for_jsonschema_too() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed; the check above is our own")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(plan_to_json(whole_plan()), SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["version"], 2),
        (["candidates", 0, "fits"], "yes"),
        (["candidates", 0, "basis"], "guessed"),
        (["candidates", 0, "simulated", "peak_categories", "optimiser"], 1),
        (["candidates", 0, "estimated", "days"], [1.0]),
        (["request", "num_gpus"], 0),
        (["model", "num_parameters"], None),
    ],
)
def test_the_schema_refuses_what_is_wrong(path: list[Any], value: Any) -> None:
    document = plan_to_json(whole_plan())
    inner: Any = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert len(problems(document, SCHEMA)) == 1


def test_the_schema_names_every_category() -> None:
    assert set(SCHEMA["$defs"]["categories"]["properties"]) == set(CATEGORIES)


def test_the_json_says_the_figures_and_how_they_are_known() -> None:
    first, second, third, fourth, fifth = plan_to_json(whole_plan())["candidates"]
    assert [item["rank"] for item in (first, second, third, fourth, fifth)] == [1, 2, None, None, None]
    assert (
        first["simulated"]["peak_bytes"] == 60 * GIB and first["simulated"]["peak_phase"] == "backward: head and loss"
    )
    assert first["estimated"]["reserve_bytes"] == int(1.5 * GIB)
    assert first["estimated"]["days"] == pytest.approx([10**9 / 26_512 / 86_400, 10**9 / 21_034 / 86_400])
    assert first["estimated"]["cost"][0] == pytest.approx(first["estimated"]["days"][0] * 24 * 8 * 2.5)
    assert third["missing_bytes"] == 19 * GIB and third["headroom_bytes"] == -19 * GIB
    assert fourth["simulated"] is None and fourth["basis"] == "arithmetic"
    assert fifth["missing_host_bytes"] == 88 * GIB and not fifth["fits"]


def test_config_and_simulation_can_be_read_back_from_the_json() -> None:
    found = whole_plan()
    document = json.loads(json.dumps(plan_to_json(found)))
    item = document["candidates"][1]
    assert FSDPConfig.from_mapping(item["job"]["fsdp"], source="the plan") == found.candidates[1].job.fsdp
    names = {field.name for field in dataclasses.fields(Simulation)}
    kept = {key: value for key, value in item["simulated"].items() if key in names}
    assert Simulation.from_mapping(kept) == found.candidates[1].simulation


# ---- the page -----------------------------------------------------------------------------------------


@pytest.fixture
def plotly() -> Any:
    return pytest.importorskip("plotly", reason='plotly is not installed: pip install "hf-fsdp[report]"')


class Page(HTMLParser):
    """Text and attributes of a page, without what its scripts hold."""

    def __init__(self, text: str):
        super().__init__()
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.rows: list[list[str]] = []
        self.num_scripts = 0
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self.num_scripts += tag == "script"
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._open):
            self.words.append(data)
            if {"td", "th"} & set(self._open):
                self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_without_plotly_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(PlanError, match="draws its charts with Plotly, which is not installed") as caught:
        page_module.write_report(plan(), tmp_path / "plan.html")
    assert caught.value.problems[0].fix.startswith('pip install "hf-fsdp[report]"')
    assert not (tmp_path / "plan.html").exists()


def test_a_page_that_exists_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "build_report", lambda plan: "new")
    (tmp_path / "plan.html").write_text("mine", encoding="utf-8")
    with pytest.raises(PlanError, match="exists and is not overwritten"):
        page_module.write_report(plan(), tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == "mine"
    page_module.write_report(plan(), tmp_path / "plan.html", force=True)  # the advice of the message
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == "new"
    with pytest.raises(PlanError, match="is a folder") as caught:
        page_module.write_report(plan(), tmp_path)
    assert caught.value.problems[0].fix == f"--html {tmp_path}/plan.html"


def test_the_page_has_the_plan_in_text_and_tables(plotly: Any) -> None:
    page = Page(page_module.build_report(whole_plan()))
    for words in (
        "It fits.",
        "60.0 GiB simulated",
        "21,000-26,500 estimated",
        "210-264 estimated",
        "8 x A100-80G: 79.0 GiB each - 1.5 GiB reserve (estimated) = 77.5 GiB usable",
        "Checkpointing in full costs a quarter of the speed.",
        "matrix products at 60 to 80 % of the data sheet",
        "parameter bytes equal arithmetic",
        "hf-fsdp plan llama-2-7b --gpus 8xA100-80G --max-length 4096 --write planned",
        "torch 2.13",
    ):
        assert words in page.text
    (head,) = [row for row in page.rows if row[0] == "backward: head and loss"]
    assert head[1] == "60.0 GiB" and "15.0 GiB" in head
    verdicts = [row[-1] for row in page.rows if len(row) == 12]
    assert verdicts[1:3] == ["fits", "fits"] and "lacks 19.0 GiB a GPU" in verdicts[3]
    assert "at least 100.4 GiB by arithmetic" in verdicts[4]
    assert ["NCCL buffers", "1.0 GiB", "1 communicator"] in page.rows


def test_the_page_needs_no_network(plotly: Any) -> None:
    page = Page(page_module.build_report(whole_plan()))
    assert page.num_scripts >= 4  # Plotly's own, and one a chart
    loading = [(tag, key, value) for tag, key, value in page.attributes if key in ("src", "href", "srcset", "data")]
    assert loading == []


def test_names_from_outside_are_text_on_the_page(plotly: Any) -> None:
    spec = dataclasses.replace(LLAMA, name=HOSTILE)
    found = plan(
        candidate(60.0, model=spec, num_points=20),
        candidate(None, pruned=HOSTILE, floor_gib=100.0),
        command=HOSTILE,
        notes=(HOSTILE,),
        title=HOSTILE,
        versions={HOSTILE: HOSTILE},
        layer_class=HOSTILE,
    )
    page, plain = (
        Page(page_module.build_report(found)),
        Page(page_module.build_report(plan(candidate(60.0, num_points=20)))),
    )
    assert page.num_scripts == plain.num_scripts
    assert not [tag for tag, key, _ in page.attributes if key.startswith("on") or tag == "img"]
    assert "alert('x')" in page.text and "{{ 7*7 }}" in page.text


def test_a_phase_of_a_hostile_model_cannot_leave_its_chart(plotly: Any) -> None:
    base = simulation(60.0, num_points=20)
    phases = tuple(dataclasses.replace(phase, name=HOSTILE) for phase in base.phases)
    points = tuple(dataclasses.replace(point, phase=HOSTILE) for point in base.timeline)
    item = dataclasses.replace(candidate(60.0), simulation=dataclasses.replace(base, phases=phases, timeline=points))
    page, plain = (
        Page(page_module.build_report(plan(item))),
        Page(page_module.build_report(plan(candidate(60.0, num_points=20)))),
    )
    assert page.num_scripts == plain.num_scripts
    assert not [tag for tag, _, _ in page.attributes if tag == "img"]


def test_where_nothing_fits_the_page_shows_the_nearest(plotly: Any) -> None:
    page = Page(page_module.build_report(plan(candidate(100.0), candidate(120.0))))
    assert "Nothing fits." in page.text and "22.5 GiB of the usable memory" in page.text
    assert "--write" not in page.text


def test_a_page_without_any_simulation_or_candidate_says_so(plotly: Any) -> None:
    for found in (plan(candidate(None, pruned="too large")), dataclasses.replace(plan(), candidates=())):
        page = Page(page_module.build_report(found))
        assert "Arithmetic alone rules out every candidate" in page.text and page.num_scripts == 0


def test_the_charts_hold_the_figures_of_the_plan(plotly: Any) -> None:
    found = whole_plan()
    timeline, phases, points = (
        charts.draw_timeline(found.candidates[0]),
        charts.draw_phases(found.candidates[0]),
        charts.draw_map(found),
    )
    assert timeline is not None and phases is not None and points is not None
    highest = max(sum(values) for values in zip(*(trace.y for trace in timeline.data), strict=True))
    assert highest == pytest.approx(60.0, abs=0.01)
    assert [note.text for note in timeline.layout.annotations][:2] == ["forward", "backward"]
    assert max(sum(values) for values in zip(*(trace.x for trace in phases.data), strict=True)) == pytest.approx(
        60.0, abs=0.01
    )
    fits, lacks = points.data
    assert list(fits.y) == pytest.approx([60.0, 52.2]) and list(lacks.y) == pytest.approx([96.5])
    assert fits.x[0] == pytest.approx((21_034 + 26_512) / 2) and fits.error_x.array[0] == pytest.approx(2739)
    assert "lacks 19.0 GiB a GPU" in lacks.text[0]
    (line,) = points.layout.shapes
    assert line.y0 == line.y1 == pytest.approx(77.5)
    assert charts.draw_timeline(found.candidates[1]) is None


def test_a_long_timeline_is_thinned_out_and_keeps_its_peak_and_its_phases() -> None:
    timeline = simulation(60.0, num_points=20_000).timeline
    kept = thin_out(timeline)
    assert len(kept) <= 620
    assert [point.operator for point in kept] == sorted({point.operator for point in kept})
    assert max(sum(point.categories.values()) for point in kept) == 60 * GIB
    assert kept[0] == timeline[0] and kept[-1] == timeline[-1]
    changes = [point for before, point in zip(timeline, timeline[1:], strict=False) if before.phase != point.phase]
    first_words = [point.phase.partition(":")[0] for point in changes]
    assert first_words == ["backward", "backward", "clip", "optimizer"]
    assert {point.operator for point in (changes[0], changes[2], changes[3])} <= {point.operator for point in kept}


# ---- a real browser -----------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.mark.parametrize("width", [420, 1200])
def test_a_browser_draws_the_three_charts(width: int, plotly: Any, tmp_path: Path) -> None:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)}")
    path = page_module.write_report(whole_plan(), tmp_path / "plan.html")
    probe = (
        "<script>addEventListener('load', () => setTimeout(() => { const bodies = [...document.querySelectorAll("
        "'.js-plotly-plot')].map(c => `${c.id}:${c.querySelectorAll('.main-svg').length > 0}`).join(' ');"
        "document.documentElement.dataset.probe = `${bodies} wide:${document.documentElement.scrollWidth > innerWidth}`"
        "}, 1000)); addEventListener('error', e => { document.documentElement.dataset.error = e.message })</script>"
    )
    text = path.read_text(encoding="utf-8").replace("<head>", "<head>" + probe, 1)
    path.write_text(text, encoding="utf-8")
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},2000"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=8000", "--dump-dom", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    found = re.search(r'<html[^>]*data-probe="([^"]*)"', dom)
    assert found is not None and 'data-error="' not in dom[:2000]
    assert found[1] == "chart-timeline:true chart-phases:true chart-map:true wide:false"
