"""What a folder of torch DCP holds: every tensor with the parts that make it up, checked before anything is read."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_fsdp.checkpoint.foreign.unpickle import Record, load_dcp_pickle
from hf_fsdp.errors import CheckpointError, Problem
from hf_fsdp.storage.files import DAMAGED_FIX, safe_join
from hf_fsdp.storage.safetensors_file import MAX_DIMS, TensorEntry
from hf_fsdp.storage.tensor_source import TensorInfo, check_coverage

METADATA_FILE = ".metadata"
_MAX_PROBLEMS = 5


@dataclass(frozen=True)
class StoredRange:
    """Where `torch.save` put one object: bytes ``begin:end`` of a file that holds many."""

    path: Path
    begin: int
    end: int


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor: its offsets and shape in the whole one, and the object that holds it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    stored: StoredRange


@dataclass(frozen=True)
class DcpFolder:
    """The content of a DCP checkpoint.

    Args:
        path: the folder.
        tensors: key -> dtype and shape.
        parts: key -> the parts of that tensor; they cover it, each element once.
        values: key -> where a value that is no tensor lies.
        paths: key -> the way to it through the nested state dict, e.g. ``("optimizer", "param_groups", 0, "lr")``.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]
    parts: Mapping[str, tuple[StoredPart, ...]]
    values: Mapping[str, StoredRange]
    paths: Mapping[str, tuple[str | int, ...]]


def read_dcp_folder(folder: Path) -> DcpFolder:
    """Return what a DCP folder holds, without reading tensors.

    Raises:
        CheckpointError: `.metadata` is missing, damaged or hostile; a file that it names is missing, too short or
            outside of the folder; the parts of a tensor leave gaps or overlap.
    """
    try:
        with _garbage_collection_paused():
            return _read(folder, load_dcp_pickle(safe_join(folder, METADATA_FILE)))
    except _MalformedError as error:
        raise CheckpointError(f"{folder / METADATA_FILE} is damaged: {error}", fix=DAMAGED_FIX) from error


@contextlib.contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Metadata of 300 tensors on 512 ranks are two million objects, all kept: looking for garbage is time lost."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _MalformedError(Exception):
    """The metadata is not of the form that DCP writes."""


def _read(folder: Path, metadata: Record) -> DcpFolder:
    ranges = _ranges(folder, metadata.get("storage_data"))
    tensors: dict[str, TensorInfo] = {}
    parts: dict[str, tuple[StoredPart, ...]] = {}
    values: dict[str, StoredRange] = {}
    problems: list[Problem] = []
    for key, item in _mapping(metadata.get("state_dict_metadata"), "state_dict_metadata").items():
        kind = _text(key, "a key") and _record(item, key).class_name.rpartition(".")[2]
        if kind == "BytesStorageMetadata":
            if (stored := ranges.get((key, None))) is None:
                problems.append(Problem(message=f"{key} of {folder} is in none of its files", fix=DAMAGED_FIX))
            else:
                values[key] = stored
        elif kind == "TensorStorageMetadata":
            tensors[key], parts[key], problem = _tensor(key, item, ranges)
            problems += [problem] if problem is not None else []
        else:
            raise _MalformedError(f"{key} is a {kind}")
    if not problems:
        problems = _file_problems(folder, [p.stored for some in parts.values() for p in some] + list(values.values()))
    if problems:
        raise CheckpointError(problems[:_MAX_PROBLEMS])
    return DcpFolder(folder, tensors, parts, values, _paths(metadata, set(tensors) | set(values)))


def _ranges(folder: Path, storage: Any) -> dict[tuple[str, tuple[int, ...] | None], StoredRange]:
    paths: dict[str, Path] = {}
    result = {}
    for index, info in _mapping(storage, "storage_data").items():
        key = _text(_record(index, "an entry of storage_data").get("fqn"), "a key")
        info = _record(info, key)
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{key} of {folder} was written through a DCP extension, such as compression, and cannot be read",
                fix="save again with: FileSystemWriter(PATH) without extensions",
            )
        name = _text(info.get("relative_path"), key)
        if name not in paths:
            paths[name] = safe_join(folder, name)
        begin, length = _number(info.get("offset"), key), _number(info.get("length"), key)
        offset = index.get("offset")
        place = None if offset is None else _sizes(offset, key)
        result[key, place] = StoredRange(paths[name], begin, begin + length)
    return result


