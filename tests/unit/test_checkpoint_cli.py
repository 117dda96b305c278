"""`hf-fsdp checkpoint`: every command on a real run folder, with its exit codes and its JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from hf_fsdp.checkpoint.manifest import Manifest
from hf_fsdp.checkpoint.save import SaveRequest, save_checkpoint
from hf_fsdp.cli import app
from hf_fsdp.cli.inspect_view import block_of
from hf_fsdp.cli.terminal import printable

ESCAPE = "\x1b[2J"


def build_run(run: Path) -> Path:
    """Three checkpoints: whole, whole and the model only; the first is the best. And a save that died."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.ones(1, 4, dtype=torch.long)
    for step in (1, 2, 3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        state = {"global_step": step, "best_model_checkpoint": str(run / "checkpoint-1")}
        save_checkpoint(
            SaveRequest(
                output_dir=run,
                step=step,
                model=model,
                optimizer=optimizer if step < 3 else None,
                documents={"trainer_state.json": json.dumps(state).encode(), "state/data.json": b'{"batch": 4}'},
                write_extras=model.config.save_pretrained,
            )
        )
    (run / ".hf-fsdp-saving-9").mkdir()
    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("saved") / "run")


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def call(*arguments: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["checkpoint", *(str(argument) for argument in arguments)])
    assert result.exit_code == code, result.output
    return result


def call_json(*arguments: Any, code: int = 0) -> Any:
    return json.loads(call(*arguments, "--json", code=code).stdout)


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])


def age(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (then, then))


def weights(checkpoint: Path) -> Path:
    return next((checkpoint / "model").iterdir())


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


# -- list -------------------------------------------------------------------------------------------------------------


def test_list_shows_every_folder_and_marks_newest_and_best(run: Path) -> None:
    lines = call("list", run).stdout.splitlines()
    assert lines[0].split()[:2] == ["STEP", "CHECKPOINT"]
    rows = {line.split()[1]: line for line in lines[1:]}
    assert "committed" in rows["checkpoint-1"] and rows["checkpoint-1"].rstrip().endswith("best")
    assert "whole, model only" in rows["checkpoint-3"] and rows["checkpoint-3"].rstrip().endswith("newest")
    assert "a save that did not end" in rows[".hf-fsdp-saving-9"]


def test_list_as_json(run: Path) -> None:
    content = call_json("list", run)
    assert set(content) == {"folder", "checkpoints"}
    found = {item["name"]: item for item in content["checkpoints"]}
    assert set(found["checkpoint-2"]) == {
        "name",
        "path",
        "step",
        "created",
        "bytes",
        "world_size",
        "content",
        "model_class",
        "state",
        "committed",
        "problem",
        "newest",
        "best",
    }
    assert found["checkpoint-2"]["state"] == "committed" and found["checkpoint-2"]["content"] == "whole"
    assert [name for name, item in found.items() if item["newest"]] == ["checkpoint-3"]
    assert [name for name, item in found.items() if item["best"]] == ["checkpoint-1"]
    assert found[".hf-fsdp-saving-9"]["state"] == "unfinished"
    assert found["checkpoint-1"]["bytes"] == sum(
        path.stat().st_size for path in (run / "checkpoint-1").rglob("*") if path.is_file()
    )


def test_list_of_one_checkpoint_and_of_nothing(run: Path, tmp_path: Path) -> None:
    assert [item["name"] for item in call_json("list", run / "checkpoint-2")["checkpoints"]] == ["checkpoint-2"]
    (tmp_path / "empty").mkdir()
    assert "no checkpoints in" in call("list", tmp_path / "empty").stdout
    assert "is no folder" in call("list", tmp_path / "nothing", code=2).stderr


def test_list_says_what_is_wrong_with_a_folder(run: Path) -> None:
    weights(run / "checkpoint-2").unlink()
    (run / "checkpoint-3" / "manifest.json").unlink()
    found = {item["name"]: item for item in call_json("list", run)["checkpoints"]}
    assert "is missing" in found["checkpoint-2"]["problem"] and found["checkpoint-2"]["state"] == "damaged"
    assert "incomplete" in found["checkpoint-3"]["problem"]
    assert found["checkpoint-1"]["newest"]


# -- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_shows_blocks_optimizer_data_and_versions(run: Path) -> None:
    text = call("inspect", run / "checkpoint-2").stdout
    assert "step 2" in text and "LlamaForCausalLM 21 tensors" in text
    assert "optimizer: AdamW 63 tensors" in text and "exp_avg ×21" in text
    assert "lr 0.001" in text and "data: batch 4" in text and "torch " in text
    row = next(line for line in text.splitlines() if line.startswith("model.layers.*"))
    assert row.split()[1] == "18" and "float32" in row


def test_inspect_takes_the_newest_of_a_run_and_shows_tensors(run: Path) -> None:
    text = call("inspect", run, "--tensors").stdout
    assert "taken: checkpoint-3" in text and "optimizer: none" in text
    assert any(line.startswith("lm_head.weight") and line.rstrip().endswith("67×16") for line in text.splitlines())


