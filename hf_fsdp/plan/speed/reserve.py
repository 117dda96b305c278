"""What a count of allocations cannot see: CUDA's context, NCCL's buffers, workspaces, holes in the allocator.

All of it is estimated: figures that others reported, none of which this project has measured on a GPU. It is a sum of
its own beside the simulated peak and never part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_fsdp.config.gpus import Gpu
from hf_fsdp.plan.job import Job

_MIB = 1024**2

# MiB of one process's CUDA context with torch's kernels, loaded as they are used (the default since CUDA 12.2). More
# multiprocessors and more kernel variants need more.
_CONTEXT_MIB = {"A100": 500, "H100": 600, "H200": 600, "B200": 750, "V100": 400, "T4": 300}
_CONTEXT_MIB_OTHERS = 450
# Rings that NCCL opens side by side; on NVLink as many as it takes to fill the links.
_NUM_CHANNELS = {"A100": 24, "H100": 32, "H200": 32, "B200": 32, "V100": 12}
_NUM_CHANNELS_PCIE = 4
_CHANNEL_MIB = 12
_FRAGMENTATION = 0.05


@dataclass(frozen=True, kw_only=True)
class ReservePart:
    """One thing that is not in the simulated peak.

    Args:
        name: in one or two words.
        num_bytes: estimated.
        reason: how it was reckoned, and from what.
    """

    name: str
    num_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """Memory of one GPU to keep free beside the simulated peak; estimated, part by part."""

    parts: tuple[ReservePart, ...]

    @property
    def total_bytes(self) -> int:
        """The sum of all parts."""
        return sum(part.num_bytes for part in self.parts)


def estimate_reserve(
    gpu: Gpu, *, world_size: int, num_groups: int = 1, allocated_bytes: int | None = None, num_nodes: int = 1
) -> Reserve:
    """Return what to keep free on `gpu` beside a simulated peak of `allocated_bytes`.

    Args:
        gpu: the GPU; for one that is not known, the largest figures of all known ones hold.
        world_size: processes of the training; one alone has no NCCL buffers.
        num_groups: NCCL communicators of a process. Sharding over all processes: 1. Hybrid sharding: 3 (the shard
            axis, the replicate axis, and the whole world that losses and flags go over).
        allocated_bytes: the simulated peak, of which fragmentation is a share. None: the largest peak that still
            fits, so that the reserve is a property of GPU and layout alone: what fits beside it, fits.
        num_nodes: machines; NCCL keeps buffers for the network too.

    Example:
        >>> from hf_fsdp.config.hardware import parse_gpus
        >>> reserve = estimate_reserve(parse_gpus("A100-80G").gpu, world_size=1, allocated_bytes=0)
        >>> [part.name for part in reserve.parts]
        ['CUDA context', 'cuBLAS workspaces']
    """
    parts = [_context(gpu), _nccl_buffers(gpu, world_size, num_groups, num_nodes), _workspaces(gpu)]
    if allocated_bytes is None:
        left = gpu.usable_bytes - sum(part.num_bytes for part in parts)
        allocated_bytes = max(0, int(left / (1 + _FRAGMENTATION)))
    parts.append(_fragmentation(allocated_bytes))
    return Reserve(parts=tuple(part for part in parts if part.num_bytes))


def estimate_job_reserve(gpu: Gpu, job: Job, *, num_nodes: int = 1, allocated_bytes: int | None = None) -> Reserve:
    """Return the reserve of `job` on `gpu`, its communicators counted; the rest as in `estimate_reserve`."""
    is_hybrid = job.strategy == "fsdp" and job.fsdp.sharding.dp_replicate_size > 1
    return estimate_reserve(
        gpu,
        world_size=job.world_size,
        num_groups=3 if is_hybrid else 1,
        allocated_bytes=allocated_bytes,
        num_nodes=num_nodes,
    )


def _is_unknown(gpu: Gpu) -> bool:
    return gpu.link is None


def _context(gpu: Gpu) -> ReservePart:
    mib = max(_CONTEXT_MIB.values()) if _is_unknown(gpu) else _CONTEXT_MIB.get(gpu.family, _CONTEXT_MIB_OTHERS)
    return ReservePart(
        name="CUDA context",
        num_bytes=mib * _MIB,
        reason=f"context and kernels of one process: {mib} MiB, assumed between reports of 723 MiB with all kernels "
        "loaded at once (discuss.pytorch.org 73021) and 1.06 GB on 8 H100 with NCCL's start (NVIDIA/nccl#1685)",
    )


def _nccl_buffers(gpu: Gpu, world_size: int, num_groups: int, num_nodes: int) -> ReservePart:
    if world_size < 2 or num_groups < 1:
        return ReservePart(name="NCCL buffers", num_bytes=0, reason="one process: no collectives")
    if _is_unknown(gpu):
        channels = max(_NUM_CHANNELS.values())
    else:
        channels = _NUM_CHANNELS.get(gpu.family, _NUM_CHANNELS_PCIE) if gpu.link == "nvlink" else _NUM_CHANNELS_PCIE
    # Within a machine a channel has a buffer for its ring and one for its tree; over machines one more for the network.
    ends = 2 if num_nodes == 1 else 3
    return ReservePart(
        name="NCCL buffers",
        num_bytes=num_groups * channels * ends * _CHANNEL_MIB * _MIB,
        reason=f"{num_groups} communicator{'s' if num_groups > 1 else ''} x {channels} channels x {ends} connections x "
        f"{_CHANNEL_MIB} MiB: NVIDIA/nccl#1685 shows buffers of 10 and 2 MiB a channel; by NVIDIA/nccl#986 they grow "
        "with communicators and channels, not with machines beyond two. Channels a GPU: assumed",
    )


def _workspaces(gpu: Gpu) -> ReservePart:
    is_hopper = gpu.compute_capability is None or gpu.compute_capability >= (9, 0)
    cublas, cublas_lt = (32.0, 32.0) if is_hopper else (8.125, 4.0)
    return ReservePart(
        name="cuBLAS workspaces",
        # Forward and backward run in threads of their own, and each has its own handle.
        num_bytes=int(2 * (cublas + cublas_lt) * _MIB),
        reason=f"{cublas:g} MiB cuBLAS and {cublas_lt:g} MiB cuBLASLt in the forward's and the backward's thread "
        "(torch's defaults: pytorch#83461, #120925); a CUDA run counts them as allocated, the simulation does not",
    )


def _fragmentation(allocated_bytes: int) -> ReservePart:
    return ReservePart(
        name="fragmentation",
        num_bytes=int(_FRAGMENTATION * allocated_bytes),
        reason=f"{_FRAGMENTATION:.0%} of the peak: out-of-memory messages in public issues show 0 to 9 % that is "
        "reserved but not allocated; PYTORCH_ALLOC_CONF=expandable_segments:True keeps it low",
    )
