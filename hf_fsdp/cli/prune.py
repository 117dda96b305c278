"""Which folders `hf-fsdp checkpoint prune` deletes, and the deletion."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_fsdp.checkpoint.commit import DELETED, take_name
from hf_fsdp.checkpoint.find import CHECKPOINT, REPLACED, SAVING, find_checkpoints
from hf_fsdp.checkpoint.verify import verify_checkpoint
from hf_fsdp.cli.checkpoint_view import best_name, bytes_under, newest_committed
from hf_fsdp.errors import ConfigError
from hf_fsdp.storage.files import files_under
from hf_fsdp.units import format_bytes

# A save that goes on writes all the time; a slow one may wait for other machines.
QUIET_SECONDS = 600.0


@dataclass(frozen=True)
class PruneAction:
    """A folder that goes, and why."""

    path: Path
    reason: str
    num_bytes: int
    is_checkpoint: bool


@dataclass
class PrunePlan:
    """What goes and what stays."""

    folder: Path
    delete: list[PruneAction] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "deleted": [
                {"name": action.path.name, "reason": action.reason, "bytes": action.num_bytes} for action in self.delete
            ],
            "kept": [{"name": name, "reason": reason} for name, reason in self.kept],
            "bytes": sum(action.num_bytes for action in self.delete),
            "failed": self.failed,
        }

    def lines(self, *, dry_run: bool) -> list[str]:
        """Return what a person sees."""
        word = "would delete" if dry_run else "deleted"
        lines = [f"{word} {action.path.name}: {action.reason}" for action in self.delete]
        lines += [f"kept {name}: {reason}" for name, reason in self.kept]
        lines += [f"NOT deleted: {line}" for line in self.failed]
        freed = format_bytes(sum(action.num_bytes for action in self.delete))
        return [*lines, f"{freed} {'would be ' if dry_run else ''}freed"]


def plan_prune(folder: Path, keep: int | None, leftovers: bool, *, hashes: bool = True) -> PrunePlan:
    """Return what is to be deleted.

    Args:
        folder: of the run.
        keep: how many of the newest committed checkpoints stay; None deletes none.
        leftovers: whether folders of saves and deletions that died go.
        hashes: whether the bytes of those that stay are read: one that is damaged does not count as kept.

    Raises:
        ConfigError: `folder` is a checkpoint.
    """
    if CHECKPOINT.fullmatch(folder.resolve().name):
        raise ConfigError(f"{folder} is one checkpoint", fix=f"hf-fsdp checkpoint prune {folder.resolve().parent}")
    plan = PrunePlan(folder)
    found = find_checkpoints(folder)
    named = [item for item in found if item.is_committed and CHECKPOINT.fullmatch(item.path.name)]
    committed = [item for item in named if not item.path.is_symlink()]
    plan.kept += [(item.path.name, "a link") for item in named if item.path.is_symlink()]
    if keep is not None:
        best, newest, num_kept = best_name(found), newest_committed(found), 0
        for item in reversed(committed):
            name = item.path.name
            if num_kept < max(keep, 1):
                damage = verify_checkpoint(item.path) if hashes and len(committed) > keep else []
                why = "newest" if item is newest else f"among the newest {keep}"
                plan.kept.append((name, f"damaged: {damage[0].message}" if damage else why))
                num_kept += not damage
            elif item is newest or name == best:
                plan.kept.append((name, "newest" if item is newest else "the best"))
            else:
                plan.delete.append(_action(item.path, f"older than the newest {keep}", is_checkpoint=True))
        plan.delete.reverse()
    steps = {item.step for item in committed}
    for path in sorted(folder.iterdir()):
        if not path.is_dir() or path.is_symlink():
            continue
        if reason := _leftover(path, steps) if leftovers else None:
            if (age := _seconds_since_written(path)) < QUIET_SECONDS:
                plan.kept.append((path.name, f"written to {age:.0f} s ago: a save may still be going on"))
            else:
                plan.delete.append(_action(path, reason, is_checkpoint=False))
    plan.kept += [
        (item.path.name, item.problem) for item in found if item.problem and CHECKPOINT.fullmatch(item.path.name)
    ]
    return plan


def run_prune(plan: PrunePlan) -> None:
    """Delete; what could not be, or not to the last file, moves from ``plan.delete`` to ``plan.failed``."""
    for action in list(plan.delete):
        try:
            shutil.rmtree(take_name(action.path) if action.is_checkpoint else action.path)
        except OSError as error:
            plan.delete.remove(action)
            plan.failed.append(f"{action.path.name}: {error.filename or ''}: {error.strerror or error}")


def _leftover(path: Path, committed_steps: set[int]) -> str | None:
    if SAVING.fullmatch(path.name):
        return "a save that did not end"
    if path.name.startswith(DELETED):
        return "a deletion that did not end"
    match = REPLACED.fullmatch(path.name)
    # Without a committed one of its step it is the only copy.
    return "replaced by a later save of its step" if match and int(match[1]) in committed_steps else None


def _action(path: Path, reason: str, *, is_checkpoint: bool) -> PruneAction:
    return PruneAction(path, reason, bytes_under(path), is_checkpoint)


def _seconds_since_written(path: Path) -> float:
    newest = path.stat().st_mtime
    for name in files_under(path):
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, (path / name).stat().st_mtime)
    return time.time() - newest
