"""What the demos share: headings with the time since the start, steps in processes of their own, and their logs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch_training import tail, training_environment
from rich.console import Console

PACKAGES = ("hf-fsdp", "torch", "transformers", "accelerate", "peft", "trl", "datasets", "wandb")

console = Console(highlight=False)
began = time.monotonic()


def stage(title: str) -> None:
    """Print the heading of the next part, with the time since the start."""
    console.print(f"\n[bold]== {title}[/bold]  [dim]({time.monotonic() - began:.0f} s)[/dim]", soft_wrap=True)


def show(line: str) -> None:
    """Print a line whole, however narrow the terminal is."""
    print(line, flush=True)


def show_versions() -> None:
    """Print what this runs on."""
    stage("versions")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    console.print(
        f"Python {platform.python_version()} on {platform.system()}, {os.cpu_count()} CPU cores\n{versions}",
        soft_wrap=True,
    )


def run_step(script: str, values: Mapping[str, object], logs: Path, num_processes: int = 1) -> None:
    """Run another file of this folder in processes of its own, its output in a log.

    Args:
        script: its name.
        values: its flags.
        logs: the folder of the logs.
        num_processes: more than one run under torchrun.

    Raises:
        SystemExit: it failed; the end of its log is shown.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    command = [sys.executable, *(launcher if num_processes > 1 else []), str(Path(__file__).with_name(script))]
    command += [word for name, value in values.items() for word in (f"--{name}", str(value))]
    _run(command, logs / f"{Path(script).stem}.log", script, num_processes)


def run_command(words: Sequence[str], logs: Path) -> None:
    """Run the `hf-fsdp` command as a person would, showing it and what it prints.

    Raises:
        SystemExit: it failed; the end of its log is shown.
    """
    print(f"$ hf-fsdp {' '.join(words)}", flush=True)
    command = [sys.executable, "-m", "hf_fsdp", *words]
    _run(command, logs / f"{words[1]}.log", f"hf-fsdp {words[1]}", 1, is_shown=True)


def end(unmet: Sequence[str]) -> None:
    """Print how long it took, and fail when a claim did not hold.

    Raises:
        SystemExit: there is an unmet claim.
    """
    console.print(f"\n{time.monotonic() - began:.0f} s in all, without the installation")
    if unmet:
        raise SystemExit("error: the demo did not show what it says: " + "; ".join(unmet))


def _run(command: Sequence[str], log: Path, name: str, num_processes: int, is_shown: bool = False) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as stream:
        output = None if is_shown else stream
        finished = subprocess.run(command, stdout=output, stderr=stream, env=training_environment(num_processes))
    if finished.returncode != 0:
        raise SystemExit(f"{tail(log)}\nerror: {name} failed (exit {finished.returncode}); all of it: {log}")
