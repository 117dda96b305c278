"""What the demo shows while a training run goes on, and when one fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launch_training import (
    TrainingRun,
    progress_lines,
    read_metrics,
    run_training,
    show_everything,
    show_nothing,
    show_resume,
    training_environment,
    watch_training,
)


class ScriptedRun(TrainingRun):
    """A run whose program is given as text."""

    program: str

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.program]


def scripted_run(tmp_path: Path, program: str, resumes: bool = False) -> ScriptedRun:
    run = ScriptedRun(
        num_processes=1,
        launch_file=Path("launch.yaml"),
        config=Path("run.yaml"),
        overrides={},
        output_dir=tmp_path,
        num_steps=4,
        log=tmp_path / "logs" / "run.log",
        resumes=resumes,
    )
    object.__setattr__(run, "program", program)
    return run


def test_time_left_follows_from_the_steps_so_far():
    records = [
        {"step": 0, "seconds": 10.0, "eval_loss": 3.5},
        {"step": 1, "seconds": 14.0, "loss": 3.0},
        {"step": 2, "seconds": 16.0, "loss": 2.5},
        {"step": 4, "seconds": 22.0, "loss": 2.25},
        {"step": 4, "seconds": 22.0, "train_runtime": 12.0},
        {"step": 4, "seconds": 25.0, "eval_loss": 2.5},
    ]
    assert list(progress_lines(records, num_shown=0, num_steps=4)) == [
        "held-out loss before training: 3.500",
        "step   1/4  loss 3.000  4.0 s a step, about 12 s left",
        "step   2/4  loss 2.500  3.0 s a step, about 6 s left",
        "step   4/4  loss 2.250  3.0 s a step",
        "held-out loss after training: 2.500",
    ]


def test_a_first_step_without_an_evaluation_before_it_promises_no_time():
    records = [{"step": 1, "seconds": 90.0, "loss": 3.0}, {"step": 2, "seconds": 92.0, "loss": 2.5}]
    assert list(progress_lines(records, num_shown=0, num_steps=4)) == [
        "step   1/4  loss 3.000",
        "step   2/4  loss 2.500  2.0 s a step, about 4 s left",
    ]


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 1}\n{"st', encoding="utf-8")
    assert read_metrics(path) == [{"step": 1}]


def test_one_process_is_started_plainly_and_several_through_the_launch_file(tmp_path):
    settings = {
        "launch_file": Path("launch.yaml"),
        "config": Path("run.yaml"),
        "overrides": {"max_steps": "4"},
        "output_dir": tmp_path,
        "num_steps": 4,
        "log": tmp_path / "run.log",
    }
    recipe = ["recipes/text/train.py", "run.yaml", "--output_dir", str(tmp_path), "--max_steps", "4"]
    assert TrainingRun(num_processes=1, **settings).command() == [sys.executable, *recipe]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "launch.yaml"]
    assert TrainingRun(num_processes=2, **settings).command() == [sys.executable, *launcher, *recipe]
    through = TrainingRun(num_processes=2, **settings, through=["killer.py", "--step", "8"])
    assert through.command() == [sys.executable, *launcher, "killer.py", "--step", "8", *recipe]
    resumed = TrainingRun(num_processes=2, **settings, resumes=True)
    assert resumed.command() == [sys.executable, *launcher, *recipe, "--resume_from_checkpoint", "true"]


def test_the_processes_share_the_cores_and_stay_offline(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    environment = training_environment(num_processes=2)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["WANDB_MODE"] == "offline"
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_output_and_steps_are_shown_and_trainers_own_lines_are_not(tmp_path, capfd):
    record = json.dumps({"step": 1, "seconds": 1.0, "loss": 3.0})
    program = f"""
print("an audit")
print({{'loss': 3.0}})
open({str(tmp_path / "metrics.jsonl")!r}, "w").write({record!r} + chr(10))
"""
    assert run_training(scripted_run(tmp_path, program), show_everything) == [json.loads(record)]
    assert sorted(capfd.readouterr().out.splitlines()) == ["  step   1/4  loss 3.000", "an audit"]


def test_a_failed_run_shows_the_end_of_its_log(tmp_path):
    program = "import sys; print('what went wrong', file=sys.stderr); sys.exit(3)"
    with pytest.raises(SystemExit, match=r"what went wrong\nerror: training failed \(exit 3\); all of it: .*run\.log"):
        run_training(scripted_run(tmp_path, program), show_nothing)


def test_an_evaluation_is_named_by_the_step_it_was_made_at():
    records = [{"step": step, "seconds": 1.0, "eval_loss": 3.0} for step in (0, 2, 4)]
    assert list(progress_lines(records, num_shown=0, num_steps=4)) == [
        "held-out loss before training: 3.000",
        "held-out loss at step 2: 3.000",
        "held-out loss after training: 3.000",
    ]


def test_a_resumed_run_keeps_the_metrics_and_shows_only_what_is_new(tmp_path, capfd):
    old = [{"step": step, "seconds": float(step), "loss": 3.0} for step in (1, 2, 3)]
    new = [{"step": step, "seconds": step + 0.5, "loss": 2.0} for step in (3, 4)]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in old), encoding="utf-8")
    kept = "".join(json.dumps(record) + "\n" for record in [*old[:2], *new])
    program = f"""
print("an audit")
print("hf-fsdp: resume: checkpoint-2 (step 2)")
assert len(open({str(metrics)!r}).readlines()) == 3
open({str(metrics)!r}, "w").write({kept!r})
"""
    assert run_training(scripted_run(tmp_path, program, resumes=True), show_resume) == [*old[:2], *new]
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "  step   3/4  loss 2.000",
        "  step   4/4  loss 2.000  1.0 s a step",
        "hf-fsdp: resume: checkpoint-2 (step 2)",
    ]


def test_a_run_from_its_first_step_drops_the_metrics_of_an_earlier_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "seconds": 1.0, "loss": 3.0}\n', encoding="utf-8")
    assert run_training(scripted_run(tmp_path, "pass"), show_nothing) == []


def test_a_run_that_is_killed_gives_its_exit_code_and_raises_nothing(tmp_path):
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert watch_training(scripted_run(tmp_path, program), show_nothing) == -9
