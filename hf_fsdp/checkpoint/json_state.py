"""State of schedulers, scalers and random generators as JSON, which runs no code when it is read.

What JSON has no word for is written as a mapping with one key that says what it is.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from hf_fsdp.errors import CheckpointError

_TUPLE, _ITEMS, _COUNTER, _TENSOR, _ARRAY = "__tuple__", "__items__", "__counter__", "__tensor__", "__array__"


def encode_state(value: Any, where: str = "state") -> Any:
    """Return `value` in JSON's own types.

    Raises:
        CheckpointError: it holds an object that is neither a number, a text, a container nor a tensor.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return float(value) if isinstance(value, numpy.floating) else value
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, tuple):
        return {_TUPLE: [encode_state(item, where) for item in value]}
    if isinstance(value, list):
        return [encode_state(item, where) for item in value]
    if isinstance(value, Counter):
        return {_COUNTER: [[encode_state(key, where), count] for key, count in value.items()]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: encode_state(item, f"{where}.{key}") for key, item in value.items()}
        return {_ITEMS: [[encode_state(key, where), encode_state(item, where)] for key, item in value.items()]}
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        text = base64.b64encode(data.view(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b"").decode()
        return {_TENSOR: [str(data.dtype).removeprefix("torch."), list(data.shape), text]}
    if isinstance(value, numpy.ndarray) and value.dtype != object:
        text = base64.b64encode(numpy.ascontiguousarray(value).tobytes()).decode()
        return {_ARRAY: [value.dtype.str, list(value.shape), text]}
    raise CheckpointError(
        f"{where} holds a {type(value).__name__}, which a checkpoint without pickle cannot hold",
        fix="keep only numbers, text, lists, mappings and tensors in state_dict()",
    )


def decode_state(value: Any) -> Any:
    """Return what `encode_state` was given."""
    if isinstance(value, list):
        return [decode_state(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind == _TUPLE:
            return tuple(decode_state(item) for item in content)
        if kind == _ITEMS:
            return {_hashable(decode_state(key)): decode_state(item) for key, item in content}
        if kind == _COUNTER:
            return Counter({_hashable(decode_state(key)): int(count) for key, count in content})
        if kind == _TENSOR:
            return _decode_tensor(*content)
        if kind == _ARRAY:
            dtype, shape, text = content
            return numpy.frombuffer(base64.b64decode(text), dtype=numpy.dtype(dtype)).reshape(shape).copy()
    return {key: decode_state(item) for key, item in value.items()}


def _decode_tensor(dtype: str, shape: list[int], text: str) -> torch.Tensor:
    data = bytearray(base64.b64decode(text))
    kind = getattr(torch, dtype)
    assert isinstance(kind, torch.dtype)
    return torch.frombuffer(data, dtype=kind).reshape(shape).clone() if data else torch.empty(shape, dtype=kind)


def _hashable(key: Any) -> Any:
    return key if not isinstance(key, list) else tuple(key)
