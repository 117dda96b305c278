"""The folder of a run: can it be written, and is there a checkpoint in it to go on from? Asked before data loads."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hf_fsdp.errors import ConfigError, nearest_names

# The file that every checkpoint of Trainer has, whatever the format of its weights.
_STATE_FILE = "trainer_state.json"


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


def find_resume_checkpoint(asked: str | bool | None, output_dir: str | Path) -> str | None:
    """Return the checkpoint folder to go on from, or None for a fresh start.

    Args:
        asked: `resume_from_checkpoint`: a folder, or ``true`` / ``last`` for the newest one in `output_dir`.
        output_dir: the folder of the run.

    Raises:
        ConfigError: there is no such folder, or Trainer did not finish writing it.
    """
    word = str(asked or "").strip()
    if word.lower() in ("", "false", "no", "none"):
        return None
    found = _find_checkpoints(Path(output_dir).expanduser())
    if word.lower() in ("true", "last"):
        if not found:
            raise ConfigError(
                f"resume_from_checkpoint={word}: there is no checkpoint in {output_dir}",
                fix="leave resume_from_checkpoint out to start anew, or give the output_dir of the run to go on with",
            )
        return str(found[-1])
    folder = Path(word).expanduser()
    if (folder / _STATE_FILE).is_file():
        return str(folder)
    inside = _find_checkpoints(folder) or _find_checkpoints(folder.parent) or found
    names = {path.name: str(path) for path in inside}
    near = [names[name] for name in nearest_names(folder.name, names)] or [str(path) for path in inside[-3:][::-1]]
    what = f"has no {_STATE_FILE}, so it is not a checkpoint of Trainer" if folder.is_dir() else "does not exist"
    raise ConfigError(
        f"resume_from_checkpoint={word}: the folder {what}",
        near=", ".join(near) or None,
        fix=f"resume_from_checkpoint: {near[0]}" if near else "leave resume_from_checkpoint out to start anew",
    )


def _find_checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints in `folder`, oldest first."""
    numbered = [
        (path.parent.name.rpartition("-")[2], path.parent) for path in folder.glob(f"checkpoint-*/{_STATE_FILE}")
    ]
    return [path for number, path in sorted((int(text), path) for text, path in numbered if text.isdigit())]
