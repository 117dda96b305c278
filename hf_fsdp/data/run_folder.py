"""The folder of a run: can it be written, and is there a checkpoint in it to go on from? Asked before data loads."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hf_fsdp.checkpoint.find import (
    AUTO,
    TRAINER_STATE_FILE,
    FoundCheckpoint,
    find_checkpoints,
    may_start_anew,
    read_wish,
)
from hf_fsdp.checkpoint.manifest import MANIFEST_FILE
from hf_fsdp.errors import ConfigError, nearest_names


def check_output_dir(output_dir: str | Path) -> None:
    """Make the folder of the run, and check that a file can be written into it.

    Raises:
        ConfigError: it cannot; for example a file of that name, or no permission.
    """
    folder = Path(output_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"output_dir={str(output_dir)!r} cannot be written: {error.strerror or error}",
            fix="output_dir: runs/text   # or any folder that this user may write",
        ) from error


def find_resume_checkpoint(asked: str | bool | None, output_dir: str | Path) -> str | bool | None:
    """Return what to give `Trainer.train` as `resume_from_checkpoint`, once it is clear that there is something.

    Which one is the newest that is whole, and whether every byte of it is right, is found out by all processes
    together when training begins; here only what costs no time is looked at, before data and model load.

    Args:
        asked: `resume_from_checkpoint`: a folder, ``true`` / ``last`` for the newest one in `output_dir`, or ``auto``
            for the newest one if there is any.
        output_dir: the folder of the run.

    Returns:
        None for a fresh start, True for the newest one, or the folder.

    Raises:
        ConfigError: there is no such folder, or nothing committed in it.
    """
    wish = read_wish(asked)
    if wish is None:
        return None
    found = find_checkpoints(Path(output_dir).expanduser())
    usable = _paths(found)
    if wish is True or wish == AUTO:
        if wish == AUTO and not usable and may_start_anew(found):
            return None
        if not usable:
            raise ConfigError(
                f"resume_from_checkpoint={asked}: there is no checkpoint in {output_dir}"
                + "".join(f"\n  {item.path.name} is {item.problem}" for item in found),
                fix="leave resume_from_checkpoint out to start anew, or give the output_dir of the run to go on with",
            )
        return True
    folder = Path(wish).expanduser()
    beside = find_checkpoints(folder.parent)
    if (problem := _problem(folder, beside)) is None:
        return str(folder)
    inside = _paths(find_checkpoints(folder)) or _paths(beside) or usable
    names = {path.name: str(path) for path in inside}
    near = [names[name] for name in nearest_names(folder.name, names)] or [str(path) for path in inside[-3:][::-1]]
    raise ConfigError(
        f"resume_from_checkpoint={asked}: {problem}",
        near=", ".join(near) or None,
        fix=f"resume_from_checkpoint: {near[0]}" if near else "leave resume_from_checkpoint out to start anew",
    )


def _paths(found: list[FoundCheckpoint]) -> list[Path]:
    """Return those against which nothing is known, the newest last."""
    return [item.path for item in found if item.problem is None]


def _problem(folder: Path, beside: list[FoundCheckpoint]) -> str | None:
    """Return why the folder cannot be resumed from, or None."""
    if not folder.is_dir():
        return "it is a file, not the folder of a checkpoint" if folder.exists() else "the folder does not exist"
    known = next((item.problem for item in beside if item.path.name == folder.name), None)
    if known is not None:
        return known
    if not any((folder / name).is_file() for name in (MANIFEST_FILE, TRAINER_STATE_FILE)):
        return f"the folder has no {MANIFEST_FILE}, so it is not a checkpoint"
    return None
