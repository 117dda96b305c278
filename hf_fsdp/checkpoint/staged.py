"""A save between the moment its content is fixed and its commit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hf_fsdp.checkpoint.commit import Rotation
from hf_fsdp.checkpoint.find import staging_folder
from hf_fsdp.checkpoint.manifest import Manifest
from hf_fsdp.sharding.mesh import rank
from hf_fsdp.storage.files import FileRecord
from hf_fsdp.storage.safetensors_file import TensorToWrite


@dataclass(frozen=True)
class SafetensorsFile:
    """A file that this rank will write."""

    name: str
    tensors: tuple[TensorToWrite, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass
class StagedSave:
    """A save of which everything that changes with training is collected."""

    output_dir: Path
    manifest: Manifest
    files: list[SafetensorsFile]
    documents: dict[str, bytes]
    keep: Rotation
    began: float
    attempt: str
    lines: tuple[str, ...] = ()
    extras: dict[str, FileRecord] = field(default_factory=dict)
    live: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters and the optimizer's state, by their names in the files: only a step of the optimizer changes them."""

    @property
    def folder(self) -> Path:
        return staging_folder(self.output_dir, self.manifest.step)

    @property
    def action(self) -> str:
        return f"save checkpoint-{self.manifest.step}"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was committed."""

    path: Path
    manifest: Manifest
    seconds: float
    lines: tuple[str, ...] = ()


@contextmanager
def cleaned_up(staged: StagedSave) -> Iterator[None]:
    """Remove the staging folder when the save fails: the space it took may be what is missing."""
    try:
        yield
    except Exception:
        if rank() == 0:
            shutil.rmtree(staged.folder, ignore_errors=True)
        raise
