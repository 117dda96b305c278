"""Which folders of a run are checkpoints: committed ones, and everything that only looks like one and why."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Literal

from hf_fsdp.checkpoint.manifest import MANIFEST_FILE, MODEL_ONLY, Manifest
from hf_fsdp.errors import CheckpointError, Problem
from hf_fsdp.storage.files import DAMAGED_FIX

CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
# None of these is matched by `checkpoint-*`, by which Trainer finds checkpoints to resume from and to delete.
SAVING = re.compile(r"\.hf-fsdp-saving-(\d+)")
_INCOMPLETE = "incomplete"
REPLACED = re.compile(r"\.hf-fsdp-replaced-(\d+)")
TRAINER_STATE_FILE = "trainer_state.json"


def staging_folder(output_dir: Path, step: int) -> Path:
    """Return where checkpoint `step` is written before it is committed."""
    return output_dir / f".hf-fsdp-saving-{step}"


def replaced_folder(output_dir: Path, step: int) -> Path:
    """Return where an earlier checkpoint of the same step goes while the new one takes its name."""
    return output_dir / f".hf-fsdp-replaced-{step}"


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """Return the folder of the committed checkpoint `step`."""
    return output_dir / f"checkpoint-{step}"


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder that is, was or wants to be a checkpoint.

    `problem` says in words why it cannot be resumed from; None when nothing is known against it. `manifest` is None
    for one that another program wrote. `created` is when it was written (UTC, ISO 8601): by it, and not by the step,
    the newest is found, since a run that was started again from an earlier step has later checkpoints with lower steps.
    """

    path: Path
    step: int
    manifest: Manifest | None = None
    problem: str | None = None
    created: str = ""

    @property
    def is_committed(self) -> bool:
        return self.manifest is not None and self.problem is None

    @property
    def is_foreign(self) -> bool:
        """Whether Trainer or Accelerate wrote it: it has no mark that says whether it is whole."""
        return self.manifest is None and self.problem is None


AUTO = "auto"  # the newest one if there is any, else a fresh start: one command for a first start and a later one


def read_wish(asked: str | bool | None) -> str | Literal[True] | None:
    """Return what `resume_from_checkpoint` means, also when it comes as a word from a command line.

    Returns:
        None: a fresh start; True: the newest one; `AUTO`; or the path of a folder.
    """
    word = str(asked or "").strip()
    if word.lower() in ("", "false", "no", "none"):
        return None
    if word.lower() in ("true", "last"):
        return True
    return AUTO if word.lower() == AUTO else word


def may_start_anew(found: Sequence[FoundCheckpoint]) -> bool:
    """Return whether a run loses nothing by a fresh start: all that is there are saves that never ended."""
    return all(SAVING.fullmatch(item.path.name) or (item.problem or "").startswith(_INCOMPLETE) for item in found)


def find_checkpoints(output_dir: Path) -> list[FoundCheckpoint]:
    """Return every checkpoint of a run, the newest last; folders of saves that never ended come with their problem.

    Sizes of all files are looked at, their bytes are not: see `verify_checkpoint`.
    """
    found = []
    if not output_dir.is_dir():
        return []
    for path in output_dir.iterdir():
        for pattern in (CHECKPOINT, REPLACED, SAVING):
            if (match := pattern.fullmatch(path.name)) and path.is_dir():
                with contextlib.suppress(FileNotFoundError):  # a run may delete it at this moment
                    found.append(_look_at(path, int(match[1]), pattern))
    committed = {item.step for item in found if item.is_committed and CHECKPOINT.fullmatch(item.path.name)}
    found = [
        item for item in found if not (REPLACED.fullmatch(item.path.name) and item.step in committed)
    ]  # a crash came after the new one took its name: nothing but garbage
    return sorted(found, key=lambda item: (item.created, item.step, item.path.name))


def _look_at(path: Path, step: int, pattern: re.Pattern[str]) -> FoundCheckpoint:
    created = _written_at(path)
    if pattern is SAVING:
        return FoundCheckpoint(path, step, problem="a save that did not end", created=created)
    if not (path / MANIFEST_FILE).exists():
        return FoundCheckpoint(path, step, problem=lack_of_mark(path), created=created)
    try:
        manifest = Manifest.read(path)
    except (CheckpointError, OSError) as error:
        return FoundCheckpoint(path, step, problem=f"damaged: {str(error).splitlines()[0]}", created=created)
    return FoundCheckpoint(path, step, manifest, _check_sizes(path, manifest), manifest.created or created)


