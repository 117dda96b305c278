"""Another program's weights by the live model's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hf_fsdp.checkpoint.foreign.dcp_metadata import read_dcp_folder
from hf_fsdp.checkpoint.foreign.dcp_source import DcpSource
from hf_fsdp.checkpoint.foreign.mapped_source import MappedSource
from hf_fsdp.checkpoint.foreign.names import LiveNames, canonical_names
from hf_fsdp.checkpoint.foreign.torch_file import load_torch_file
from hf_fsdp.errors import CheckpointError
from hf_fsdp.sharding.adapters import DEFAULT_FOLDER
from hf_fsdp.storage.files import DAMAGED_FIX, read_json, safe_join
from hf_fsdp.storage.safetensors_file import read_header
from hf_fsdp.storage.tensor_source import (
    INDEX_FILE,
    WEIGHTS_FILE,
    JoinedSource,
    SafetensorsSource,
    TensorSource,
    hf_folder_source,
)

FULL_FILE, SHARDED_FOLDER = "pytorch_model_fsdp.bin", "pytorch_model_fsdp_0"
ADAPTER_FILE = "adapter_model.safetensors"
TORCH_FILE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_RANK_FILE = re.compile(r"(pytorch_model_fsdp|optimizer)(_\d+)?_rank\d+\.bin")


@dataclass
class ForeignModel:
    """The weights of a folder.

    Args:
        source: tensors by live name; None when there are none that can be read.
        kind: what wrote them, in words.
        missing: what is not there, in plain words.
    """

    source: TensorSource | None
    kind: str
    missing: list[str] = field(default_factory=list)


def open_model(folder: Path, live: LiveNames | None) -> ForeignModel:
    """Return the weights of a folder of Trainer or Accelerate, by the names of the live model.

    Raises:
        CheckpointError: none are there, several are, or they cannot be read.
    """
    if rank_files := [path.name for path in sorted(folder.iterdir()) if _RANK_FILE.fullmatch(path.name)]:
        raise CheckpointError(
            f"{folder} holds {rank_files[0]}, one file for each rank (LOCAL_STATE_DICT, or use_dcp=False), which only "
            "the same number of ranks of the program that wrote it can read",
            fix="resume it there once and save under fsdp_state_dict_type: SHARDED_STATE_DICT",
        )
    if (folder / FULL_FILE).exists() and (folder / SHARDED_FOLDER).exists():
        raise CheckpointError(
            f"{folder} holds {FULL_FILE} and {SHARDED_FOLDER}/: two saves were mixed",
            fix="take a checkpoint that one run wrote",
        )
    for name, (kind, reader) in _READERS.items():
        if (folder / name).exists():
            safe_join(folder, name)
            found = reader(folder, live)
            found.kind = kind
            return _say_what_is_missing(found, live)
    adapters = _adapter_folders(folder)
    if adapters:
        return _say_what_is_missing(_read_adapters(folder, live), live)
    raise CheckpointError(
        f"{folder} holds no weights of a Trainer or an Accelerator: none of {', '.join(_READERS)} is there",
        near=", ".join(sorted(path.name for path in folder.iterdir())[:8]) or None,
        fix="give the path of a checkpoint-N folder",
    )


def _read_full(folder: Path, live: LiveNames | None) -> ForeignModel:
    return _read_torch_files([safe_join(folder, FULL_FILE)], live)


def _read_sharded(folder: Path, live: LiveNames | None) -> ForeignModel:
    path = safe_join(folder, SHARDED_FOLDER)
    dcp = read_dcp_folder(path)
    keys = {str(steps[1]): key for key, steps in dcp.paths.items() if len(steps) == 2 and steps[0] == "model"}
    names = canonical_names(keys, live, str(path), live.adapter_keys() if live else None)
    tensors = {name: keys[key] for name, key in names.items() if keys[key] in dcp.tensors}
    return ForeignModel(DcpSource(dcp, tensors), "", _unread([name for name in names if name not in tensors]))


def _read_adapters(folder: Path, live: LiveNames | None) -> ForeignModel:
    sources: list[TensorSource] = []
    for adapter in _adapter_folders(folder):
        path = safe_join(folder, ADAPTER_FILE if adapter == DEFAULT_FOLDER else f"{adapter}/{ADAPTER_FILE}")
        keys = canonical_names(read_header(path).entries, live, str(path), live.adapter_keys(adapter) if live else None)
        if not keys:
            raise CheckpointError(
                f"{path} holds an adapter without a single tensor: what Accelerate writes for PEFT models under "
                "fsdp_config.activation_checkpointing",
                fix="take an earlier checkpoint; the weights of this one are nowhere in the folder",
            )
        sources.append(RenamedSource(SafetensorsSource([path]), keys))
    return ForeignModel(JoinedSource(sources), "an adapter of Trainer (PEFT)")


def _adapter_folders(folder: Path) -> list[str]:
    names = [DEFAULT_FOLDER] if (folder / ADAPTER_FILE).exists() else []
    return names + sorted(path.name for path in folder.iterdir() if (path / ADAPTER_FILE).exists())


def _read_safetensors(folder: Path, live: LiveNames | None) -> ForeignModel:
    source = hf_folder_source(folder)
    names = canonical_names(source.tensors, live, str(folder), live.file_keys(source.tensors) if live else None)
    return ForeignModel(RenamedSource(source, names), "")


def _read_torch(folder: Path, live: LiveNames | None) -> ForeignModel:
    index = folder / TORCH_INDEX
    if not index.is_file():
        return _read_torch_files([safe_join(folder, TORCH_FILE)], live)
    weight_map = read_json(safe_join(folder, TORCH_INDEX)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from names to files", fix=DAMAGED_FIX)
    found = _read_torch_files([safe_join(folder, name) for name in sorted(set(weight_map.values()))], live)
    lost = set(canonical_names(weight_map, live, str(index), live.file_keys(weight_map) if live else None)) - set(
        found.source.tensors if found.source else ()
    )
    if lost:
        raise CheckpointError(f"{index} names {sorted(lost)[0]!r}, which is in none of its files", fix=DAMAGED_FIX)
    return found


def _read_torch_files(paths: Iterable[Path], live: LiveNames | None) -> ForeignModel:
    tensors: dict[str, torch.Tensor] = {}
    others: list[str] = []
    where = ""
    for path in paths:
        where = where or str(path)
        content = load_torch_file(path)
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise CheckpointError(f"{path} holds no weights by name", fix=DAMAGED_FIX)
        for key, value in content.items():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            else:
                others.append(key)
    names = canonical_names(tensors, live, where, live.file_keys(tensors) if live else None)
    return ForeignModel(MappedSource({name: tensors[key] for name, key in names.items()}, where), "", _unread(others))


def _unread(names: list[str]) -> list[str]:
    return [f"{len(names)} values that are no tensors, the first {names[0]}, are not read"] if names else []


def _say_what_is_missing(found: ForeignModel, live: LiveNames | None) -> ForeignModel:
    if live is None or found.source is None:
        return found
    if frozen := set(found.source.tensors) & (live.names - live.saved):  # the base of an adapter is not read again
        names = {name: name for name in found.source.tensors if name not in frozen}
        found.source = RenamedSource(found.source, names)
    absent = sorted(live.saved - set(found.source.tensors))
    if absent:
        found.missing.append(f"weights of {len(absent)} of {len(live.saved)} tensors, the first {absent[0]}")
    return found


class RenamedSource:
    """A source under other names; tensors without one are left out.

    Args:
        source: what is read from.
        names: name -> name in `source`.
    """

    def __init__(self, source: TensorSource, names: dict[str, str]):
        self._source, self._names = source, names
        self.tensors = {name: source.tensors[key] for name, key in names.items()}

    def read(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        self._source.read(self._names[name], offsets, out)

    def close(self) -> None:
        self._source.close()


# In this order: beside the file that FSDP resumes from, in full precision, Trainer puts one for `from_pretrained`.
_READERS: dict[str, tuple[str, Callable[[Path, LiveNames | None], ForeignModel]]] = {
    FULL_FILE: ("FSDP under FULL_STATE_DICT (Accelerate)", _read_full),
    SHARDED_FOLDER: ("FSDP under SHARDED_STATE_DICT (Accelerate)", _read_sharded),
    ADAPTER_FILE: ("an adapter of Trainer (PEFT)", _read_adapters),
    INDEX_FILE: ("Trainer without FSDP", _read_safetensors),
    WEIGHTS_FILE: ("Trainer without FSDP", _read_safetensors),
    TORCH_INDEX: ("Trainer without FSDP", _read_torch),
    TORCH_FILE: ("Trainer without FSDP", _read_torch),
}
