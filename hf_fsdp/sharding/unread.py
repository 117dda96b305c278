"""Weights that are still in their files: parameters with a shape and a dtype, which are read when somebody asks.

Between `load_sharded` and sharding a model passes through other people's code: PEFT puts adapters beside its layers,
a vocabulary is resized, a script prints a norm. On torch's meta device such code goes wrong without an error: PEFT
moves fresh adapters to meta, where their values are lost, and writing into a meta tensor does nothing. So these
parameters say that they are on the CPU, answer what can be answered without values, and read themselves the moment an
operation wants values, in place and for everyone who holds them. Sharding finds those that nobody has read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hf_fsdp.sharding.origins import Cast, Origin, are_equal, cut, join, stack

# Answered from shape and dtype. Properties are `NAME.__get__`.
_WITHOUT_VALUES = frozenset(
    f"{name}.__get__"
    for name in (
        "shape dtype layout ndim requires_grad grad grad_fn is_leaf itemsize nbytes names output_nr retains_grad name "
        "is_cuda is_xpu is_mps is_xla is_ipu is_maia is_mtia is_vulkan is_mkldnn is_sparse is_sparse_csr is_quantized "
        "is_nested _version _base _backward_hooks _post_accumulate_grad_hooks _grad"
    ).split()
) | frozenset(
    "size dim numel nelement element_size is_floating_point is_complex is_signed is_contiguous stride storage_offset "
    "get_device is_same_size is_inference is_shared requires_grad_ requires_grad.__set__ grad.__set__ __hash__ __len__ "
    "_use_count _is_view _has_compatible_shallow_copy_type".split()
)
_MADE_ON_THE_CPU = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like "
    "new_empty new_zeros new_ones new_full new_tensor new_empty_strided".split()
)
_ANSWERS = {"device.__get__": torch.device("cpu"), "is_meta.__get__": False, "is_cpu.__get__": True}


class UnreadParameter(nn.Parameter):
    """A parameter whose values are still in a file; it becomes an ordinary one when an operation wants them.

    Args:
        origin: where they are.
        requires_grad: as for `torch.nn.Parameter`.
    """

    origin: Origin

    def __new__(cls, origin: Origin, requires_grad: bool = True) -> UnreadParameter:
        empty = torch.empty(origin.shape, dtype=origin.dtype, device="meta")
        self: UnreadParameter = torch.Tensor._make_subclass(cls, empty, requires_grad)
        self.origin = origin
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> UnreadParameter:
        if id(self) not in memo:
            memo[id(self)] = UnreadParameter(self.origin, self.requires_grad)
            _keep_attributes(self, memo[id(self)])
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        read_now(self)
        return self.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnreadParameter({self.origin.name}, {list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _answer(func, tuple(args), dict(kwargs or {}))


class UnreadView(torch.Tensor):
    """What `.data` and `.detach()` of an unread parameter give; writing into it writes into the parameter."""

    parameter: nn.Parameter

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _answer(func, tuple(args), dict(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return _view(self.parameter.__deepcopy__(memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _values(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnreadView({self.parameter!r})"


def read_now(parameter: nn.Parameter) -> None:
    """Give an unread parameter its values, in place; nothing happens to any other."""
    if isinstance(parameter, UnreadParameter):
        origin = parameter.origin
        values = torch.empty(origin.shape, dtype=origin.dtype)
        origin.read((0,) * len(origin.shape), values)
        _swap(parameter, nn.Parameter(values, parameter.requires_grad))


def read_all(parameters: Iterable[nn.Parameter]) -> None:
    """Give every unread parameter among `parameters` its values."""
    for parameter in parameters:
        read_now(parameter)


def make_placeholder(parameter: UnreadParameter) -> Origin:
    """Turn an unread parameter into an ordinary one on the meta device, in place, and return where its values are."""
    origin = parameter.origin
    del parameter.origin
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    return origin


def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        name = f"{func.__self__.__name__}.{name}"  # type: ignore[attr-defined]
    if name in _ANSWERS:
        return _ANSWERS[name]
    if name in _SPECIAL and (answer := _SPECIAL[name](*args, **kwargs)) is not None:
        return None if answer is _DONE else answer
    if name in _MADE_ON_THE_CPU:
        kwargs.setdefault("device", "cpu")
    if name not in _WITHOUT_VALUES and name not in _MADE_ON_THE_CPU:
        args, kwargs = tree_map(_values, args), tree_map(_values, kwargs)
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _values(value: Any) -> Any:
    """Return `value` with its values read, when it is an unread tensor."""
    if isinstance(value, UnreadParameter):
        read_now(value)
    elif isinstance(value, UnreadView):
        read_now(value.parameter)
        return value.parameter.detach()
    return value


def _swap(parameter: UnreadParameter, other: nn.Parameter) -> None:
    """Make `parameter` what `other` is, in place: the object stays, and so do ties and optimizers."""
    _keep_attributes(parameter, other)
    with torch._C.DisableTorchFunctionSubclass():
        torch.utils.swap_tensors(parameter, other)


def _keep_attributes(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Hand on what others noted on a parameter, e.g. transformers that it needs no initialisation."""
    other.__dict__.update({name: value for name, value in vars(parameter).items() if name != "origin"})


