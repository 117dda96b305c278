"""TRL's loss in chunks as a GPU runs it: its Triton kernels work inside the tile that is there and make nothing new.

On a device without Triton TRL takes plain operators, which copy the tile several times in float32. A planned GPU has
Triton, so on the simulated device the kernels are what they are there: no tensor more, and products that add in
float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

_state = {"on_gpu": False}


@contextmanager
def kernels_of_gpu(wanted: bool) -> Iterator[None]:
    """Let the loss in chunks be what it is on a GPU, wherever the tensors are; else what it is on a CPU."""
    before = _state["on_gpu"]
    _state["on_gpu"] = wanted
    try:
        yield
    finally:
        _state["on_gpu"] = before


def install_fused_loss() -> None:
    """Give TRL's chunked loss the kernels of a GPU where `kernels_of_gpu` says so; nothing without TRL."""
    if find_spec("trl") is None:
        return
    from trl.kernels import chunked_logprob

    for name in ("_forward_tile", "_backward_tile"):
        setattr(chunked_logprob, name, _in_place(getattr(chunked_logprob, name)))
    plain_product = chunked_logprob._addmm_fp32

    def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        if not _state["on_gpu"]:
            plain_product(total, left, right)
            return
        # Shapes alone, so that the work is counted and nothing is held.
        total.addmm_(_shape_of(left), _shape_of(right))

    chunked_logprob._addmm_fp32 = add_product


def _in_place(original: Any) -> Any:
    def fold(tile: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return None if _state["on_gpu"] else original(tile, *args, **kwargs)

    return fold


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.float32, device=tensor.device).expand(tensor.shape)
