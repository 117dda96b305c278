"""Every YAML in configs/ is what its folder says it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hf_fsdp import FSDPConfig
from hf_fsdp.cli import app
from hf_fsdp.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LAUNCH_FILES = sorted(CONFIGS.glob("*.y*ml"))
PLAN_LINE = r"^# Plan: (?P<gib>[\d.]+) GiB a GPU on (?P<gpus>\d+) GPUs, simulated"
RUN_FILES = sorted((CONFIGS / "train").glob("*.y*ml"))


def test_there_are_launch_files() -> None:
    assert {"fsdp_llama7b.yaml", "fsdp_llava7b.yaml"} <= {path.name for path in LAUNCH_FILES}


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.name)
def test_a_launch_file_is_accepted_by_accelerates_own_loader(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    with pytest.raises(ConfigError, match="is a launch file of Accelerate"):
        FSDPConfig.from_yaml(path)


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.name)
def test_a_run_file_has_an_fsdp_section_that_is_accepted(path: Path) -> None:
    config = FSDPConfig.from_yaml(path)
    assert config.said
    assert "distributed_type" not in yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.name)
def test_a_committed_launch_file_is_what_its_command_writes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    (command,) = (line for line in text.splitlines() if line.startswith("# Written by: hf-fsdp "))
    words = command.removeprefix("# Written by: hf-fsdp ").split()
    assert words[-2:] == ["-o", f"configs/{path.name}"]
    written = CliRunner().invoke(app, words[:-2], catch_exceptions=False).stdout
    assert written == text.replace(f" -o configs/{path.name}", "")


def test_every_run_file_says_what_it_needs_and_the_planner_agrees() -> None:
    from hf_fsdp.plan.search.recipe_run import read_recipe_run
    from hf_fsdp.plan.service import Service

    lines = {path: re.search(PLAN_LINE, path.read_text(encoding="utf-8"), re.MULTILINE) for path in RUN_FILES}
    assert all(lines.values()), f"without a plan line: {[path.name for path, line in lines.items() if not line]}"
    jobs = [read_recipe_run(path, int(line["gpus"])) for path, line in lines.items() if line]
    with Service() as service:
        simulations = service.simulate(jobs)
    for (path, line), simulation in zip(lines.items(), simulations, strict=True):
        assert line
        assert float(line["gib"]) == pytest.approx(simulation.peak.num_bytes / 2**30, abs=0.06, rel=0.01), path.name
