"""A run config: the file first, the command line over it, the `fsdp` section kept apart."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_fsdp import FSDPConfig
from hf_fsdp.data import override, read_run_config, resolve_accumulation_steps, write_run_config
from hf_fsdp.errors import ConfigError
from hf_fsdp.monitor.metrics import MetricsFile

KNOWN = {"learning_rate", "max_steps", "eval_strategy", "use_peft", "output_dir"}


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(
        "learning_rate: 2e-5\neval_strategy: no\n"
        "fsdp:\n  precision: bf16-mixed\n  activation_checkpointing: {every: 2}\n"
    )
    return str(path)


@pytest.mark.parametrize("how", [["FILE"], ["--config", "FILE"], ["--config=FILE"]])
def test_the_file_is_given_by_flag_or_first(run_file: str, how: list[str]) -> None:
    words = [word.replace("FILE", run_file) for word in how]
    run = read_run_config([*words, "--max-steps", "3", "--use_peft"], KNOWN)
    assert run.values == {"learning_rate": "2e-5", "eval_strategy": "no"}
    assert run.flags == ["--max_steps", "3", "--use_peft"]
    assert run.typed >= {"learning_rate", "max_steps", "use_peft"}
    assert run.fsdp.precision.preset == "bf16-mixed"


def test_fsdp_flags_change_the_section_and_nothing_else(run_file: str) -> None:
    run = read_run_config(
        [run_file, "--fsdp.precision", "fp32", "--fsdp.sharding.reshard-after-forward=false", "--max_steps", "1"], KNOWN
    )
    assert run.fsdp.precision.preset == "fp32"
    assert run.fsdp.sharding.reshard_after_forward is False
    assert run.fsdp.activation_checkpointing.every == 2
    assert run.flags == ["--max_steps", "1"]


def test_a_whole_section_replaces_its_keys_and_a_dotted_key_only_itself(run_file: str) -> None:
    whole = read_run_config([run_file, "--fsdp.activation_checkpointing", "none"], KNOWN).fsdp
    assert (whole.activation_checkpointing.mode, whole.activation_checkpointing.every) == ("none", 1)
    dotted = read_run_config([run_file, "--fsdp.precision.save_dtype", "bfloat16"], KNOWN).fsdp
    assert (dotted.precision.preset, dotted.precision.save_dtype) == ("bf16-mixed", "bfloat16")


def test_without_a_file_the_command_line_is_enough() -> None:
    run = read_run_config(["--learning_rate", "1", "--fsdp.wrap", "[LlamaDecoderLayer]"], KNOWN)
    assert run.path is None and run.values == {}
    assert run.fsdp.wrap.layer_classes == ("LlamaDecoderLayer",)


def test_unknown_keys_are_told_at_once_with_line_and_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("max_steps: 1\nlearning_rte: 1e-5\nuse_pfet: true\n")
    with pytest.raises(ConfigError, match="2 problems") as caught:
        read_run_config([str(path)], KNOWN)
    assert f"{path}:2" in str(caught.value) and f"{path}:3" in str(caught.value)
    fixes = [problem.fix for problem in caught.value.problems]
    assert fixes == ["learning_rate: 1e-5", "use_peft: True"]
    path.write_text("max_steps: 1\n" + "\n".join(fixes))
    assert read_run_config([str(path)], KNOWN).values["use_peft"] is True


def test_an_unknown_fsdp_flag_is_refused_by_its_name(run_file: str) -> None:
    with pytest.raises(ConfigError, match="fsdp.precison|precison") as caught:
        read_run_config([run_file, "--fsdp.precison", "fp32"], KNOWN)
    assert "precision" in str(caught.value)


def test_a_flag_without_value_is_refused(run_file: str) -> None:
    with pytest.raises(ConfigError, match="--fsdp.precision has no value"):
        read_run_config([run_file, "--fsdp.precision"], KNOWN)


def test_a_misspelt_file_names_the_nearest(run_file: str) -> None:
    with pytest.raises(ConfigError, match="there is no run config") as caught:
        read_run_config([run_file.replace("run.yaml", "rnu.yaml")], KNOWN)
    assert read_run_config([caught.value.problems[0].fix.removeprefix("give ")], KNOWN).path == run_file


def test_accelerates_file_is_recognised_and_the_right_command_printed(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(FSDPConfig().to_accelerate(num_processes=2))
    with pytest.raises(ConfigError, match="is a launch file of Accelerate, not a run config") as caught:
        read_run_config([str(path)], {*KNOWN, "use_cpu", "debug", "fsdp_config"})
    assert caught.value.problems[0].fix == f"accelerate launch --config_file {path} recipes/text/train.py RUN_CONFIG"


def test_trainers_own_section_in_a_run_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("max_steps: 1\nfsdp_config: {version: 2}\n")
    with pytest.raises(ConfigError, match="fsdp_config is Trainer's own section") as caught:
        read_run_config([str(path)], {*KNOWN, "fsdp_config"})
    path.write_text("max_steps: 1\n" + caught.value.problems[0].fix.partition("write\n")[2])
    assert read_run_config([str(path)], KNOWN).fsdp.precision.preset == "bf16-mixed"


def test_keys_flags_and_the_fsdp_section_are_checked_together(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("max_stps: 1\nprecision: fp32\nfsdp: {warp: transformer_layers}\n")
    with pytest.raises(ConfigError, match="^5 problems") as caught:
        read_run_config([str(path), "--lerning-rate", "1e-4", "--fsdp.precison", "fp32"], KNOWN)
    fixes = [problem.fix for problem in caught.value.problems]
    assert fixes == [
        "max_steps: 1",
        "fsdp: {precision: fp32}",
        "--learning_rate 1e-4",
        "wrap: transformer_layers",
        "precision: fp32",
    ]


@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        (["--lerning-rate=1e-4"], "--learning_rate 1e-4"),
        (["--use_pfet"], "--use_peft"),
        (["--precision", "fp32"], "--fsdp.precision fp32"),
    ],
)
def test_an_unknown_flag_names_the_nearest_and_the_advice_works(flag: list[str], fix: str) -> None:
    with pytest.raises(ConfigError, match="is not a flag of this recipe") as caught:
        read_run_config(flag, KNOWN)
    assert caught.value.problems[0].fix == fix
    read_run_config(shlex.split(fix), KNOWN)


def test_a_flag_that_resembles_nothing_and_one_switched_off() -> None:
    with pytest.raises(ConfigError, match="--zzzz is not a flag of this recipe") as caught:
        read_run_config(["--zzzz"], KNOWN)
    assert caught.value.problems[0].fix == "remove --zzzz"
    assert read_run_config(["--no_use_peft"], KNOWN).typed >= {"use_peft"}
    assert read_run_config(["-h"], KNOWN).flags == ["--help"]


def test_two_run_configs_are_refused(run_file: str) -> None:
    for words in ([run_file, "b.yaml"], ["--config", run_file, "b.yaml"], ["b.yaml", "--config", run_file]):
        with pytest.raises(ConfigError, match="there is more than one run config: ") as caught:
            read_run_config(words, KNOWN)
        assert run_file in caught.value.problems[0].fix and "b.yaml" in caught.value.problems[0].fix
    with pytest.raises(ConfigError, match="the path of the run config is empty"):
        read_run_config([""], KNOWN)


@pytest.mark.parametrize(
    "value", ["{precision: fp32, wrap: [LlamaDecoderLayer]}", "shard_grad_op auto_wrap", "something"]
)
def test_the_whole_section_as_a_flag_is_refused_and_the_advice_works(value: str, run_file: str) -> None:
    with pytest.raises(ConfigError, match="the fsdp section is changed a key at a time") as caught:
        read_run_config([run_file, "--fsdp", value], KNOWN)
    fsdp = read_run_config(
        shlex.split(caught.value.problems[0].fix.partition("e.g. ")[2] or caught.value.problems[0].fix), KNOWN
    ).fsdp
    if "shard_grad_op" in value:
        assert fsdp.sharding.reshard_after_forward is False
    else:
        assert fsdp.precision.preset == "fp32"
    assert fsdp.wrap.layer_classes == (("LlamaDecoderLayer",) if "Llama" in value else ())


@pytest.mark.parametrize("flag", ["--fsdp", "--fsdp_config"])
def test_the_words_of_fsdp1_are_not_needed(flag: str, run_file: str) -> None:
    with pytest.raises(ConfigError, match="the fsdp section is changed a key at a time") as caught:
        read_run_config([run_file, flag, "full_shard"], KNOWN)
    assert caught.value.problems[0].fix.startswith(f"remove {flag}: every run")


def test_a_flag_that_is_no_yaml_is_refused_and_the_advice_works(run_file: str) -> None:
    with pytest.raises(ConfigError, match=r"--fsdp.wrap '\[A' is not valid YAML") as caught:
        read_run_config([run_file, "--fsdp.wrap", "[A"], KNOWN)
    assert read_run_config(shlex.split(caught.value.problems[0].fix), KNOWN).fsdp.wrap.layer_classes == ("A",)


def test_overriding_with_nothing_changes_nothing() -> None:
    config = FSDPConfig(precision="fp32")
    assert override(config, {}) is config


def test_a_written_run_config_reads_back_the_same(tmp_path: Path) -> None:
    @dataclass
    class Group:
        learning_rate: float = 1e-5
        output_dir: str = "runs/x"
        hub_token: str | None = "secret"
        fsdp_config: str | None = "{}"
        eval_strategy: str = "no"
        eos_token: str = "</s>"

        def to_dict(self) -> dict[str, Any]:  # as TrainingArguments does
            return {key: f"<{key.upper()}>" if key.endswith("_token") else v for key, v in vars(self).items()}

    config = FSDPConfig(precision="fp32", wrap=["LlamaDecoderLayer"])
    write_run_config(tmp_path / "new" / "run.yaml", config, [Group()])
    text = (tmp_path / "new" / "run.yaml").read_text()
    assert "secret" not in text and "fsdp_config" not in yaml.safe_load(text)
    run = read_run_config([str(tmp_path / "new" / "run.yaml")], {*KNOWN, "eos_token"})
    assert run.fsdp == config
    assert run.values == {"learning_rate": 1e-5, "output_dir": "runs/x", "eval_strategy": "no", "eos_token": "</s>"}


@pytest.mark.parametrize(("size", "per_device", "world", "steps"), [(64, 1, 8, 8), (64, 4, 16, 1), (6, 3, 1, 2)])
def test_accumulation_keeps_the_global_batch(size: int, per_device: int, world: int, steps: int) -> None:
    assert resolve_accumulation_steps(size, per_device, world) == steps


@pytest.mark.parametrize(("size", "per_device", "world"), [(64, 3, 8), (64, 1, 6), (4, 1, 8), (10, 4, 2)])
def test_a_batch_that_does_not_divide_is_refused_and_each_advice_works(size: int, per_device: int, world: int) -> None:
    with pytest.raises(ConfigError, match=f"global_batch_size={size} is not a multiple of") as caught:
        resolve_accumulation_steps(size, per_device, world)
    for advice in caught.value.problems[0].fix.split("   or   "):
        key, _, values = advice.partition(": ")
        for value in values.split(" or "):
            if key == "global_batch_size":
                assert resolve_accumulation_steps(int(value), per_device, world) >= 1
            else:
                assert resolve_accumulation_steps(size, int(value), world) >= 1


def test_a_batch_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="per_device_train_batch_size=0 must be at least 1"):
        resolve_accumulation_steps(4, 0, 1)


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_are_json_lines_whatever_the_values(tmp_path: Path) -> None:
    import torch

    file = MetricsFile(tmp_path / "deep" / "metrics.jsonl")
    file.write({"step": 1, "loss": torch.tensor(2.0), "grad_norm": math.nan, "note": ["a"], "lr": 1e-5, "ok": True})
    file.write({"step": 2, "loss": math.inf})
    assert _lines(file.path) == [
        {"step": 1, "loss": 2.0, "grad_norm": "nan", "note": "['a']", "lr": 1e-5, "ok": True},
        {"step": 2, "loss": "inf"},
    ]


def test_a_new_run_begins_a_new_file_and_a_resumed_one_repeats_no_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in (1, 2, 3):
        first.write({"step": step})
    path.write_text(path.read_text() + '{"step": 4, "lo')  # killed while it wrote
    resumed = MetricsFile(path)
    resumed.start(resume_step=2)
    resumed.write({"step": 3, "again": True})
    assert _lines(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    MetricsFile(path).write({"step": 1, "fresh": True})
    assert _lines(path) == [{"step": 1, "fresh": True}]
