"""Read a checkpoint back: on any number of ranks, each reading its own part, after everything was checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hf_fsdp.checkpoint.documents import GROUPS_FILE, SCALER_FILE, SCHEDULER_FILE, rank_file
from hf_fsdp.checkpoint.foreign import ForeignCheckpoint, open_foreign
from hf_fsdp.checkpoint.foreign.names import live_names
from hf_fsdp.checkpoint.json_state import decode_state
from hf_fsdp.checkpoint.manifest import MANIFEST_FILE, Manifest, dtype_name
from hf_fsdp.checkpoint.model_state import ModelState, expected_names, frozen_fingerprint, read_model_state
from hf_fsdp.checkpoint.optimizer_state import FRESH_FIX, load_optimizer_state
from hf_fsdp.checkpoint.verify import open_sources
from hf_fsdp.errors import CheckpointError, Problem, nearest_names
from hf_fsdp.sharding.read import read_into_model
from hf_fsdp.storage.files import read_json, safe_join
from hf_fsdp.storage.tensor_source import TensorSource


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose parts were all found: one of ours, or one that Trainer or Accelerate wrote.

    Args:
        folder: of the checkpoint.
        manifest: what it says of itself; None for one that another program wrote.
        model: the tensors of the model.
        optimizer: the tensors of the optimizer's state, named ``state.<parameter>.<key>``; None when there are none.
        groups: the optimizer's groups and what else `load_optimizer_state` wants; None when it was not saved.
        scheduler: for ``scheduler.load_state_dict``; None when it was not saved.
        scaler: likewise.
        random_state: rank -> what `set_random_state` takes, or None.
        foreign: when another program wrote it.
    """

    folder: Path
    manifest: Manifest | None
    model: TensorSource
    optimizer: TensorSource | None
    groups: Mapping[str, Any] | None
    scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None
    random_state: Callable[[int], dict[str, Any] | None]
    foreign: ForeignCheckpoint | None = None

    def document(self, name: str) -> Any:
        """Return the content of a JSON file of ours, or None when the checkpoint has none of that name."""
        if self.manifest is None or name not in self.manifest.files:
            return None
        return read_json(safe_join(self.folder, name))

    def close(self) -> None:
        self.model.close()
        if self.optimizer is not None:
            self.optimizer.close()


