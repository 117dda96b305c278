"""What `hf-fsdp plan --write DIR` leaves is read by the programs that it is for, and means what was planned."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from hf_fsdp.config.io import load_yaml
from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.data.run_config import read_run_config
from hf_fsdp.errors import PlanError
from hf_fsdp.plan.candidate import Plan
from hf_fsdp.plan.job import Method, ModelSpec
from hf_fsdp.plan.report.files import plan_files, write_plan
from hf_fsdp.plan.report.run_file import loadable_name, settle_config
from tests.unit.small_plans import LLAMA, candidate, plan

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["accelerate.yaml", "fsdp.yaml", "train.yaml", "plan.json"]
LLAVA = ModelSpec(name="llava-hf/llava-1.5-7b-hf", config={"model_type": "llava", "vision_config": {}})


def load_recipe(script: str) -> ModuleType:
    name = script.replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, ROOT / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def read_by_recipe(found: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what the recipe named in the written command makes of that command, as one of 8 processes."""
    import trl

    from hf_fsdp.data import read_recipe_arguments, recipe_arguments

    words = shlex.split(write_plan(found, folder).command)
    script, *argv = words[words.index(str(folder / "accelerate.yaml")) + 1 :]
    monkeypatch.setattr(recipe_arguments, "launched_processes", lambda: 8)
    recipe = load_recipe(script)
    return read_recipe_arguments(
        [*argv, "--report_to", "none"],
        trl.TrlParser(recipe.ARGUMENT_CLASSES),
        script=script,
        output_dir="runs/x",
        refused=recipe.REFUSED,
    )


def test_four_files_are_written_and_the_command_names_them(tmp_path: Path) -> None:
    written = write_plan(plan(), tmp_path / "new" / "folder")
    assert [path.name for path in written.paths] == NAMES
    assert all(path.read_text(encoding="utf-8") for path in written.paths)
    folder = tmp_path / "new" / "folder"
    assert written.command == (
        f"accelerate launch --config_file {folder}/accelerate.yaml recipes/text/train.py {folder}/train.yaml "
        "--dataset_name YOUR_DATASET"
    )


