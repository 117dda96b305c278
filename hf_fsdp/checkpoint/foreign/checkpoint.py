"""Reads the checkpoints that Trainer and Accelerate write, and says what they do not hold.

Nothing in such a folder is trusted: no pickle is run (`torch.load(weights_only=True)`, or for DCP's metadata a reader
of its own), no name leads out of the folder, and every tensor is whole before the first one is handed out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from hf_fsdp.checkpoint.foreign.model import open_model
from hf_fsdp.checkpoint.foreign.names import LiveNames
from hf_fsdp.checkpoint.foreign.optimizer import ForeignOptimizer, open_optimizer_file, open_optimizer_folder
from hf_fsdp.checkpoint.foreign.torch_file import load_torch_file
from hf_fsdp.checkpoint.json_state import encode_state
from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.files import DAMAGED_FIX, safe_join
from hf_fsdp.storage.tensor_source import TensorSource

TRAINER_STATE_FILE = "trainer_state.json"
# Trainer's name first, then that of `Accelerator.save_state`.
_SCHEDULER_FILES = ("scheduler.pt", "scheduler.bin")
_SCALER_FILES = ("scaler.pt",)
_RANDOM_FILE = re.compile(r"rng_state(?:_(\d+))?\.pth|random_states_(\d+)\.pkl")
# Our name of a generator -> those of Trainer and Accelerate.
_GENERATORS = {
    "python": ("python", "random_state"),
    "numpy": ("numpy", "numpy_random_seed"),
    "torch": ("cpu", "torch_manual_seed"),
    "cuda": ("cuda", "torch_cuda_manual_seed"),
    "xpu": ("xpu", "torch_xpu_manual_seed"),
    "npu": ("npu", "torch_npu_manual_seed"),
}


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint of Trainer or Accelerate in our form.

    Args:
        path: the folder.
        kind: what wrote the weights, in words.
        model: the weights by live name; None when there are none that can be read.
        optimizer: ``state.<parameter>.<key>``; None when there is no state, which `missing` then says.
        groups: with `optimizer`, what `load_optimizer_state` wants beside it.
        scheduler: for ``scheduler.load_state_dict``, or None.
        scaler: for ``scaler.load_state_dict``, or None, as for every run without fp16.
        random_files: rank -> the file with its random state.
        trainer_state: the path of `trainer_state.json`, or None.
        missing: what a run that resumes from here starts without, in plain words.
    """

    path: Path
    kind: str
    model: TensorSource | None
    optimizer: TensorSource | None
    groups: dict[str, Any]
    scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None
    random_files: dict[int, Path]
    trainer_state: Path | None
    missing: list[str] = field(default_factory=list)

    def random_state(self, rank: int, device_index: int | None = None) -> dict[str, Any] | None:
        """Return a rank's random state for `set_random_state`, or None when the folder has none for it.

        Args:
            rank: of the process that saved.
            device_index: which of the accelerators that the process saw was its own; default: the one this process
                uses.

        Raises:
            CheckpointError: the file is damaged or hostile.
        """
        if (path := self.random_files.get(rank)) is None:
            return None
        if device_index is None:
            device_index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0
        return _read_random_state(path, device_index)

    def close(self) -> None:
        """Close the files."""
        for source in (self.model, self.optimizer):
            if source is not None:
                source.close()


