"""The model in a checkpoint, whoever wrote it: tensors by name, export dtypes, the files beside them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from hf_fsdp.checkpoint.find import TRAINER_STATE_FILE, choose_checkpoint
from hf_fsdp.checkpoint.manifest import MANIFEST_FILE, Manifest
from hf_fsdp.checkpoint.verify import ADAPTER_FILE, open_model_source
from hf_fsdp.errors import CheckpointError, Problem
from hf_fsdp.sharding.adapters import DEFAULT_FOLDER
from hf_fsdp.storage.files import DAMAGED_FIX, safe_join
from hf_fsdp.storage.safetensors_file import read_header
from hf_fsdp.storage.tensor_source import SafetensorsSource, TensorSource

ADAPTER_CONFIG = "adapter_config.json"
# Folders of a checkpoint that have nothing to do with the model as others use it.
_OURS = ("model", "optimizer", "state")
# What configs, tokenizers and a model's own code are kept in; weights are written anew, and a folder may hold anything.
_DOCUMENTS = (
    ".json", ".txt", ".model", ".jinja", ".py", ".md", ".tiktoken", ".vocab", ".bpe", ".codes", ".spm", ".merges"
)  # fmt: skip
# Of no use but to a run that goes on.
_LEFT_OUT = ("*.index.json", MANIFEST_FILE, TRAINER_STATE_FILE, "audit.json")


@dataclass(frozen=True)
class SavedModel:
    """A model in a checkpoint; headers were read and checked, tensors were not.

    Args:
        folder: of the checkpoint.
        source: its tensors. Ours are under live names, another program's under those in its files.
        manifest: None for another program's checkpoint.
        adapters: folder in the checkpoint -> key in PEFT's file -> name in `source`; empty for a whole model.
        documents: relative names of the files that belong beside the weights: config, tokenizer, processor.
        lines: what a person should know of the choice.
    """

    folder: Path
    source: TensorSource
    manifest: Manifest | None = None
    adapters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    documents: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()

    @property
    def model_class(self) -> str | None:
        return self.manifest.model_class if self.manifest is not None else None

    @property
    def export_dtypes(self) -> Mapping[str, torch.dtype]:
        return self.manifest.export_dtypes if self.manifest is not None else {}

    @property
    def ties(self) -> Mapping[str, tuple[str, ...]]:
        return self.manifest.ties if self.manifest is not None else {}

    @property
    def base(self) -> Mapping[str, Any]:
        return self.manifest.base if self.manifest is not None else {}

    @property
    def used_files(self) -> list[str]:
        """Files of the manifest whose bytes an export passes on."""
        if self.manifest is None:
            return []
        weights = [name for name in self.manifest.files if name.endswith(".safetensors")]
        return sorted({*self.documents, *(name for name in weights if not name.startswith("optimizer/"))})

    @property
    def trained_names(self) -> set[str]:
        """Tensors with optimizer state: those that were trained, as far as the checkpoint tells."""
        keys = self.manifest.optimizer if self.manifest is not None else {}
        return {key.removeprefix("state.").rpartition(".")[0] for key in keys}

    def close(self) -> None:
        self.source.close()


def open_saved_model(path: Path) -> SavedModel:
    """Open the model of a checkpoint, or of the newest committed checkpoint of a run.

    Raises:
        CheckpointError: there is none, it was not committed, or it is damaged.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder", fix="give a checkpoint-N folder, or the run folder above it")
    folder, lines = choose_checkpoint(path)
    if (folder / MANIFEST_FILE).is_file():
        manifest = Manifest.read(folder)
        problems = _check_sizes(folder, manifest)
        if problems:
            raise CheckpointError(problems)
        return SavedModel(
            folder,
            open_model_source(folder, manifest),
            manifest,
            manifest.adapters,
            document_names(list(manifest.files)),
            lines,
        )
    return _open_foreign(folder, lines)


def _check_sizes(folder: Path, manifest: Manifest) -> list[Problem]:
    """Return the files that are lost or cut off, those of the optimizer aside: the model can be whole without them."""
    problems = []
    for name, record in manifest.files.items():
        path = safe_join(folder, name)
        if name.startswith("optimizer/"):
            continue
        if not path.is_file():
            problems.append(Problem(message=f"{path} is missing", fix=DAMAGED_FIX))
        elif path.stat().st_size != record.size:
            problems.append(
                Problem(message=f"{path} has {path.stat().st_size} bytes, not {record.size}", fix=DAMAGED_FIX)
            )
    return problems


def _open_foreign(folder: Path, lines: tuple[str, ...]) -> SavedModel:
    from hf_fsdp.checkpoint.foreign import open_foreign  # seconds of imports that our own checkpoints need not wait for

    foreign = open_foreign(folder)
    if foreign.model is None:
        raise CheckpointError(f"{folder} holds no weights that can be read ({foreign.kind})", fix=DAMAGED_FIX)
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    documents = document_names([name for name in names if safe_join(folder, name)])
    lines = (*lines, f"written by another program, without a mark that says whether it is whole: {foreign.kind}")
    if "(PEFT)" not in foreign.kind:
        if parts := [name for name in foreign.model.tensors if ".lora_" in name]:
            foreign.close()
            raise CheckpointError(
                f"{folder} holds a PEFT model without the config of its adapter ({parts[0]}): {foreign.kind}",
                fix="resume from it once (resume_from_checkpoint), save, and export that checkpoint",
            )
        return SavedModel(folder, foreign.model, None, {}, documents, lines)
    foreign.close()
    # Each adapter of its own: two of them have the same keys.
    adapters: dict[str, dict[str, str]] = {}
    renames: dict[Path, Mapping[str, str]] = {}
    for name in names:
        if PurePosixPath(name).name == ADAPTER_FILE:
            place = PurePosixPath(name).parent.as_posix()
            path = safe_join(folder, name)
            keys = {key: key if place == DEFAULT_FOLDER else f"{place}:{key}" for key in read_header(path).entries}
            adapters[place], renames[path] = keys, keys
    return SavedModel(folder, SafetensorsSource(list(renames), renames), None, adapters, documents, lines)


def document_names(names: list[str]) -> tuple[str, ...]:
    """Return which files of a checkpoint are copied beside the exported weights."""
    kept = []
    for name in sorted(names):
        parts = PurePosixPath(name).parts
        if parts[0] in (*_OURS, "optimizer_0", "pytorch_model_fsdp_0") or any(part.startswith(".") for part in parts):
            continue
        is_left_out = any(fnmatch.fnmatchcase(parts[-1], pattern) for pattern in _LEFT_OUT)
        if parts[-1].endswith(_DOCUMENTS) and not is_left_out:
            kept.append(name)
    return tuple(kept)
