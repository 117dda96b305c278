"""`hf-fsdp recipes`: the recipes reach people who installed the wheel, and a copy runs as printed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hf_fsdp.cli import app
from hf_fsdp.cli.recipe_files import find_recipes
from tests.recipes import tiny

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_CONFIGS = sorted(path.stem for path in (REPOSITORY / "configs" / "train").glob("*.yaml"))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["recipes", *arguments], catch_exceptions=False)


def call(*command: str, cwd: Path, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        command, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which a wheel was installed that was built from the source distribution, offline."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("hf_fsdp", "recipes", "configs"):  # a copy: building writes beside the files
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import os; os.mkdir('dist'); from setuptools import build_meta; build_meta.build_sdist('dist')"
    call(sys.executable, "-c", code, cwd=source)
    (archive,) = (source / "dist").glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    call(
        *pip, "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(work), str(archive), cwd=work
    )
    (wheel,) = work.glob("*.whl")
    call(*pip, "install", "-q", "--no-deps", "--no-index", "--target", str(work / "site"), str(wheel), cwd=work)
    return work


def from_wheel(installed: Path, *arguments: str, cwd: Path) -> str:
    return call(sys.executable, "-m", "hf_fsdp", "recipes", *arguments, cwd=cwd, PYTHONPATH=str(installed / "site"))


def test_every_run_config_is_a_recipe_that_says_how_it_is_started() -> None:
    recipes = find_recipes()
    assert [recipe.name for recipe in recipes] == RUN_CONFIGS and RUN_CONFIGS
    for recipe in recipes:
        run_config = yaml.safe_load((REPOSITORY / recipe.run_config).read_text(encoding="utf-8"))
        assert recipe.model == run_config["model_name_or_path"]
        assert recipe.method == recipe.name.rpartition("_")[2]  # its name says the method too
        assert recipe.num_gpus >= 1 and recipe.summary.endswith(".")


def test_the_extras_that_are_printed_exist() -> None:
    table = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    known = set(re.findall(r"^(\w+) = \[", table.partition("\n[")[0], re.MULTILINE))
    assert {name for recipe in find_recipes() for name in recipe.extras.split(",")} <= known


def test_the_list_shows_name_model_method_gpus_and_a_line() -> None:
    lines = run("list").stdout.splitlines()
    assert lines[0].split() == ["NAME", "MODEL", "METHOD", "GPUS"]
    (row,) = [line for line in lines if line.startswith("llama2_7b_lora")]
    assert row.split()[:4] == ["llama2_7b_lora", "meta-llama/Llama-2-7b-hf", "lora", "8"]
    assert "LoRA on all linear layers" in row


@pytest.mark.parametrize(
    ("name", "fix"),
    [("llama2_7b_lroa", "hf-fsdp recipes copy llama2_7b_lora"), ("zzzzz", "hf-fsdp recipes list")],
)
def test_an_unknown_name_gives_the_nearest(
    name: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("copy", name)
    assert result.exit_code == 2
    assert f"{name} is not a recipe" in result.stderr and fix in result.stderr
    assert run(*shlex.split(fix)[2:]).exit_code == 0


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run("copy", "llama2_7b_lora", "-o", str(folder)).exit_code == 0
    script = folder / "recipes" / "text" / "train.py"
    script.write_text("mine", encoding="utf-8")
    refused = run("copy", "llama2-7b-lora", "-o", str(folder))
    assert refused.exit_code == 2 and f"{script} exists and is not overwritten" in refused.stderr
    assert script.read_text(encoding="utf-8") == "mine"
    assert run("copy", "llama2_7b_lora", "-o", str(folder), "--force").exit_code == 0
    assert script.read_bytes() == (REPOSITORY / "recipes" / "text" / "train.py").read_bytes()


def test_two_recipes_share_a_folder(tmp_path: Path) -> None:
    for name in ("llama2_7b_lora", "llama2_7b_full"):
        result = run("copy", name, "-o", str(tmp_path))
        assert result.exit_code == 0
    assert f"kept  {tmp_path / 'recipes/text/train.py'}, which is the same" in result.stdout


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    result = run("copy", "llama2_7b_lora", "-o", str(tmp_path / "run"))
    assert result.exit_code == 2 and "is a file" in result.stderr


def test_the_wheel_holds_every_recipe_once_and_nothing_of_the_repository_beside(installed: Path) -> None:
    (wheel,) = installed.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {name.removeprefix("hf_fsdp/shipped/") for name in names if name.startswith("hf_fsdp/shipped/")}
    wanted = {file for recipe in find_recipes() for file in recipe.files}
    assert wanted <= shipped
    assert all((REPOSITORY / name).is_file() for name in shipped)
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"hf_fsdp"}


def test_the_wheel_holds_every_package_and_its_data(installed: Path) -> None:
    (wheel,) = installed.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    source = REPOSITORY / "hf_fsdp"
    files = [*source.rglob("*.py"), *source.rglob("*.jinja"), source / "py.typed"]
    assert {path.relative_to(REPOSITORY).as_posix() for path in files} <= names


def test_an_installed_package_lists_and_copies(installed: Path, tmp_path: Path) -> None:
    listed = from_wheel(installed, "list", cwd=tmp_path)
    assert [line.split()[0] for line in listed.splitlines()[1:-1]] == RUN_CONFIGS
    for name in RUN_CONFIGS:
        from_wheel(installed, "copy", name, "-o", "copies", cwd=tmp_path)
    copied = {
        path.relative_to(tmp_path / "copies").as_posix() for path in (tmp_path / "copies").rglob("*") if path.is_file()
    }
    assert copied == {file for recipe in find_recipes() for file in recipe.files}
    assert all((tmp_path / "copies" / name).read_bytes() == (REPOSITORY / name).read_bytes() for name in copied)


def test_a_copied_recipe_trains_sharded_by_the_printed_command(installed: Path, tmp_path: Path) -> None:
    printed = from_wheel(installed, "copy", "llama2_7b_lora", cwd=tmp_path)
    folder = tmp_path / "llama2_7b_lora"
    assert f"cd {folder.name}\n" in printed
    (command,) = re.findall(r"^\s+accelerate launch (--config_file configs/.*)$", printed, re.MULTILINE)
    data = tmp_path / "data"
    data.mkdir()
    tiny.save_tiny_llama(tmp_path / "model", tiny.llama2_tokenizer())
    for split in ("train", "test"):
        tiny.write_jsonl(data / f"{split}.jsonl", tiny.conversations(8))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    stdout = call(
        *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", port),
        *shlex.split(command),
        *("--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(data), "--max_steps", "2"),
        *("--max_length", "128", "--global_batch_size", "4", "--report_to", "none", "--output_dir", "out"),
        cwd=folder,
        PYTHONPATH=str(installed / "site"),
    )
    assert "FSDP audit" in stdout and "sharded      100.0%" in stdout
    assert (folder / "out" / "final" / "adapter_model.safetensors").is_file()
