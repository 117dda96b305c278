"""Start one training run of a recipe and show how it gets on: what it says, each step, the time left."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

RECIPE = "recipes/text/train.py"
POLL_SECONDS = 0.3
# What a library prints about itself; the numbers of Trainer's own lines come from metrics.jsonl, with the time left.
NOISE = ("{'", "[INFO] Running in WANDB", "wandb: send this run")
# What a resumed run says that the run before it did not say already.
NEW_IN_A_RESUME = ("hf-fsdp: resume", "hf-fsdp: checkpoint-", "hf-fsdp: removed", "saved ")

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One run of the recipe.

    Args:
        num_processes: 1 runs it as a plain Python program, more through `launch_file`.
        launch_file: Accelerate's file for the run with several processes.
        config: the run config.
        overrides: flags for the recipe, ``{"max_steps": "4"}``.
        output_dir: where the recipe writes.
        num_steps: optimizer steps it will take, for the time left.
        log: where the run's stderr goes.
        through: a program and its flags that runs the recipe; without it the launcher does.
        recipe: the script.
        resumes: it goes on where an earlier run in `output_dir` stopped, and keeps that one's metrics.
    """

    num_processes: int
    launch_file: Path
    config: Path
    overrides: Mapping[str, str]
    output_dir: Path
    num_steps: int
    log: Path
    through: Sequence[str] = ()
    recipe: str = RECIPE
    resumes: bool = False

    @property
    def metrics(self) -> Path:
        """Where the recipe writes its numbers."""
        return self.output_dir / "metrics.jsonl"

    def command(self) -> list[str]:
        """Return the command, as a person could type it."""
        start = [sys.executable]
        if self.num_processes > 1:
            start += ["-m", "accelerate.commands.launch", "--config_file", str(self.launch_file)]
        flags = [word for key, value in self.overrides.items() for word in (f"--{key}", value)]
        flags += ["--resume_from_checkpoint", "true"] if self.resumes else []
        return [*start, *self.through, self.recipe, str(self.config), "--output_dir", str(self.output_dir), *flags]

    def command_line(self) -> str:
        """Return the command in one line to copy, with the launcher's short name."""
        words = self.command()
        start = ["accelerate", "launch"] if self.num_processes > 1 else ["python"]
        return shlex.join([*start, *words[3 if self.num_processes > 1 else 1 :]])


def show_everything(line: str) -> bool:
    """Tell which lines of a run to show: all but noise."""
    return not line.startswith(NOISE)


def show_resume(line: str) -> bool:
    """Tell which lines of a run to show: about its checkpoints."""
    return line.startswith(NEW_IN_A_RESUME)


def show_nothing(line: str) -> bool:
    """Tell which lines of a run to show: none."""
    return False


def read_metrics(path: Path) -> list[Record]:
    """Return the whole lines of a metrics file as records; none while it is not there."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


def progress_line(record: Record, num_steps: int, first: Record) -> str | None:
    """Return the line to show for one record of metrics.jsonl, or None where there is nothing to show.

    Args:
        record: the record.
        num_steps: steps of the whole run.
        first: the run's first record, which a step's time is counted from.
    """
    if "eval_loss" in record:
        when = {0: "before training", num_steps: "after training"}.get(record["step"], f"at step {record['step']}")
        return f"held-out loss {when}: {record['eval_loss']:.3f}"
    if "loss" not in record:
        return None
    line = f"step {record['step']:>3}/{num_steps}  loss {record['loss']:.3f}"
    num_timed = record["step"] - first["step"]
    if num_timed == 0:  # the first step of a run without an evaluation before it: nothing to compare with yet
        return line
    seconds = (record["seconds"] - first["seconds"]) / num_timed
    left = round(seconds * (num_steps - record["step"]))
    return f"{line}  {seconds:.1f} s a step" + (f", about {left} s left" if left else "")


def progress_lines(records: Sequence[Record], num_shown: int, num_steps: int) -> Iterator[str]:
    """Yield the lines for the records after the first `num_shown`."""
    for record in records[num_shown:]:
        line = progress_line(record, num_steps, records[0])
        if line:
            yield line


def run_training(run: TrainingRun, is_shown: Callable[[str], bool]) -> list[Record]:
    """Run the recipe to its end, showing progress, and return the records of its metrics.jsonl.

    Args:
        run: what to run.
        is_shown: tells for a line that the recipe prints (examples, audit) whether to show it.

    Raises:
        SystemExit: the run failed; the end of its log is shown.
    """
    exit_code = watch_training(run, is_shown)
    if exit_code != 0:
        raise SystemExit(f"{tail(run.log)}\nerror: training failed (exit {exit_code}); all of it: {run.log}")
    return read_metrics(run.metrics)


def watch_training(run: TrainingRun, is_shown: Callable[[str], bool]) -> int:
    """Run the recipe until it ends, well or not, showing progress, and return its exit code."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    if not run.resumes:
        run.metrics.unlink(missing_ok=True)
    # A resumed run keeps the lines up to its checkpoint and drops the later ones, which it writes anew.
    old = read_metrics(run.metrics)
    environment = training_environment(run.num_processes)
    with (
        run.log.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            run.command(), stdout=subprocess.PIPE, stderr=log, encoding="utf-8", errors="replace", env=environment
        ) as process,
    ):
        assert process.stdout is not None
        echo = threading.Thread(target=_echo, args=(process.stdout, is_shown))
        echo.start()
        try:
            num_shown = 0
            while process.poll() is None:
                num_shown = _show_new(run, old, num_shown)
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            echo.join()
    _show_new(run, old, num_shown)
    return process.returncode


def training_environment(num_processes: int) -> dict[str, str]:
    """Return the environment for `num_processes` processes that share this machine's cores; nothing goes online."""
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "WANDB_SILENT": "true"}
    offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    # Passive: a thread that spins while it waits takes the core from the one it waits for, on a machine that is shared.
    cores = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return {**os.environ, **cores, **quiet, **offline}


def tail(log: Path, num_lines: int = 30) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])


def _echo(stream: IO[str], is_shown: Callable[[str], bool]) -> None:
    for line in stream:
        if is_shown(line):
            print(line, end="", flush=True)


def _show_new(run: TrainingRun, old: Sequence[Record], num_shown: int) -> int:
    records = [record for record in read_metrics(run.metrics) if record not in old]
    for line in progress_lines(records, num_shown, run.num_steps):
        print(f"  {line}", flush=True)
    return len(records)
