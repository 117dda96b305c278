"""A Hugging Face folder, written beside its place, read back, and put there by a rename: it is never half there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from hf_fsdp.checkpoint.find import CHECKPOINT
from hf_fsdp.checkpoint.manifest import MANIFEST_FILE
from hf_fsdp.errors import CheckpointError, ConfigError, Problem
from hf_fsdp.storage.direct_file import read_pieces
from hf_fsdp.storage.files import files_under, fsync_folder, write_bytes
from hf_fsdp.storage.safetensors_file import TensorToWrite, read_header, tensor_bytes, write_safetensors
from hf_fsdp.storage.tensor_source import INDEX_FILE, WEIGHTS_FILE
from hf_fsdp.units import format_bytes

# Headers, configs and a file system's own needs.
SPARE_BYTES = 32 * 1024**2
_EXPORTED = ("config.json", "adapter_config.json")
_STAGING = ".hf-fsdp-exporting-"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE | re.ASCII)
_WEIGHTS = re.compile(r"(.*/)?(model|adapter_model)(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_FIX = "check the disk, and export again"


def parse_size(text: str | int) -> int:
    """Return ``5GB`` as bytes; with an i (``5GiB``) a thousand is 1,024, as in transformers.

    Raises:
        ConfigError: that is no size.
    """
    match = _SIZE.fullmatch(str(text).strip())
    size = 0.0
    if match:
        size = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")
    if not 1 <= size < 2**63:
        raise ConfigError(f"--max-shard-size {text} is no size", fix="--max-shard-size 5GB")
    return int(size)


def check_output(output: Path, checkpoint: Path, *, force: bool) -> None:
    """Refuse a place that an export must not take.

    Raises:
        ConfigError: it is there already and may not be replaced.
    """
    place, source = output.absolute().resolve(), checkpoint.absolute().resolve()
    if CHECKPOINT.fullmatch(place.name):
        raise ConfigError(
            f"-o {output} has the name of a checkpoint, which an exported model is not",
            fix=f"-o {output.parent / f'{output.name}-exported'}",
        )
    if source.is_relative_to(place):
        raise ConfigError(f"-o {output} is the checkpoint or a folder above it", fix=f"-o {output.name}-exported")
    if place.is_relative_to(source):
        raise ConfigError(
            f"-o {output} lies in the checkpoint, which would not be what was saved any more",
            fix=f"-o {checkpoint.resolve().parent / f'{checkpoint.name}-exported'}",
        )
    if not (output.exists() or output.is_symlink()) or _is_empty(output):
        return
    if not force:
        raise ConfigError(
            f"-o {output} exists and is not overwritten", fix="--force replaces it; or -o with another name"
        )
    if output.is_symlink() or not output.is_dir() or not _looks_exported(output):
        raise ConfigError(
            f"-o {output} is no exported model, so --force does not delete it",
            fix="-o with the name of a folder that is not there",
        )


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())


def _looks_exported(folder: Path) -> bool:
    """Whether a folder holds one model as others load it, and no run, no checkpoint and no repository."""
    names = {path.name for path in folder.iterdir()}
    is_run = any(CHECKPOINT.fullmatch(name) or name in (MANIFEST_FILE, ".git") for name in names)
    has_adapter = any((folder / name / _EXPORTED[1]).is_file() for name in names)
    return not is_run and (has_adapter or any(name in names for name in _EXPORTED))


def check_room(output: Path, num_bytes: int) -> None:
    """Refuse before a byte is written what does not fit on the disk.

    Raises:
        CheckpointError: too little is free.
    """
    place = output.absolute()
    while not place.is_dir():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < num_bytes + SPARE_BYTES:
        raise CheckpointError(
            f"the export takes {format_bytes(num_bytes + SPARE_BYTES)} and {place} has {format_bytes(free)} free",
            fix=f"free {format_bytes(num_bytes + SPARE_BYTES - free)}, or -o on another disk, or --dtype bf16",
        )


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `output` when the block ends well, and is gone when it does not."""
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(output)
    staging = output.with_name(f".{output.name}{_STAGING}{os.getpid()}-{secrets.token_hex(4)}")
    staging.mkdir()
    try:
        yield staging
        for folder, _, _ in os.walk(staging, topdown=False):
            fsync_folder(Path(folder))
        old = None
        if output.exists() and not _is_empty(output):
            old = staging.with_name(f"{staging.name}-replaced")
            os.rename(output, old)
        try:
            os.rename(staging, output)
        except OSError:
            if old is not None:
                os.rename(old, output)
            raise
        fsync_folder(output.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_replaced(output: Path, new: Container[str]) -> None:
    """Refuse, before a byte is written, to replace a folder that holds what no export put there.

    Args:
        output: the place; it may not exist.
        new: the files beside the weights that this export writes.
    """
    strangers = [name for name in files_under(output) if name not in new and not _WEIGHTS.fullmatch(name)]
    if strangers:
        raise ConfigError(
            f"-o {output} holds {strangers[0]}, which this export does not write and --force would delete",
            fix="move it away, or -o with the name of a folder that is not there",
        )


def _remove_leftovers(output: Path) -> None:
    """Remove what killed exports to the same place left, unless their process still runs."""
    for path in output.parent.glob(f".{_glob_escape(output.name)}{_STAGING}*"):
        process = path.name.rpartition(_STAGING)[2].split("-")[0]
        if path.name.endswith("-replaced") and not output.exists():
            os.rename(path, output)  # killed between two renames: what was there is worth more than nothing
        elif not (process.isdigit() and _is_running(int(process))):
            shutil.rmtree(path, ignore_errors=True)


def _glob_escape(name: str) -> str:
    return re.sub(r"([\[*?])", r"[\1]", name)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


# -- weights ----------------------------------------------------------------------------------------------------------


@dataclass
class WrittenWeights:
    """Weight files of a folder, and the hash of every tensor as it was handed over."""

    folder: Path
    files: list[str]
    digests: dict[str, dict[str, str]]

    def compare(self) -> None:
        """Read every file again and compare what it holds with what was handed over.

        Raises:
            CheckpointError: a tensor is not what it should be.
        """
        problems = []
        for name in self.files:
            path = self.folder / name
            found = _digests(path)
            wrong = [key for key in {*found, *self.digests[name]} if found.get(key) != self.digests[name].get(key)]
            problems += [Problem(message=f"{key} reads back wrong from {path}", fix=_FIX) for key in sorted(wrong)]
        if problems:
            raise CheckpointError(problems[:5])


def write_weights(
    folder: Path, tensors: Sequence[TensorToWrite], max_bytes: int, on_bytes: Callable[[int], None] | None = None
) -> WrittenWeights:
    """Write a model's files, and the index when there are several.

    Args:
        folder: where to.
        tensors: names are those of the files.
        max_bytes: of one file; a tensor that is larger gets a file of its own.
        on_bytes: called with the number of bytes of every piece.
    """
    shards = _split(tensors, max_bytes)
    names = [WEIGHTS_FILE]
    if len(shards) > 1:
        names = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
        write_bytes(folder / INDEX_FILE, _index(dict(zip(names, shards, strict=True))))
    written = WrittenWeights(folder, [], {})
    for name, shard in zip(names, shards, strict=True):
        write_file(written, name, shard, on_bytes)
    return written


def write_file(
    written: WrittenWeights, name: str, tensors: Sequence[TensorToWrite], on_bytes: Callable[[int], None] | None = None
) -> None:
    """Write one file and take the hash of every tensor on the way."""
    digests: dict[str, str] = {}

    def hashed(item: TensorToWrite) -> TensorToWrite:
        read_pieces = item.read_pieces
        if read_pieces is not None:

            def pass_on() -> Iterator[torch.Tensor]:
                digest = xxhash.xxh3_128()
                for piece in read_pieces():
                    digest.update(tensor_bytes(piece))
                    yield piece
                digests[item.name] = digest.hexdigest()

            return replace(item, read_pieces=pass_on)

        def read() -> torch.Tensor:
            tensor = item.read().detach().to(item.dtype).contiguous()
            digests[item.name] = xxhash.xxh3_128_hexdigest(tensor_bytes(tensor))
            return tensor

        return replace(item, read=read)

    (written.folder / name).parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(written.folder / name, [hashed(item) for item in tensors], on_bytes=on_bytes, direct=True)
    written.files.append(name)
    written.digests[name] = digests


def _split(tensors: Sequence[TensorToWrite], max_bytes: int) -> list[list[TensorToWrite]]:
    shards: list[list[TensorToWrite]] = [[]]
    size = 0
    for item in tensors:
        if shards[-1] and size + item.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.num_bytes
    return shards


def _index(shards: Mapping[str, Sequence[TensorToWrite]]) -> bytes:
    total = sum(item.num_bytes for shard in shards.values() for item in shard)
    content: dict[str, Any] = {
        "metadata": {"total_size": total},
        "weight_map": {item.name: name for name, shard in shards.items() for item in shard},
    }
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode("utf-8")


def _digests(path: Path) -> dict[str, str]:
    """Return the hash of every tensor in a file, as it comes from the disk."""
    entries = sorted(read_header(path).entries.values(), key=lambda entry: entry.begin)
    digests = {entry.name: xxhash.xxh3_128() for entry in entries}
    position, index = 0, 0
    for piece in read_pieces(path):
        end = position + len(piece)
        while index < len(entries) and entries[index].begin < end:
            entry = entries[index]
            digests[entry.name].update(piece[max(entry.begin - position, 0) : entry.end - position])
            if entry.end > end:
                break
            index += 1
        position = end
    return {name: digest.hexdigest() for name, digest in digests.items()}