def test_inspect_as_json(run: Path) -> None:
    content = call_json("inspect", run / "checkpoint-2", "--tensors")
    manifest = Manifest.read(run / "checkpoint-2")
    assert content["step"] == 2 and content["world_size"] == 1 and content["content"] == "whole"
    assert content["model"]["num_tensors"] == len(manifest.model) == len(content["model"]["tensors"])
    assert content["model"]["num_parameters"] == sum(block["parameters"] for block in content["model"]["blocks"])
    assert content["bytes"] == manifest.num_bytes == sum(content["files"].values())
    assert content["data"] == {"batch": 4} and content["trainer"]["global_step"] == 2
    assert "tensors" not in call_json("inspect", run)["model"]


def test_inspect_of_a_damaged_checkpoint_fails(run: Path) -> None:
    flip(run / "checkpoint-2" / "manifest.json")
    assert "manifest.json" in call("inspect", run / "checkpoint-2", code=1).stderr
    assert "is no folder" in call("inspect", run / "nothing", code=2).stderr


def test_another_programs_checkpoint_is_shown_as_such(run: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**_TINY))
    model.save_pretrained(run / "checkpoint-7")
    (run / "checkpoint-7" / "trainer_state.json").write_text("{}")
    found = {item["name"]: item for item in call_json("list", run)["checkpoints"]}
    assert found["checkpoint-7"]["state"] == "another program's" and not found["checkpoint-7"]["committed"]
    assert "Trainer without FSDP" in call("inspect", run / "checkpoint-7").stdout
    assert call_json("verify", run / "checkpoint-7")["checkpoints"][0]["note"]


_TINY = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def test_layers_are_one_block() -> None:
    assert block_of("model.layers.12.mlp.up_proj.weight") == "model.layers.*"
    assert block_of("lm_head.weight") == "lm_head"
    assert block_of("scale") == "scale"


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_of_a_whole_run(run: Path) -> None:
    text = call("verify", run).stdout
    assert text.count(": whole") == 3 and ".hf-fsdp-saving-9: not verified" in text
    content = call_json("verify", run)
    assert content["ok"] and content["hashes"]
    assert set(content["checkpoints"][0]) == {"name", "path", "step", "state", "ok", "note", "problems"}


def test_verify_finds_a_flipped_byte_which_sizes_do_not_show(run: Path) -> None:
    flip(weights(run / "checkpoint-2"))
    assert call_json("verify", run, "--quick")["ok"]
    text = call("verify", run, code=1).stdout
    assert "checkpoint-2: DAMAGED" in text and "its hash differs" in text and "checkpoint-1: whole" in text
    content = call_json("verify", run / "checkpoint-2", code=1)
    assert not content["ok"] and content["checkpoints"][0]["state"] == "damaged"
    assert "its hash differs" in content["checkpoints"][0]["problems"][0]["message"]
    assert call_json("verify", run / "checkpoint-1")["ok"]


def test_verify_finds_what_sizes_show(run: Path) -> None:
    path = weights(run / "checkpoint-1")
    path.write_bytes(path.read_bytes()[:-1])
    assert "checkpoint-1: DAMAGED" in call("verify", run, "--quick", code=1).stdout


def test_verify_of_nothing_is_no_success(tmp_path: Path) -> None:
    assert "no checkpoints in" in call("verify", tmp_path, code=1).stdout
    assert "is no folder" in call("verify", tmp_path / "nothing", code=2).stderr


# -- prune ------------------------------------------------------------------------------------------------------------


def test_prune_keeps_the_newest_and_the_best(run: Path) -> None:
    before = names(run)
    text = call("prune", run, "--keep", 1, "--dry-run").stdout
    assert "would delete checkpoint-2" in text and names(run) == before
    content = call_json("prune", run, "--keep", 1, "--yes")
    assert [item["name"] for item in content["deleted"]] == ["checkpoint-2"]
    assert {item["name"]: item["reason"] for item in content["kept"]} == {
        "checkpoint-3": "newest",
        "checkpoint-1": "the best",
    }
    assert content["failed"] == [] and content["bytes"] > 0
    assert names(run) == [".hf-fsdp-saving-9", "checkpoint-1", "checkpoint-3"]


def test_prune_leaves_damaged_checkpoints_and_other_programs_alone(run: Path) -> None:
    weights(run / "checkpoint-1").unlink()
    (run / "checkpoint-0").mkdir()
    (run / "checkpoint-0" / "trainer_state.json").write_text("{}")
    call("prune", run, "--keep", 1, "--yes")
    assert names(run) == [".hf-fsdp-saving-9", "checkpoint-0", "checkpoint-1", "checkpoint-3"]


