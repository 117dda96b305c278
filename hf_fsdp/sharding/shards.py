"""This rank's part of a tensor: where it lies in the whole one, its values, and back again."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hf_fsdp.errors import CheckpointError


@dataclass(frozen=True)
class Box:
    """Where this rank's part of a tensor lies in the whole one."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]


def local_box(tensor: torch.Tensor) -> Box:
    """Return where `tensor`'s local part lies; a plain tensor is its own whole.

    Raises:
        CheckpointError: the tensor is laid out in a way that FSDP does not make (partial sums, strided shards).
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape), tuple(tensor.shape))
    if not all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        raise CheckpointError(
            f"a tensor is laid out as {tensor.placements}, which checkpoints do not know",
            fix="save with plain or hybrid FSDP2 sharding",
        )
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    shape = tuple(shape)
    # Torch places an empty part at the end or beyond; any offset inside will do.
    offsets = tuple(offsets) if math.prod(shape) else (0,) * len(shape)
    return Box(offsets, shape, tuple(tensor.shape))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's values, without gradients."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_shard(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return `local` as this rank's part of a tensor that is laid out like `like`; nothing is copied or sent."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def reshard_all(model: nn.Module) -> None:
    """Free every gathered parameter: after a forward without backward some units are still whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
