"""The part of sharding that reads: weights that are still in files are cut on meta, then every rank reads its boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from hf_fsdp.errors import CheckpointError, ShardingError
from hf_fsdp.sharding.agree import checksum
from hf_fsdp.sharding.mesh import agree_all, rank
from hf_fsdp.sharding.origins import Origin
from hf_fsdp.sharding.outcome import agreed
from hf_fsdp.sharding.shards import as_shard, local_box
from hf_fsdp.sharding.unread import UnreadParameter, make_placeholder, read_all

if TYPE_CHECKING:
    from hf_fsdp.sharding.apply import AppliedSharding

_SAMPLED_ELEMENTS = 64


def take_unread(model: nn.Module) -> dict[str, Origin]:
    """Put meta tensors in place of the weights that nobody has read, and return where their values are; collective.

    A weight that one rank has read (to print it, to resize it) is read by all: they must agree on its values.

    Returns:
        Name -> origin, on every rank the same; a tied weight under every name.

    Raises:
        CheckpointError: on all ranks alike, when their files are not the same.
    """
    mine = {name: item for name, item in model.named_parameters() if isinstance(item, UnreadParameter)}
    samples = agreed("read the weights", lambda: {name: _sample(item.origin) for name, item in mine.items()})
    everyone = agree_all(samples)
    common = set(mine).intersection(*everyone)
    for name in sorted(common):
        if any(theirs[name] != samples[name] for theirs in everyone):
            raise CheckpointError(
                f"the processes read different files: the first values of {name} are not the same on every rank",
                fix="give every node the same folder, on a shared file system or copied from one place",
            )
    agreed("read the weights", lambda: read_all(item for name, item in mine.items() if name not in common))
    origins = {id(mine[name]): make_placeholder(mine[name]) for name in common}
    named = model.named_parameters(remove_duplicate=False)
    return {name: origins[id(item)] for name, item in named if id(item) in origins}


def read_shards(
    model: nn.Module, origins: Mapping[str, Origin], dtypes: Mapping[str, torch.dtype], applied: AppliedSharding
) -> None:
    """Give the shards that are on meta their values, read in the dtype they are stored in; collective.

    Args:
        model: sharded; parameters named in `origins` are DTensors on meta.
        origins: from `take_unread`.
        dtypes: the dtype that each parameter is stored in.
        applied: what `model` was sharded with.

    Raises:
        CheckpointError: on all ranks alike, when one of them could not read.
        ShardingError: copies of one shard differ.
    """
    if not origins:
        return
    places = {
        id(parameter): (origins[name], dtypes[name]) for name, parameter in model.named_parameters() if name in origins
    }
    num_bytes = sum(parameter.to_local().nbytes for parameter in model.parameters() if id(parameter) in places)  # type: ignore[attr-defined]
    device = "cpu" if isinstance(applied.offload, CPUOffloadPolicy) else applied.mesh.device_type
    bar = logging.tqdm(total=num_bytes, desc="Reading shards", unit="B", unit_scale=True, disable=rank() != 0)

    def read(tensor: torch.Tensor) -> torch.Tensor:
        origin, dtype = places.pop(id(tensor), (None, None))
        if origin is None or not isinstance(tensor, DTensor):
            return tensor
        box = local_box(tensor)
        local = torch.empty(box.shape, dtype=dtype, device=device)
        if local.numel():
            _read(origin, box.offsets, local)
        bar.update(local.numel() * tensor.element_size())
        return as_shard(local, tensor)

    try:
        agreed("read the weights", lambda: model._apply(read))
    finally:
        bar.close()
        for source in {id(item): item for origin in origins.values() for item in origin.sources()}.values():
            source.close()
    applied.agreement.num_tensors += len(set(origins.values()))
    _check_copies(model, origins, applied.mesh)


def _check_copies(model: nn.Module, names: Mapping[str, Origin], mesh: DeviceMesh) -> None:
    """Compare the shards that several ranks have read, under hybrid sharding; collective."""
    if mesh.ndim == 1:
        return
    digest = xxhash.xxh3_64()
    for name, parameter in model.named_parameters():
        if name in names and isinstance(parameter, DTensor):
            digest.update(checksum(parameter.to_local()).encode())
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    seen: dict[int, str] = {}
    for shard, theirs in agree_all((coordinate[-1], digest.hexdigest())):
        if seen.setdefault(shard, theirs) != theirs:
            raise ShardingError(
                f"copies of shard {shard} are not the same on every replica after they were read",
                fix="do not change the files while they are read; give every node the same folder",
            )


def _read(origin: Origin, offsets: Sequence[int], out: torch.Tensor) -> None:
    try:
        origin.read(offsets, out)
    except OSError as error:
        raise CheckpointError(
            f"{origin.name} could not be read from its file ({error})",
            fix="check that the folder is still there and its disk is well, then start again",
        ) from error


def _sample(origin: Origin) -> str:
    """Return a hash of a weight's dtype, shape and first values: enough to tell two models from each other."""
    shape = tuple(min(size, 1) for size in origin.shape[:-1]) + tuple(
        min(size, _SAMPLED_ELEMENTS) for size in origin.shape[-1:]
    )
    values = torch.empty(shape, dtype=origin.dtype)
    if values.numel():
        _read(origin, (0,) * len(shape), values)
    return f"{list(origin.shape)} {checksum(values)}"
