"""Parameters and optimizer in host memory: torch's offload policy, pinned where there is a device to copy to.

Between their uses the shards of parameters, gradients and the optimizer's state lie in host memory; a unit's shard goes
to the device for its gather, and the optimizer's step runs on the CPU. On a CPU run nothing moves, and pinning, which
needs an accelerator, fails: so `pin_memory: auto` follows the device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from hf_fsdp.config.schema import OffloadConfig
from hf_fsdp.errors import ShardingError

# Gathers run on the device, norms and whole tensors of shards in host memory on the CPU: both need a backend.
BOTH_BACKENDS = "cpu:gloo,cuda:nccl"


def build_offload_policy(config: OffloadConfig, mesh: DeviceMesh) -> OffloadPolicy:
    """Return torch's policy for every unit.

    Args:
        config: the `offload` section.
        mesh: its device type is where units compute.

    Raises:
        ShardingError: pinned memory without an accelerator, or a process group that cannot reduce on the CPU.
    """
    if not config.parameters:
        return OffloadPolicy()
    on_cpu = mesh.device_type == "cpu"
    if config.pin_memory is True and not torch.accelerator.is_available():
        raise ShardingError(
            "offload.pin_memory=true needs an accelerator to copy to, and there is none",
            fix="offload: {parameters: true, pin_memory: auto}",
        )
    if not on_cpu and not _reduces_on_cpu():
        raise ShardingError(
            "offload.parameters=true keeps gradients in host memory, and the process group "
            f"({dist.get_backend_config()}) cannot reduce there: clipping and saving would fail",
            fix=f'TrainingArguments(..., **config.trainer_kwargs()), or init_process_group("{BOTH_BACKENDS}")',
        )
    pin = not on_cpu if config.pin_memory == "auto" else bool(config.pin_memory)
    return CPUOffloadPolicy(pin_memory=pin)


def _reduces_on_cpu() -> bool:
    backends = dict(
        part.partition(":")[::2] if ":" in part else (part, "") for part in dist.get_backend_config().split(",")
    )
    return "cpu" in backends or set(backends) <= {"gloo", "mpi", "fake"}
