"""The demo's killed save: what counts as one, and when the steps computed twice count as equal."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import training_runs
import yaml
from killed_save import KilledSave, Resume, look_at_killed_save
from train_until_killed import killing_at

NUM_RANKS = 2


def write_run(output_dir: Path, *, committed: tuple[int, ...] = (4,), shards: int | None = NUM_RANKS) -> Path:
    """Write a run's folder: checkpoints with a manifest, and a save of step 8 with so many ranks' shards."""
    for step in committed:
        (output_dir / f"checkpoint-{step}").mkdir(parents=True)
        (output_dir / f"checkpoint-{step}" / "manifest.json").touch()
    if shards is not None:
        folder = output_dir / ".hf-fsdp-saving-8" / "optimizer"
        folder.mkdir(parents=True)
        for rank in range(shards):
            (folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors").touch()
    return output_dir


def record(step: int, seconds: float, loss: float = 2.5, **changes: Any) -> dict[str, Any]:
    return {"step": step, "seconds": seconds, "loss": loss, "grad_norm": 1.25, "learning_rate": 1e-3, **changes}


KILLED = [
    {"step": 0, "seconds": 1.0, "eval_loss": 3.5},
    *(record(step, seconds=float(step), num_tokens=100 * step) for step in range(1, 9)),
]
RESUMED = [
    *KILLED[:5],
    {"step": 4, "seconds": 2.0, "eval_loss": 3.25},
    *(record(step, seconds=step + 0.5, num_tokens=100 * (step - 4)) for step in range(5, 17)),
]


def resume(killed: list[dict[str, Any]] | None = None, resumed: list[dict[str, Any]] | None = None) -> Resume:
    return Resume(killed=killed or KILLED, resumed=resumed or RESUMED, resumed_from=4, killed_at=8)


def changed(records: list[dict[str, Any]], step: int, **changes: Any) -> list[dict[str, Any]]:
    return [{**item, **changes} if item["step"] == step and "loss" in item else item for item in records]


# -- what lies on the disk ---------------------------------------------------------------------------------------------


def test_a_save_with_all_shards_and_no_commit_is_a_killed_one(tmp_path):
    write_run(tmp_path, committed=(4, 2))
    assert look_at_killed_save(tmp_path, 8, NUM_RANKS, exit_code=1) == KilledSave(
        step=8, resumable_step=4, staging=tmp_path / ".hf-fsdp-saving-8"
    )


@pytest.mark.parametrize(
    ("layout", "exit_code", "message"),
    [
        (
            {"committed": (4, 8, 12, 16), "shards": None},
            0,
            r"ended by itself: the kill in the save of step 8 never came",
        ),
        ({"committed": (4, 8), "shards": None}, 1, r"the kill came too late: \S+checkpoint-8 is committed"),
        ({"shards": 1}, 1, "the kill came too early: 1 of 2 ranks had written their shards"),
        ({"shards": None}, 3, r"ended \(exit 3\) before its save of step 8"),
        ({"committed": ()}, 1, "without an earlier checkpoint to go on from"),
    ],
)
def test_a_run_that_ended_otherwise_is_named(tmp_path, layout, exit_code, message):
    write_run(tmp_path, **layout)
    with pytest.raises(ValueError, match=message):
        look_at_killed_save(tmp_path, 8, NUM_RANKS, exit_code)


def test_a_kill_between_the_manifest_and_the_rename_is_not_the_one_that_was_meant(tmp_path):
    write_run(tmp_path)
    (tmp_path / ".hf-fsdp-saving-8" / "manifest.json").touch()
    with pytest.raises(ValueError, match=r"too late: \S+hf-fsdp-saving-8 has its manifest"):
        look_at_killed_save(tmp_path, 8, NUM_RANKS, exit_code=1)


def test_a_checkpoint_without_its_manifest_is_none_to_go_on_from(tmp_path):
    write_run(tmp_path)
    (tmp_path / "checkpoint-4" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="without an earlier checkpoint"):
        look_at_killed_save(tmp_path, 8, NUM_RANKS, exit_code=1)


# -- the curves --------------------------------------------------------------------------------------------------------


def test_equal_curves_bear_out_the_claim_whatever_their_times_and_token_counts():
    assert [(one["step"], two["step"]) for one, two in resume().pairs()] == [(5, 5), (6, 6), (7, 7), (8, 8)]
    assert resume().unmet_claims() == []
    assert resume().to_mapping()["equal_to_the_bit"] is True


@pytest.mark.parametrize("name", ["loss", "grad_norm", "learning_rate"])
def test_a_difference_in_the_last_bit_is_named(name):
    value = RESUMED[-10][name]
    other = resume(resumed=changed(RESUMED, 7, **{name: math.nextafter(value, 9.0)}))
    [claim] = other.unmet_claims()
    assert claim.startswith(f"step 7 has {name} {value!r} before the kill and ")
    assert other.to_mapping()["equal_to_the_bit"] is False


@pytest.mark.parametrize("launch", ["killed", "resumed"])
def test_a_step_that_is_missing_is_named(launch):
    records = {"killed": KILLED, "resumed": RESUMED}
    lacking = [item for item in records[launch] if item["step"] != 6]
    assert resume(**{launch: lacking}).unmet_claims() == [f"step 6 is missing in the metrics of the {launch} launch"]


def test_lines_that_were_never_written_again_are_not_taken_for_equal_ones():
    stale = [*KILLED, *RESUMED[-8:]]
    claims = resume(resumed=stale).unmet_claims()
    assert claims == [f"step {step} was not computed again: its record is the killed launch's" for step in (5, 6, 7, 8)]


def test_a_run_that_began_anew_instead_of_resuming_is_named():
    anew = [record(step, seconds=step + 0.5) for step in range(1, 17)]
    assert resume(resumed=anew).unmet_claims() == [
        "metrics.jsonl lost what was written up to step 4: it was not resumed there"
    ]


def test_a_resume_at_the_killed_step_proves_nothing_and_says_so():
    nothing = Resume(killed=KILLED, resumed=[*KILLED, *RESUMED[-8:]], resumed_from=8, killed_at=8)
    assert nothing.unmet_claims() == ["no step was computed twice: killed at step 8, resumed from step 8"]


# -- the kill ----------------------------------------------------------------------------------------------------------


def test_other_steps_are_committed_as_ever():
    calls = []
    commit = killing_at(8, lambda output_dir, manifest: calls.append((output_dir, manifest.step)) or "committed")
    assert commit(Path("run"), SimpleNamespace(step=4)) == "committed"
    assert calls == [(Path("run"), 4)]


def test_the_script_runs_with_its_own_arguments_and_dies_in_the_place_of_its_commit(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom types import SimpleNamespace\nfrom hf_fsdp.checkpoint import write\n"
        "print(__name__, sys.argv[1:], flush=True)\n"
        "write.commit(None, SimpleNamespace(step=int(sys.argv[2])))\nprint('committed')\n",
        encoding="utf-8",
    )
    killer = Path(__file__).parents[2] / "scripts" / "demo" / "train_until_killed.py"
    command = [sys.executable, str(killer), "--step", "8", str(script), "--max_steps", "8"]
    finished = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert finished.returncode == -9
    assert finished.stdout.startswith("__main__ ['--max_steps', '8']\ndemo: SIGKILL to rank 0 (process ")
    assert "committed" not in finished.stdout


# -- the launches ------------------------------------------------------------------------------------------------------


def test_the_killed_and_the_resumed_launch_run_the_same_command(tmp_path):
    run = training_runs.sharded_run(tmp_path, full=False)
    plain, resumed = run.command(), training_runs.resumed_run(run).command()
    assert resumed == [*plain, "--eval_on_start", "false", "--resume_from_checkpoint", "true"]


def test_the_kill_comes_in_a_save_that_has_a_checkpoint_before_it_and_steps_after_it():
    config = yaml.safe_load((Path(__file__).parents[2] / training_runs.CONFIG).read_text(encoding="utf-8"))
    assert config["save_strategy"] == "steps"
    assert training_runs.KILLED_STEP % config["save_steps"] == 0
    assert config["save_steps"] < training_runs.KILLED_STEP < training_runs.NUM_STEPS


@pytest.mark.parametrize(
    ("exit_code", "layout", "message"),
    [
        (0, {"committed": (4, 8), "shards": None}, "the end of the log\nerror: the run ended by itself.*; all of it: "),
        (1, {"committed": (4, 8), "shards": None}, "the end of the log\nerror: the kill came too late"),
    ],
)
def test_a_demo_without_its_kill_ends_with_the_log(tmp_path, monkeypatch, exit_code, layout, message):
    write_run(tmp_path, **layout)

    def watch(run: Any, is_shown: Any) -> int:
        assert run.command()[5:8] == list(training_runs.KILLER)
        run.log.write_text("the end of the log\n", encoding="utf-8")
        return exit_code

    monkeypatch.setattr(training_runs, "OUTPUT", tmp_path)
    monkeypatch.setattr(training_runs, "LOGS", tmp_path)
    monkeypatch.setattr(training_runs, "watch_training", watch)
    with pytest.raises(SystemExit, match=message):
        training_runs.train_until_killed(training_runs.sharded_run(tmp_path, full=False))


def test_a_killed_launch_leaves_its_metrics_beside_those_of_the_resumed_one(tmp_path, monkeypatch, capsys):
    write_run(tmp_path)
    lines = "".join(json.dumps(item) + "\n" for item in KILLED)

    def watch(run: Any, is_shown: Any) -> int:
        run.log.write_text("noise\n[rank 1] CheckpointError: another rank ended\n", encoding="utf-8")
        run.metrics.write_text(lines, encoding="utf-8")
        return 1

    for name in ("OUTPUT", "LOGS"):
        monkeypatch.setattr(training_runs, name, tmp_path)
    monkeypatch.setattr(training_runs, "watch_training", watch)
    left, records = training_runs.train_until_killed(training_runs.sharded_run(tmp_path, full=False))
    assert (left.resumable_step, records) == (4, KILLED)
    assert (tmp_path / "metrics_killed.jsonl").read_text(encoding="utf-8") == lines
    assert (
        "  [rank 1] CheckpointError: another rank ended\n  the launcher ended with exit code 1"
        in capsys.readouterr().out
    )
