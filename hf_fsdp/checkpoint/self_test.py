"""Before the first step: would a save work? Found out in a second, and not after a day of training.

The whole save is planned: every name, every shape, who writes which part. Then its smallest part and the adapters are
written where checkpoints go, reread and compared, by all ranks, and removed again.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_fsdp.checkpoint.manifest import dtype_name
from hf_fsdp.checkpoint.model_state import ModelState, read_extra_state, read_model_state
from hf_fsdp.checkpoint.parts import LocalPart, describe, local_parts, to_entry
from hf_fsdp.checkpoint.room import make_shared_folder
from hf_fsdp.checkpoint.whole import check_adapters, check_names, check_parts
from hf_fsdp.errors import CheckpointError
from hf_fsdp.sharding.mesh import agree_all, rank
from hf_fsdp.sharding.outcome import agreed
from hf_fsdp.storage.safetensors_file import OpenFiles, read_box, read_header, write_safetensors

_ACTION = "test a checkpoint before the first step"
TEST_FOLDER = ".hf-fsdp-self-test"
# Below it, opening and syncing take longer than the bytes.
TELLING_BYTES = 8 * 1024**2


@dataclass(frozen=True)
class SelfTest:
    """What the test found.

    Args:
        num_tensors: of the model that a checkpoint holds.
        num_bytes: of these tensors in all files together; an optimizer such as AdamW adds twice the trained ones.
        num_trained_bytes: of those that are trained.
        was_written: whether a part was written, or the plan was all.
        bytes_per_second: at which all ranks together wrote, synced and reread their smallest part; None where it was
            too small to say anything about a large write.
    """

    num_tensors: int
    num_bytes: int
    num_trained_bytes: int
    was_written: bool
    bytes_per_second: float | None


def test_saving(model: nn.Module, output_dir: Path | None) -> SelfTest:
    """Plan the whole save and write a small part of it for real; collective.

    Args:
        model: the live one, sharded or not.
        output_dir: where checkpoints will go; None for a run that saves none: the plan is all that is tested.

    Raises:
        CheckpointError: on all ranks alike: a name that would not be saved, a part that nobody writes, an adapter
            that would be empty, a folder that is not shared or cannot be written.
    """
    state = agreed(_ACTION, lambda: read_model_state(model))
    agreed(_ACTION, lambda: read_extra_state(model))
    parts = agreed(_ACTION, lambda: local_parts(state.tensors))
    plans = agree_all([(p.name, dtype_name(p.tensor.dtype), p.box.shape, p.box.offsets) for p in parts])
    agreed(_ACTION, lambda: _check_plan(model, state, plans))
    return SelfTest(
        num_tensors=len(state.tensors),
        num_bytes=_num_bytes(state.tensors.values()),
        num_trained_bytes=_num_bytes(tensor for tensor in state.tensors.values() if tensor.requires_grad),
        was_written=output_dir is not None,
        bytes_per_second=None if output_dir is None else _measure_speed(output_dir / TEST_FOLDER, parts, state),
    )


def _measure_speed(folder: Path, parts: list[LocalPart], state: ModelState) -> float | None:
    """Write and reread the smallest part in `folder`, which is removed again; return bytes a second, if telling."""
    try:
        make_shared_folder(folder, _ACTION)
        began = time.monotonic()
        chosen = _smallest(parts, state)
        agreed(_ACTION, lambda: _write_and_reread(folder, chosen))
        seconds = max(time.monotonic() - began, 1e-6)
    finally:
        if rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    written = agree_all(sum(part.num_bytes for part in chosen))
    slowest = max(agree_all(seconds))
    return sum(written) / slowest if min(written) >= TELLING_BYTES else None


test_saving.__test__ = False  # type: ignore[attr-defined]  # pytest: not a test of ours


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)


def _check_plan(model: nn.Module, state: ModelState, plans: list[list[tuple[Any, ...]]]) -> None:
    parts: dict[str, list[Any]] = {}
    for plan in plans:
        for name, dtype, shape, offsets in plan:
            parts.setdefault(name, []).append(to_entry(name, dtype, shape, offsets))
    problems = check_names(model, state) + check_parts(describe(state.tensors), parts) + check_adapters(state.adapters)
    if problems:
        raise CheckpointError(problems[:5])


def _smallest(parts: list[LocalPart], state: ModelState) -> list[LocalPart]:
    """Return the smallest group of this rank's parts (a block, an embedding), and all that belong to adapters."""
    adapters = state.adapter_names
    groups: Mapping[str, list[LocalPart]] = _by_group([part for part in parts if part.name not in adapters])
    smallest = min(groups.values(), key=lambda group: sum(part.num_bytes for part in group), default=[])
    return smallest + [part for part in parts if part.name in adapters]


def _by_group(parts: list[LocalPart]) -> dict[str, list[LocalPart]]:
    """Group by the path up to a number: ``model.layers.3``."""
    groups: dict[str, list[LocalPart]] = {}
    for part in parts:
        words = part.name.split(".")
        end = next((index + 1 for index, word in enumerate(words) if word.isdigit()), len(words) - 1)
        groups.setdefault(".".join(words[:end]), []).append(part)
    return groups


def _write_and_reread(folder: Path, parts: list[LocalPart]) -> None:
    path = folder / f"rank-{rank():05d}.safetensors"
    write_safetensors(path, [part.to_write() for part in parts])
    entries = read_header(path).entries
    files = OpenFiles()
    try:
        for part in parts:
            back = torch.empty(part.box.shape, dtype=part.tensor.dtype)
            read_box(files.descriptor(path), entries[part.name], part.box.offsets, back)
            live = part.tensor.to("cpu").contiguous()
            if not torch.equal(back.reshape(-1).view(torch.uint8), live.reshape(-1).view(torch.uint8)):
                raise CheckpointError(f"{path}: {part.name} reads back with other values", fix="check the disk")
    finally:
        files.close()
    path.unlink()
