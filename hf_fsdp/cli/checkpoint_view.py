"""What `hf-fsdp checkpoint list` and `verify` show of each folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hf_fsdp.checkpoint.find import (
    CHECKPOINT,
    SAVING,
    TRAINER_STATE_FILE,
    FoundCheckpoint,
    find_checkpoints,
)
from hf_fsdp.checkpoint.manifest import MANIFEST_FILE, MODEL_ONLY
from hf_fsdp.checkpoint.verify import verify_checkpoint
from hf_fsdp.errors import CheckpointError, Problem
from hf_fsdp.storage.files import files_under, read_json, safe_join
from hf_fsdp.units import format_bytes

LIST_HEADER = ("STEP", "CHECKPOINT", "SAVED (UTC)", "SIZE", "RANKS", "CONTENT", "STATE", "")
COMMITTED, FOREIGN, UNFINISHED, DAMAGED = "committed", "another program's", "unfinished", "damaged"


@dataclass(frozen=True)
class Look:
    """A folder of a run as `find_checkpoints` sees it, with its size and what it is to the run."""

    found: FoundCheckpoint
    num_bytes: int
    is_newest: bool = False
    is_best: bool = False

    @property
    def name(self) -> str:
        return self.found.path.name

    @property
    def is_committed(self) -> bool:
        return self.found.is_committed

    @property
    def state(self) -> str:
        if self.found.problem is None:
            return COMMITTED if self.is_committed else FOREIGN
        return UNFINISHED if SAVING.fullmatch(self.name) else DAMAGED

    @property
    def content(self) -> str | None:
        manifest = self.found.manifest
        if manifest is None:
            return None
        kind = "adapter" if manifest.is_adapter else "whole"
        return f"{kind}, model only" if manifest.content == MODEL_ONLY else kind

    def to_json(self) -> dict[str, Any]:
        manifest = self.found.manifest
        return {
            "name": self.name,
            "path": str(self.found.path),
            "step": self.found.step,
            "created": self.found.created or None,
            "bytes": self.num_bytes,
            "world_size": manifest.world_size if manifest is not None else None,
            "content": self.content,
            "model_class": manifest.model_class if manifest is not None else None,
            "state": self.state,
            "committed": self.is_committed,
            "problem": self.found.problem,
            "newest": self.is_newest,
            "best": self.is_best,
        }


def look(folder: Path) -> list[Look]:
    """Return the checkpoints of a run, the newest last; of a folder that is one itself, that one."""
    is_one = (folder / MANIFEST_FILE).is_file() or CHECKPOINT.fullmatch(folder.resolve().name) is not None
    run = folder.resolve().parent if is_one else folder
    found = find_checkpoints(run)
    best = best_name(found)
    newest = newest_committed(found)
    if is_one:
        mine = [item for item in found if item.path.name == folder.resolve().name]
        found = mine or [_renamed(folder)]
    return [
        Look(item, folder_bytes(item), newest is not None and item.path == newest.path, item.path.name == best)
        for item in found
    ]


def newest_committed(found: list[FoundCheckpoint]) -> FoundCheckpoint | None:
    """Return the checkpoint that a run resumes from, as far as sizes tell."""
    return next((item for item in reversed(found) if item.is_committed), None)


def _renamed(folder: Path) -> FoundCheckpoint:
    """A checkpoint that was copied to another name."""
    from hf_fsdp.checkpoint.manifest import Manifest

    try:
        manifest = Manifest.read(folder)
    except (CheckpointError, OSError) as error:
        return FoundCheckpoint(folder, 0, problem=f"damaged: {str(error).splitlines()[0]}")
    return FoundCheckpoint(folder, manifest.step, manifest, None, manifest.created)


def folder_bytes(item: FoundCheckpoint) -> int:
    """Return the size of a checkpoint on the disk."""
    return bytes_under(item.path)


def bytes_under(folder: Path) -> int:
    """Return the size of all files; those that vanish meanwhile, in a run that goes on, have none."""
    size = 0
    for name in files_under(folder):
        with contextlib.suppress(FileNotFoundError):
            size += (folder / name).stat().st_size
    return size


def best_name(found: list[FoundCheckpoint]) -> str | None:
    """Return the name of the best checkpoint, as the newest one's Trainer state says."""
    for item in reversed(found):
        if item.problem is None:
            try:
                state = read_json(safe_join(item.path, TRAINER_STATE_FILE))
            except CheckpointError:
                continue
            best = state.get("best_model_checkpoint") if isinstance(state, dict) else None
            return Path(best).name if isinstance(best, str) else None
    return None


def list_row(item: Look) -> list[str]:
    """Return the cells under `LIST_HEADER`."""
    marks = [word for word, is_on in (("newest", item.is_newest), ("best", item.is_best)) if is_on]
    manifest = item.found.manifest
    state = item.state if item.found.problem is None else item.found.problem
    return [
        str(item.found.step),
        item.name,
        _minute(item.found.created),
        format_bytes(item.num_bytes),
        str(manifest.world_size) if manifest is not None else "-",
        item.content or "-",
        state,
        ", ".join(marks),
    ]


def _minute(created: str) -> str:
    try:
        return datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return "-"


def verify_look(item: Look, *, hashes: bool, on_bytes: Callable[[int], None]) -> dict[str, Any]:
    """Return what is wrong with one folder, for JSON.

    A save that never ended is no damage: it was never a checkpoint, and nothing takes it for one.
    """
    note: str | None = None
    problems: list[Problem] = []
    state = item.state
    if state == UNFINISHED:
        note = item.found.problem
    elif state == FOREIGN:
        from hf_fsdp.checkpoint.foreign import open_foreign  # seconds of imports that `list` does without

        note = "another program wrote it, without hashes; its structure is whole"
        try:
            open_foreign(item.found.path).close()
        except CheckpointError as error:
            problems, note = list(error.problems), None
    elif item.found.manifest is None:
        problems = [Problem(message=item.found.problem or "", fix="take another checkpoint")]
    else:
        problems = verify_checkpoint(item.found.path, hashes=hashes, on_bytes=on_bytes)
    if problems and state in (COMMITTED, FOREIGN):
        state = DAMAGED
    return {
        "name": item.name,
        "path": str(item.found.path),
        "step": item.found.step,
        "state": state,
        "ok": not problems,
        "note": note,
        "problems": [{"message": problem.message, "fix": problem.fix} for problem in problems],
    }
