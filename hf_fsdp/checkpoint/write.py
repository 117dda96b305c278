"""The second half of a save: write in parallel, reread, agree, commit, rotate; in a thread behind training or not."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from hf_fsdp.checkpoint.commit import commit, rotate
from hf_fsdp.checkpoint.find import creation_time
from hf_fsdp.checkpoint.manifest import Manifest, dtype_name
from hf_fsdp.checkpoint.parts import to_entry
from hf_fsdp.checkpoint.staged import SavedCheckpoint, StagedSave, cleaned_up
from hf_fsdp.checkpoint.verify import ADAPTER_FILE
from hf_fsdp.checkpoint.whole import check_adapters, check_parts
from hf_fsdp.errors import CheckpointError
from hf_fsdp.sharding.adapters import DEFAULT_FOLDER
from hf_fsdp.sharding.mesh import agree_all, rank, world_size
from hf_fsdp.sharding.outcome import OtherRankFailed, agreed, rank_ends_explained
from hf_fsdp.storage.files import FileRecord, files_under, fsync_file, hash_file, write_bytes
from hf_fsdp.storage.safetensors_file import TensorEntry, TensorToWrite, read_box, read_header, write_safetensors
from hf_fsdp.torch_private import process_group_store

# How many of a rank's tensors are read back and compared with what was to be written.
NUM_COMPARED = 8


def finish_save(staged: StagedSave, group: dist.ProcessGroup | None = None) -> SavedCheckpoint:
    """Write what was collected, reread it, agree, commit, rotate; collective on `group`.

    Raises:
        CheckpointError: on all ranks alike; the staging folder is gone, earlier checkpoints are untouched.
    """
    action, folder = staged.action, staged.folder
    with cleaned_up(staged):
        records = agreed(action, lambda: _write_files(staged), group)
        headers = agreed(action, lambda: _compare_files(staged), group)
        with rank_ends_explained(action):
            everything = agree_all((records, headers), group)
        agreed(action, lambda: _check_whole(staged.manifest, everything) if rank() == 0 else None, group)

        def put_in_place() -> tuple[Path, Manifest] | None:
            if rank() != 0:
                return None
            files = {name: record for theirs, _ in everything for name, record in theirs.items()}
            extras = extra_files(folder, files)
            if extras != staged.extras:
                lost = min({name for name in {*extras, *staged.extras} if extras.get(name) != staged.extras.get(name)})
                raise CheckpointError(f"{folder / lost} was changed or removed while it was saved", fix=_ONE_RUN_FIX)
            files.update(extras)
            manifest = _complete(staged, files)
            return commit(staged.output_dir, manifest), manifest

        committed = agreed(action, put_in_place, group)
        with rank_ends_explained(action):
            path, manifest = agree_all(committed, group)[0]
    lines: list[str] = []
    if rank() == 0:
        try:
            lines = rotate(staged.output_dir, path, staged.keep)
        except OSError as error:  # what is saved is saved
            lines = [f"older checkpoints could not be deleted: {error}"]
    return SavedCheckpoint(path, manifest, time.monotonic() - staged.began, (*staged.lines, *lines))


def _write_files(staged: StagedSave) -> dict[str, FileRecord]:
    watch = _OthersWatch(staged.attempt)
    records = {}
    try:
        for file in staged.files:
            _make_subfolder(staged.folder, file.name)
            records[file.name] = write_safetensors(
                staged.folder / file.name,
                file.tensors,
                {"hf_fsdp_step": str(staged.manifest.step)},
                on_bytes=watch.look,
            )
        for name, data in staged.documents.items():
            _make_subfolder(staged.folder, name)
            records[name] = write_bytes(staged.folder / name, data)
    except OtherRankFailed:
        raise
    except BaseException:
        watch.tell()
        raise
    return records


def _make_subfolder(folder: Path, name: str) -> None:
    """Make the folder of a file, but never the staging folder: without it, what was in it is gone."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} was removed while it was saved", fix=_ONE_RUN_FIX)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)