def open_foreign(folder: Path, live: LiveNames | None = None) -> ForeignCheckpoint:
    """Open a checkpoint folder that Trainer or Accelerate wrote; headers are read, tensors are not.

    Args:
        folder: `checkpoint-N`, or a folder of `Accelerator.save_state`.
        live: what `live_names(model, optimizer)` returns. Without it names stay as they are in the files, adapters
            keep PEFT's names, and an optimizer that numbers its parameters (`optimizer.pt`) is not read.

    Raises:
        CheckpointError: the folder holds no such checkpoint, a layout that cannot be read (named in the message), or
            one of its files is damaged, incomplete, hostile or outside of the folder.

    Example:
        >>> from hf_fsdp.checkpoint.foreign.checkpoint import open_foreign
        >>> # foreign = open_foreign(Path("output/checkpoint-500"), live_names(model, optimizer))
        >>> # for line in foreign.missing: print(line)
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder", fix="give the path of a checkpoint-N folder")
    model = open_model(folder, live)
    optimizer = _open_optimizer(folder, live)
    scheduler = _first_state(folder, _SCHEDULER_FILES)
    trainer_state = _find(folder, (TRAINER_STATE_FILE,))
    random_files = _random_files(folder)
    missing = [*model.missing, *optimizer.missing]
    if scheduler is None:
        missing.append("scheduler: no scheduler.pt, so the learning rate starts as at step 0")
    if trainer_state is None:
        missing.append(f"step and log history: no {TRAINER_STATE_FILE}, so the run counts from step 0")
    if not random_files:
        missing.append("random states: no rng_state files, so dropout and shuffling draw other numbers")
    return ForeignCheckpoint(
        path=folder,
        kind=model.kind,
        model=model.source,
        optimizer=optimizer.source,
        groups=optimizer.groups,
        scheduler=scheduler,
        scaler=_first_state(folder, _SCALER_FILES),
        random_files=random_files,
        trainer_state=trainer_state,
        missing=missing,
    )


def _open_optimizer(folder: Path, live: LiveNames | None) -> ForeignOptimizer:
    readers: dict[str, Callable[[Path, LiveNames | None], ForeignOptimizer]] = {
        "optimizer.bin": open_optimizer_file,
        "optimizer_0": open_optimizer_folder,
        "optimizer.pt": open_optimizer_file,
    }
    there = [name for name in readers if (folder / name).exists()]
    if len(there) > 1:
        raise CheckpointError(
            f"{folder} holds the optimizer twice, as {' and '.join(there)}: two saves were mixed",
            fix="take a checkpoint that one run wrote",
        )
    if not there:
        return ForeignOptimizer(
            None, {}, ["optimizer state: no optimizer.bin, optimizer_0/ or optimizer.pt, so it starts fresh"]
        )
    found = readers[there[0]](safe_join(folder, there[0]), live)
    if found.source is None and not found.missing:
        found.missing.append(
            f"optimizer state: {there[0]} holds none, so it starts fresh (FSDP1 writes that after a resume under "
            "SHARDED_STATE_DICT that lost it)"
        )
    elif without := found.groups.get("without_state"):
        found.missing.append(
            f"optimizer state of {len(without)} parameters, the first {without[0]}: they never had a gradient"
        )
    return found


def _random_files(folder: Path) -> dict[int, Path]:
    files = {}
    for path in sorted(folder.iterdir()):
        if match := _RANDOM_FILE.fullmatch(path.name):
            files[int(match[1] or match[2] or 0)] = safe_join(folder, path.name)
    return files


def _read_random_state(path: Path, device_index: int) -> dict[str, Any]:
    content = load_torch_file(path, allowed=_numpy_types())
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no random states", fix="remove the file: other random numbers are drawn")
    state: dict[str, Any] = {}
    for ours, theirs in _GENERATORS.items():
        value = next((content[name] for name in theirs if name in content), None)
        if isinstance(value, list):  # of all accelerators that the process saw
            value = value[device_index] if device_index < len(value) else None
        if value is not None:
            state[ours] = value
    encoded: dict[str, Any] = encode_state(state, str(path))
    return encoded


def _numpy_types() -> list[Any]:
    """What NumPy's generator state consists of, under the names that NumPy 1 and 2 write."""
    reconstruct: Any = numpy.zeros(0).__reduce__()[0]
    return [
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        (reconstruct, "numpy._core.multiarray._reconstruct"),
        numpy.ndarray,
        numpy.dtype,
        type(numpy.dtype(numpy.uint32)),
    ]


def _first_state(folder: Path, names: tuple[str, ...]) -> dict[str, Any] | None:
    path = _find(folder, names)
    if path is None:
        return None
    content = load_torch_file(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} where a state_dict should be", fix=DAMAGED_FIX)
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in content.items()}


def _find(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((safe_join(folder, name) for name in names if (folder / name).is_file()), None)
