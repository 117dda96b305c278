"""Model access is checked before anything loads, and each refusal says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors as hub

from hf_fsdp.data import check_model_access
from hf_fsdp.errors import ModelAccessError


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


def _answer(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def download(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)


def _http(error_class: type[Exception], status: int) -> Exception:
    response = httpx2.Response(status, request=httpx2.Request("GET", "https://huggingface.co"))
    return error_class("refused", response=response)  # type: ignore[call-arg]


def test_a_complete_local_folder_passes(model_folder: Path) -> None:
    check_model_access(str(model_folder))


def test_a_gated_model_names_the_licence_page_and_the_login(monkeypatch: pytest.MonkeyPatch) -> None:
    _answer(monkeypatch, _http(hub.GatedRepoError, 403))
    with pytest.raises(ModelAccessError, match="is gated") as caught:
        check_model_access("meta-llama/Llama-2-7b-hf")
    assert "https://huggingface.co/meta-llama/Llama-2-7b-hf" in str(caught.value)
    assert "hf auth login" in str(caught.value)


def test_an_unknown_model_is_not_called_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    _answer(monkeypatch, _http(hub.RepositoryNotFoundError, 404))
    with pytest.raises(ModelAccessError, match="the hub knows no such model, or it is private"):
        check_model_access("meta-llama/Llama-9")


def test_an_unknown_revision_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _answer(monkeypatch, _http(hub.RevisionNotFoundError, 404))
    with pytest.raises(ModelAccessError, match="model_revision='v9' does not exist in a/b"):
        check_model_access("a/b", revision="v9")


def test_a_repository_without_config_points_at_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    _answer(monkeypatch, _http(hub.RemoteEntryNotFoundError, 404))
    with pytest.raises(ModelAccessError, match="has no config.json"):
        check_model_access("a/b-gguf")


def test_offline_and_not_cached_says_how_to_get_it() -> None:
    with pytest.raises(ModelAccessError, match="is not in the local cache") as caught:
        check_model_access("nobody/no-such-model-here")
    assert "hf download nobody/no-such-model-here" in str(caught.value)


def test_a_name_that_is_no_hub_id_is_refused_as_such() -> None:
    with pytest.raises(ModelAccessError, match="is neither a folder nor a hub id"):
        check_model_access("my model!")


def test_a_misspelt_folder_names_the_nearest_and_following_it_works(model_folder: Path) -> None:
    with pytest.raises(ModelAccessError, match="there is no such folder") as caught:
        check_model_access(str(model_folder.parent / "modle"))
    near = caught.value.problems[0].near
    assert near == str(model_folder)
    check_model_access(near)


def test_a_folder_of_checkpoints_names_the_one_inside(model_folder: Path) -> None:
    with pytest.raises(ModelAccessError, match="has no config.json, so it is not a model folder") as caught:
        check_model_access(str(model_folder.parent))
    fix = caught.value.problems[0].fix.removeprefix("model_name_or_path: ")
    check_model_access(fix)


def test_an_adapter_folder_names_its_base_model(tmp_path: Path, model_folder: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model_folder)}))
    with pytest.raises(ModelAccessError, match="is a LoRA adapter, not a model") as caught:
        check_model_access(str(adapter))
    check_model_access(caught.value.problems[0].fix.removeprefix("model_name_or_path: "))


def test_a_missing_shard_is_named(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (model_folder / "model-1.safetensors").write_bytes(b"x")
    with pytest.raises(ModelAccessError, match="1 of 2 weight files .* are missing, first model-2.safetensors"):
        check_model_access(str(model_folder))
    (model_folder / "model-2.safetensors").write_bytes(b"x")
    check_model_access(str(model_folder))


def test_a_folder_without_weights_is_refused(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    with pytest.raises(ModelAccessError, match="has a config.json but no weights"):
        check_model_access(str(model_folder))


def test_a_file_is_no_model(model_folder: Path) -> None:
    with pytest.raises(ModelAccessError, match="is a file, and a model is a folder") as caught:
        check_model_access(str(model_folder / "config.json"))
    check_model_access(caught.value.problems[0].fix.removeprefix("model_name_or_path: "))


@pytest.mark.parametrize("name", ["./modle", "modle", "MISSPELT/model", "./MISSPELT/model"])
def test_a_misspelt_relative_folder_is_not_to_be_downloaded(
    name: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = model_folder.parent
    monkeypatch.chdir(parent.parent)
    where = f"{parent.name}/" if "MISSPELT" not in name else ""
    misspelt = name.replace("./", f"./{where}") if where and "./" in name else where + name
    with pytest.raises(ModelAccessError, match="there is no such folder|is not in the local cache") as caught:
        check_model_access(misspelt.replace("MISSPELT", f"{parent.name}x"))
    assert "hf download" not in str(caught.value)
    check_model_access(caught.value.problems[0].fix.removeprefix("model_name_or_path: "))
