"""Files that are there whole or not at all: drafts beside them first, then all names at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path


def write_whole(texts: Mapping[Path, str]) -> None:
    """Write files that belong together; where one cannot be written, those that were there stay as they were.

    Args:
        texts: by path. Folders are made; a link keeps pointing where it does.

    Raises:
        OSError: a folder cannot be made, or the disk is full.
    """
    drafts: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            target = path.resolve() if path.is_symlink() else path
            if target.exists() and not target.is_file():  # a device or a pipe has no draft
                target.write_text(text, encoding="utf-8")
                continue
            drafts[target] = target.with_name(f".{target.name}.draft")
            drafts[target].write_text(text, encoding="utf-8")
        for target, draft in drafts.items():
            os.replace(draft, target)
    except BaseException:
        for draft in drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        raise


def find_obstacle(folder: Path) -> str | None:
    """Return why no file can be put into `folder`, which need not exist yet; None where nothing is in the way."""
    for place in (folder, *folder.parents):
        if place.is_symlink() and not place.exists():
            return f"{place} is a link to nothing"
        if place.exists():
            if not place.is_dir():
                return f"{place} is not a folder"
            return None if os.access(place, os.W_OK | os.X_OK) else f"{place} is not this user's to write"
    return None
