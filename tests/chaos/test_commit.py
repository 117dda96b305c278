"""Commit and rotation in one process: crashes between two renames, a clock that goes back, what is never deleted."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp.checkpoint import commit as commit_module
from hf_fsdp.checkpoint import find
from hf_fsdp.checkpoint.commit import Rotation, commit, rotate
from hf_fsdp.checkpoint.find import creation_time, find_checkpoints, staging_folder
from hf_fsdp.checkpoint.manifest import Manifest
from hf_fsdp.storage.files import write_bytes


def stage(output_dir: Path, step: int, text: str = "") -> Manifest:
    """Leave a staging folder as all ranks have written it, and return the manifest that is still to come."""
    folder = staging_folder(output_dir, step)
    (folder / "model").mkdir(parents=True)
    record = write_bytes(folder / "model/weights", (text or f"step {step}").encode())
    return Manifest(
        step=step, world_size=1, model_class="X", files={"model/weights": record}, created=creation_time(output_dir)
    )


def save(output_dir: Path, step: int, text: str = "", keep: Rotation | None = None) -> list[str]:
    path = commit(output_dir, stage(output_dir, step, text))
    return rotate(output_dir, path, keep or Rotation())


def usable(output_dir: Path) -> list[tuple[str, str]]:
    """Return name and content of what could be resumed from, the newest last."""
    return [
        (item.path.name, (item.path / "model/weights").read_text())
        for item in find_checkpoints(output_dir)
        if item.problem is None
    ]


class Crash(BaseException):
    """The process ends here: nothing handles it."""


def crash_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Crash instead of the `number`-th rename that `commit` does."""
    rename, count = os.rename, 0

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise Crash
        rename(*args)

    monkeypatch.setattr(commit_module.os, "rename", counted)


@pytest.mark.parametrize(("number", "name"), [(1, "checkpoint-5"), (2, ".hf-fsdp-replaced-5")])
def test_a_crash_while_a_step_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    save(tmp_path, 5, "first")
    with monkeypatch.context() as patched:
        crash_at(patched, number)
        with pytest.raises(Crash):
            save(tmp_path, 5, "second")
    assert usable(tmp_path) == [(name, "first")]
    save(tmp_path, 6)  # puts right what the crash left
    assert usable(tmp_path) == [("checkpoint-5", "first"), ("checkpoint-6", "step 6")]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-5", "checkpoint-6"]


def test_the_same_step_is_saved_again_after_such_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 5, "first")
    for _ in range(2):
        with monkeypatch.context() as patched:
            crash_at(patched, 2 if (tmp_path / "checkpoint-5").exists() else 1)
            with pytest.raises(Crash):
                save(tmp_path, 5, "second")
        assert usable(tmp_path) == [(".hf-fsdp-replaced-5", "first")]
        commit_module.shutil.rmtree(staging_folder(tmp_path, 5))
    save(tmp_path, 5, "third")
    assert usable(tmp_path) == [("checkpoint-5", "third")]
    assert os.listdir(tmp_path) == ["checkpoint-5"]


def test_what_lies_beside_a_damaged_one_is_kept_until_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 5, "first")
    os.rename(tmp_path / "checkpoint-5", tmp_path / ".hf-fsdp-replaced-5")
    (tmp_path / "checkpoint-5/model").mkdir(parents=True)  # by whatever program: no manifest
    with monkeypatch.context() as patched:
        crash_at(patched, 2)
        with pytest.raises(Crash):
            save(tmp_path, 5, "second")
    assert usable(tmp_path) == [(".hf-fsdp-replaced-5", "first")]
    commit_module.shutil.rmtree(staging_folder(tmp_path, 5))
    save(tmp_path, 5, "third")
    assert usable(tmp_path) == [("checkpoint-5", "third")]


def test_a_crash_after_both_renames_leaves_garbage_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 5, "first")
    with monkeypatch.context() as patched:
        patched.setattr(commit_module.shutil, "rmtree", lambda *args, **kwargs: (_ for _ in ()).throw(Crash))
        with pytest.raises(Crash):
            save(tmp_path, 5, "second")
    assert usable(tmp_path) == [("checkpoint-5", "second")]
    assert (tmp_path / ".hf-fsdp-replaced-5").exists()
    save(tmp_path, 6)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-5", "checkpoint-6"]


def test_an_error_of_the_second_rename_gives_the_name_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 5, "first")
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source == staging_folder(tmp_path, 5):
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(commit_module.os, "rename", refuse)
    with pytest.raises(OSError, match="no"):
        commit(tmp_path, stage(tmp_path, 5, "second"))
    assert usable(tmp_path) == [("checkpoint-5", "first")]


def test_a_clock_that_goes_back_does_not_make_the_newest_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine goes on with the run, and its clock is an hour late."""
    save(tmp_path, 10)
    save(tmp_path, 20)

    class Late(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) - timedelta(hours=1)

    monkeypatch.setattr(find, "datetime", Late)
    for step in (30, 40, 50):
        save(tmp_path, step, keep=Rotation(limit=2))
    assert [name for name, _ in usable(tmp_path)] == ["checkpoint-40", "checkpoint-50"]


def test_an_earlier_step_may_be_the_newest(tmp_path: Path) -> None:
    """A run that was started again from step 10: what it saves then is worth more than the later steps of before."""
    for step in (10, 20, 30):
        save(tmp_path, step)
    save(tmp_path, 15, keep=Rotation(limit=2))
    assert [name for name, _ in usable(tmp_path)] == ["checkpoint-30", "checkpoint-15"]


def test_rotation_keeps_the_best_and_what_is_not_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "checkpoint-2/model/weights").write_text("damaged")
    (tmp_path / "checkpoint-mine").mkdir()
    staging_folder(tmp_path, 9).mkdir()
    lines = save(tmp_path, 4, keep=Rotation(limit=1, best=tmp_path / "checkpoint-1"))
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "checkpoint-2", "checkpoint-4", "checkpoint-mine"]
    assert lines == ["removed .hf-fsdp-saving-9, the leftover of a save that did not end"]
    save(tmp_path, 5, keep=Rotation(limit=1, best=tmp_path / "checkpoint-77"))  # a best one that was never saved
    assert [name for name, _ in usable(tmp_path)] == ["checkpoint-5"]
