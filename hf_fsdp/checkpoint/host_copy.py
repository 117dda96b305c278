"""What a save behind training writes, copied into host memory while the next forward and backward run.

Parameters and the optimizer's state change in the optimizer's step only, so training is not held for their copy: it
runs in the thread of the save, and the step waits for what is left of it. Buffers change in a forward and are copied at
once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_fsdp.checkpoint.staged import SafetensorsFile, StagedSave
from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.safetensors_file import TensorToWrite

HostMemory = dict[str, torch.Tensor]

# What every optimizer's step waits for, of whatever model: hooks know no better. Torch has one hook for all, which
# stays: one that removes itself breaks the loop over the others.
_unfinished: list[HostCopy] = []
_hooks: list[object] = []


class HostCopy:
    """The copy of one save's tensors; from its making on, `staged` reads from host memory.

    What only a step of the optimizer changes waits for `run`; the rest is copied here.

    Args:
        staged: of which every tensor is replaced by its copy.
        memory: where copies of earlier saves lie, which are written over: fresh memory takes three times as long.
    """

    def __init__(self, staged: StagedSave, memory: HostMemory):
        self._memory = memory
        self._copies: HostMemory = {}
        self._waiting: list[tuple[str, torch.Tensor]] = []
        self._ended = threading.Event()
        # A change of a sharded tensor counts in the tensor itself, one of this rank's part only in that part.
        self._versions = [
            (name, part, _version_of(part))
            for name, tensor in staged.live.items()
            for part in (tensor, _part_of(tensor))
        ]
        # On a device: what was queued before, an optimizer step among it, comes before the copies. A thread begins on
        # the first device, not on this process's.
        self._ready = self._device = None
        if torch.accelerator.is_available():
            self._ready = torch.accelerator.current_stream().record_event()
            self._device = torch.accelerator.current_stream().device
        for index, file in enumerate(staged.files):
            tensors = []
            for tensor in file.tensors:
                key, value = f"{file.name}:{tensor.name}", tensor.read()
                if tensor.name in staged.live:
                    self._waiting.append((key, value))
                else:
                    self._copy(key, value)
                tensors.append(
                    TensorToWrite(
                        tensor.name, tensor.dtype, tensor.shape, self._reader(key), tensor.offsets, tensor.whole_shape
                    )
                )
            staged.files[index] = SafetensorsFile(file.name, tuple(tensors))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def hold_weights(self) -> None:
        """Let every optimizer's step wait for `run`, which must follow."""
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_wait_for_unfinished))
        _unfinished.append(self)

    def run(self) -> None:
        """Copy the rest; in a thread.

        Raises:
            CheckpointError: a tensor was changed meanwhile, so that its copy may be half old and half new.
        """
        try:
            if self._ready is None:
                self._copy_waiting()
            else:
                stream = torch.Stream(device=self._device)
                stream.wait_event(self._ready)
                with stream:
                    self._copy_waiting()
                stream.synchronize()
            for name, tensor, version in self._versions:
                if version != _version_of(tensor):
                    raise CheckpointError(
                        f"{name} was changed while it was copied, and not by an optimizer's step",
                        fix="change weights in on_step_end or on_optimizer_step, or checkpoint: {async_save: false}",
                    )
            self._memory.clear()
            self._memory.update(self._copies)
        finally:
            self._waiting.clear()
            self._versions.clear()
            self._ended.set()
            _unfinished.remove(self)

    def wait(self) -> None:
        """Wait until the weights may change; not collective, and not about how the copy went."""
        self._ended.wait()

    def _copy_waiting(self) -> None:
        for key, value in self._waiting:
            self._copy(key, value)

    def _copy(self, key: str, value: torch.Tensor) -> None:
        host = self._memory.get(key)
        if host is None or host.shape != value.shape or host.dtype != value.dtype:
            host = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.device.type == "cuda")
        self._copies[key] = host
        host.copy_(value, non_blocking=True)

    def _reader(self, key: str) -> Callable[[], torch.Tensor]:
        return lambda: self._copies[key]


def _wait_for_unfinished(*_: object) -> None:
    for copy in tuple(_unfinished):
        copy.wait()


@torch.no_grad()
def _part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, which counts changes with every other view of it; that of a detached one does not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _version_of(value: torch.Tensor) -> int | None:
    """Return how often torch has seen `value` changed in place."""
    return None if value.is_inference() else int(value._version)
