"""`hf-fsdp migrate` on the command line: what it writes, what it prints, what it refuses."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hf_fsdp import FSDPConfig
from hf_fsdp.cli import app
from tests.golden.migrate.make import HERE
from tests.unit.test_cli import HEAVY, load_with_accelerate, modules_after

HYBRID = str(HERE / "accelerate_fsdp1_hybrid.yaml")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["migrate", *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("migrate", "--help"),
        ("migrate", HYBRID),
        ("migrate", str(HERE / "fsdp1_script.py")),
        ("recipes", "--help"),
        ("recipes", "list"),
    ],
    ids=lambda arguments: " ".join(Path(word).name for word in arguments),
)
def test_the_commands_import_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert modules_after(*arguments).isdisjoint(HEAVY)


def test_the_new_file_is_written_and_what_is_left_is_printed(tmp_path: Path) -> None:
    new = tmp_path / "new" / "fsdp.yaml"
    result = run(HYBRID, "-o", str(new))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"wrote {new}, from a launch file of Accelerate"
    assert "Works differently now:" in lines and "Not needed any more:" in lines
    assert FSDPConfig.from_yaml(new).sharding.dp_replicate_size == 2
    assert f"# Written by: {shlex.join(['hf-fsdp', 'migrate', HYBRID, '-o', str(new)])}" in new.read_text()


def test_the_next_lines_are_code_that_works(tmp_path: Path) -> None:
    new = tmp_path / "fsdp.yaml"
    printed = run(HYBRID, "-o", str(new)).stdout.partition("next  in your script:\n")[2].splitlines()
    names: dict[str, Any] = {}
    exec("\n".join(line.strip() for line in printed[:2]), names)
    assert names["config"] == FSDPConfig.from_yaml(new)
    assert [line.strip() for line in printed[2:4]] == [
        "args = TrainingArguments(..., **config.trainer_kwargs())",
        "trainer = Trainer(..., args=args, callbacks=[FSDPCallback(config)])",
    ]
    assert not any("recipes copy" in line for line in printed)
    command = shlex.split(printed[4].partition(": ")[2])
    assert command[:2] == ["hf-fsdp", "migrate"]
    assert run(*command[2:-1], str(tmp_path / "launch.yaml")).exit_code == 0


@pytest.mark.parametrize("new", ["fsdp2.yaml", "launch.yaml"])
def test_the_printed_launch_command_works_as_it_is(new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("acc1.yaml").write_text(Path(HYBRID).read_text())
    printed = run("acc1.yaml", "-o", new).stdout
    (line,) = [line for line in printed.splitlines() if "a launch file for FSDP2" in line]
    command = shlex.split(line.partition(": ")[2])
    before = Path(new).read_text()
    assert (command[-1] == "launch.yaml") == (new != "launch.yaml")
    assert run(*command[2:]).exit_code == 0
    assert load_with_accelerate(Path(command[-1])).num_processes == 16
    assert Path(new).read_text() == before  # a person may have edited it


def test_the_title_of_the_launch_file_names_the_new_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for options, name in (([], "NEW"), (["-o", "fsdp2.yaml"], "fsdp2.yaml")):
        assert run(HYBRID, *options, "--launch", "launch.yaml", "--force").exit_code == 0
        title = Path("launch.yaml").read_text().splitlines()[1]
        assert f"callbacks=[FSDPCallback(FSDPConfig.from_yaml({name!r}))]" in title


def test_without_the_number_of_processes_no_launch_command_is_printed(tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    old.write_text(Path(HYBRID).read_text().replace("num_processes: 16\n", ""))
    result = run(str(old), "-o", str(tmp_path / "new.yaml"))
    assert result.exit_code == 0 and "launch file for FSDP2" not in result.stdout


@pytest.mark.parametrize("word", ["true", "false"])
def test_how_weights_are_read_is_carried_over_to_the_launch_file(word: str, tmp_path: Path) -> None:
    old, launch = tmp_path / "old.yaml", tmp_path / "launch.yaml"
    key = "fsdp_cpu_ram_efficient_loading"
    old.write_text(Path(HYBRID).read_text().replace(f"{key}: true", f"{key}: {word}"))
    assert run(str(old), "--launch", str(launch)).exit_code == 0
    assert load_with_accelerate(launch).fsdp_config[key] is (word == "true")


@pytest.mark.parametrize("name", ["axolotl_fsdp1.yaml", "llama_factory_full.yaml", "llama_factory_v1.yaml"])
def test_the_recipe_is_named_to_users_of_other_trainers(name: str, tmp_path: Path) -> None:
    (line,) = [line for line in run(str(HERE / name)).stderr.splitlines() if "recipes copy" in line]
    command = shlex.split(line.partition(": ")[2])
    result = CliRunner().invoke(app, [*command[1:], "-o", str(tmp_path / "copy")], catch_exceptions=False)
    assert result.exit_code == 0


def test_without_a_file_the_yaml_alone_goes_to_the_terminal(tmp_path: Path) -> None:
    result = run(HYBRID)
    assert yaml.safe_load(result.stdout)["fsdp"]["sharding"]["dp_replicate_size"] == 2
    assert "next  in your script" in result.stderr and "Works differently" not in result.stderr


def test_the_new_launch_file_has_the_old_machines_and_is_accepted_by_accelerate(tmp_path: Path) -> None:
    launch = tmp_path / "launch.yaml"
    result = run(HYBRID, "-o", str(tmp_path / "fsdp.yaml"), "--launch", str(launch))
    assert result.exit_code == 0 and f"accelerate launch --config_file {launch} train.py" in result.stdout
    loaded = load_with_accelerate(launch)
    assert (loaded.num_processes, loaded.num_machines, loaded.machine_rank) == (16, 2, 1)
    assert (loaded.main_process_ip, loaded.main_process_port) == ("10.0.0.1", 29511)
    assert loaded.fsdp_config["fsdp_version"] == 2
    assert loaded.fsdp_config["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
    assert loaded.fsdp_config["fsdp_reshard_after_forward"] is True
    assert "sharding.dp_replicate_size: 2" in launch.read_text()


def test_a_launch_file_from_anything_but_accelerates_is_refused(tmp_path: Path) -> None:
    new, launch = tmp_path / "new.yaml", tmp_path / "launch.yaml"
    result = run(str(HERE / "axolotl_fsdp1.yaml"), "-o", str(new), "--launch", str(launch))
    assert result.exit_code == 2
    assert "so the machines are not known" in result.stderr and "hf-fsdp config MODEL --gpus 8" in result.stderr
    assert not new.exists() and not launch.exists()


def test_existing_files_are_not_overwritten_without_force(tmp_path: Path) -> None:
    new, launch = tmp_path / "new.yaml", tmp_path / "launch.yaml"
    new.write_text("mine")
    launch.write_text("mine")
    result = run(HYBRID, "-o", str(new), "--launch", str(launch))
    assert result.exit_code == 2 and result.stderr.startswith("ConfigError: 2 problems")
    assert new.read_text() == launch.read_text() == "mine"
    assert run(HYBRID, "-o", str(new), "--launch", str(launch), "--force").exit_code == 0
    assert FSDPConfig.from_yaml(new).said


def test_one_name_for_both_files_is_refused_and_the_fix_works(tmp_path: Path) -> None:
    new = str(tmp_path / "new.yaml")
    result = run(HYBRID, "-o", new, "--launch", new)
    assert result.exit_code == 2 and "are two files" in result.stderr
    (fix,) = [line.split()[1:] for line in result.stderr.splitlines() if line.strip().startswith("fix")]
    assert run(HYBRID, "-o", new, *fix).exit_code == 0


def test_hybrid_sharding_without_replicas_is_refused_and_the_printed_option_works(tmp_path: Path) -> None:
    old = str(HERE / "llama_factory_fsdp.yaml")
    result = run(old)
    assert result.exit_code == 2 and "does not say how many replicas" in result.stderr
    (fix,) = [line.split()[1:3] for line in result.stderr.splitlines() if line.strip().startswith("fix")]
    again = run(old, *fix)
    assert again.exit_code == 0 and "dp_replicate_size: 2" in again.stdout


def test_an_error_is_printed_without_a_traceback(tmp_path: Path) -> None:
    result = run(str(tmp_path / "missing.yaml"))
    assert result.exit_code == 2
    assert result.stderr.startswith("ConfigError: ") and "does not exist" in result.stderr
    assert "Traceback" not in result.stderr


def test_only_a_file_with_nearly_the_same_name_is_suggested(tmp_path: Path) -> None:
    for name in ("nothing.yaml", "train.py"):
        (tmp_path / name).write_text("")
    assert "fix   check the path" in run(str(tmp_path / "missing.yaml")).stderr
    (tmp_path / "accelerate1.yaml").write_text(Path(HYBRID).read_text())
    result = run(str(tmp_path / "accelerate.yaml"))
    (fix,) = [line.split()[2] for line in result.stderr.splitlines() if line.strip().startswith("fix")]
    assert fix == str(tmp_path / "accelerate1.yaml") and run(fix).exit_code == 0
