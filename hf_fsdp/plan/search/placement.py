"""So many GPUs as machines: full ones, or a part of one."""

from __future__ import annotations

from hf_fsdp.config.gpus import Gpu
from hf_fsdp.config.hardware import GpuRequest

_USUAL_NODE = 8


def place_gpus(num_gpus: int, gpu: Gpu | None, node_size: int | None = None) -> GpuRequest:
    """Return machines that hold `num_gpus`: one if they fit into it, else several of the same size.

    Args:
        num_gpus: a power of two, or a multiple of the machine's size.
        gpu: gives the size of the usual machine.
        node_size: GPUs of one machine, where it is known better.

    Example:
        >>> place_gpus(16, None).num_nodes
        2
    """
    size = node_size or (gpu.node_size if gpu is not None else None) or _USUAL_NODE
    if num_gpus <= size:
        return GpuRequest(count=num_gpus, gpu=gpu)
    while num_gpus % size:
        size -= 1
    return GpuRequest(count=size, gpu=gpu, num_nodes=num_gpus // size)
