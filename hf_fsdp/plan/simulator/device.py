"""An accelerator that computes nothing: a device of its own for fake tensors, and a process group of any size.

On a CPU build of torch no tensor can be on "cuda", fake or not: the autograd engine asks for a device guard that is
not there, and the process dies. Torch lets Python register a device ("PrivateUse1", experimental); the names it takes
are in `torch_private.py`. It is registered for good and patches torch, so this module is used in processes of the
planner's own.

A device apart from "cpu" shows what offload leaves where; a simulation of a CPU run (to be held against a real one)
uses the CPU instead, whose kernels are others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_fsdp.config.schema import ShardingConfig
from hf_fsdp.sharding.mesh import build_mesh
from hf_fsdp.torch_private import (
    FakeTensor,
    FakeTensorMode,
    cut_for_first_rank_only,
    register_python_device,
    start_fake_group,
)

GPU = "simgpu"


class _Event:
    """Everything has happened already."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    """One order for all: what a stream would do later is done at once."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass


class _Accelerator:
    """What torch asks of `torch.<device>`; mixed into torch's own stub."""

    Stream = _Stream
    Event = _Event
    stream_now = _Stream()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, index: Any) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def current_stream(self, *args: Any) -> _Stream:
        return self.stream_now

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, *args: Any) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.empty(16, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        pass

    def is_bf16_supported(self, *args: Any) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def memory_allocated(self, *args: Any) -> int:
        return 0


def install_device() -> None:
    """Register the simulated accelerator and what fake tensors need beside it; once a process, and not undone."""
    if hasattr(torch, GPU):
        return
    register_python_device(GPU, _Accelerator)
    cut_for_first_rank_only()
    # torch.accelerator asks C++ for the stream of the device, which knows none; the backward of LoRA does so.
    _patch(torch.accelerator, "current_stream", lambda *args, **kwargs: _Accelerator.stream_now)
    # Else a constant that is made on the device is really allocated there first.
    _patch(FakeTensorMode, "avoid_device_init", property(lambda mode: True))
    _patch(FakeTensor, "data_ptr", lambda tensor: id(tensor))
    _patch(torch.Tensor, "pin_memory", lambda tensor, *args: tensor)
    # Vision-language models count placeholders, which are values.
    _patch(torch, "_check_tensor_all_with", lambda *args, **kwargs: None)


def _patch(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


@contextlib.contextmanager
def simulated_ranks(world_size: int, sharding: ShardingConfig, device: str) -> Iterator[DeviceMesh]:
    """Make this process rank 0 of `world_size` that do not exist, and yield the mesh over them."""
    start_fake_group(world_size)
    try:
        yield build_mesh(sharding, device)  # outside of fake tensors: it reads the ranks' numbers
    finally:
        dist.destroy_process_group()
