"""The device mesh that parameters are sharded and replicated over, and the group that ranks agree on.

Axes: `dp_shard` splits every parameter; `dp_replicate`, when larger than one (hybrid sharding), holds copies of the
shards. Torch's own names, so that a mesh of another library reads the same.
"""

from __future__ import annotations

import atexit
import functools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_fsdp.config.schema import ShardingConfig
from hf_fsdp.errors import ShardingError

SHARD_AXIS = "dp_shard"
REPLICATE_AXIS = "dp_replicate"

_agreement_groups: dict[Any, dist.ProcessGroup] = {}
_background_groups: dict[Any, dist.ProcessGroup] = {}


def build_mesh(config: ShardingConfig, device_type: str | None = None) -> DeviceMesh:
    """Build the mesh over all ranks of the default process group.

    Args:
        config: `dp_shard_size` (or `auto`: all ranks that are left) times `dp_replicate_size` must be the world size.
        device_type: `cuda`, `cpu`, …: where parameters live; default: where the process group reduces.

    Raises:
        ShardingError: no process group, or sizes that do not multiply to the world size.
    """
    if not dist.is_initialized():
        raise ShardingError(
            "sharding needs a process group and there is none: this script runs as a single process",
            fix="start it with: torchrun --nproc_per_node 2 SCRIPT, or accelerate launch --num_processes 2 SCRIPT",
        )
    device_type = device_type or default_device_type()
    world_size = dist.get_world_size()
    replicate = config.dp_replicate_size
    shard = world_size // replicate if config.dp_shard_size == "auto" else int(config.dp_shard_size)
    if shard * replicate != world_size:
        raise ShardingError(
            f"sharding.dp_shard_size={config.dp_shard_size} and sharding.dp_replicate_size={replicate} "
            f"do not multiply to the {world_size} processes that are running",
            fix=f"sharding: {{dp_shard_size: auto, dp_replicate_size: {_nearest_divisor(replicate, world_size)}}}",
        )
    if shard == 1 and replicate > 1:
        raise ShardingError(
            f"sharding.dp_replicate_size={replicate} on {world_size} processes leaves one process for each copy: "
            "every rank would hold the whole model",
            fix=f"sharding: {{dp_replicate_size: {_nearest_divisor(replicate // 2, world_size)}}}, or DDP",
        )
    if replicate == 1:
        return init_device_mesh(device_type, (shard,), mesh_dim_names=(SHARD_AXIS,))
    return init_device_mesh(device_type, (replicate, shard), mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS))


def default_device_type() -> str:
    """Return where parameters go when nobody says it: the accelerator, if the process group can reduce there.

    A machine with GPUs can run a CPU job (`use_cpu=True`, a gloo group); its parameters must stay on the CPU.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # "gloo", "nccl", or by device: "cpu:gloo,cuda:nccl"
    backends = {part.rpartition(":")[2] for part in dist.get_backend_config().split(",")}
    return "cpu" if accelerator is None or backends <= {"gloo", "mpi", "fake"} else accelerator.type


def shard_axis_size(mesh: DeviceMesh) -> int:
    """Return over how many ranks one parameter is split."""
    return mesh.size(mesh.ndim - 1)


def is_simulated() -> bool:
    """Return whether the other ranks exist only by name (torch's fake group, in the planner): nobody to agree with."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def agreement_group() -> dist.ProcessGroup:
    """Return the gloo group over all ranks that agreements run on: CPU objects, no device wait, never mixed with NCCL.

    Made once per process group; every rank must make its first call at the same point.
    """
    default: Any = dist.group.WORLD
    if is_simulated():
        return default
    if default not in _agreement_groups:
        _agreement_groups.clear()  # an earlier default group is gone with its side group
        _agreement_groups[default] = dist.new_group(backend="gloo")
        _pause_at_exit()
    return _agreement_groups[default]


# Long enough for a thread that is ready to run to be given a core, on a machine with many more threads than cores.
EXIT_PAUSE_SECONDS = 0.2


@functools.cache
def _pause_at_exit() -> None:
    """Let gloo's threads hand back their last tensors before the interpreter goes; registered once.

    A thread of gloo that is late drops the tensors of a finished collective after the main thread has left it. Doing
    so during the interpreter's own end it asks for a lock that is gone, and the process dies with "terminate called
    without an active exception" after a training that went well (seen in 1 of 30 exits on a loaded machine). Torch has
    no call that waits for these threads, and destroying a group does not while a mesh or a module still refers to it.
    """
    atexit.register(time.sleep, EXIT_PAUSE_SECONDS)


def background_group() -> dist.ProcessGroup:
    """Return the gloo group for what threads agree on behind training; every rank must first call this at one point.

    Collectives of one group must start in the same order on all ranks, which a thread beside training cannot promise.
    """
    default = dist.group.WORLD
    if default not in _background_groups:
        _background_groups.clear()
        _background_groups[default] = dist.new_group(backend="gloo")
        _pause_at_exit()
    return _background_groups[default]


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def agree_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's `value`, in rank order; collective on `group`, by default the agreement group."""
    if world_size() == 1 or is_simulated():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group=group or agreement_group())
    return gathered


def _nearest_divisor(wanted: int, world_size: int) -> int:
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return min(divisors, key=lambda size: (abs(size - wanted), size))
