"""What a tower is given on a rank that has nothing for it: inputs of the shapes that another rank has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Grids, sizes and counts say how pixels are cut up, so their values travel. More than this are masks of pixels.
_MAX_VALUES = 65536


@dataclass(frozen=True)
class TensorOutline:
    """A tensor without its values, or with them where they are few and whole numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Any = None


def outline(value: Any) -> Any:
    """Return `value` with every tensor replaced by its outline: small, and fit to be sent to other ranks.

    Args:
        value: an argument of a feature method: a tensor, a list or mapping of tensors, a plain value.

    Raises:
        TypeError: something that has no outline.
    """
    if isinstance(value, torch.Tensor):
        whole = not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
        keep = whole and value.numel() <= _MAX_VALUES
        return TensorOutline(tuple(value.shape), value.dtype, value.tolist() if keep else None)
    if isinstance(value, Mapping):
        return {name: outline(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [outline(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__}")


def stand_in(outlined: Any, device: torch.device) -> Any:
    """Return inputs of the outlined shapes on `device`, the same on every rank.

    Floating values rise evenly from -1 to 1, as of a normalised picture: families drop pictures that are all zero
    (Idefics3 takes them for padding), and a picture of one colour has no variance to divide by. Masks are all ones.
    """
    if isinstance(outlined, TensorOutline):
        if outlined.values is not None:
            return torch.tensor(outlined.values, dtype=outlined.dtype, device=device).view(outlined.shape)
        if not outlined.dtype.is_floating_point:
            return torch.ones(outlined.shape, dtype=outlined.dtype, device=device)
        count = torch.Size(outlined.shape).numel()
        return torch.linspace(-1.0, 1.0, count, device=device).to(outlined.dtype).view(outlined.shape)
    if isinstance(outlined, Mapping):
        return {name: stand_in(item, device) for name, item in outlined.items()}
    if isinstance(outlined, list):
        return [stand_in(item, device) for item in outlined]
    return outlined


def count_values(value: Any) -> int:
    """Return how many values an input holds; 0 for None and for an empty one."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, Mapping):
        return sum(count_values(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(count_values(item) for item in value)
    return 0


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return the floating tensors of an output that may be nested, in order."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    items = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]