def lack_of_mark(folder: Path) -> str | None:
    """Return why a folder without a manifest is nobody's checkpoint, or None when another program's could look so."""
    if any((folder / name).is_dir() for name in ("state", "model", "optimizer")):
        return f"{_INCOMPLETE}: it has no {MANIFEST_FILE}"
    if not (folder / TRAINER_STATE_FILE).exists():
        return f"{_INCOMPLETE}: it has no {MANIFEST_FILE} and no {TRAINER_STATE_FILE}"
    return None


def _written_at(path: Path) -> str:
    state = path / TRAINER_STATE_FILE
    seconds = (state if state.exists() else path).stat().st_mtime
    with contextlib.suppress(ValueError, OverflowError, OSError):  # a clock may have said anything
        return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="microseconds")
    return ""


def creation_time(output_dir: Path) -> str:
    """Return the time for the next commit: now, or just after the last one when the clock went back since.

    Checkpoints are ordered by it. Another machine's clock may be late by minutes, and what it saves must not be the
    oldest: it would be deleted first.
    """
    now = datetime.now(timezone.utc)
    manifests = [path / MANIFEST_FILE for path in output_dir.iterdir() if CHECKPOINT.fullmatch(path.name)]
    with contextlib.suppress(CheckpointError, OSError, ValueError):
        newest = max((path for path in manifests if path.exists()), key=lambda path: path.stat().st_mtime_ns)
        now = max(now, datetime.fromisoformat(Manifest.read(newest.parent).created) + timedelta(microseconds=1))
    return now.isoformat(timespec="microseconds")


def _check_sizes(path: Path, manifest: Manifest) -> str | None:
    for name, record in manifest.files.items():
        file = path / name
        if not file.is_file():
            return f"damaged: {name} is missing"
        if file.stat().st_size != record.size:
            return f"damaged: {name} has {file.stat().st_size} bytes instead of {record.size}"
    return None


def newest_usable(
    found: Sequence[FoundCheckpoint],
    look_closer: Callable[[FoundCheckpoint], str | None],
    say: Callable[[str], None],
    *,
    optimizer_is_fresh: bool = False,
) -> FoundCheckpoint | None:
    """Return the newest checkpoint that can be resumed from, and say of every newer one why it is skipped.

    Args:
        found: as `find_checkpoints` returns them.
        look_closer: returns what is wrong with a committed or foreign one (hashes, missing parts), or None.
        say: is given a line for each that is skipped. Nothing is touched.
        optimizer_is_fresh: whether a checkpoint without an optimizer will do.
    """
    for item in reversed(found):
        problem = item.problem
        if problem is None and item.manifest is not None and item.manifest.content == MODEL_ONLY:
            if not optimizer_is_fresh:
                problem = "it holds the model only (checkpoint: {optimizer: fresh} takes it)"
        problem = problem or look_closer(item)
        if problem is None:
            return item
        say(f"resume: {item.path.name} is skipped: {problem}")
    return None


def choose_checkpoint(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the checkpoint that `path` means, and lines about newer ones that were passed over.

    Raises:
        CheckpointError: the checkpoint, or every one of the run, is damaged or was not committed.
    """
    if (path / MANIFEST_FILE).is_file():
        return path, ()
    real = path.resolve()
    if CHECKPOINT.fullmatch(real.name):
        this = next((item for item in find_checkpoints(real.parent) if item.path.name == real.name), None)
        if this is not None and this.problem is not None:
            raise CheckpointError(f"{path} is {this.problem}", fix=DAMAGED_FIX)
        return path, ()
    lines: list[str] = []
    found = find_checkpoints(path)
    for item in reversed(found):
        if item.problem is None:
            return item.path, (f"taken: {item.path.name}, the newest of {path}", *lines)
        lines.append(f"skipped: {item.path.name}: {item.problem}")
    if found:
        problems = [
            Problem(message=f"{item.path} is no use: {item.problem}", fix=DAMAGED_FIX) for item in reversed(found)
        ]
        raise CheckpointError(problems)
    return path, ()
