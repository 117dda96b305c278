"""A checkpoint as a folder that `from_pretrained` loads, whatever the model's size: one tensor is in memory at a time.

Nothing is exported that was not checked: the checkpoint's structure and hashes, the tensors against the model that
`config.json` describes, and at the end every tensor as it reads back from the new files.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hf_fsdp.checkpoint.export.draft import ADAPTER, ExportDraft, ExportOptions, draft_adapters, draft_model
from hf_fsdp.checkpoint.export.folder import (
    WrittenWeights,
    check_output,
    check_replaced,
    check_room,
    new_folder,
    parse_size,
    write_file,
    write_weights,
)
from hf_fsdp.checkpoint.export.plan import AUTO, DTYPES, SAVED, main_dtype
from hf_fsdp.checkpoint.export.saved_model import SavedModel, open_saved_model
from hf_fsdp.checkpoint.manifest import dtype_name
from hf_fsdp.checkpoint.verify import ADAPTER_FILE, check_hashes
from hf_fsdp.errors import CheckpointError, ConfigError, Problem
from hf_fsdp.sharding.adapters import DEFAULT_FOLDER
from hf_fsdp.storage.files import open_to_read, write_bytes
from hf_fsdp.storage.tensor_source import TensorSource


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was exported.

    Args:
        path: the folder.
        checkpoint: where it came from.
        kind: ``model``, ``adapter`` or ``merged``.
        files: every file, by name in the folder.
        num_tensors: in the weight files.
        num_bytes: of all tensors.
        dtype: of most of them.
        lines: what a person should know.
        seconds: that it took.
    """

    path: Path
    checkpoint: Path
    kind: str
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    dtype: str
    lines: tuple[str, ...]
    seconds: float


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    options: ExportOptions | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Export a checkpoint into a folder for `from_pretrained`, or an adapter into one for PEFT.

    In one process, without collectives, and without a change of torch's global state: training may go on meanwhile.

    Args:
        checkpoint: a committed checkpoint, a run folder (its newest committed one), or a checkpoint that Trainer or
            Accelerate wrote.
        output: the new folder; it is there whole, or not at all.
        options: dtype, merging, file size.
        on_bytes: called with the bytes written so far and all that there will be.

    Raises:
        CheckpointError: the checkpoint is damaged or does not fit its config, or the disk is full.
        ConfigError: the place is taken, or options do not fit.

    Example:
        >>> from hf_fsdp.checkpoint.export import ExportOptions, export_checkpoint
        >>> # export_checkpoint(Path("output/checkpoint-500"), Path("exported"), ExportOptions(dtype="bf16"))
    """
    options, began = options or ExportOptions(), time.monotonic()
    if options.dtype not in (AUTO, SAVED, *DTYPES):
        raise ConfigError(f"--dtype {options.dtype} is not known", fix=f"--dtype {'|'.join((*DTYPES, SAVED))}")
    max_bytes = parse_size(options.max_shard_size)
    saved = open_saved_model(checkpoint)
    sources: list[TensorSource] = [saved.source]
    reading = _HashCheck(saved, with_hashes=options.check_hashes)
    try:
        check_output(output, saved.folder, force=options.force)
        with reading:
            draft = _draft(saved, options)
            sources += draft.opened
            for base in draft.bases:
                check_output(output, base, force=options.force)
            check_replaced(output, {*draft.copies, *draft.texts})
            if not draft.tensors:
                raise CheckpointError(f"{saved.folder} holds no tensor to export", fix="take another checkpoint")
            check_room(output, draft.num_bytes + sum(path.stat().st_size for path in draft.copies.values()))
            files = _write(draft, output, max_bytes, reading, on_bytes)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise CheckpointError(
            f"the export to {output} failed: {error.filename or ''} {error.strerror or error}",
            fix="free space or choose another -o" if is_full else "another -o, that this user may write",
        ) from error
    finally:
        for source in sources:
            source.close()
    return ExportReport(
        path=output,
        checkpoint=saved.folder,
        kind=draft.kind,
        files=tuple(sorted(files)),
        num_tensors=len(draft.tensors),
        num_bytes=draft.num_bytes,
        dtype=dtype_name(main_dtype(draft.tensors)),
        lines=(*saved.lines, *draft.lines, *draft.closing()),
        seconds=round(time.monotonic() - began, 3),
    )


def _draft(saved: SavedModel, options: ExportOptions) -> ExportDraft:
    if options.merge_lora and not saved.adapters:
        raise ConfigError(f"--merge-lora: {saved.folder} holds no adapter", fix="leave --merge-lora out")
    if options.merge_lora:
        from hf_fsdp.checkpoint.export.merge_lora import draft_merged

        return draft_merged(saved, options)
    return draft_adapters(saved, options) if saved.adapters else draft_model(saved, options)


# -- writing ----------------------------------------------------------------------------------------------------------


def _write(
    draft: ExportDraft,
    output: Path,
    max_bytes: int,
    reading: _HashCheck,
    on_bytes: Callable[[int, int], None] | None,
) -> list[str]:
    """Write, read back and put in place; return the names of all files."""
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_bytes is not None:
            on_bytes(min(done, draft.num_bytes), draft.num_bytes)

    try:
        with new_folder(output) as folder:
            for name, path in draft.copies.items():
                if name not in draft.texts:
                    with open_to_read(path) as stream:
                        write_bytes(folder / name, stream.read())
            for name, data in draft.texts.items():
                write_bytes(folder / name, data)
            for written in _write_weights(folder, draft, max_bytes, count):
                written.compare()
            reading.raise_damage()
            return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    except CheckpointError:
        reading.raise_damage()  # the cause, when a damaged file led to the error
        raise


def _write_weights(
    folder: Path, draft: ExportDraft, max_bytes: int, count: Callable[[int], None]
) -> Sequence[WrittenWeights]:
    if draft.kind != ADAPTER:
        return [write_weights(folder, draft.weights[DEFAULT_FOLDER], max_bytes, count)]
    written = WrittenWeights(folder, [], {})
    for place, tensors in draft.weights.items():
        write_file(written, ADAPTER_FILE if place == DEFAULT_FOLDER else f"{place}/{ADAPTER_FILE}", tensors, count)
    return [written]


class _HashCheck:
    """Hashes of all files that are used, taken in a thread beside planning and writing.

    The same bytes are read by both, so the disk gives most of them once. Left early, it stops.
    """

    def __init__(self, saved: SavedModel, *, with_hashes: bool):
        self._saved, self._is_on = saved, with_hashes and saved.manifest is not None
        self._pool = ThreadPoolExecutor(1)
        self._is_over = False
        self._result: Future[list[Problem]] | None = None

    def __enter__(self) -> None:
        if self._is_on:
            self._result = self._pool.submit(self._check)

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._pool.shutdown()

    def _check(self) -> list[Problem]:
        assert self._saved.manifest is not None
        try:
            return check_hashes(self._saved.folder, self._saved.manifest, self._saved.used_files, self._go_on)
        except _OverError:
            return []

    def _go_on(self, num_bytes: int) -> None:
        if self._is_over:
            raise _OverError

    def raise_damage(self) -> None:
        """Wait for the end, and raise what was found."""
        if self._result is not None and (problems := self._result.result()):
            raise CheckpointError(problems[:5])


class _OverError(Exception):
    """Nobody waits for the hashes any more."""