def test_prune_takes_leftovers_only_when_nobody_writes_to_them(run: Path) -> None:
    (run / ".hf-fsdp-saving-9" / "part").write_text("data")
    for name in (".hf-fsdp-deleted-checkpoint-0", ".hf-fsdp-replaced-1", ".hf-fsdp-replaced-5"):
        (run / name).mkdir()
    text = call("prune", run, "--leftovers", "--yes").stdout
    assert text.count("a save may still be going on") == 3 and ".hf-fsdp-saving-9" in names(run)
    for name in names(run):
        if name.startswith("."):
            age(run / name, 3600)
    content = call_json("prune", run, "--leftovers", "--yes")
    assert [item["name"] for item in content["deleted"]] == [
        ".hf-fsdp-deleted-checkpoint-0",
        ".hf-fsdp-replaced-1",
        ".hf-fsdp-saving-9",
    ]
    # Nothing else holds step 5.
    assert names(run) == [".hf-fsdp-replaced-5", "checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_prune_asks_and_refuses_without_an_answer(run: Path) -> None:
    assert "nobody is there to ask" in call("prune", run, "--keep", 1, code=2).stderr
    assert "was not told what to delete" in call("prune", run, code=2).stderr
    assert "is one checkpoint" in call("prune", run / "checkpoint-1", "--keep", 1, code=2).stderr
    call("prune", run, "--keep", 0, code=2)
    assert len(names(run)) == 4


# -- export -----------------------------------------------------------------------------------------------------------


def test_export_writes_what_from_pretrained_loads(run: Path, tmp_path: Path) -> None:
    text = call("export", run, "-o", tmp_path / "out", "--dtype", "bf16").stdout
    assert "taken: checkpoint-3" in text and "every tensor reads back equal" in text
    assert "AutoModelForCausalLM.from_pretrained" in text and "vllm serve" in text
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_export_as_json(run: Path, tmp_path: Path) -> None:
    content = call_json("export", run / "checkpoint-1", "-o", tmp_path / "out", "--max-shard-size", "5KB")
    assert content["kind"] == "model" and content["dtype"] == "float32" and content["num_tensors"] == 21
    assert content["path"] == str(tmp_path / "out") and content["checkpoint"].endswith("checkpoint-1")
    assert sorted(content["files"]) == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(content["serving"]) == 2


def test_export_fails_with_1_for_damage_and_2_for_misuse(run: Path, tmp_path: Path) -> None:
    flip(weights(run / "checkpoint-2"))
    assert "its hash differs" in call("export", run / "checkpoint-2", "-o", tmp_path / "out", code=1).stderr
    assert not (tmp_path / "out").exists()
    call("export", run / "checkpoint-1", "-o", tmp_path / "out")
    assert "--force replaces it" in call("export", run / "checkpoint-1", "-o", tmp_path / "out", code=2).stderr
    call("export", run / "checkpoint-1", "-o", tmp_path / "out", "--force")
    assert "is no folder" in call("export", tmp_path / "nothing", "-o", tmp_path / "x", code=2).stderr
    assert "--dtype int8" in call("export", run, "-o", tmp_path / "x", "--dtype", "int8", code=2).stderr


def test_a_full_disk_is_found_before_a_byte_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    error = call("export", run, "-o", tmp_path / "out", code=1).stderr
    assert "the export takes" in error and "1000 B free" in error
    assert names(tmp_path) == ["run"]


# -- hostile names, speed ---------------------------------------------------------------------------------------------


def test_escape_sequences_in_names_do_not_reach_the_terminal(run: Path) -> None:
    folder = run / "checkpoint-2"
    manifest = Manifest.read(folder)
    path = folder / f"evil{ESCAPE}.json"
    path.write_text("{}")
    tensors = {f"evil{ESCAPE}[red]\u202e.weight": info for info in manifest.model.values()}
    object.__setattr__(manifest, "model", tensors)
    object.__setattr__(manifest, "model_class", f"Evil{ESCAPE}")
    manifest.write(folder)
    for arguments, code in (
        (("list", run), 0),
        (("inspect", folder, "--tensors"), 0),
        (("verify", folder), 1),
        (("export", folder, "-o", run.parent / "out"), 1),
    ):
        result = call(*arguments, code=code)
        assert "\x1b" not in result.output and "\u202e" not in result.output
    assert "[red]" in call("inspect", folder, "--tensors").stdout
    assert "\x1b" not in call("inspect", folder, "--json").stdout


def test_names_in_a_manifest_cannot_lead_out_of_the_folder(run: Path) -> None:
    folder = run / "checkpoint-2"
    manifest = Manifest.read(folder)
    record = next(iter(manifest.files.values()))
    object.__setattr__(manifest, "files", {**manifest.files, "../checkpoint-1/config.json": record})
    manifest.write(folder)
    for command in (("verify", folder), ("export", folder, "-o", run.parent / "out")):
        result = call(*command, code=1)
        assert "'../checkpoint-1/config.json' is named in" in result.output and "outside of it" in result.output
    assert not (run.parent / "out").exists()


def test_printable_keeps_text_and_lines() -> None:
    assert printable("größe\n×") == "größe\n×"
    assert printable("a\x1b]0;b\x07\u202e\x9b") == r"a\x1b]0;b\x07\u202e\x9b"


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from hf_fsdp.cli import app\n"
        "try: app(['checkpoint', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'rich.table'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "verify" in result.stdout