# -- operations that need no values; None means that they do ----------------------------------------------------------

_DONE = object()  # the operation was done and returns None


def _origin(tensor: Any) -> Origin | None:
    """Return where the values of a tensor without gradient are, or None when they have been read."""
    if isinstance(tensor, UnreadView):
        tensor = tensor.parameter
    elif isinstance(tensor, UnreadParameter) and tensor.requires_grad and torch.is_grad_enabled():
        return None  # what is computed from a trained weight needs its graph
    return tensor.origin if isinstance(tensor, UnreadParameter) else None


def _unread(origin: Origin | None) -> UnreadParameter | None:
    return None if origin is None else UnreadParameter(origin, requires_grad=False)


def _view(tensor: Any) -> torch.Tensor:
    parameter = tensor.parameter if isinstance(tensor, UnreadView) else tensor
    if not isinstance(parameter, UnreadParameter):
        return parameter.detach()
    with torch._C.DisableTorchFunctionSubclass():
        view = torch.Tensor._make_subclass(UnreadView, torch.Tensor.detach(parameter))
    view.parameter = parameter
    return view


def _set_data(parameter: Any, value: Any) -> Any:
    if not isinstance(parameter, UnreadParameter):
        return None
    value = value.parameter if isinstance(value, UnreadView) else value
    if isinstance(value, UnreadParameter):
        _swap(parameter, UnreadParameter(value.origin, parameter.requires_grad))
    else:
        _swap(parameter, nn.Parameter(value.detach(), parameter.requires_grad))
    return _DONE


def _item(tensor: Any, index: Any) -> Any:
    return tensor if index is Ellipsis and isinstance(tensor, UnreadParameter) else None


def _same(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return None if kwargs or args else tensor


def _to(tensor: Any, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
    if copy or any(isinstance(arg, torch.Tensor) for arg in args) or "other" in kwargs:
        return None
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if memory_format is not None or device not in (None, torch.device("cpu")):
        return None
    if dtype in (None, tensor.dtype):
        return tensor
    origin = _origin(tensor)
    return None if origin is None else _unread(Cast(origin, dtype))


def _join(how: Callable[[Sequence[Origin], int], Origin | None]) -> Callable[..., Any]:
    def joined(tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
        origins = [_origin(tensor) for tensor in tensors]
        known = [origin for origin in origins if origin is not None]
        return None if kwargs or len(known) < len(origins) else _unread(how(known, dim))

    return joined


def _chunk(tensor: Any, chunks: int, dim: int = 0) -> Any:
    size = tensor.shape[dim]
    return _split(tensor, -(-size // chunks), dim) if size else None


def _split(tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Any:
    origin, size = _origin(tensor), tensor.shape[dim]
    if origin is None or not size:
        return None
    sizes = split_size_or_sections
    if isinstance(sizes, int):
        sizes = [min(sizes, size - start) for start in range(0, size, sizes)]
    pieces = cut(origin, sizes, dim)
    return None if pieces is None else tuple(_unread(piece) for piece in pieces)


def _equal(one: Any, other: Any) -> Any:
    first, second = (tensor.origin if isinstance(tensor, UnreadParameter) else None for tensor in (one, other))
    return None if first is None or second is None else are_equal(first, second)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "detach": _view,
    "data.__get__": _view,
    "data.__set__": _set_data,
    "__getitem__": _item,
    "contiguous": _same,
    "cpu": _same,
    "to": _to,
    "float": lambda tensor: _to(tensor, torch.float32),
    "double": lambda tensor: _to(tensor, torch.float64),
    "half": lambda tensor: _to(tensor, torch.float16),
    "bfloat16": lambda tensor: _to(tensor, torch.bfloat16),
    "cat": _join(join),
    "stack": _join(stack),
    "chunk": _chunk,
    "split": _split,
    "equal": _equal,
}
