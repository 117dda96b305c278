"""What the cases of saving under fire share: a Trainer that can save any step, folders, fingerprints of folders."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.tensor import DTensor
from transformers import Trainer

from hf_fsdp.errors import CheckpointError
from hf_fsdp.integrations.checkpoint_seams import checkpoints_of
from hf_fsdp.sharding.mesh import agree_all, rank
from tests.chaos.calls import Calls
from tests.chaos.lives import build_trainer


@contextlib.contextmanager
def shared_folder(parent: str | None = None) -> Iterator[Path]:
    """Yield a new folder, the same on all ranks."""
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(tempfile.TemporaryDirectory(dir=parent)) if rank() == 0 else None
        yield Path(agree_all(mine)[0])
        agree_all(None)


def trained(output_dir: Path, num_steps: int = 1, **checkpoint: Any) -> Trainer:
    """Return a Trainer that has taken a step under sharding and saved nothing."""
    trainer = build_trainer(output_dir, checkpoint, save_strategy="no", max_steps=num_steps)
    quietly(trainer.train)
    for parameter in trainer.model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().numel() <= -(-parameter.shape[0] // 2) * parameter[0].numel()
    return trainer


def save(trainer: Trainer, step: int) -> None:
    """Save as Trainer does after step `step`, and wait until it is committed."""
    trainer.state.global_step = step
    quietly(trainer._save_checkpoint, trainer.model, None)
    finish(trainer)


def finish(trainer: Trainer) -> None:
    checkpoints = checkpoints_of(trainer)
    assert checkpoints is not None
    quietly(checkpoints.finish)


def quietly(do: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Call it and return what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        do(*args, **kwargs)
    return printed.getvalue()


def refused(do: Callable[[], Any]) -> dict[str, Any]:
    """Return how a save that must not work was refused on every rank, and how long that took."""
    began, error = time.monotonic(), None
    try:
        do()
    except CheckpointError as raised:
        error = str(raised)
    seconds = time.monotonic() - began
    return {"errors": agree_all(error), "seconds": max(agree_all(seconds))}


def fingerprint(folder: Path) -> dict[str, str]:
    """Return every entry under `folder` with a hash of what it holds."""
    agree_all(None)
    found = {}
    for path in sorted(folder.rglob("*")):
        content = xxhash.xxh3_64_hexdigest(path.read_bytes()) if path.is_file() else "folder"
        found[path.relative_to(folder).as_posix()] = content
    agree_all(None)
    return found


def names(folder: Path) -> list[str]:
    """Return what lies in a folder, once all ranks are here."""
    agree_all(None)
    return sorted(os.listdir(folder))


@contextlib.contextmanager
def failing(root: Path, rank: int, on_rank: int, operation: str, part: str, code: int) -> Iterator[list[str]]:
    """Let one call of one rank fail; yields the list of paths where it did."""
    hits: list[str] = []

    def before(done: str, path: str) -> None:
        if rank == on_rank and done == operation and part in path and not hits:
            hits.append(path)
            raise OSError(code, os.strerror(code), path)

    with Calls(root, rank, before):
        yield hits


def slow(seconds: float, part: str) -> Callable[[str, str], None]:
    def before(operation: str, path: str) -> None:
        if operation == "fsync" and part in path:
            time.sleep(seconds)

    return before
