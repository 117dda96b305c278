"""Start one training run of the text recipe and show how it gets on: what it says, each step, the time left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

RECIPE = "recipes/text/train.py"
POLL_SECONDS = 0.3
# What a library prints about itself; the numbers of Trainer's own lines come from metrics.jsonl, with the time left.
NOISE = ("{'", "[INFO] Running in WANDB", "wandb: send this run")

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
    """

    num_processes: int
    launch_file: Path
    config: Path
    overrides: Mapping[str, str]
    output_dir: Path
    num_steps: int
    log: Path

    def command(self) -> list[str]:
        """Return the command, as a person could type it."""
        start = [sys.executable]
        if self.num_processes > 1:
            start += ["-m", "accelerate.commands.launch", "--config_file", str(self.launch_file)]
        flags = [word for key, value in self.overrides.items() for word in (f"--{key}", value)]
        return [*start, RECIPE, str(self.config), "--output_dir", str(self.output_dir), *flags]


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
        when = "before training" if record["step"] == 0 else "after training"
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


def run_training(run: TrainingRun, show_output: bool) -> list[Record]:
    """Run the recipe to its end, showing progress, and return the records of its metrics.jsonl.

    Args:
        run: what to run.
        show_output: show what the recipe prints (examples, audit), not only the progress.

    Raises:
        SystemExit: the run failed; the end of its log is shown.
    """
    run.log.parent.mkdir(parents=True, exist_ok=True)
    metrics = run.output_dir / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    environment = training_environment(run.num_processes)
    with (
        run.log.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            run.command(), stdout=subprocess.PIPE, stderr=log, encoding="utf-8", errors="replace", env=environment
        ) as process,
    ):
        assert process.stdout is not None
        echo = threading.Thread(target=_echo, args=(process.stdout, show_output))
        echo.start()
        try:
            num_shown = 0
            while process.poll() is None:
                num_shown = _show_new(metrics, num_shown, run.num_steps)
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            echo.join()
    _show_new(metrics, num_shown, run.num_steps)
    if process.returncode != 0:
        raise SystemExit(f"{tail(run.log)}\nerror: training failed (exit {process.returncode}); all of it: {run.log}")
    return read_metrics(metrics)


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


def _echo(stream: IO[str], show: bool) -> None:
    for line in stream:
        if show and not line.startswith(NOISE):
            print(line, end="", flush=True)


def _show_new(metrics: Path, num_shown: int, num_steps: int) -> int:
    records = read_metrics(metrics)
    for line in progress_lines(records, num_shown, num_steps):
        print(f"  {line}", flush=True)
    return len(records)
