"""What the recorded calls of a save must show: nothing takes the name of a checkpoint before its bytes are on the disk.

A file system may write in any order what was not synced. So the order that survives a loss of power is the order of
the fsyncs between the calls, and that is what is looked at.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.calls import Call


def order_problems(log: Sequence[Call], output_dir: str, step: int) -> list[str]:
    """Return every rule that the save of `step` broke; `log` holds the calls of all ranks by when they began.

    The checkpoint is still there: its files say what has to be in the log.
    """
    root = os.path.realpath(output_dir)
    staging, final = f"{root}/.hf-fsdp-saving-{step}", f"{root}/checkpoint-{step}"
    renames = [call for call in log if call.operation == "rename" and (call.path, call.target) == (staging, final)]
    if len(renames) != 1:
        return [f"{len(renames)} renames of {staging} to {final}"]
    rename, problems = renames[0], []
    began = max(
        (c.begin for c in log if c.operation == "mkdir" and c.path == staging and c.end < rename.begin), default=0
    )
    log = [call for call in log if call.begin >= began]
    manifest = f"{staging}/manifest.json"
    written = [call for call in log if call.operation == "write" and call.path == manifest]
    if not written:
        return ["the manifest was never written"]
    manifest_begins, manifest_ends = written[0].begin, written[-1].end
    if not Path(final, "manifest.json").exists():
        return [f"{final} is gone before it was looked at"]
    for path in sorted(Path(final).rglob("*")):
        if path.is_dir():
            continue
        inside = f"{staging}/{path.relative_to(final)}"
        writes = [call for call in log if call.operation == "write" and call.path == inside]
        if sum(call.size for call in writes) != path.stat().st_size:
            problems.append(f"{inside}: the log holds {sum(c.size for c in writes)} of its {path.stat().st_size} bytes")
        last = max((call.end for call in writes), default=0)
        if inside == manifest:
            continue
        if not _synced(log, inside, last, manifest_begins):
            problems.append(f"{inside} is not synced between its last write and the manifest")
    if not (manifest_synced := _synced(log, manifest, manifest_ends, rename.begin)):
        return [*problems, "the manifest is not synced before the rename"]
    folders = [staging, *(f"{staging}/{p.relative_to(final)}" for p in Path(final).rglob("*") if p.is_dir())]
    problems += [
        f"folder {folder} is not synced between the manifest and the rename"
        for folder in folders
        if not _synced(log, folder, manifest_synced.end, rename.begin)
    ]
    parent_synced = _synced(log, root, rename.end, None)
    if parent_synced is None:
        return [*problems, "the folder of the run is not synced after the rename"]
    for above in Path(root).parents:
        if not _synced(log, str(above), rename.end, None):
            problems.append(f"{above} is not synced, and the run may have made the folder in it")
    problems += _early_deletions(log, root, rename, parent_synced)
    return problems


def _early_deletions(log: Sequence[Call], root: str, rename: Call, parent_synced: Call) -> list[str]:
    problems = []
    for call in log:
        if call.operation not in ("rename", "rmtree", "unlink", "rmdir") or call.begin > parent_synced.end:
            continue
        first = os.path.relpath(call.path, root).split(os.sep)[0]
        if call.operation == "rename" and call.target.startswith(f"{root}/.hf-fsdp-replaced-"):
            if call.path != rename.target or call.end > rename.begin:
                problems.append(f"{call.path} lost its name for another step, or after the rename")
        elif first.startswith(("checkpoint-", ".hf-fsdp-replaced-", ".hf-fsdp-deleted-")):
            problems.append(f"{call.operation} of {call.path} comes before the new checkpoint is on the disk")
    return problems


def _synced(log: Sequence[Call], path: str, after: int, before: int | None) -> Call | None:
    """Return an fsync of `path` that began after one moment and ended before another."""
    for call in log:
        if call.operation == "fsync" and call.path == path and call.begin >= after:
            if before is None or call.end <= before:
                return call
    return None
