"""A save, by all ranks: enter together, write in parallel, agree, verify, commit, rotate.

`begin_save` does what needs the live model and every rank's main thread; `finish_save` writes what `begin_save`
collected and may run in a thread behind training, on a process group of its own. Nothing takes the name of a
checkpoint before every rank has written, reread and agreed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_fsdp.checkpoint.commit import Rotation
from hf_fsdp.checkpoint.documents import EXTRA_STATE_FILE, GROUPS_FILE
from hf_fsdp.checkpoint.manifest import MODEL_ONLY, WHOLE, Manifest
from hf_fsdp.checkpoint.model_state import (
    ModelState,
    buffers_that_differ,
    frozen_fingerprint,
    precision_of,
    read_extra_state,
    read_model_state,
)
from hf_fsdp.checkpoint.optimizer_state import read_optimizer_state
from hf_fsdp.checkpoint.parts import LocalPart, describe, local_parts
from hf_fsdp.checkpoint.room import make_room
from hf_fsdp.checkpoint.staged import SafetensorsFile, SavedCheckpoint, StagedSave, cleaned_up
from hf_fsdp.checkpoint.verify import ADAPTER_FILE
from hf_fsdp.checkpoint.versions import package_versions
from hf_fsdp.checkpoint.whole import check_names
from hf_fsdp.checkpoint.write import extra_files, finish_save
from hf_fsdp.errors import CheckpointError
from hf_fsdp.policies.packed_weights import packed_names
from hf_fsdp.sharding.adapters import DEFAULT_FOLDER
from hf_fsdp.sharding.apply import get_applied_sharding
from hf_fsdp.sharding.mesh import agree_all, rank, world_size
from hf_fsdp.sharding.outcome import agreed, rank_ends_explained, wait_for_all_ranks
from hf_fsdp.storage.files import json_bytes
from hf_fsdp.storage.safetensors_file import TensorToWrite


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """What is to be saved.

    Args:
        output_dir: of the run; the checkpoint becomes ``output_dir/checkpoint-<step>``.
        step: optimizer steps taken.
        model: the live model.
        optimizer: torch's own; None saves the model only.
        documents: relative name -> bytes that this rank adds; every name on one rank only.
        write_extras: called on rank 0 with the staging folder: config, tokenizer, processor.
        format: ``sharded`` or ``full``: the model's tensors whole, in files that `from_pretrained` reads.
        keep: which checkpoints stay.
    """

    output_dir: Path
    step: int
    model: Any
    optimizer: Optimizer | None
    documents: Mapping[str, bytes] = field(default_factory=dict)
    write_extras: Callable[[Path], None] = lambda folder: None
    format: str = "sharded"
    keep: Rotation = Rotation()


def save_checkpoint(request: SaveRequest) -> SavedCheckpoint:
    """Save and commit a checkpoint; collective.

    Raises:
        CheckpointError: on all ranks alike. Earlier checkpoints are untouched.
    """
    return finish_save(begin_save(request))


# -- collected in the main thread --------------------------------------------------------------------------------------


def begin_save(request: SaveRequest) -> StagedSave:
    """Enter on all ranks, make room, and collect what is to be written; collective.

    Args:
        request: the same on all ranks but for `documents` and what belongs to this rank in the model.

    Raises:
        CheckpointError: on all ranks alike; nothing was written but a staging folder, which is removed.
    """
    began = time.monotonic()
    action = f"save checkpoint-{request.step}"
    wait_for_all_ranks(action)
    with rank_ends_explained(action):
        asked = set(agree_all((request.step, request.format, request.optimizer is not None)))
    if len(asked) > 1:
        raise CheckpointError(
            f"ranks want to save different things (step, format, whether with an optimizer): {sorted(asked)}",
            fix="decide on what all ranks know, such as the step, and not on a clock or a file",
        )
    model_state = agreed(action, lambda: read_model_state(request.model))
    optimizer_state = agreed(
        action, lambda: read_optimizer_state(request.model, request.optimizer) if request.optimizer else None
    )
    with rank_ends_explained(action):
        manifest = _draft_manifest(request, model_state, optimizer_state.tensors if optimizer_state else {})
        files = _model_files(request, model_state)
        different = buffers_that_differ(model_state.tensors)
    lines: tuple[str, ...] = ()
    if different:
        lines = (
            f"{len(different)} buffers have other values on each rank ({different[0]}): those of rank 0 are saved, and "
            "every rank goes on from them after a resume",
        )
    if optimizer_state is not None:
        files.append(_shard_file("optimizer", local_parts(optimizer_state.tensors)))
    documents = dict(request.documents)
    if (extra := agreed(action, lambda: read_extra_state(request.model))) and rank() == 0:
        documents[EXTRA_STATE_FILE] = json_bytes(extra)
    if optimizer_state is not None:
        text = json_bytes(optimizer_state.groups)
        with rank_ends_explained(action):
            digests = agree_all(xxhash.xxh3_64_hexdigest(text))
        if len(set(digests)) > 1:
            raise CheckpointError(
                "the optimizer's settings, or its state that is no tensor, differ between the ranks: one of them alone "
                "would not be what the others go on with",
                fix="let every rank's optimizer count and decide alike, or keep what differs in tensors of the "
                "parameters' shapes",
            )
        if rank() == 0:
            documents[GROUPS_FILE] = text
    files = [file for file in files if file.tensors]
    with rank_ends_explained(action):
        attempt = agree_all(secrets.token_hex(8))[0]
    staged = StagedSave(
        output_dir=request.output_dir.absolute(),  # it may be written when the process works in another folder
        manifest=manifest,
        files=files,
        documents=documents,
        keep=Rotation(request.keep.limit, request.keep.best and request.keep.best.absolute()),
        began=began,
        attempt=attempt,
        lines=lines,
        live={
            **{name: tensor for name, tensor in model_state.tensors.items() if isinstance(tensor, nn.Parameter)},
            **(optimizer_state.tensors if optimizer_state else {}),
        },
    )
    make_room(staged)
    with cleaned_up(staged):
        agreed(action, lambda: _write_extras(request, staged) if rank() == 0 else None)
    return staged


def _write_extras(request: SaveRequest, staged: StagedSave) -> None:
    request.write_extras(staged.folder)
    staged.extras = extra_files(staged.folder)


def _draft_manifest(
    request: SaveRequest, model_state: ModelState, optimizer_tensors: Mapping[str, torch.Tensor]
) -> Manifest:
    applied = get_applied_sharding(request.model)
    base: dict[str, Any] = {}
    if model_state.adapters:
        config = next(iter(request.model.peft_config.values()))
        base = {
            "name": config.base_model_name_or_path,
            "fingerprint": frozen_fingerprint(request.model, model_state.tensors),
            "is_packed": bool(packed_names(request.model)),
        }
    if problems := check_names(request.model, model_state):
        raise CheckpointError(problems[:5])
    mesh = applied.mesh if applied is not None else None
    return Manifest(
        step=request.step,
        content=WHOLE if request.optimizer is not None else MODEL_ONLY,
        world_size=world_size(),
        mesh={} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)),
        model_class=_model_class(request.model),
        precision=precision_of(request.model),
        model=describe(model_state.tensors),
        optimizer=describe(optimizer_tensors),
        ties=model_state.ties,
        export_dtypes=model_state.export_dtypes,
        adapters=model_state.adapters,
        base=base,
        versions=package_versions(),
    )


def _model_class(model: Any) -> str:
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    return type(inner).__name__


def _model_files(request: SaveRequest, state: ModelState) -> list[SafetensorsFile]:
    """Return the files of the model that this rank writes. Whole tensors are gathered here: collective."""
    in_adapters = state.adapter_names
    files = []
    for folder, keys in state.adapters.items():
        name = ADAPTER_FILE if folder == DEFAULT_FOLDER else f"{folder}/{ADAPTER_FILE}"
        files.append(SafetensorsFile(name, _whole_tensors({key: state.tensors[live] for key, live in keys.items()})))
    rest = {name: tensor for name, tensor in state.tensors.items() if name not in in_adapters}
    if request.format == "full" and not state.adapters:
        files.append(SafetensorsFile("model.safetensors", _whole_tensors(rest)))
    else:
        files.append(_shard_file("model", local_parts(rest)))
    return files


def _shard_file(section: str, parts: Sequence[LocalPart]) -> SafetensorsFile:
    name = f"{section}/shard-{rank() + 1:05d}-model-00001-of-00001.safetensors"
    return SafetensorsFile(name, tuple(part.to_write() for part in parts))


def _whole_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorToWrite, ...]:
    """Return whole tensors for rank 0 to write, in its host memory; nothing on the others. Collective."""
    whole = []
    for name, tensor in tensors.items():
        value = tensor.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if rank() == 0:
            whole.append(_to_write(name, value.cpu()))
    return tuple(whole)


def _to_write(name: str, value: torch.Tensor) -> TensorToWrite:
    return TensorToWrite(name, value.dtype, tuple(value.shape), lambda: value)
