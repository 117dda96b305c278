"""Operators seen before are answered from what they returned then: every layer asks the questions of the one before.

Fake tensors run an operator without data to know the shape of its result, and remember it; but telling that they know
an operator takes them longer than anything else in a simulation. What is remembered here are the plain ones, of which a
step is full: one new tensor, a view of the first argument, or a write into it, with nothing known about any values. For
these, the shapes, strides, dtypes and devices of what goes in say all about what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_fsdp.torch_private import FakeTensor, fake_device, make_fake, view_fake

_NEW, _VIEW, _WRITE = "new", "view", "write"
_SHAPE_DEPENDS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_WORDS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
# A model at one batch size asks some hundreds of questions; a long search must not fill the memory.
_MAX_KNOWN = 20_000


class Repeats(TorchDispatchMode):
    """Answers operators on fake tensors while it is entered; it comes right after their own mode."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would switch its compiler off around every call; nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return fake_device(args[0])  # most of all calls: autograd asks it of every tensor, several times
        kwargs = kwargs or {}
        kind = _kind_of(func)
        key = _key(func, args, kwargs) if kind else None
        if key is None:
            return func(*args, **kwargs)
        known = self._known.get(key)
        if known is not None:
            return _again(kind, args[0], known)
        result = func(*args, **kwargs)
        if _is_as_expected(kind, args[0], key, result):
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = _facts(result)
        return result


# What one depth of a job asked, the next asks again, and so do most other jobs of a search.
REPEATS = Repeats()


@cache
def _kind_of(func: Any) -> str:
    """Return what `func` makes; empty: something else, or it depends on values."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return ""
    arguments, returns = func._schema.arguments, func._schema.returns
    if len(returns) != 1 or str(returns[0].type) != "Tensor" or not arguments or str(arguments[0].type) != "Tensor":
        return ""
    if any(tag in func.tags for tag in _SHAPE_DEPENDS) or any(argument.alias_info for argument in arguments[1:]):
        return ""
    first, out = arguments[0].alias_info, returns[0].alias_info
    if first is None:
        return _NEW if out is None else ""
    if out is None or out.is_write != first.is_write:
        return ""
    return _WRITE if first.is_write else _VIEW


def _key(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return all that the result depends on, that of the first argument first; None: it may depend on more."""
    parts: list[Any] = []
    if not _collect(parts, args) or not _collect(parts, kwargs.values()):
        return None
    return (*parts, func, tuple(kwargs), torch.get_default_dtype())


def _collect(parts: list[Any], values: Iterable[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.is_conj() or value.is_neg():
                return False  # a view of a conjugate is one too, and a sparse tensor has no strides
            parts.append(_facts(value))
        elif kind in _WORDS:
            parts += (kind, value)  # 1 and 1.0 are equal and make other dtypes
        elif isinstance(value, list | tuple):
            parts.append(len(value))
            if not _collect(parts, value):
                return False
        else:
            return False
    return True


def _facts(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device


def _is_as_expected(kind: str, first: Any, key: tuple[Any, ...], result: Any) -> bool:
    """Whether `result` is what `_again` would make; an operator may do otherwise than its schema says."""
    if kind is _WRITE:
        return result is first and _facts(first) == key[0]
    if type(result) is not FakeTensor or result.constant is not None or result.layout is not torch.strided:
        return False
    if result.is_conj() or result.is_neg():
        return False
    shares = result.untyped_storage()._cdata == first.untyped_storage()._cdata
    if kind is _VIEW:
        return shares and result.dtype is first.dtype
    return not shares and result.storage_offset() == 0


def _again(kind: str, first: Any, known: tuple[Any, ...]) -> Any:
    if kind is _WRITE:
        return first
    shape, stride, offset, dtype, device = known
    if kind is _VIEW:
        return view_fake(first, shape, stride, offset)
    return make_fake(first.fake_mode, shape, stride, dtype, device)
