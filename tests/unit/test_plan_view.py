"""What `hf-fsdp plan` prints: every candidate in words, in the width that there is, and where its figures come from."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys

import pytest

from hf_fsdp.cli.plan_view import print_plan
from hf_fsdp.config.hardware import parse_gpus
from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.plan.candidate import Plan
from hf_fsdp.plan.job import Job, Method
from hf_fsdp.plan.report.figures import explain_rejection
from hf_fsdp.plan.report.files import launch_command
from hf_fsdp.plan.report.section import Section
from hf_fsdp.plan.report.settings import describe_checkpointing, describe_method, describe_offload, describe_sharding
from hf_fsdp.plan.report.view import view_plan
from hf_fsdp.units import GIB
from tests.unit.small_plans import LLAMA, candidate, plan, some_speed


def wide_plan() -> Plan:
    """Three that fit, with days and cost, the longest settings, and two that do not."""
    return plan(
        candidate(60.0, sharding={"dp_replicate_size": 2, "sync_each_batch": False}),
        candidate(52.2, micro=4, steps=2, offload=["parameters", "activations"]),
        candidate(70.2, micro=1, steps=8, sharding={"reshard_after_forward": False}),
        candidate(96.5, micro=8, steps=1, activation_checkpointing="none"),
        candidate(None, pruned="parameters alone are more", floor_gib=100.4, steps=1),
        price_per_gpu_hour=2.5,
        training_tokens=10**9,
    )


def text_of(sections: list[Section]) -> str:
    return "\n".join(
        line
        for section in sections
        for line in (section.title, *section.header, *(cell for row in section.rows for cell in row), *section.lines)
    )


def table_width(section: Section) -> int:
    """As a table of two spaces between columns prints it."""
    columns = zip(section.header, *section.rows, strict=True)
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    return sum(widths) + 2 * (len(widths) - 1)


def test_the_first_lines_say_what_is_planned_and_what_is_left_of_a_gpu() -> None:
    first = view_plan(plan())[0].lines
    assert "6.74B parameters, 32 blocks; full fine-tuning" in first[0]
    assert first[2] == "8 x A100-80G: 79.0 GiB each - 1.5 GiB reserve (estimated) = 77.5 GiB usable"


def test_every_fitting_candidate_is_a_row_in_words() -> None:
    ranked = view_plan(wide_plan(), width=200)[1]
    header = [title.split("\n")[0] for title in ranked.header]
    rows = [dict(zip(header, row, strict=True)) for row in ranked.rows]
    assert [row["#"] for row in rows] == ["1", "2", "3"]
    assert rows[0]["SHARDING"] == "2 copies x 4, reshard, reduce once a step"
    assert rows[1]["OFFLOAD"] == "parameters+optimizer and activations"
    assert rows[2]["SHARDING"] == "keep gathered"
    assert [row["BATCH"] for row in rows] == ["2 x 4", "4 x 2", "1 x 8"]
    assert [row["PEAK"] for row in rows] == ["60.0 GiB", "52.2 GiB", "70.2 GiB"]
    assert [row["FREE"] for row in rows] == ["17.5 GiB", "25.3 GiB", "7.3 GiB"]
    assert rows[0]["TOKENS/S"] == "21,000-26,500" and rows[0]["MFU"] == "38-47 %"
    # 1e9 tokens at 26,512 and 21,034 a second; 8 GPUs at 2.5 an hour.
    assert "TIME\nhours" in ranked.header and rows[0]["TIME"] == "10.5-13.2" and rows[0]["COST"] == "210-264"


@pytest.mark.parametrize("width", [50, 60, 80, 100, 120, 200])
def test_nothing_is_wider_than_the_window(width: int) -> None:
    for section in view_plan(wide_plan(), width=width, why=True):
        lines = [*section.title.split("\n"), *section.lines]
        assert [line for line in lines if len(line) > width] == []
        assert not section.header or table_width(section) <= width


@pytest.mark.parametrize("width", [50, 80, 100, 120])
def test_a_narrow_window_loses_no_figure_that_was_asked_for(width: int) -> None:
    shown = " ".join(text_of(view_plan(wide_plan(), width=width)).split())
    for figure in ("60.0 GiB", "52.2 GiB", "21,000-26,500", "10.5-13.2", "210-264"):
        assert figure in shown


def test_printed_to_a_file_it_has_at_most_120_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(wide_plan(), why=True)
    printed = capsys.readouterr().out
    assert "60.0 GiB" in printed and max(len(line) for line in printed.splitlines()) <= 120


def test_what_is_simulated_and_what_is_estimated_is_said_beside_the_figures() -> None:
    sections = view_plan(plan())
    assert sections[1].title.endswith("Memory is simulated; speed (of all GPUs together) is estimated.")
    everything = view_plan(wide_plan())[1].title
    assert everything.endswith("Memory is simulated; speed (of all GPUs together), time and cost are estimated.")
    assert view_plan(plan(candidate(60.0, speed=None)))[1].title.endswith("Memory is simulated.")
    assert "PEAK\nsimulated" in sections[1].header and "TOKENS/S\nestimated" in sections[1].header
    assert sections[2].title == "One GPU at its peak, simulated"


@pytest.mark.parametrize("width", [60, 120])
def test_a_peak_that_was_not_simulated_itself_is_marked(width: int) -> None:
    extended = dataclasses.replace(candidate(60.0), basis="extended")
    assert "~60.0 GiB" in text_of(view_plan(plan(extended), width=width))
    assert "~" not in text_of(view_plan(plan(candidate(60.0)), width=width))
    assert "96.0 GiB in backward, extended" in explain_rejection(dataclasses.replace(candidate(96.0), basis="extended"))


def test_the_parts_of_a_peak_and_the_rest_are_the_peak() -> None:
    item = candidate(60.0)
    assert item.simulation is not None
    memory = view_plan(plan(item))[2]
    rows = {row[0]: row[1] for row in memory.rows}
    assert rows["peak"] == "60.0 GiB" and rows["reached in"] == "backward"
    parts = [text for name, text in rows.items() if name not in ("peak", "reached in")]
    sizes = {"GiB": 1.0, "MiB": 1 / 1024}
    total = sum(float(text.split()[0]) * sizes[text.split()[1]] for text in parts)
    assert total == pytest.approx(60.0, abs=0.05 * len(parts))
    assert "temporaries" not in rows and "all other" in rows  # a thousandth of the peak has no row of its own


def test_what_does_not_fit_says_what_it_lacks_and_how_that_is_known() -> None:
    lines = text_of(view_plan(wide_plan(), width=200))
    assert "Does not fit, nearest first" in lines
    assert "checkpointing none; micro-batch 8 x 1: 96.5 GiB in backward, simulated; lacks 19.0 GiB a GPU" in lines
    assert "at least 100.4 GiB by arithmetic; parameters alone are more; lacks 22.9 GiB a GPU" in lines


def test_missing_host_memory_is_a_reason_too() -> None:
    item = dataclasses.replace(candidate(60.0), host_bytes=600 * GIB, host_limit_bytes=512 * GIB)
    assert not item.fits and not item.missing_bytes
    assert "lacks 88.0 GiB of host memory a machine" in explain_rejection(item)


def test_only_so_many_are_shown_and_the_others_are_counted() -> None:
    fitting = [candidate(20.0 + size, speed=some_speed(1 - size / 10)) for size in range(7)]
    rejected = [candidate(100.0 + size) for size in range(9)]
    sections = view_plan(plan(*fitting, *rejected), limit=3)
    assert sections[1].title.startswith("Fits: the best 3 of 7.") and len(sections[1].rows) == 3
    assert sections[3].lines[-1].strip() == "and 6 more, which lack more"


def test_where_nothing_fits_the_next_command_asks_which_gpus_would_do() -> None:
    text = text_of(view_plan(plan(candidate(100.0))))
    assert "Nothing fits." in text and "--min-gpus" in text
    assert "accelerate launch" not in text


def test_a_plan_without_any_candidate_is_shown_too() -> None:
    empty = dataclasses.replace(plan(), candidates=())
    assert "8 x A100-80G: 79.0 GiB each" in text_of(view_plan(empty, why=True))


def test_reasons_and_the_reserve_are_shown_on_request() -> None:
    reason, part = "Checkpointing in full costs a quarter of the speed.", "1.0 GiB NCCL buffers: 1 communicator"
    assert reason not in text_of(view_plan(plan()))
    explained = text_of(view_plan(plan(), why=True))
    assert reason in explained and part in explained


@pytest.mark.parametrize("width", [60, 120])
def test_the_next_commands_can_be_copied(width: int) -> None:
    spec = dataclasses.replace(LLAMA, name="my models/llama; rm -rf x")
    found = plan(
        candidate(60.0, model=spec), command=shlex.join(["hf-fsdp", "plan", spec.name, "--gpus", "8xA100-80G"])
    )
    lines = list(view_plan(found, width=width)[-1].lines[1:])
    joined = "\n".join(lines).replace("\\\n", " ")
    first, second = (shlex.split(command) for command in joined.split("\n"))
    assert first == ["hf-fsdp", "plan", spec.name, "--gpus", "8xA100-80G", "--write", "planned"]
    assert second == shlex.split(launch_command(found, "planned"))


def test_a_gpu_of_unknown_speed_has_memory_only() -> None:
    ranked = view_plan(plan(candidate(60.0, speed=None)))[1]
    assert [title.split("\n")[0] for title in ranked.header] == [
        *("#", "SHARDING", "CHECKPOINTING", "OFFLOAD", "BATCH", "PEAK", "FREE"),
    ]
    named = plan(candidate(60.0, speed=None), candidate(61.0, speed=None), training_tokens=10**7)
    own = dataclasses.replace(named, request=dataclasses.replace(named.request, gpus=parse_gpus("8")))
    note = "note only the memory of this GPU is known: no speed, time or cost; ordered as on A100-80G"
    assert note in " ".join(text_of(view_plan(own)).split())
    assert "only the memory" not in text_of(view_plan(named))


def test_a_memory_in_gb_is_told_with_one_digit() -> None:
    request = dataclasses.replace(plan().request, gpus=parse_gpus("2"), gpu_memory_bytes=32 * 10**9)
    assert request.gpu_name == "GPU of 29.8 GiB"


@pytest.mark.parametrize(
    ("tokens", "shown"), [(10**6, "0.63-0.79 minutes"), (10**9, "10.5-13.2 hours"), (10**10, "4.37-5.50 days")]
)
def test_a_time_has_the_unit_that_leaves_it_digits(tokens: int, shown: str) -> None:
    """26,512 to 21,034 tokens a second; a width of 50 tells it in a line."""
    assert shown in " ".join(text_of(view_plan(plan(training_tokens=tokens), width=50)).split())


@pytest.mark.parametrize("width", [50, 100])
def test_columns_without_room_are_named_once(width: int) -> None:
    shown = " ".join(text_of(view_plan(wide_plan(), width=width)).split())
    assert shown.count("HOST, STEP and MFU: --json, or a wider terminal") == 1
    assert "or a wider terminal" not in text_of(view_plan(wide_plan(), width=220))


def test_what_a_token_is_is_said_where_rows_are_padded() -> None:
    padded = text_of(view_plan(plan(padded=True, training_tokens=10**9), width=200))
    assert "tokens/s, time and cost count every position of them, padding too" in padded
    assert "tokens/s counts every position" in text_of(view_plan(plan(padded=True), width=200))
    assert "padding" not in text_of(view_plan(plan(padded=False), width=200))
    assert "padding" not in text_of(view_plan(plan(candidate(60.0, speed=None), padded=True), width=200))


def test_what_a_speed_rests_on_is_told() -> None:
    found = plan(method=Method(name="qlora"))
    two = dataclasses.replace(found, request=dataclasses.replace(found.request, gpus=parse_gpus("2x8xH100")))
    shown = text_of(view_plan(two, width=200))
    assert "note  assumed network of a machine, each way: 400 GB/s (H100-80G); a cloud's may be a quarter" in shown
    assert "the unpacking of 4-bit weights before each use is not in the speed" in shown
    alone = text_of(view_plan(plan(), width=200))
    assert "assumed network" not in alone and "4-bit" not in alone
    assert "matrix products at 60" not in alone
    assert "matrix products at 60 to 80 % of the data sheet" in text_of(view_plan(plan(), width=200, why=True))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("none", "none"),
        ("auto", "none"),
        ("full", "full"),
        ({"every": 2}, "full, 1 block in 2"),
        ({"fraction": 0.5}, "full, 50% of blocks"),
        ({"selective": ["attention"]}, "keeps attention"),
        ({"towers": ["language"]}, "full, language only"),
    ],
)
def test_checkpointing_in_words(section: object, words: str) -> None:
    assert describe_checkpointing(FSDPConfig(activation_checkpointing=section)) == words


def test_other_settings_in_words() -> None:
    assert describe_sharding(Job(model=LLAMA, strategy="ddp")) == "DDP, all on each GPU"
    assert describe_sharding(Job(model=LLAMA, world_size=1)) == "one GPU, whole"
    assert describe_offload(FSDPConfig()) == "none"
    assert describe_method(Method(), 10, 10) == "full fine-tuning"
    words = describe_method(Method(name="qlora", lora_r=8), 40_000_000, 6_780_000_000)
    assert words == "QLoRA r=8, 40.0M of 6.78B parameters trained"


def test_showing_a_plan_needs_no_torch() -> None:
    names = ("view", "files", "document")
    modules = ", ".join(f"hf_fsdp.plan.report.{name}" for name in names)
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