class _OthersWatch:
    """Between two pieces, look whether another rank has failed: nobody writes gigabytes for a save that is lost."""

    SECONDS_BETWEEN_LOOKS = 1.0

    def __init__(self, attempt: str):
        self._key = f"hf-fsdp-save-{attempt}-failed"
        self._store = process_group_store() if world_size() > 1 else None
        self._next = 0.0

    def tell(self) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store went with the rank that kept it
                self._store.set(self._key, str(rank()))

    def look(self, num_bytes: int) -> None:
        if self._store is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self.SECONDS_BETWEEN_LOOKS
        with contextlib.suppress(RuntimeError):
            if self._store.check([self._key]):
                raise OtherRankFailed


Headers = list[tuple[str, list[tuple[str, str, tuple[int, ...], tuple[int, ...]]]]]


def _compare_files(staged: StagedSave) -> Headers:
    """Reread a sample of what was written, past the page cache where the system lets us, against what was to be.

    Returns:
        What the files of this rank hold, as they are on the disk: file name -> parts.
    """
    headers: Headers = []
    for file in staged.files:
        path = staged.folder / file.name
        if not path.is_file():
            raise CheckpointError(f"{path} was removed while it was saved", fix=_ONE_RUN_FIX)
        header = read_header(path)
        wanted = {tensor.name: (tensor.dtype, tensor.shape, tensor.offsets) for tensor in file.tensors}
        found = {name: (entry.dtype, entry.shape) for name, entry in header.entries.items()}
        if found != {name: value[:2] for name, value in wanted.items()}:
            raise CheckpointError(f"{path} does not hold what was written to it", fix=_DISK_FIX)
        step = max(1, len(file.tensors) // NUM_COMPARED)
        compared = list(file.tensors[::step])
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            for tensor in compared:
                _compare(descriptor, path, header.entries[tensor.name], tensor)
        finally:
            os.close(descriptor)
        parts = [(e.name, dtype_name(e.dtype), e.shape, e.offsets) for e in header.entries.values()]
        headers.append((file.name, parts))
    return headers


_ONE_RUN_FIX = "let one run at a time use an output_dir; earlier checkpoints are untouched"
_DISK_FIX = "check the disk; earlier checkpoints are untouched"


def _compare(descriptor: int, path: Path, entry: TensorEntry, tensor: TensorToWrite) -> None:
    back = torch.empty(entry.shape, dtype=entry.dtype)
    read_box(descriptor, entry, entry.offsets, back)
    live = tensor.read().detach().to(device="cpu", dtype=entry.dtype).contiguous()
    if not torch.equal(back.reshape(-1).view(torch.uint8), live.reshape(-1).view(torch.uint8)):
        raise CheckpointError(f"{path}: {tensor.name} reads back with other values than were written", fix=_DISK_FIX)


def _check_whole(manifest: Manifest, everything: Sequence[tuple[Mapping[str, FileRecord], Headers]]) -> None:
    """Check over all ranks' files that every tensor of the manifest is there, each value once."""
    problems = check_adapters(manifest.adapters)
    for section in ("model", "optimizer"):
        parts: dict[str, list[TensorEntry]] = {}
        for _, headers in everything:
            for file, entries in headers:
                if (file.split("/")[0] == "optimizer") != (section == "optimizer"):
                    continue
                names = _names_in(manifest, file)
                for key, dtype, shape, offsets in entries:
                    parts.setdefault(names.get(key, key), []).append(to_entry(key, dtype, shape, offsets))
        problems += [
            dataclasses.replace(problem, fix=_DISK_FIX) for problem in check_parts(getattr(manifest, section), parts)
        ]
    if problems:
        raise CheckpointError(problems[:5])


def _names_in(manifest: Manifest, file: str) -> Mapping[str, str]:
    if not file.endswith(ADAPTER_FILE):
        return {}
    return manifest.adapters.get(file.rpartition("/")[0] or DEFAULT_FOLDER, {})


def extra_files(folder: Path, known: Container[str] = ()) -> dict[str, FileRecord]:
    """Return the records of what `write_extras` left, made durable: other packages do not sync their files."""
    records = {}
    for name in files_under(folder):
        if name not in known:
            fsync_file(folder / name)
            records[name] = hash_file(folder / name)
    return records


def _complete(staged: StagedSave, files: Mapping[str, FileRecord]) -> Manifest:
    return dataclasses.replace(
        staged.manifest,
        files=dict(sorted(files.items())),
        save_seconds=round(time.monotonic() - staged.began, 3),
        created=creation_time(staged.output_dir),
    )
