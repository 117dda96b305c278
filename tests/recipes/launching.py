"""Runs of recipes from their command line, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


def launch(
    recipe: Path, folder: Path, *arguments: str, processes: int = 1, timeout: int = 240
) -> subprocess.CompletedProcess[str]:
    """Run a recipe in `folder`, under torchrun with more than one process."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join(filter(None, (str(REPOSITORY), kept.get("PYTHONPATH"))))
    offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return subprocess.run(
        [sys.executable, *(torchrun if processes > 1 else []), str(recipe), *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": path, **offline},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_recipe(recipe: Path, folder: Path, *arguments: str, processes: int = 1) -> str:
    """Run a recipe that must end well; return what it printed."""
    done = launch(recipe, folder, *arguments, processes=processes)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    """Return the logged training losses of a run."""
    return [line["loss"] for line in metrics(folder) if "loss" in line]
