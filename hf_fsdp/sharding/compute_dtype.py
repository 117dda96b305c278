"""What a sharded model answers when its own forward asks for its dtype.

transformers' ``self.dtype`` is the dtype of the first parameter. Under mixed precision that is the one of what is
kept (float32) wherever the unit with this parameter is not gathered at that moment, while all around is computed in
bf16: SmolVLM casts its pictures' features to it and puts them among the words, which have another.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

_MARK = "_hf_fsdp_follows_forward"


class _Computing:
    """The dtype that one model computes in, and how many of its forwards are running (generation nests them)."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.depth = 0

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self.depth += 1

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.depth = max(0, self.depth - 1)


_computing: weakref.WeakKeyDictionary[nn.Module, _Computing] = weakref.WeakKeyDictionary()


def answer_compute_dtype(model: nn.Module, compute: torch.dtype) -> None:
    """Let ``module.dtype`` be `compute` while the forward of `model` runs; outside of it, what it was.

    Args:
        model: the root of a sharded model.
        compute: what its units gather and compute in.
    """
    state = _Computing(compute)
    for module in model.modules():
        owner = next((cls for cls in type(module).__mro__ if isinstance(vars(cls).get("dtype"), property)), None)
        if owner is not None:
            _follow_forwards(owner)
            _computing[module] = state
    model.register_forward_pre_hook(state.enter, prepend=True)
    model.register_forward_hook(state.leave, always_call=True)


def _follow_forwards(owner: type) -> None:
    """Replace the property of a class, once: no instance can have a property of its own."""
    original = vars(owner)["dtype"]
    if hasattr(original.fget, _MARK):
        return

    def dtype(self: nn.Module) -> Any:
        state = _computing.get(self)
        return state.dtype if state is not None and state.depth else original.fget(self)

    setattr(dtype, _MARK, True)
    owner.dtype = property(dtype, original.fset, original.fdel, original.__doc__)  # type: ignore[attr-defined]
