"""Folders that somebody has tampered with: one clear error, no hang, nothing but models made, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fsdp.checkpoint.export.blueprint import build_blueprint
from hf_fsdp.checkpoint.export.saved_model import document_names
from hf_fsdp.checkpoint.foreign.torch_file import load_torch_file
from hf_fsdp.checkpoint.foreign.unpickle import load_dcp_pickle
from hf_fsdp.checkpoint.manifest import Manifest, _checksum
from hf_fsdp.checkpoint.verify import verify_checkpoint
from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.files import hash_file, open_to_read, read_json
from hf_fsdp.storage.safetensors_file import read_header
from tests.unit.test_checkpoint_cli import build_run, call, call_json, flip, names, weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("saved") / "run")


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


# -- what is no file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [open_to_read, hash_file, read_json, read_header, load_torch_file, load_dcp_pickle])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_not_read(read: Any, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="is no regular file"):
        read(path)


@pytest.mark.parametrize("command", ["list", "inspect", "verify"])
def test_a_pipe_in_a_checkpoint_is_an_error_and_no_hang(command: str, run: Path) -> None:
    (run / "checkpoint-3" / "manifest.json").unlink()
    os.mkfifo(run / "checkpoint-3" / "manifest.json")
    result = call(command, run, code={"list": 0, "inspect": 0, "verify": 1}[command])
    assert "no regular file" in result.output or command == "inspect"


def test_an_error_of_the_system_is_a_line_and_json_too(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(run / "checkpoint-3"))

    monkeypatch.setattr("hf_fsdp.cli.checkpoint_view.find_checkpoints", refuse)
    content = call_json("list", run, code=1)
    assert content["error"].endswith("checkpoint-3: Permission denied")


# -- manifests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("created", 5),
        ("created", "yesterday"),
        ("step", "x"),
        ("step", -1),
        ("world_size", {}),
        ("mesh", 5),
        ("adapters", []),
        ("ties", {"a": [["b"]]}),
        ("save_seconds", {}),
        ("model", {"w": ["float32", -1]}),
        ("model", {"w": ["float32", 1e300]}),
        ("export_dtypes", {"model.norm.weight": "int8"}),
        ("base", 5),
        ("files", {"a": ["1", "0"]}),
    ],
)
def test_a_manifest_with_a_right_checksum_and_wrong_types_is_damaged(key: str, value: Any, run: Path) -> None:
    path = run / "checkpoint-3" / "manifest.json"
    content = {**json.loads(path.read_text()), key: value}
    content.pop("checksum")
    path.write_text(json.dumps({**content, "checksum": _checksum(content)}))
    with pytest.raises(CheckpointError, match="lacks or garbles an entry"):
        Manifest.read(path.parent)
    assert "lacks or garbles an entry" in call("list", run).stdout


# -- other programs' files --------------------------------------------------------------------------------------------


def test_a_storage_that_is_said_to_be_larger_than_its_record_is_damage(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(10.0)}, tmp_path / "whole.bin")
    with zipfile.ZipFile(tmp_path / "whole.bin") as whole, zipfile.ZipFile(tmp_path / "short.bin", "w") as short:
        for item in whole.infolist():
            data = whole.read(item)
            short.writestr(item.filename, data[:4] if item.filename.endswith("/data/0") else data)
    assert torch.equal(load_torch_file(tmp_path / "whole.bin")["w"], torch.arange(10.0))
    with pytest.raises(CheckpointError, match=r"its record data/0 has 4 bytes, and 40 are described"):
        load_torch_file(tmp_path / "short.bin")


def test_all_dtypes_and_shared_storages_of_torch_files_are_read(tmp_path: Path) -> None:
    base = torch.arange(12, dtype=torch.float32)
    content: dict[str, Any] = {
        "view": base[2:5],
        "whole": base,
        "none": torch.empty(0),
        "list": [1, {"a": (2.0, None)}],
    }
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        content[str(dtype)] = torch.ones(3).to(dtype)
    torch.save(content, tmp_path / "file.bin")
    again = load_torch_file(tmp_path / "file.bin")
    assert again["list"] == content["list"]
    for name in set(content) - {"list"}:
        assert again[name].dtype == content[name].dtype and again[name].tolist() == content[name].tolist()


def test_dcp_metadata_of_nothing_but_containers_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + b"]" * 100_000 + b".")
    with pytest.raises(CheckpointError, match="more containers than DCP's metadata can have"):
        load_dcp_pickle(tmp_path / ".metadata")


# -- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Trainer", "pipeline", "AutoModelForCausalLM", "set_seed", "LlamaConfig"])
def test_a_name_in_a_config_makes_nothing_but_a_model(name: str) -> None:
    assert build_blueprint({"model_type": "llama", "architectures": [name]}, None) is None


@pytest.mark.parametrize("changes", [{"hidden_size": "x"}, {"num_attention_heads": 0}, {"hidden_act": "none"}])
def test_a_config_that_describes_no_model_is_one_error(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not describe a LlamaForCausalLM"):
        build_blueprint({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **changes}, None)


def test_only_configs_tokenizers_and_code_are_copied_beside_the_weights() -> None:
    kept = ["config.json", "generation_config.json", "merges.txt", "spiece.model", "tokenizer.json", "modeling_x.py"]
    strangers = ["model.gguf", "tf_model.h5", "flax_model.msgpack", "id_rsa", "a.ckpt", "b.npz", "c.pickle", "d.pt.bak"]
    assert document_names([*kept, *strangers, "trainer_state.json", "model/x.json"]) == tuple(sorted(kept))


# -- what may be deleted ----------------------------------------------------------------------------------------------


def test_prune_does_not_count_a_damaged_checkpoint_as_one_that_is_kept(run: Path) -> None:
    state = json.loads((run / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"].endswith("checkpoint-1")
    flip(weights(run / "checkpoint-3"))
    content = call_json("prune", run, "--keep", 1, "--yes")
    kept = {item["name"]: item["reason"] for item in content["kept"]}
    assert content["deleted"] == [] and kept["checkpoint-3"].startswith("damaged: ")
    assert kept["checkpoint-2"] == "among the newest 1"
    content = call_json("prune", run, "--keep", 1, "--yes", "--skip-hashes")
    assert [item["name"] for item in content["deleted"]] == ["checkpoint-2"]


def test_prune_leaves_links_alone(run: Path, tmp_path: Path) -> None:
    shutil.move(run / "checkpoint-2", tmp_path / "elsewhere")
    (run / "checkpoint-2").symlink_to(tmp_path / "elsewhere")
    content = call_json("prune", run, "--keep", 1, "--yes")
    assert content["deleted"] == [] and {"name": "checkpoint-2", "reason": "a link"} in content["kept"]
    assert (run / "checkpoint-2" / "manifest.json").is_file()


def test_prune_says_what_it_could_not_delete(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr("hf_fsdp.cli.prune.shutil.rmtree", refuse)
    result = call("prune", run, "--keep", 1, "--yes", code=1)
    assert "NOT deleted: checkpoint-2" in result.stdout and "\ndeleted" not in f"\n{result.stdout}"
    assert "0 B freed" in result.stdout


def test_force_replaces_exports_only(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    call("export", run, "-o", output)
    call("export", run, "-o", output, "--force")
    (output / "thesis.txt").write_text("years")
    result = call("export", run, "-o", output, "--force", code=2)
    assert "holds thesis.txt, which this export does not write" in result.stderr
    assert (output / "thesis.txt").read_text() == "years" and (output / "model.safetensors").is_file()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


def test_an_export_is_not_named_like_a_checkpoint(run: Path) -> None:
    assert "has the name of a checkpoint" in call("export", run, "-o", run / "checkpoint-9", code=2).stderr
    assert "checkpoint-9" not in names(run)


@pytest.mark.parametrize("size", ["9" * 400, "1\u212a", "1e9999", "-1", "NaN"])
def test_sizes_that_are_none_are_refused(size: str, run: Path, tmp_path: Path) -> None:
    result = call("export", run, "-o", tmp_path / "out", "--max-shard-size", size, code=2)
    assert "is no size" in result.stderr


def test_verifying_stops_at_once_when_it_is_interrupted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_fsdp.storage.files.PIECE_BYTES", 64)
    folder = run / "checkpoint-2"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has it ignored
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            verify_checkpoint(folder, on_bytes=lambda num_bytes: time.sleep(0.02))  # seconds, if it went on to the end
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 1.5
