"""The folder of a run is checked before data and model load."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_fsdp.data import check_output_dir, find_resume_checkpoint
from hf_fsdp.errors import ConfigError


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    for step in (9, 10):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
        (tmp_path / "run" / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    (tmp_path / "run" / "checkpoint-11").mkdir()  # killed while it was written
    return tmp_path / "run"


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
def test_the_newest_finished_checkpoint_is_found(asked: str | bool, run_folder: Path) -> None:
    assert find_resume_checkpoint(asked, run_folder) == str(run_folder / "checkpoint-10")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("checkpoint-1", "the folder does not exist"),
        ("checkpoint-11", "the folder has no trainer_state.json"),
        ("", "the folder has no trainer_state.json"),
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
