"""The linear layers of each part of a model, as adapters count them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from hf_fsdp.policies.model_parts import find_parts

ALL_LINEAR = "all-linear"


def linears_by_part(model: nn.Module, *, inside_attention: bool = False) -> dict[str, list[str]]:
    """Return the linear layers that all-linear means: no head, and none whose weight its owner reads itself."""
    parts = part_of_modules(model)
    head = head_of(model)
    found: dict[str, list[str]] = {}
    for path, module in _linears(model):
        # torch's attention computes with out_proj.weight and never calls the layer: an adapter there does nothing.
        is_read = isinstance(model.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention)
        if module is not head and (inside_attention or not is_read) and path in parts:
            found.setdefault(parts[path], []).append(path)
    return found


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    from transformers.pytorch_utils import Conv1D

    for path, module in model.named_modules():
        if path and isinstance(module, (nn.Linear, Conv1D)):
            yield path, module


def head_of(model: Any) -> Any:
    """Return the output embeddings of `model`, or None."""
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def part_of_modules(model: nn.Module) -> dict[str, str]:
    """Return the part of every module with parameters of its own, by path; of a tied weight the owner's."""
    by_name = find_parts(model).by_parameter()
    by_id = {id(parameter): by_name[name] for name, parameter in model.named_parameters()}
    return {
        path: by_id[id(parameter)]
        for path, module in model.named_modules()
        if path and (parameter := next(module.parameters(recurse=False), None)) is not None
    }


def is_named(path: str, kinds: str | Sequence[str]) -> bool:
    """Return whether `kinds` (``all-linear``, names, or one pattern over full paths) takes the layer at `path`."""
    if isinstance(kinds, str):
        if kinds.lower() == ALL_LINEAR:
            return True
        if not re.fullmatch(r"[\w.]+", kinds):
            return re.fullmatch(kinds, path) is not None
        kinds = [kinds]
    return any(path == kind or path.endswith(f".{kind}") for kind in kinds)


def read_by_attention(model: nn.Module) -> Iterator[str]:
    """Yield linear layers that are never called: torch's attention reads their weight."""
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            yield f"{path}.out_proj"
