"""One folder that all ranks see, with room for what they will write: looked at before a save, not found out by it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path

from hf_fsdp.checkpoint.staged import StagedSave, cleaned_up
from hf_fsdp.errors import CheckpointError
from hf_fsdp.sharding.mesh import agree_all, rank
from hf_fsdp.sharding.outcome import agreed, rank_ends_explained
from hf_fsdp.storage.files import write_bytes
from hf_fsdp.units import format_bytes

# Headers, JSON files and a file system's own needs beside the tensors.
SPARE_BYTES = 16 * 1024**2
# A file that another machine wrote may take this long to show on a network file system.
PROBE_SECONDS = 5.0


def make_room(staged: StagedSave) -> None:
    """Make the staging folder, and prove that it is one folder for all ranks with room for all files; collective."""
    mine = sum(file.num_bytes for file in staged.files) + sum(map(len, staged.documents.values()))
    with rank_ends_explained(staged.action):
        needed = sum(agree_all(mine))

    def prepare() -> None:
        if rank() == 0:
            check_room(staged.output_dir, needed)

    with cleaned_up(staged):
        make_shared_folder(staged.folder, staged.action)
        agreed(staged.action, prepare)


def make_shared_folder(folder: Path, action: str) -> None:
    """Make `folder` anew on rank 0, and prove that all ranks see the same one; collective.

    Raises:
        CheckpointError: on all ranks alike: it cannot be made, or it is another one for another rank.
    """
    with rank_ends_explained(action):
        probe, token = folder / ".probe", agree_all(secrets.token_hex(8))[0]

    def prepare() -> None:
        if rank() == 0:
            if folder.exists():  # what an earlier attempt left that did not end
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            write_bytes(probe, token.encode())

    agreed(action, prepare)
    agreed(action, lambda: _look_for(probe, token))
    agreed(action, lambda: probe.unlink() if rank() == 0 else None)


def check_room(output_dir: Path, needed: int) -> None:
    """Refuse to begin what the disk has no room for.

    Raises:
        CheckpointError: fewer than `needed` bytes, and some to spare, are free.
    """
    free = shutil.disk_usage(output_dir).free
    if free < needed + SPARE_BYTES:
        raise CheckpointError(
            f"the checkpoint needs {format_bytes(needed)} and {output_dir} has {format_bytes(free)} free",
            fix="free space there, keep fewer checkpoints (save_total_limit=2), or choose another output_dir",
        )


def _look_for(probe: Path, token: str) -> None:
    deadline = time.monotonic() + PROBE_SECONDS
    while True:
        with contextlib.suppress(FileNotFoundError):
            os.listdir(probe.parent.parent)  # makes a network file system look again
            if probe.read_bytes() == token.encode():
                return
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{probe.parent.parent} is not one folder for all processes: what rank 0 writes there, "
                f"rank {rank()} does not see",
                fix="output_dir on a file system that all machines share",
            )
        time.sleep(0.1)
