"""Runs cases in a mount namespace with a small disk and a read-only folder of its own, where the system allows it.

Where it does not, the same cases run without: they then make the calls fail themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.distributed.harness import REPOSITORY, Outcome, run_cases

# Where cases find them, where the system lets us mount: a tmpfs of a few MiB, and a folder that is read-only.
SMALL_DISK, READ_ONLY = "HF_FSDP_CHAOS_SMALL_DISK", "HF_FSDP_CHAOS_READ_ONLY"
SMALL_DISK_MIB = 40


def run_cases_mounted(module: str, cases: Sequence[str], folder: Path) -> dict[str, Outcome]:
    """Run cases on two processes, under a small disk and a read-only folder; values come back through JSON."""
    answer = folder / "outcomes.json"
    command = [sys.executable, "-m", "tests.chaos.mounted", str(answer), module, *cases]
    if can_mount():
        command = ["unshare", "-rm", *command, "--mount"]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    return {name: Outcome(values, failure) for name, (values, failure) in json.loads(answer.read_text()).items()}


def can_mount() -> bool:
    """Return whether this system lets a process mount in a namespace of its own."""
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def main() -> None:
    """Mount, run the cases, write their outcomes."""
    answer, module, *cases = [argument for argument in sys.argv[1:] if argument != "--mount"]
    environment = {}
    with tempfile.TemporaryDirectory(prefix="hf-fsdp-mounts-") as folder:
        small, fixed = os.path.join(folder, "small"), os.path.join(folder, "fixed")
        if "--mount" in sys.argv:
            os.mkdir(small)
            os.mkdir(fixed)
            mount("-t", "tmpfs", "-o", f"size={SMALL_DISK_MIB}m", "tmpfs", small)
            mount("-t", "tmpfs", "-o", "ro", "tmpfs", fixed)
            environment = {SMALL_DISK: small, READ_ONLY: fixed}
        try:
            outcomes = run_cases(module, cases, world_size=2, environment=environment)
        finally:
            for place in environment.values():
                subprocess.run(["umount", place], check=True)
    Path(answer).write_text(json.dumps({name: [outcome.values, outcome.failure] for name, outcome in outcomes.items()}))


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main()