def open_checkpoint(folder: Path, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> OpenCheckpoint:
    """Open a checkpoint: manifest or foreign files, headers, and the cover of every tensor are checked.

    Args:
        folder: of the checkpoint.
        model: the live model, by whose names the files of another program are understood.
        optimizer: the live optimizer, likewise.

    Raises:
        CheckpointError: it is no checkpoint, or it is damaged.
    """
    if not (folder / MANIFEST_FILE).exists():
        return _open_foreign(folder, model, optimizer)
    manifest = Manifest.read(folder)
    model_source, optimizer_source = open_sources(folder, manifest)

    def document(name: str) -> Any:
        return read_json(safe_join(folder, name)) if name in manifest.files else None

    def random_state(rank: int) -> dict[str, Any] | None:
        mine = document(rank_file(rank))
        return None if mine is None else mine["random"]

    return OpenCheckpoint(
        folder=folder,
        manifest=manifest,
        model=model_source,
        optimizer=optimizer_source,
        groups=document(GROUPS_FILE),
        scheduler=decode_state(document(SCHEDULER_FILE)),
        scaler=decode_state(document(SCALER_FILE)),
        random_state=random_state,
    )


def _open_foreign(folder: Path, model: nn.Module | None, optimizer: Optimizer | None) -> OpenCheckpoint:
    foreign = open_foreign(folder, live_names(model, optimizer) if model is not None else None)
    if foreign.model is None:
        raise CheckpointError(f"{folder} holds no weights: {'; '.join(foreign.missing)}", fix="take another checkpoint")
    return OpenCheckpoint(
        folder=folder,
        manifest=None,
        model=foreign.model,
        optimizer=foreign.optimizer,
        groups=foreign.groups if foreign.optimizer is not None else None,
        scheduler=foreign.scheduler,
        scaler=foreign.scaler,
        random_state=foreign.random_state,
        foreign=foreign,
    )


def load_model(model: nn.Module, source: TensorSource, folder: Path, *, may_hold_base: bool = False) -> list[str]:
    """Fill `model` with the saved tensors, each rank its own part; return lines that a person should see.

    Not collective; call it under `agreed`.

    Args:
        model: the live one.
        source: the saved tensors.
        folder: of the checkpoint, for messages.
        may_hold_base: whether weights that are frozen here may be saved too, as other programs do; they are not read.

    Raises:
        CheckpointError: the checkpoint is of another model, or of other adapters; before a byte is read.
    """
    state = read_model_state(model)
    names = _match(state, source, folder, expected_names(model) if may_hold_base else set())
    rounded = sorted(
        {
            (dtype_name(source.tensors[saved].dtype), dtype_name(state.tensors[live].dtype))
            for live, saved in names.items()
            if source.tensors[saved].dtype != state.tensors[live].dtype
        }
    )
    read_into_model(model, source, names)
    return [f"resume: weights saved in {saved} are held in {live} by this run" for saved, live in rounded]


def _match(state: ModelState, source: TensorSource, folder: Path, ignored: set[str]) -> dict[str, str]:
    """Return live name -> saved name for every tensor of the model that belongs to a checkpoint."""
    names: dict[str, str] = {}
    missing = []
    for live in state.tensors:
        known = [name for name in (live, *state.ties.get(live, ())) if name in source.tensors]
        if known:
            names[live] = known[0]
        else:
            missing.append(live)
    aliases = {name for group in state.ties.values() for name in group}
    used = {*names.values(), *aliases, *ignored}
    unused = [name for name in source.tensors if name not in used]
    problems = []
    if missing:
        near = nearest_names(missing[0], unused)
        problems.append(
            Problem(
                message=f"{folder.name} lacks {len(missing)} tensors of this run's model, among them {missing[0]}",
                near=", ".join(near) or None,
                fix="build the model as in the run that saved (model, adapter config, trained parts)",
            )
        )
    if unused:
        problems.append(
            Problem(
                message=f"{folder.name} holds {len(unused)} tensors that this run's model has no place for, "
                f"among them {unused[0]}",
                near=", ".join(nearest_names(unused[0], missing)) or None,
                fix="build the model as in the run that saved (model, adapter config, trained parts)",
            )
        )
    for live, saved in names.items():
        shape, wanted = source.tensors[saved].shape, tuple(state.tensors[live].shape)
        if shape != wanted:
            problems.append(
                Problem(
                    message=f"{live} is {list(shape)} in {folder.name} and {list(wanted)} in this run",
                    fix="the same model sizes, vocabulary and adapter rank as in the run that saved",
                )
            )
    if problems:
        raise CheckpointError(problems[:5])
    return names


def load_extra_state(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Give modules back what they keep by `get_extra_state`.

    Raises:
        CheckpointError: a module that has such state is not in the model.
    """
    modules = dict(model.named_modules())
    for path, value in saved.items():
        if path not in modules:
            raise CheckpointError(
                f"the checkpoint holds extra state of {path}, which this run's model does not have",
                near=", ".join(nearest_names(path, modules)) or None,
                fix="build the model as in the run that saved",
            )
        modules[path].set_extra_state(decode_state(value))


def compare_base(model: nn.Module, manifest: Manifest | None) -> list[str]:
    """Return a line when an adapter would go on another base than it was trained on; collective."""
    if manifest is None or not manifest.base:
        return []
    state = read_model_state(model)
    if not state.adapters or frozen_fingerprint(model, state.tensors) == manifest.base.get("fingerprint"):
        return []
    name = manifest.base.get("name")
    return [
        f"resume: the frozen weights are not those that the adapter was trained on{f' ({name})' if name else ''}: "
        "another base, another dtype or another quantization"
    ]


def load_optimizer(model: nn.Module, optimizer: Optimizer, checkpoint: OpenCheckpoint) -> int:
    """Give `optimizer` the saved state; return how many parameters got some. Not collective.

    Raises:
        CheckpointError: there is none, or it is another optimizer's.
    """
    if checkpoint.groups is None or checkpoint.optimizer is None:
        raise CheckpointError(f"{checkpoint.folder} holds the model only, no optimizer state", fix=FRESH_FIX)
    saved_dtypes = {name: info.dtype for name, info in checkpoint.model.tensors.items()}
    num_restored = load_optimizer_state(model, optimizer, checkpoint.optimizer, checkpoint.groups, saved_dtypes)
    steps = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    if (checkpoint.optimizer.tensors and not num_restored) or (steps and max(steps) <= 0):
        raise CheckpointError(f"the optimizer took none of the state in {checkpoint.folder}", fix=FRESH_FIX)
    return num_restored
