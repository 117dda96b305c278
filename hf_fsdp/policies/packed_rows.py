"""The cache is off in forwards over packed rows: with one, transformers builds no mask between samples.

A packed batch has no attention mask; its `position_ids` restart where a sample begins. transformers keeps such samples
apart only while there is no key-value cache, and a forward makes one by default, in evaluation too. TRL turns it off
itself; `DataCollatorWithFlattening` under a plain Trainer does not.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

_HOOK = "_hf_fsdp_packed_rows_hook"


def keep_packed_rows_apart(model: nn.Module) -> None:
    """Make forwards over packed rows run with ``use_cache=False``, where nobody said otherwise.

    The hook sits on the outermost modules that know the argument, as PEFT and multimodal models only hand it on.
    """
    if "use_cache" not in inspect.signature(model.forward).parameters:
        for child in model.children():
            keep_packed_rows_apart(child)
    elif getattr(model, _HOOK, None) is None:
        setattr(model, _HOOK, model.register_forward_pre_hook(_without_cache, with_kwargs=True))


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    stated = any(kwargs.get(name) is not None for name in ("attention_mask", "past_key_values", "use_cache"))
    if stated or not holds_packed_rows(kwargs.get("position_ids")):
        return None
    return args, {**kwargs, "use_cache": False}


def holds_packed_rows(position_ids: Any) -> bool:
    """Return whether positions of shape (rows, tokens) restart within a row."""
    if not isinstance(position_ids, torch.Tensor) or position_ids.ndim != 2:
        return False
    return bool((position_ids.diff(dim=-1) != 1).any())