def test_accelerates_own_loader_reads_the_launch_file(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    write_plan(plan(candidate(60.0, offload="parameters", sharding={"reshard_after_forward": False})), tmp_path)
    launch = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (launch.num_processes, launch.mixed_precision) == (8, "bf16")
    assert launch.fsdp_config["fsdp_version"] == 2
    assert launch.fsdp_config["fsdp_offload_params"] is True
    assert launch.fsdp_config["fsdp_reshard_after_forward"] is False
    assert launch.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"


@pytest.mark.parametrize(
    "fsdp",
    [
        {},
        {"activation_checkpointing": {"every": 2, "towers": ["language"]}},
        {"activation_checkpointing": {"selective": ["attention"]}, "offload": ["parameters", "activations"]},
        {"sharding": {"dp_replicate_size": 2, "sync_each_batch": False, "forward_prefetch": 1}},
        {"precision": {"preset": "bf16-true", "reduce_dtype": "bfloat16"}, "wrap": {"layer_classes": ["LlamaMLP"]}},
    ],
)
def test_both_configs_are_the_one_that_was_simulated(fsdp: dict[str, Any], tmp_path: Path) -> None:
    item = candidate(60.0, **fsdp)
    write_plan(plan(item), tmp_path)
    assert FSDPConfig.from_yaml(tmp_path / "fsdp.yaml") == item.job.fsdp
    assert FSDPConfig.from_yaml(tmp_path / "train.yaml") == item.job.fsdp


def test_what_was_left_open_is_written_as_it_was_simulated(tmp_path: Path) -> None:
    item = candidate(60.0, precision="auto", activation_checkpointing="auto")
    write_plan(plan(item), tmp_path)
    section = yaml.safe_load((tmp_path / "train.yaml").read_text(encoding="utf-8"))["fsdp"]
    assert section["precision"] == "bf16-mixed" and section["activation_checkpointing"] == "none"
    assert FSDPConfig.from_yaml(tmp_path / "train.yaml") == settle_config(item.job)


def test_the_text_recipe_trains_what_was_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = candidate(60.0, micro=2, steps=4)
    fsdp, recipe, script, training, model = read_by_recipe(plan(item), tmp_path, monkeypatch)
    assert fsdp == item.job.fsdp
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (2, 4)
    assert (recipe.global_batch_size, training.max_length, training.packing) == (64, 4096, False)
    assert (str(training.optim.value), training.max_grad_norm) == ("adamw_torch_fused", 1.0)
    assert (model.model_name_or_path, model.attn_implementation) == (LLAMA.name, "sdpa")
    assert (model.use_peft, model.load_in_4bit, model.dtype) == (False, False, "auto")
    assert training.learning_rate == 2e-5 and script.dataset_name == "YOUR_DATASET"


def test_the_text_recipe_trains_adapters_as_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = Method(name="lora", lora_r=8, lora_dropout=0.05, lora_targets=("q_proj", "v_proj"))
    found = plan(candidate(20.0, method=method, attention="eager"), method=method)
    _, _, _, training, model = read_by_recipe(found, tmp_path, monkeypatch)
    assert (model.use_peft, model.lora_r, model.lora_dropout, model.dtype) == (True, 8, 0.05, "auto")
    assert model.lora_target_modules == ["q_proj", "v_proj"] and model.attn_implementation == "eager"
    assert training.learning_rate == 2e-4


def test_the_text_recipe_trains_on_four_bits_as_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    method = Method(name="qlora", double_quantization=False)
    found = plan(candidate(20.0, method=method), method=method)
    model = read_by_recipe(found, tmp_path, monkeypatch).model
    assert (model.load_in_4bit, model.use_bnb_nested_quant, model.bnb_4bit_quant_type) == (True, False, "nf4")
    assert (model.dtype, model.bnb_4bit_quant_storage) == ("bfloat16", "bfloat16")


def test_a_model_with_a_tower_goes_to_the_recipe_for_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = Method(name="lora", lora_parts=("language",), lora_full=("projector",))
    found = plan(candidate(20.0, model=LLAVA, method=method), method=method)
    run = read_by_recipe(found, tmp_path, monkeypatch)
    assert run.recipe.lora_parts == ["language"] and run.recipe.trainable == ["projector"]
    assert "packing" not in yaml.safe_load((tmp_path / "train.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "key"), [("full", "trainable"), ("lora", "lora_parts")])
def test_a_job_that_names_no_part_trains_every_part(name: str, key: str, tmp_path: Path) -> None:
    method = Method(name=name)
    texts = plan_files(plan(candidate(20.0, model=LLAVA, method=method), method=method), tmp_path)
    assert yaml.safe_load(texts["train.yaml"])[key] == ["all"]


def test_the_revision_that_was_planned_is_the_one_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_fsdp.plan.search.search_command import search_command

    model = dataclasses.replace(LLAMA, revision="v2")
    found = plan(candidate(20.0, model=model))
    found = dataclasses.replace(found, request=dataclasses.replace(found.request, model=model))
    assert read_by_recipe(found, tmp_path, monkeypatch).model.model_revision == "v2"
    assert "--revision v2" in search_command(found.request)


def test_the_data_set_is_to_be_filled_in_and_missing_until_then(tmp_path: Path) -> None:
    write_plan(plan(), tmp_path)
    text = (tmp_path / "train.yaml").read_text(encoding="utf-8")
    assert "# dataset_name: YOUR_DATASET" in text and "to be filled in" in text
    assert "dataset_name" not in yaml.safe_load(text)


def test_the_run_config_says_what_was_predicted_and_how(tmp_path: Path) -> None:
    write_plan(plan(), tmp_path)
    text = (tmp_path / "train.yaml").read_text(encoding="utf-8")
    assert "60.0 GiB a GPU at the peak, simulated (17.5 GiB of 77.5 GiB usable stay free on 8 x A100-80G)" in text
    assert "21,034 to 26,512 tokens/s, estimated" in text
    assert "# Written by: hf-fsdp plan llama-2-7b --gpus 8xA100-80G --max-length 4096" in text


def test_the_plan_itself_is_beside_them_with_this_candidate_only(tmp_path: Path) -> None:
    found = plan(candidate(60.0), candidate(50.0, micro=1, steps=8))
    write_plan(found, tmp_path, rank=2)
    (item,) = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["candidates"]
    assert item["job"]["batch"]["micro_batch_size"] == 1
    assert read_run_config([str(tmp_path / "train.yaml")], _keys(tmp_path)).values["per_device_train_batch_size"] == 1


def _keys(folder: Path) -> set[str]:
    return set(load_yaml(folder / "train.yaml")[0])


def test_files_that_exist_are_all_named_and_kept(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("mine", encoding="utf-8")
    (tmp_path / "fsdp.yaml").write_text("mine too", encoding="utf-8")
    with pytest.raises(PlanError, match="exists and is not overwritten") as caught:
        write_plan(plan(), tmp_path)
    assert len(caught.value.problems) == 2 and "train.yaml" in str(caught.value) and "fsdp.yaml" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fsdp.yaml", "train.yaml"]
    assert (tmp_path / "train.yaml").read_text(encoding="utf-8") == "mine"
    write_plan(plan(), tmp_path, force=True)  # the advice of the message
    assert (tmp_path / "train.yaml").read_text(encoding="utf-8") != "mine"


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(PlanError, match="--write .*file/folder cannot be written: Not a directory"):
        write_plan(plan(), tmp_path / "file" / "folder")
    (tmp_path / "train.yaml").mkdir()
    with pytest.raises(PlanError, match="train.yaml is not a file"):
        write_plan(plan(), tmp_path, force=True)


def test_what_does_not_fit_or_is_only_compared_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no candidate #1 fits"):
        write_plan(plan(candidate(100.0)), tmp_path)
    with pytest.raises(PlanError, match="no candidate #2 fits") as caught:
        write_plan(plan(), tmp_path, rank=2)
    assert caught.value.problems[0].fix == "a rank from 1 to 1"
    item = candidate(60.0)
    ddp = dataclasses.replace(item, job=dataclasses.replace(item.job, strategy="ddp"))
    with pytest.raises(PlanError, match="is DDP, for comparison only") as caught:
        write_plan(plan(ddp, item), tmp_path)
    assert caught.value.problems[0].fix == "write candidate #2"
    assert list(tmp_path.iterdir()) == []


def test_a_name_from_outside_stays_in_its_line(tmp_path: Path) -> None:
    name = "evil\nload_in_8bit: true\n#\x1b[2J: no"
    spec = dataclasses.replace(LLAMA, name=name)
    write_plan(plan(candidate(60.0, model=spec), command=f"hf-fsdp plan {name}"), tmp_path)
    values, _ = load_yaml(tmp_path / "train.yaml")
    assert values["model_name_or_path"] == name and "load_in_8bit" not in values
    launch, _ = load_yaml(tmp_path / "accelerate.yaml")
    assert "load_in_8bit" not in launch and launch["num_processes"] == 8


@pytest.mark.parametrize("name", ["no", "1e5", "null", "a: b", "# x", "007", "C:\\models"])
def test_a_name_that_yaml_would_read_as_something_else_stays_a_name(name: str, tmp_path: Path) -> None:
    texts = plan_files(plan(candidate(60.0, model=dataclasses.replace(LLAMA, name=name))), tmp_path)
    assert yaml.safe_load(texts["train.yaml"])["model_name_or_path"] == name


def test_the_model_is_named_as_the_hub_or_the_disk_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert loadable_name("llama-2-7b") == "meta-llama/Llama-2-7b-hf"
    assert loadable_name("meta-llama/Llama-2-7b-chat-hf") == "meta-llama/Llama-2-7b-chat-hf"
    assert loadable_name(str(tmp_path / "config.json")) == str(tmp_path)
    assert loadable_name(str(tmp_path)) == str(tmp_path)
    assert loadable_name("somebody/else") == "somebody/else"