def _tensor(
    key: str, item: Record, ranges: Mapping[tuple[str, tuple[int, ...] | None], StoredRange]
) -> tuple[TensorInfo, tuple[StoredPart, ...], Problem | None]:
    info = TensorInfo(_dtype(_record(item.get("properties"), key), key), _sizes(item.get("size"), key))
    chunks = item.get("chunks")
    if not isinstance(chunks, list):
        raise _MalformedError(f"{key} has no list of chunks")
    entries: list[TensorEntry] = []
    parts: list[StoredPart] = []
    for chunk in chunks:
        offsets = _sizes(_record(chunk, key).get("offsets"), key)
        shape = _sizes(chunk.get("sizes"), key)
        if not len(offsets) == len(shape) == len(info.shape):
            raise _MalformedError(f"{key} has {len(info.shape)} dimensions and a chunk of it {len(shape)}")
        stored = ranges.get((key, offsets))
        if not math.prod(shape):
            continue
        if stored is None:
            return info, (), Problem(message=f"the part of {key} at {list(offsets)} is in no file", fix=DAMAGED_FIX)
        num_bytes = math.prod(shape) * info.dtype.itemsize
        if stored.end - stored.begin < num_bytes:
            raise _MalformedError(f"{num_bytes} bytes of {key} are said to lie in {stored.end - stored.begin}")
        entries.append(TensorEntry(key, info.dtype, shape, offsets, stored.begin, stored.end))
        parts.append(StoredPart(offsets, shape, stored))
    return info, tuple(parts), check_coverage(key, info, entries)


def _file_problems(folder: Path, ranges: list[StoredRange]) -> list[Problem]:
    """Files that are missing or end too early; said once a file, not once a tensor."""
    ends: dict[Path, int] = {}
    counts: dict[Path, int] = {}
    for stored in ranges:
        ends[stored.path] = max(ends.get(stored.path, 0), stored.end)
        counts[stored.path] = counts.get(stored.path, 0) + 1
    problems = []
    for path, end in sorted(ends.items()):
        lost = f"it holds parts of {counts[path]} of the values in {folder.name}"
        if not path.is_file():
            problems.append(Problem(message=f"{path} is missing; {lost}", fix=DAMAGED_FIX))
        elif (size := path.stat().st_size) < end:
            problems.append(
                Problem(message=f"{path} is cut off: it has {size} of {end} bytes; {lost}", fix=DAMAGED_FIX)
            )
    return problems


def _paths(metadata: Record, keys: set[str]) -> dict[str, tuple[str | int, ...]]:
    planner_data = metadata.get("planner_data")
    if planner_data is None:
        return {key: (key,) for key in keys}
    paths: dict[str, tuple[str | int, ...]] = {}
    for key, path in _mapping(planner_data, "planner_data").items():
        if key not in keys:
            continue
        if not isinstance(path, tuple) or not all(isinstance(step, str | int) for step in path):
            raise _MalformedError(f"the way to {key} is not made of names")
        paths[key] = path
    return {key: paths.get(key, (key,)) for key in keys}


# -- values of the metadata, which may be anything until they were looked at -------------------------------------------


def _mapping(value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _MalformedError(f"{what} is not a mapping")
    return value


def _record(value: Any, what: str) -> Record:
    if not isinstance(value, Record):
        raise _MalformedError(f"{what} is described by a {type(value).__name__}")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _MalformedError(f"{what} is a {type(value).__name__} where a name should be")
    return value


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise _MalformedError(f"{what} has no size or place in a file")
    return value


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > MAX_DIMS:
        raise _MalformedError(f"{what} has no shape")
    return tuple(_number(size, what) for size in value)


def _dtype(properties: Record, key: str) -> torch.dtype:
    """DCP writes the properties' fields as a tuple that begins with the dtype; older ones as a mapping."""
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else properties.get("dtype")
    if not isinstance(dtype, torch.dtype):
        raise _MalformedError(f"{key} has no dtype")
    return dtype
