"""The demo's training runs: two sharded processes, killed in a save and resumed, and one process to compare with."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from killed_save import KilledSave, look_at_killed_save
from launch_training import (
    Record,
    TrainingRun,
    read_metrics,
    run_training,
    show_everything,
    show_nothing,
    tail,
    watch_training,
)

OUTPUT = Path("runs/demo")
DATA = OUTPUT / "data"
LOGS = OUTPUT / "logs"
LAUNCH_FILE = Path("configs/demo/fsdp_2cpu.yaml")
CONFIG = Path("configs/demo/smollm2_lora.yaml")

NUM_STEPS = 16
NUM_COMPARED_STEPS = 6
NUM_RANKS = 2
KILLED_STEP = 8  # the run saves every 4 steps: the second save is the one that does not end
KILLER = ("scripts/demo/train_until_killed.py", "--step", str(KILLED_STEP))
FULL_OVERRIDES = {"use_peft": "false", "learning_rate": "5.0e-5", "save_total_limit": "1"}


def sharded_run(model: Path, full: bool) -> TrainingRun:
    """Return the run with sharded processes, from its first step."""
    overrides = {"model_name_or_path": str(model), "max_steps": str(NUM_STEPS), **(FULL_OVERRIDES if full else {})}
    return TrainingRun(
        num_processes=NUM_RANKS,
        launch_file=LAUNCH_FILE,
        config=CONFIG,
        overrides=overrides,
        output_dir=OUTPUT,
        num_steps=NUM_STEPS,
        log=LOGS / "sharded.log",
    )


def train_until_killed(run: TrainingRun) -> tuple[KilledSave, list[Record]]:
    """Train, showing what the recipe shows, until a save is killed; return what that left, and the steps so far.

    Raises:
        SystemExit: the run ended otherwise; the end of its log is shown.
    """
    run = dataclasses.replace(run, through=KILLER, log=LOGS / "killed.log")
    exit_code = watch_training(run, show_everything)
    try:
        left = look_at_killed_save(OUTPUT, KILLED_STEP, NUM_RANKS, exit_code)
    except ValueError as error:
        raise SystemExit(f"{tail(run.log)}\nerror: {error}; all of it: {run.log}") from None
    for line in run.log.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("[rank "):  # what the recipe says on the others
            print(f"  {line}")
    print(f"  the launcher ended with exit code {exit_code}; {left.staging} has all ranks' shards and no manifest\n")
    # The resumed run drops the lines of the steps that it computes again.
    shutil.copy(run.metrics, OUTPUT / "metrics_killed.jsonl")
    return left, read_metrics(run.metrics)


def resumed_run(run: TrainingRun) -> TrainingRun:
    """Return the run that goes on from the checkpoint of `run`, which has been evaluated at its start already."""
    return dataclasses.replace(run, resumes=True, overrides={**run.overrides, "eval_on_start": "false"})


def train_in_one_process(model: Path, full: bool) -> list[Record]:
    """Train the first steps of the same run in one process, without evaluating and without W&B."""
    overrides = {
        "model_name_or_path": str(model),
        "max_steps": str(NUM_COMPARED_STEPS),
        "eval_on_start": "false",
        "eval_file": "",
        "save_strategy": "no",
        "report_to": "none",
        "print_examples": "0",
        **(FULL_OVERRIDES if full else {}),
    }
    run = TrainingRun(
        num_processes=1,
        launch_file=LAUNCH_FILE,
        config=CONFIG,
        overrides=overrides,
        output_dir=OUTPUT / "one_process",
        num_steps=NUM_COMPARED_STEPS,
        log=LOGS / "one_process.log",
    )
    return run_training(run, show_nothing)
