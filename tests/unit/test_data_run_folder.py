"""The folder of a run is checked before data and model load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hf_fsdp.checkpoint.manifest import Manifest
from hf_fsdp.data import check_output_dir, find_resume_checkpoint
from hf_fsdp.errors import ConfigError
from hf_fsdp.storage.files import write_json


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Steps 9 and 10 were committed, 11 was killed, 12 lost a file, 13 never got its name; 8 is another program's."""
    run = tmp_path / "run"
    for step in (9, 10, 12):
        folder = run / f"checkpoint-{step}"
        record = write_json(folder / "trainer_state.json", {"global_step": step})
        created = f"2026-01-01T00:00:{step:02d}+00:00"
        files = {"trainer_state.json": record}
        Manifest(step=step, world_size=1, model_class="Llama", created=created, files=files).write(folder)
    (run / "checkpoint-12" / "trainer_state.json").unlink()
    (run / "checkpoint-11" / "model").mkdir(parents=True)
    (run / ".hf-fsdp-saving-13").mkdir()
    write_json(run / "checkpoint-8" / "trainer_state.json", {})
    os.utime(run / "checkpoint-8" / "trainer_state.json", (0, 0))
    return run


def test_a_new_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    check_output_dir(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_and_the_advice_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("file", "file/run"):
        with pytest.raises(
            ConfigError, match=f"output_dir='.*{name}' cannot be written: (File exists|Not a dir)"
        ) as caught:
            check_output_dir(f"{tmp_path}/{name}")
    monkeypatch.chdir(tmp_path)
    check_output_dir(caught.value.problems[0].fix.removeprefix("output_dir: ").partition(" ")[0])


def test_a_read_only_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")  # file modes do not stop root

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
        check_output_dir(tmp_path)


@pytest.mark.parametrize("asked", [None, False, "", "false", "no", "none"])
def test_no_checkpoint_asked_for_is_a_fresh_start(asked: str | bool | None, run_folder: Path) -> None:
    assert find_resume_checkpoint(asked, run_folder) is None


@pytest.mark.parametrize("asked", [True, "true", "last"])
def test_the_newest_one_is_left_for_all_processes_to_choose(asked: str | bool, run_folder: Path) -> None:
    assert find_resume_checkpoint(asked, run_folder) is True


@pytest.mark.parametrize("step", [8, 9, 10])
def test_a_checkpoint_is_taken_by_its_path(step: int, run_folder: Path) -> None:
    folder = str(run_folder / f"checkpoint-{step}")
    assert find_resume_checkpoint(folder, "elsewhere") == folder


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("checkpoint-1", "the folder does not exist"),
        ("checkpoint-11", "incomplete: it has no manifest.json"),
        ("checkpoint-12", "damaged: trainer_state.json is missing"),
        ("checkpoint-10/manifest.json", "it is a file, not the folder of a checkpoint"),
        ("", "the folder has no manifest.json"),
    ],
)
def test_a_wrong_checkpoint_names_one_that_works(name: str, rule: str, run_folder: Path) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        find_resume_checkpoint(f"{run_folder}/{name}", run_folder)
    advice = caught.value.problems[0].fix.removeprefix("resume_from_checkpoint: ")
    assert find_resume_checkpoint(advice, run_folder) == advice


def test_nothing_to_go_on_from_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume_from_checkpoint=last: there is no checkpoint in"):
        find_resume_checkpoint("last", tmp_path)
    with pytest.raises(ConfigError, match="the folder does not exist") as caught:
        find_resume_checkpoint(str(tmp_path / "gone"), tmp_path)
    assert caught.value.problems[0].near is None


def test_a_run_of_which_nothing_was_committed_says_why(run_folder: Path) -> None:
    for step in (8, 9, 10):
        shutil.rmtree(run_folder / f"checkpoint-{step}")
    with pytest.raises(ConfigError, match="there is no checkpoint in") as caught:
        find_resume_checkpoint(True, run_folder)
    for line in (
        "checkpoint-11 is incomplete",
        "checkpoint-12 is damaged",
        ".hf-fsdp-saving-13 is a save that did not end",
    ):
        assert line in str(caught.value)
