"""The manifest: what a checkpoint holds, written last; a folder without it is no checkpoint.

A rename is not atomic on every file system and object stores have none, so the mark of a commit is a file: it names
every other file with its size and hash, and carries a checksum of itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import xxhash

from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.files import DAMAGED_FIX, FileRecord, read_json, write_json
from hf_fsdp.storage.safetensors_file import DTYPES
from hf_fsdp.storage.tensor_source import TensorInfo

MANIFEST_FILE = "manifest.json"
KIND = "hf-fsdp checkpoint"
FORMAT_VERSION = 1
# The whole state, or only what a model needs to be used: a save that had to fit a short grace.
WHOLE, MODEL_ONLY = "whole", "model_only"
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `manifest.json` says.

    Args:
        step: optimizer steps that were taken.
        content: `WHOLE`, or `MODEL_ONLY` without the optimizer's state.
        world_size: processes that saved.
        mesh: axis -> size.
        model_class: as `transformers` names it.
        precision: the preset that the run computed in; empty for one that was not sharded.
        model: every tensor of the model that was saved, in its training dtype.
        optimizer: every tensor of the optimizer's state.
        ties: the first name of each shared tensor -> all its names; only the first is saved.
        export_dtypes: parameter -> dtype that an export writes by default: the one it was loaded in.
        adapters: folder in the checkpoint (``.`` for the default) -> key in its file -> name of the tensor.
        base: of an adapter: the base model's name, the fingerprint of its frozen weights, whether they were 4-bit.
        versions: package -> version.
        save_seconds: from the first rank's entry to the manifest.
        created: UTC, ISO 8601.
        files: relative name -> size and hash, of every file but this one.
    """

    step: int
    world_size: int
    model_class: str
    content: str = WHOLE
    precision: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    model: Mapping[str, TensorInfo] = field(default_factory=dict)
    optimizer: Mapping[str, TensorInfo] = field(default_factory=dict)
    ties: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    export_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    adapters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    save_seconds: float = 0.0
    created: str = ""
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files that the manifest names."""
        return sum(record.size for record in self.files.values())

    @property
    def is_adapter(self) -> bool:
        """Whether the checkpoint holds adapters and not their base."""
        return bool(self.adapters)

    def write(self, folder: Path) -> None:
        """Write it durably into `folder`, where every file that it names is on the disk already."""
        content = _to_json(self)
        write_json(folder / MANIFEST_FILE, {**content, "checksum": _checksum(content)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of `folder`.

        Raises:
            CheckpointError: there is none, it is damaged, or a later release wrote it.
        """
        path = folder / MANIFEST_FILE
        content = read_json(path)
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise CheckpointError(f"{path} is not the manifest of an hf-fsdp checkpoint", fix=DAMAGED_FIX)
        if content.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {content.get('format_version')!r} and this release reads {FORMAT_VERSION}",
                fix="pip install --upgrade hf-fsdp",
            )
        if content.pop("checksum", None) != _checksum(content):
            raise CheckpointError(f"{path} was changed after it was written: its checksum differs", fix=DAMAGED_FIX)
        try:
            return _from_json(content)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{path} lacks or garbles an entry ({error!r})", fix=DAMAGED_FIX) from error


def _checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode("utf-8"))


def _to_json(manifest: Manifest) -> dict[str, Any]:
    content: dict[str, Any] = {"kind": KIND, "format_version": FORMAT_VERSION}
    for item in dataclasses.fields(manifest):
        content[item.name] = getattr(manifest, item.name)
    for section in ("model", "optimizer"):
        content[section] = {
            name: [dtype_name(info.dtype), *info.shape] for name, info in getattr(manifest, section).items()
        }
    content["ties"] = {first: list(names) for first, names in manifest.ties.items()}
    content["export_dtypes"] = {name: dtype_name(dtype) for name, dtype in manifest.export_dtypes.items()}
    content["files"] = {name: [record.size, record.xxh3_128] for name, record in manifest.files.items()}
    return content


def _from_json(content: dict[str, Any]) -> Manifest:
    """Return the manifest that `content` describes; anything that is not what it should be is a ValueError."""

    def tensors(section: str) -> dict[str, TensorInfo]:
        return {
            _text(name): TensorInfo(_DTYPE_NAMES[dtype], tuple(_whole(size) for size in shape))
            for name, (dtype, *shape) in content[section].items()
        }

    manifest = Manifest(
        step=_whole(content["step"]),
        content=_text(content["content"]),
        world_size=_whole(content["world_size"]),
        mesh={_text(axis): _whole(size) for axis, size in content["mesh"].items()},
        model_class=_text(content["model_class"]),
        precision=_text(content.get("precision", "")),
        model=tensors("model"),
        optimizer=tensors("optimizer"),
        ties={first: tuple(_text(name) for name in names) for first, names in content["ties"].items()},
        export_dtypes={name: _DTYPE_NAMES[dtype] for name, dtype in content["export_dtypes"].items()},
        adapters={
            folder: {key: _text(name) for key, name in keys.items()} for folder, keys in content["adapters"].items()
        },
        base=dict(content["base"].items()),
        versions={package: _text(version) for package, version in content["versions"].items()},
        save_seconds=float(content["save_seconds"]),
        created=datetime.fromisoformat(content["created"]).isoformat(timespec="microseconds")
        if content["created"]
        else "",
        files={name: FileRecord(_whole(size), _text(digest)) for name, (size, digest) in content["files"].items()},
    )
    for name, dtype in manifest.export_dtypes.items():
        held = manifest.model.get(name)
        if held is not None and dtype.is_floating_point != held.dtype.is_floating_point:
            raise ValueError(f"{name} is to be exported as {dtype}")
    return manifest


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{str(value)[:80]} is no count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:80]} is no text")
    return value


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
