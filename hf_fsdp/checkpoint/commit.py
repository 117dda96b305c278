"""The last steps of a save, on rank 0: manifest, fsync, rename, and only then the deletion of older checkpoints."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from hf_fsdp.checkpoint.find import (
    CHECKPOINT,
    REPLACED,
    SAVING,
    FoundCheckpoint,
    checkpoint_folder,
    find_checkpoints,
    replaced_folder,
    staging_folder,
)
from hf_fsdp.checkpoint.manifest import Manifest
from hf_fsdp.storage.files import fsync_folder


@dataclass(frozen=True)
class Rotation:
    """Which checkpoints stay: the newest `limit` (None: all), and `best` in any case."""

    limit: int | None = None
    best: Path | None = None


def commit(output_dir: Path, manifest: Manifest) -> Path:
    """Make the staged files of ``manifest.step`` the checkpoint of that step; every file is on the disk already.

    The manifest comes last, then every folder is synced, then the folder takes its name. An earlier checkpoint of the
    same step keeps its files under another name until the new one is in place.
    """
    staging, final = staging_folder(output_dir, manifest.step), checkpoint_folder(output_dir, manifest.step)
    manifest.write(staging)
    for folder, _, _ in os.walk(staging, topdown=False):
        fsync_folder(Path(folder))
    replaced = _move_away(output_dir, manifest.step) if final.exists() else None
    try:
        os.rename(staging, final)
    except OSError:
        if replaced is not None:
            os.rename(replaced, final)
        raise
    fsync_folder(output_dir)
    for parent in output_dir.absolute().parents:  # the run may have made its output_dir and folders above it
        with contextlib.suppress(OSError):  # not ours to open
            fsync_folder(parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def _move_away(output_dir: Path, step: int) -> Path:
    """Take the name from the checkpoint that is replaced; what is worth most of what lies there stays on the disk."""
    final, replaced = checkpoint_folder(output_dir, step), replaced_folder(output_dir, step)
    if replaced.exists():  # left by a crash between two renames, or after them
        found = {item.path: item for item in find_checkpoints(output_dir)}
        is_hidden = replaced not in found  # by a committed one that has the name
        if not is_hidden and found[replaced].is_committed:
            take_name(final)  # damaged, or another program's and later than the crash; `rotate` deletes it
            return replaced
        shutil.rmtree(replaced)
    os.rename(final, replaced)
    return replaced


def rotate(output_dir: Path, saved: Path, keep: Rotation) -> list[str]:
    """Delete checkpoints beyond ``keep.limit``, the oldest first, and what dead saves left; return lines about it.

    Never deleted: `saved`, which was just committed, the best one, and what is damaged, a link, or no checkpoint.
    A checkpoint that is deleted loses its name first, so that a crash leaves no half of one.
    """
    lines = _give_names_back(output_dir)
    for path in output_dir.iterdir():
        if path.name.startswith(DELETED) or SAVING.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
            if SAVING.fullmatch(path.name):
                lines.append(f"removed {path.name}, the leftover of a save that did not end")
    if keep.limit is None or keep.limit <= 0:
        return lines
    # By when they were written: a run that was started again at an earlier step has later ones with lower numbers.
    candidates = [item for item in find_checkpoints(output_dir) if _may_go(item)]
    protected = {saved.resolve(), *([keep.best.resolve()] if keep.best is not None else [])}
    protected &= {item.path.resolve() for item in candidates}
    excess = len(candidates) - max(keep.limit, len(protected))
    for item in candidates:
        if excess <= 0:
            break
        if item.path.resolve() not in protected:
            delete(item.path)
            excess -= 1
    return lines


def _give_names_back(output_dir: Path) -> list[str]:
    """Undo what a crash left between the two renames that replace a checkpoint, and remove what it left after them."""
    lines: list[str] = []
    if not any(REPLACED.fullmatch(path.name) for path in output_dir.iterdir()):
        return lines
    for item in find_checkpoints(output_dir):
        final = checkpoint_folder(output_dir, item.step)
        if REPLACED.fullmatch(item.path.name) and item.is_committed and not final.exists():
            os.rename(item.path, final)
            fsync_folder(output_dir)
            lines.append(f"{final.name} has its name back: a crash came while it was replaced")
    visible = {item.path for item in find_checkpoints(output_dir)}
    for path in output_dir.iterdir():
        if REPLACED.fullmatch(path.name) and path not in visible:
            shutil.rmtree(path, ignore_errors=True)
    return lines


DELETED = ".hf-fsdp-deleted-"


def delete(path: Path) -> None:
    """Delete a checkpoint: first its name, then its files."""
    shutil.rmtree(take_name(path), ignore_errors=True)


def take_name(path: Path) -> Path:
    """Rename a checkpoint to what nothing takes for one, and return the new path."""
    away = path.with_name(f"{DELETED}{path.name}")
    shutil.rmtree(away, ignore_errors=True)
    os.rename(path, away)
    fsync_folder(path.parent)
    return away


def _may_go(item: FoundCheckpoint) -> bool:
    is_ours = CHECKPOINT.fullmatch(item.path.name) is not None and not item.path.is_symlink()
    return is_ours and (item.is_committed or item.is_foreign)
