"""Run a training script, and end rank 0 by SIGKILL in the middle of one of its saves.

    accelerate launch --config_file FILE train_until_killed.py --step 8 recipes/text/train.py CONFIG ...

The kill comes when every rank has written its shards and all of them have been reread: only the manifest and the name
are missing. The script and the library are as they always are; in this process alone, a function that kills stands in
for the one that commits. SIGKILL gives a process no chance to tidy up.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_fsdp.checkpoint import write


def killing_at(step: int, commit: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `commit` that kills this process instead of committing `step`."""

    def commit_or_die(output_dir: Path, manifest: Any, *args: Any, **kwargs: Any) -> Any:
        if manifest.step != step:
            return commit(output_dir, manifest, *args, **kwargs)
        print(f"demo: SIGKILL to rank 0 (process {os.getpid()}), in the save of step {step}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    return commit_or_die


def main() -> None:
    """Put the killer in place, then run the script as the launcher would have."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--step", type=int, required=True, help="the save that does not end")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script and its arguments")
    arguments = parser.parse_args()
    write.commit = killing_at(arguments.step, write.commit)
    sys.argv = arguments.command
    sys.path[0] = str(Path(arguments.command[0]).parent)
    runpy.run_path(arguments.command[0], run_name="__main__")


if __name__ == "__main__":
    main()
