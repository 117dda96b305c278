"""The `hf-fsdp` command: what it writes, what it refuses, and how little it imports."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hf_fsdp import FSDPConfig, __version__
from hf_fsdp.cli import app

HEAVY = ("torch", "transformers", "accelerate", "peft", "trl", "datasets", "wandb", "numpy")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def load_with_accelerate(path: Path) -> Any:
    from accelerate.commands.config.config_args import load_config_from_file

    return load_config_from_file(str(path))


def modules_after(*arguments: str) -> set[str]:
    """Return the modules that a fresh process has imported when the command leaves."""
    code = (
        "import sys, json\n"
        "from hf_fsdp.cli import app\n"
        f"try: app({list(arguments)!r})\n"
        "except SystemExit as stop: code = stop.code\n"
        "print(json.dumps([code or 0, sorted(sys.modules)]), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    code_and_modules = json.loads(done.stderr.splitlines()[-1])
    assert code_and_modules[0] == 0, done.stderr
    return set(code_and_modules[1])


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), ("config", "--help"), ("config", "llama-2-7b", "--gpus", "8")],
    ids=" ".join,
)
def test_the_command_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    modules = modules_after(*arguments)
    assert "hf_fsdp.cli" in modules
    assert modules.isdisjoint(HEAVY)


def test_importing_the_package_is_light_and_its_names_are_found_on_use() -> None:
    code = (
        "import sys, hf_fsdp\n"
        "assert 'yaml' not in sys.modules\n"
        "assert hf_fsdp.FSDPConfig().precision.preset == 'auto'\n"
        "assert 'torch' not in sys.modules\n"
        "assert {'FSDPConfig', 'FSDPCallback', 'apply_fsdp', '__version__'} <= set(dir(hf_fsdp))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    import hf_fsdp

    with pytest.raises(AttributeError, match="module 'hf_fsdp' has no attribute 'FSDPConfg'"):
        hf_fsdp.FSDPConfg  # noqa: B018


def test_the_version_is_printed() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.strip() == f"hf-fsdp {__version__}"
    module = subprocess.run([sys.executable, "-m", "hf_fsdp", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == result.stdout


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpus", "8"),
        ("--gpus", "8xA100-80G", "--method", "lora", "--precision", "fp32"),
        ("--gpus", "4", "--machines", "2", "--activation-checkpointing", "{every: 2}"),
        ("--gpus", "2xT4", "--offload", "none"),
        ("--gpus", "2", "--precision", "bf16-true"),
    ],
    ids=" ".join,
)
def test_the_file_is_accepted_by_accelerates_own_loader_and_every_line_says_why(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "new" / "f.yaml"
    result = run("config", "llama-2-7b", *flags, "-o", str(path))
    assert result.exit_code == 0, result.stderr
    config = load_with_accelerate(path)
    assert str(config.distributed_type) == "DistributedType.FSDP"
    assert config.fsdp_config["fsdp_version"] == 2
    assert config.fsdp_config["fsdp_activation_checkpointing"] is False
    for line in path.read_text(encoding="utf-8").splitlines():
        why = line.partition("# ")[2]
        assert len(why) > 8, line
        assert len(line) <= 132 or line.startswith("# Written by: "), line


def test_one_process_is_not_launched_with_fsdp(tmp_path: Path) -> None:
    """Accelerate would start it under torchrun and shard it by itself; see `test_launch`."""
    path = tmp_path / "f.yaml"
    assert run("config", "llama-2-7b", "--gpus", "1", "-o", str(path)).exit_code == 0
    config = load_with_accelerate(path)
    assert str(config.distributed_type) == "DistributedType.NO"
    assert (config.num_processes, config.mixed_precision) == (1, "bf16") and not config.fsdp_config


def test_the_keys_of_fsdp_config_are_all_known_to_accelerates_launcher(tmp_path: Path) -> None:
    from accelerate.commands.launch import launch_command_parser

    path = tmp_path / "f.yaml"
    assert run("config", "llama-2-7b", "--gpus", "8", "-o", str(path)).exit_code == 0
    known = {action.dest for action in launch_command_parser()._actions}
    written = set(load_with_accelerate(path).fsdp_config)
    assert written <= known
    assert "fsdp_reshard_after_forward" in written


def test_the_file_says_what_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    run("config", "qwen3-8b", "--gpus", "4xH100", "--machines", "2", "-o", str(path))
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert written["num_processes"] == 8
    assert written["num_machines"] == 2
    assert written["mixed_precision"] == "bf16"
    assert written["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Qwen3DecoderLayer"
    assert "full fine-tuning of Qwen/Qwen3-8B" in path.read_text(encoding="utf-8")


def test_a_model_that_is_not_known_gets_no_class_and_a_note() -> None:
    result = run("config", "org/other", "--gpus", "2")
    assert result.exit_code == 0
    assert "fsdp_transformer_layer_cls_to_wrap" not in result.stdout
    assert "its wrap classes are found from the model at run time" in result.stderr


def test_without_a_file_the_yaml_alone_goes_to_stdout() -> None:
    result = run("config", "llama-2-7b", "--gpus", "8")
    assert yaml.safe_load(result.stdout)["num_processes"] == 8
    assert "accelerate launch --config_file FILE train.py" in result.stderr


def test_the_next_commands_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "with space.yaml"
    result = run("config", "llama-2-7b", "--gpus", "8", "-o", str(path))
    assert f"accelerate launch --config_file '{path}' train.py" in result.stdout
    assert "callbacks=[FSDPCallback()]" in result.stdout
    result = run("config", "llama-2-7b", "--gpus", "8", "--machines", "2", "-o", str(path), "--force")
    assert "--machine_rank RANK --main_process_ip ADDRESS_OF_MACHINE_0" in result.stdout


def test_what_the_file_cannot_hold_is_said_as_code_that_works(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    flags = ("--precision", "bf16-true", "--activation_checkpointing", "{every: 2}")
    result = run("config", "llama-2-7b", "--gpus", "8", *flags, "-o", str(path))
    (line,) = (line for line in result.stdout.splitlines() if "trainer = " in line)
    code = line.partition("FSDPCallback(")[2].removesuffix(")])")
    config = eval(code, {"FSDPConfig": FSDPConfig})
    assert config == FSDPConfig(precision="bf16-true", activation_checkpointing={"every": 2})
    assert "#   activation_checkpointing.every: 2" in path.read_text(encoding="utf-8")
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["mixed_precision"] == "no"


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("mine: true\n")
    result = run("config", "llama-2-7b", "--gpus", "8", "-o", str(path))
    assert result.exit_code == 2
    assert "exists and is not overwritten" in result.stderr
    assert "--force" in result.stderr
    assert path.read_text() == "mine: true\n"
    assert run("config", "llama-2-7b", "--gpus", "8", "-o", str(path), "--force").exit_code == 0
    assert "distributed_type" in path.read_text()


def test_a_folder_or_an_impossible_place_for_the_file_is_refused(tmp_path: Path) -> None:
    result = run("config", "llama-2-7b", "--gpus", "8", "-o", str(tmp_path))
    assert result.exit_code == 2
    assert f"fix   -o {tmp_path / 'fsdp.yaml'}" in result.stderr
    (tmp_path / "file").write_text("")
    result = run("config", "llama-2-7b", "--gpus", "8", "-o", str(tmp_path / "file" / "f.yaml"))
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("auto", "bfloat16"), ("bf16-true", "bfloat16"), ("fp32", "float32"), ("fp16-mixed", "float16")],
)
def test_qlora_gets_a_launch_file_and_the_loading_that_can_be_sharded(precision: str, dtype: str) -> None:
    result = run("config", "llama-2-7b", "--gpus", "8", "--method", "qlora", "--precision", precision)
    assert result.exit_code == 0, result.stderr
    assert "# Launch file of Accelerate for QLoRA fine-tuning of meta-llama/Llama-2-7b-hf." in result.stdout
    assert "GiB" not in result.stdout  # the size of 16-bit weights would be four times too large
    assert f"bnb_4bit_compute_dtype=torch.{dtype}, bnb_4bit_quant_storage=torch.{dtype}))" in result.stderr
    assert f"dtype=torch.{dtype}, quantization_config=BitsAndBytesConfig(" in result.stderr
    plain = run("config", "llama-2-7b", "--gpus", "8", "--method", "lora", "--precision", precision)
    assert "BitsAndBytesConfig" not in plain.stderr


def test_every_wrong_flag_is_reported_at_once_and_the_fixes_work(tmp_path: Path) -> None:
    wrong = {
        "--gpus": "8xA100",
        "--machines": "0",
        "--method": "qlorra",
        "--precision": "bf61",
        "--offload": "disk",
        "--activation-checkpointing": "{every: 0}",
    }
    result = run("config", "lama-2-7b", *(word for pair in wrong.items() for word in pair), "-o", str(tmp_path))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("ConfigError: 8 problems\n")
    assert "Traceback" not in result.stderr
    fixes = [line.partition("fix   ")[2] for line in result.stderr.splitlines() if line.startswith("  fix   ")]
    words = [word for fix in fixes[1:] for word in shlex.split(fix.partition(" or ")[0], comments=True)]
    repaired = run("config", fixes[0].removeprefix("use "), *words)
    assert repaired.exit_code == 0, repaired.stderr


@pytest.mark.parametrize(
    ("flags", "message", "fix"),
    [
        (("--method", "lorra"), "--method lorra is not a way to fine-tune", "--method lora"),
        (("--offload", "[optimizer]"), "state is where the parameters' shards are", "--offload parameters"),
        (("--precision", "fp8"), "'fp8' arrives in a later release", "--precision fp32"),
        (
            ("--activation-checkpointing", "{fraction: 2}"),
            "not a share",
            "--activation-checkpointing '{fraction: 0.5}'",
        ),
    ],
)
def test_a_flag_that_cannot_be_used_is_refused_and_its_fix_works(
    flags: tuple[str, str], message: str, fix: str
) -> None:
    result = run("config", "llama-2-7b", "--gpus", "8", *flags)
    assert result.exit_code == 2
    assert message in result.stderr
    assert f"fix   {fix}" in result.stderr
    assert run("config", "llama-2-7b", "--gpus", "8", *shlex.split(fix)).exit_code == 0


def test_bf16_is_refused_for_a_gpu_without_it_and_auto_settles_on_fp16() -> None:
    result = run("config", "llama-2-7b", "--gpus", "8xV100-32G", "--precision", "bf16-mixed")
    assert result.exit_code == 2
    assert "V100-32G does not compute in bf16" in result.stderr
    assert "fix   --precision fp16-mixed" in result.stderr
    result = run("config", "llama-2-7b", "--gpus", "8xV100-32G")
    assert yaml.safe_load(result.stdout)["mixed_precision"] == "fp16"
    assert "V100-32G does not compute in bf16" in result.stdout
    result = run("config", "llama-2-7b", "--gpus", "8xV100-32G", "--precision", "fp32")
    assert yaml.safe_load(result.stdout)["mixed_precision"] == "no"


def test_missing_gpus_are_asked_for() -> None:
    result = run("config", "llama-2-7b")
    assert result.exit_code == 2
    assert "--gpus is missing" in result.stderr


def test_from_python_the_numbers_of_a_launch_are_checked(tmp_path: Path) -> None:
    from hf_fsdp.errors import ConfigError

    config = FSDPConfig(sharding={"dp_replicate_size": 2})
    path = tmp_path / "f.yaml"
    path.write_text(config.to_accelerate(num_processes=8, num_machines=2, machine_rank=1, main_process_ip="10.0.0.1"))
    loaded = load_with_accelerate(path)
    assert (loaded.machine_rank, loaded.main_process_ip, loaded.main_process_port) == (1, "10.0.0.1", 29500)
    assert "#   sharding.dp_replicate_size: 2" in path.read_text()
    with pytest.raises(ConfigError, match="cannot be spread evenly over num_machines=3"):
        config.to_accelerate(num_processes=8, num_machines=3)
    with pytest.raises(ConfigError, match="num_processes=0 is below 1"):
        config.to_accelerate(num_processes=0)
    with pytest.raises(ConfigError, match="machine_rank=2 is not a machine of 2"):
        config.to_accelerate(num_processes=8, num_machines=2, machine_rank=2)
    with pytest.raises(ConfigError, match="dp_replicate_size=2 does not divide 7 processes"):
        config.to_accelerate(num_processes=7)


def test_the_help_lists_every_preset() -> None:
    from hf_fsdp.config.presets import MODEL_PRESETS

    words = set(run("config", "--help").stdout.replace(",", " ").replace(". ", " ").split())
    assert {preset.alias for preset in MODEL_PRESETS} <= words | {word.rstrip(".") for word in words}
