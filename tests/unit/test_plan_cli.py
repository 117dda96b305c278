"""`hf-fsdp plan` as a person meets it: every question, every file it leaves, every error with its repair."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hf_fsdp.cli import app
from hf_fsdp.plan import service
from hf_fsdp.plan.simulation import TimelinePoint
from tests.unit.lawful_steps import LawfulSimulator
from tests.unit.test_plan_report import SCHEMA, problems

ROOT = Path(__file__).resolve().parents[2]
LLAMA = "llama-2-7b --gpus 8xA100-80G --max-length 4096"
RUN = str(ROOT / "configs" / "train" / "llama2_7b_full.yaml")


@pytest.fixture(autouse=True)
def simulator(monkeypatch: pytest.MonkeyPatch) -> LawfulSimulator:
    """Steps by formulas in place of those of the simulator."""

    class WithTimeline(LawfulSimulator):
        def __call__(self, jobs: Any) -> list[Any]:
            return [
                dataclasses.replace(one, timeline=_timeline(one) if job.timeline else ())
                for job, one in zip(jobs, super().__call__(jobs), strict=True)
            ]

    def _timeline(one: Any) -> tuple[TimelinePoint, ...]:
        return tuple(
            TimelinePoint(operator=place, phase=phase.name, categories=phase.categories)
            for place, phase in enumerate(one.phases)
        )

    lawful = WithTimeline()
    monkeypatch.setattr(service, "simulate", lawful)
    return lawful


def plan(line: str) -> Any:
    """Run a command line; a traceback fails the test."""
    return CliRunner().invoke(app, ["plan", *shlex.split(line)], catch_exceptions=False)


def shown(line: str) -> str:
    found = plan(line)
    assert found.exit_code == 0, found.output
    return str(found.output)


# -- what is asked ----------------------------------------------------------------------------------------------------


def test_a_plan_is_ranked_and_says_what_comes_next() -> None:
    text = shown(LLAMA)
    assert "Fits: " in text and "Does not fit, nearest first" in text and "Why #1" not in text
    assert "hf-fsdp plan llama-2-7b --gpus 8xA100-80G --max-length 4096 --write planned" in text


def test_why_adds_reasons_phases_and_the_reserve() -> None:
    text = shown(f"{LLAMA} --why --top 2")
    assert "Why #1: reshard" in text and "Why #3" not in text
    assert "The largest phases of #1, simulated" in text and "Reserve of each GPU" in text


def test_json_follows_the_schema_and_is_all_there_is_on_stdout(tmp_path: Path) -> None:
    line = f"{LLAMA} --price 2.5 --tokens 1.5B --json --write {tmp_path / 'planned'}"
    found = plan(line)
    data = json.loads(found.stdout)
    assert problems(data, SCHEMA) == []
    assert data["request"]["training_tokens"] == 1_500_000_000 and data["candidates"][0]["estimated"]["cost"]
    assert data["command"] == f"hf-fsdp plan {LLAMA} --price 2.5 --tokens 1.5B"
    assert "wrote" in found.stderr


def test_the_command_of_a_plan_asks_the_same_again() -> None:
    options = "--method lora --lora-r 32 --lora-dropout 0.1 --no-padded --offload none --global-batch-size 128"
    first = json.loads(shown(f"{LLAMA} {options} --json"))
    again = json.loads(shown(first["command"].removeprefix("hf-fsdp plan ") + " --json"))
    assert again["request"] == first["request"] and not first["request"]["padded"]
    assert first["request"]["method"]["lora_r"] == 32 and first["request"]["fixed"]["offload.parameters"] is False


def test_a_page_shows_the_whole_step_over_time(tmp_path: Path, simulator: LawfulSimulator) -> None:
    page = tmp_path / "plan.html"
    assert f"wrote {page}" in shown(f"{LLAMA} --html {page}")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>") or page.stat().st_size > 10**6
    assert simulator.jobs[-1].timeline and simulator.jobs[-1].exact
    refused = plan(f"{LLAMA} --html {page}")
    assert refused.exit_code == 2 and "exists and is not overwritten" in refused.output
    assert shown(f"{LLAMA} --html {page} --force")


def test_written_files_are_a_run_that_the_planner_reads_again(tmp_path: Path) -> None:
    folder = tmp_path / "planned"
    text = shown(f"{LLAMA} --write {folder}")
    assert text.count("wrote ") == 4 and "run   accelerate launch" in text and "write the files" not in text
    launch = (folder / "accelerate.yaml").read_text(encoding="utf-8")
    assert "it is in train.yaml and fsdp.yaml beside it" in launch and "the script's FSDPConfig" not in launch
    assert f"FSDPConfig.from_yaml('{folder / 'fsdp.yaml'}')" in launch
    run = yaml.safe_load((folder / "train.yaml").read_text(encoding="utf-8"))
    assert run["max_length"] == 4096 and run["global_batch_size"] == 64
    refused = plan(f"{LLAMA} --write {folder}")
    assert refused.exit_code == 2 and "train.yaml" in refused.output and "--force replaces them" in refused.output
    assert "it fits" in shown(f"{folder / 'train.yaml'} --gpus 8xA100-80G")


def test_exact_simulates_every_layer_of_the_first_plan(simulator: LawfulSimulator) -> None:
    assert "#1 was simulated with all of its layers" in shown(f"{LLAMA} --exact").replace("\n    ", " ")
    assert [job.exact for job in simulator.jobs].count(True) == 1


def test_max_batch_prints_the_answer_and_one_step_above_it() -> None:
    text = shown(f"{LLAMA} --max-batch --micro-batch-size 4")
    assert "one row more" in text and "longest rows         4 x 4,096 tokens" in text
    data = json.loads(shown(f"{LLAMA} --max-batch --json"))
    assert problems(data, {"$ref": "#/$defs/max_batch"}) == []
    assert data["largest_batch"]["fits"] and not data["one_row_more"]["fits"]


def test_min_gpus_prints_a_command_that_ranks_what_it_found() -> None:
    text = shown("llama-2-7b --min-gpus --max-length 4096")
    command = text.split("next  ")[1].splitlines()[1].strip()
    assert command.startswith("hf-fsdp plan meta-llama/Llama-2-7b-hf --gpus ") and "--max-length 4096" in command
    assert "Fits: " in shown(command.removeprefix("hf-fsdp plan "))
    if "V100" in command or "T4" in command:
        assert "--precision fp16-mixed" in command
    told = shown("llama-2-7b --min-gpus --gpus 8xA100-80G")
    assert "--gpus 8xA100-80G was not looked at" in told
    data = json.loads(shown("llama-2-7b --min-gpus --json"))
    assert data["rows"] and problems(data, {"$ref": "#/$defs/min_gpus"}) == []


def test_a_length_that_nobody_typed_is_no_reason_to_refuse_a_model() -> None:
    assert "rows of 1,024 tokens" in shown("gpt2 --gpus 8xA100-80G")
    found = plan("gpt2 --gpus 8xA100-80G --max-length 2048")
    assert found.exit_code == 2 and "1024 positions" in found.output


def test_names_of_strategies_are_taken_in_any_case() -> None:
    assert shown(f"{LLAMA} --compare FSDP,ddp") == shown(f"{LLAMA} --compare fsdp,DDP")


def test_a_large_global_batch_takes_no_longer() -> None:
    from hf_fsdp.plan.search.divisions import list_divisions

    found = list_divisions(8 * 2**26 * 3, 8)
    assert len(found) == 54 and found[-1] == (2**26 * 3, 1)


def test_strategies_are_compared() -> None:
    text = shown(f"{LLAMA} --compare ddp,fsdp,fsdp-offload")
    assert "lacks" in text and "fsdp-offload" in text
    data = json.loads(shown(f"{LLAMA} --compare ddp,fsdp --json"))
    assert len(data["rows"]) == 2 and problems(data, {"$ref": "#/$defs/compare"}) == []


def test_a_run_config_is_planned_as_it_stands(simulator: LawfulSimulator) -> None:
    text = shown(f"{RUN} --gpus 8xA100-80G --price 2 --tokens 1B --why")
    assert "as it stands: it fits" in text and "The largest phases of the step" in text and "hours, cost" in text
    assert "The speed assumes" in text and "nvlink" in text
    assert "torchrun --nproc_per_node 8 recipes/text/train.py" in text and "write the files" not in text
    assert len(simulator.jobs) == 1
    again = text.split("a faster way:")[1]
    assert "--price 2 --tokens 1000000000" in again.replace("\\\n", " ").replace("          ", "")
    small = shown(f"{RUN} --gpus 4xRTX4090")
    assert "it does not fit, it lacks" in small and "a way that fits" in small and "torchrun" not in small
    joined = small.split("a way that fits:")[1].replace("\\\n", " ").strip()
    assert "Fits: " in shown(joined.removeprefix("hf-fsdp plan "))


def test_a_run_is_started_as_its_files_ask(tmp_path: Path) -> None:
    def started(file: Path | str, gpus: str) -> list[str]:
        text = shown(f"{file} --gpus {gpus}").split("start it:\n")[1].split("\n      or let")[0]
        return shlex.split(text.replace("\\\n", " "))

    folder = tmp_path / "planned"
    shown(f"{LLAMA} --write {folder}")
    run = str(folder / "train.yaml")
    named = ["recipes/text/train.py", run, "--dataset_name", "YOUR_DATASET"]
    assert started(run, "8xA100-80G") == [
        "accelerate",
        "launch",
        "--config_file",
        str(folder / "accelerate.yaml"),
        *named,
    ]
    # Beside a launch file of other hardware, and without one.
    assert started(run, "4xH200") == ["torchrun", "--nproc_per_node", "4", *named]
    (folder / "accelerate.yaml").unlink()
    assert started(run, "8xA100-80G") == ["torchrun", "--nproc_per_node", "8", *named]
    assert started(run, "B200") == ["python", *named]
    assert started(RUN, "B200") == ["python", "recipes/text/train.py", RUN]


def test_tables_tell_the_host_of_a_machine_and_which_rows_a_note_is_about() -> None:
    line = "llama-2-7b --gpus 2x4xA100-40G --max-length 2048 --compare fsdp,fsdp-offload"
    found = json.loads(shown(f"{line} --json"))["rows"]
    text = shown(line)
    assert "a machine" in text and "of one process" not in text
    host = found[1]["candidate"]["host_bytes"]
    assert f"{host / 2**30:.1f} GiB" in text and host >= 4 * found[1]["candidate"]["simulated"]["host_bytes"] > 0
    assert "assumed network of a machine, each way: 200 GB/s (A100-40G)" in text
    smallest = shown("llama-2-7b --min-gpus")
    rows = json.loads(shown("llama-2-7b --min-gpus --json"))["rows"]
    offloaded = next(row for row in rows if row["offload"] != "none")
    cells = next(line for line in smallest.splitlines() if f" {offloaded['offload']} " in line)
    assert f"{offloaded['candidate']['host_bytes'] / 2**30:.1f} GiB" in cells
    assert " machines)" in smallest


def test_a_run_config_as_json_and_as_a_page(tmp_path: Path, simulator: LawfulSimulator) -> None:
    page = tmp_path / "run.html"
    data = json.loads(plan(f"{RUN} --gpus 8xA100-80G --json --html {page}").stdout)
    assert problems(data, SCHEMA) == [] and data["title"] == f"the run of {RUN}"
    assert page.stat().st_size > 10**5 and [job.timeline for job in simulator.jobs] == [True]


def test_models_with_pictures_have_one_a_row_and_train_what_the_recipe_trains(simulator: LawfulSimulator) -> None:
    request = json.loads(shown("llava-1.5-7b --gpus 8xA100-80G --json"))["request"]
    assert request["num_images"] == 1 and request["method"]["trainable"] == ["language", "projector"]
    assert simulator.jobs[0].batch.num_images == 1
    lora = json.loads(shown("qwen2.5-vl-7b --gpus 8xA100-80G --method lora --image-size 448x672 --json"))
    assert lora["request"]["method"]["lora_parts"] == ["language"]
    assert lora["candidates"][0]["job"]["batch"]["image_size"] == [448, 672]
    everything = json.loads(shown("llava-1.5-7b --gpus 8xA100-80G --trainable all --json"))["request"]
    assert everything["method"]["trainable"] == []
    text = json.loads(shown("gemma-3-4b --gpus 8xA100-80G --num-images 0 --json"))["request"]
    assert text["num_images"] == 0 and text["method"]["trainable"] == []


def test_a_section_of_a_file_is_fixed_and_flags_come_over_it(tmp_path: Path, simulator: LawfulSimulator) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("max_length: 3\nfsdp:\n  activation_checkpointing: full\n  offload: activations\n")
    request = json.loads(shown(f"{LLAMA} --config {file} --offload none --json"))["request"]
    assert request["fixed"]["activation_checkpointing.mode"] == "full" and request["max_length"] == 4096
    assert {job.fsdp.activation_checkpointing.mode for job in simulator.jobs} == {"full"}
    assert {job.fsdp.offload.activations for job in simulator.jobs} == {"none"}


def test_other_hardware_is_a_number_and_a_memory() -> None:
    request = json.loads(shown("llama-2-7b --gpus 2x8 --gpu-memory 40GiB --host-memory 1TiB --json"))["request"]
    assert request["num_gpus"] == 16 and request["gpu_memory_bytes"] == 40 * 2**30
    assert request["host_memory_bytes"] == 2**40


def test_the_built_in_list_needs_no_other_word() -> None:
    assert "llama-2-7b" in shown("--list-models").splitlines()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ["2 problems", "MODEL is missing", "--gpus is missing"]),
        ("llama-2-7c --gpus 8xA100-81G", ["2 problems", "'llama-2-7c' is not in", "A100-80G"]),
        ("llama-2-7b --gpus 8", ["says how many and not which", "--gpus 8xA100-80G"]),
        ("llama-2-7b --gpus 2x8xH100 --gpu-memory 40GiB", ["both say", "--gpus 2x8 --gpu-memory 40GiB"]),
        (f"{LLAMA} --gpus 0xH100", ["not a positive number"]),
        (f"{LLAMA} --max-batch --min-gpus", ["--max-batch and --min-gpus are questions of their own"]),
        (f"{LLAMA} --max-batch --html x.html --why", ["2 problems", "--html is of a plan", "--why is of a plan"]),
        (f"{LLAMA} --micro-batch-size 2", ["of --max-batch"]),
        (f"{LLAMA} --max-batch --micro-batch-size 0", ["--micro-batch-size 0 is no number of rows"]),
        (f"{LLAMA} --price 2", ["--price without --tokens"]),
        (f"{LLAMA} --price '$2' --tokens 1B", ["--price $2 is no number", "--price 2.5"]),
        ("llama-2-7b --gpus 2 --gpu-memory 32GB --price 2 --tokens 1B", ["no speed is known, so no cost"]),
        (f"{RUN} --gpus 8 --gpu-memory 80GiB --price 2 --tokens 1B", ["no speed is known, so no cost"]),
        ("llama-2-7c --gpus 8xH100 --image-size 448", ["'llama-2-7c' is not in"]),
        (f"{RUN} --gpus 8xH100 --max-length 9", ["hf-fsdp plan meta-llama/Llama-2-7b-hf ..."]),
        ("llama-2-7b --gpus p4d.24xlarge", ["--gpus 8 --gpu-memory 40GiB"]),
        (f"{LLAMA} --price -2 --tokens 1B", ["--price -2 an hour is no price"]),
        (f"{LLAMA} --tokens many", ["--tokens many is no number of tokens"]),
        (f"{LLAMA} --tokens 0", ["--tokens 0 is no number of tokens"]),
        (f"{LLAMA} --top 0", ["--top 0 shows no plan"]),
        (f"{LLAMA} --host-memory 12", ["--host-memory 12 is no size"]),
        (f"{LLAMA} --image-size large", ["--image-size large is no height and width"]),
        (f"{LLAMA} --image-size 448", ["--image-size 448x448 without pictures"]),
        (f"{LLAMA} --num-images 1", ["text alone and takes no pictures"]),
        (f"{LLAMA} --num-images -1", ["--num-images -1 is below 0"]),
        (f"{LLAMA} --optim adamw_8bit", ["--optim adamw_8bit is not known", "adamw_torch"]),
        (f"{LLAMA} --loss ce --attention flash", ["2 problems", "--loss ce", "--attention flash"]),
        (f"{LLAMA} --lora-r 8", ["--lora-r: --method full has no adapters"]),
        (f"{LLAMA} --method lora --lora-r 0", ["--lora-r 0"]),
        (f"{LLAMA} --method lora --trainable language", ["parts of a full", "--lora-parts language places adapters"]),
        (f"{LLAMA} --write ''", ["--write is empty"]),
        (f"{LLAMA} --compare ,", ["--compare is empty"]),
        (f"{LLAMA} --revision '' --lora-parts ' '", ["2 problems", "--revision is empty", "--lora-parts is empty"]),
        (f"{LLAMA} --pick 2", ["--pick 2 without --write"]),
        (f"{LLAMA} --global-batch-size 8000000000000", ["more rows than any step has", "--global-batch-size 64"]),
        (f"{LLAMA} --packing --padded", ["--packing fills every row and --padded"]),
        (f"{LLAMA} --max-length 8192", ["4096 positions", "--max-length 4096"]),
        (f"{LLAMA} --max-length 0", ["--max-length 0 leaves rows without a token"]),
        (f"{LLAMA} --global-batch-size 60", ["--global-batch-size 64"]),
        (f"{LLAMA} --global-batch-size -8", ["--global-batch-size -8"]),
        ("llama-2-7b --min-gpus --global-batch-size 0", ["--global-batch-size 0"]),
        (f"{LLAMA} --config nowhere.yaml --offload nvme", ["2 problems", "nowhere.yaml does not exist", "nvme"]),
        (f"{LLAMA} --precision bf8", ["bf8"]),
        ("llama-2-7b --gpus 8xV100-32G --precision bf16", ["does not compute in bfloat16"]),
        ("llama-2-7b --gpus 1xH200 --offload parameters", ["there is one GPU"]),
        ("qwen2.5-vl-7b --gpus 8xH100", ["needs a size of its pictures", "--image-size 448x448"]),
        ("llava-1.5-7b --gpus 8xH100 --max-length 512", ["1 x 576 tokens of pictures exceed the 512"]),
        ("llava-1.5-7b --gpus 8xH100 --packing", ["rows with pictures are not packed"]),
        (f"{RUN}", ["--gpus is missing"]),
        (f"{RUN} --gpus 8xH100 --max-length 9 --max-batch --write x", ["2 problems", "is planned as it stands"]),
        ("nowhere.yaml --top 0", ["3 problems", "nowhere.yaml cannot be read", "--gpus is missing", "--top 0"]),
        (f"{RUN} --gpus 6xH100", ["cannot be spread over 6 GPUs"]),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_is_simulated(
    line: str, words: list[str], simulator: LawfulSimulator
) -> None:
    found = plan(line)
    assert found.exit_code == 2, found.output
    for word in words:
        assert word in found.output
    assert ("problems" in found.output) == ("problems" in words[0])
    assert "\n  fix   " in found.output and not simulator.jobs


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("max_length:", ["max_length=None is no whole number"]),
        ("per_device_train_batch_size: -2", ["per_device_train_batch_size=-2 is no whole number from 1 on"]),
        ("per_device_train_batch_size: 2.5", ["per_device_train_batch_size=2.5"]),
        ("global_batch_size: many\nlora_r: 0", ["2 problems", "global_batch_size='many'", "lora_r=0"]),
        ("max_grad_norm: .nan", ["max_grad_norm=nan is no number from 0 on"]),
        ("max_length: .inf", ["max_length=inf is no whole number"]),
        ("use_peft: true\nlora_dropout: 2", ["lora_dropout=2 is no number from 0 to below 1", "lora_dropout: 0.05"]),
        ("trainable: 3", ["trainable=3 is no list of names"]),
        ("use_peft: perhaps", ["use_peft='perhaps' is neither true nor false"]),
    ],
)
def test_values_of_a_run_config_are_read_as_the_recipe_reads_them(
    values: str, words: list[str], tmp_path: Path, simulator: LawfulSimulator
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: llama-2-7b\n{values}\n", encoding="utf-8")
    found = plan(f"{file} --gpus 8xA100-80G")
    assert found.exit_code == 2 and not simulator.jobs
    for word in [*words, f"from  {file}"]:
        assert word in found.output


def test_words_in_quotes_are_what_they_say(tmp_path: Path, simulator: LawfulSimulator) -> None:
    file = tmp_path / "run.yaml"
    text = "model_name_or_path: llama-2-7b\nmodel_revision: main\nuse_peft: 'false'\nmax_length: '512'\n"
    file.write_text(text, encoding="utf-8")
    shown(f"{file} --gpus 8xA100-80G")
    assert simulator.jobs[0].method.name == "full" and simulator.jobs[0].batch.num_tokens == 512


def test_the_revision_of_a_run_config_is_the_one_that_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_fsdp.plan.search import recipe_run

    asked: list[Any] = []
    resolve = recipe_run.resolve_model

    def remember(name: str, **options: Any) -> Any:
        asked.append((options.pop("revision"), options.pop("trust_remote_code")))
        return resolve(name, **options)

    monkeypatch.setattr(recipe_run, "resolve_model", remember)
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: llama-2-7b\nmodel_revision: v2\ntrust_remote_code: true\n", encoding="utf-8")
    shown(f"{file} --gpus 8xA100-80G")
    shown(f"{file} --gpus 8xA100-80G --trust-remote-code")
    assert set(asked) == {("v2", False), ("v2", True)}, "the file's word is not a person's"


@pytest.mark.parametrize("price", ["nan", "-3", "1e308"])
def test_the_price_of_a_run_config_is_checked_too(price: str, simulator: LawfulSimulator) -> None:
    for model in (RUN, LLAMA.split()[0]):
        found = plan(f"{model} --gpus 8xA100-80G --tokens 1B --price {price}")
        assert found.exit_code == 2 and "an hour is no price" in found.output and not simulator.jobs


def test_errors_are_json_for_those_who_read_json() -> None:
    found = plan(f"{LLAMA} --top 0 --json")
    data = json.loads(found.stdout)
    assert found.exit_code == 2 and "--top 0" in data["error"] and problems(data, {"$ref": "#/$defs/error"}) == []


def test_a_model_that_does_not_fit_is_an_error_with_what_would_do() -> None:
    found = plan("llama-2-7b --gpus 2xRTX4090 --offload none")
    assert found.exit_code == 1 and "fits in no way" in found.output and "--gpus 8xRTX4090-24G" in found.output


def test_files_in_the_way_are_told_before_the_search(tmp_path: Path, simulator: LawfulSimulator) -> None:
    (tmp_path / "planned").write_text("a file")
    found = plan(f"{LLAMA} --html {tmp_path} --write {tmp_path / 'planned'} --top 0")
    assert found.exit_code == 2 and "3 problems" in found.output and not simulator.jobs


# -- the real simulator -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--write", "--html"])
def test_places_where_nothing_can_be_written_are_told_before_the_search(
    flag: str, tmp_path: Path, simulator: LawfulSimulator
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "else")
    for place in ("file/below/x", "dangling/x"):
        found = plan(f"{LLAMA} {flag} {tmp_path / place}")
        assert found.exit_code == 2 and f"{flag} {tmp_path / place}: " in found.output, found.output
    (tmp_path / "taken" / "train.yaml").mkdir(parents=True)
    assert plan(f"{LLAMA} --write {tmp_path / 'taken'} --force").exit_code == 2
    assert not simulator.jobs and (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_leaves_the_files_that_were_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "planned"
    shown(f"{LLAMA} --write {folder}")
    before = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    write = Path.write_text

    def until_full(path: Path, text: str, **options: Any) -> int:
        if path.name == ".train.yaml.draft":
            write(path, text[:10], **options)
            raise OSError(28, "No space left on device")
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", until_full)
    found = plan(f"{LLAMA} --global-batch-size 32 --write {folder} --force")
    assert found.exit_code == 1 and "No space left" in found.output and "Fits: " in found.output
    monkeypatch.undo()
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == before


def test_files_are_there_although_nobody_reads_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_fsdp.cli import plan_view

    def stop_reading(*args: Any, **options: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(plan_view, "print_plan", stop_reading)
    CliRunner().invoke(app, ["plan", *LLAMA.split(), "--write", str(tmp_path / "planned")])
    assert len(list((tmp_path / "planned").iterdir())) == 4


def test_a_small_model_of_a_file_is_planned_by_real_simulations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One structure, so few simulations; the shards of 4 GPUs by arithmetic: a quarter of 4, 4 and 8 bytes a weight."""
    monkeypatch.undo()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    fixed = tmp_path / "fixed.yaml"
    fixed.write_text("fsdp: {activation_checkpointing: full, offload: none, sharding: {reshard_after_forward: true}}\n")
    line = f"{tmp_path} --gpus 4xT4 --max-length 128 --global-batch-size 4 --config {fixed}"
    data = json.loads(shown(f"{line} --json"))
    assert problems(data, SCHEMA) == []
    best = data["candidates"][0]
    count = data["model"]["num_parameters"]
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    assert count == 4 * layer + 2 * 512 * 64 + 64
    states = best["simulated"]["state_bytes"]
    assert count <= states["parameters"] <= 1.05 * count and count <= states["gradients"] <= 1.05 * count
    assert 2 * count <= states["optimizer"] <= 2.1 * count
    assert best["simulated"]["peak_bytes"] > sum(states.values())
    assert len(data["candidates"]) == 1
    assert best["job"]["fsdp"]["precision"]["preset"] == "fp16-mixed" and best["fits"]
