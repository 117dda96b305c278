"""Which tensors of a PEFT model are its adapters, and under which names PEFT saves them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_fsdp.sharding.buffers import named_persistent_buffers

DEFAULT_FOLDER = "."


def is_peft_model(model: nn.Module) -> bool:
    """Return whether `model` is a PEFT model; PEFT is not imported for one that is not."""
    return any(cls.__module__.startswith("peft.") and cls.__name__ == "PeftModel" for cls in type(model).__mro__)


def adapter_keys(model: Any) -> dict[str, dict[str, str]]:
    """Return folder -> key in PEFT's file -> live name, for every adapter; empty without PEFT.

    PEFT itself says which tensors go where: it is given empty tensors and asked which of them it hands back.
    """
    if not is_peft_model(model):
        return {}
    known = getattr(model, "_hf_fsdp_adapter_keys", None)
    if known is not None and known[0] == sorted(model.peft_config):
        return known[1]
    from peft import get_peft_model_state_dict

    live = {**dict(model.named_parameters(remove_duplicate=False)), **dict(named_persistent_buffers(model))}
    stand_ins = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in live.items()}
    first = {id(tensor): name for name, tensor in reversed(live.items())}
    names = {id(stand_in): first[id(live[name])] for name, stand_in in stand_ins.items()}
    folders: dict[str, dict[str, str]] = {}
    for adapter in model.peft_config:
        saved = get_peft_model_state_dict(model, state_dict=stand_ins, adapter_name=adapter)
        folder = DEFAULT_FOLDER if adapter == "default" else adapter
        # One key a tensor: resized embeddings that are tied, or in modules_to_save, come under two, and PEFT needs one.
        keys: dict[str, str] = {}
        for key, tensor in saved.items():
            if id(tensor) in names:
                keys.setdefault(names[id(tensor)], key)
        folders[folder] = {key: name for name, key in keys.items()}
    model._hf_fsdp_adapter_keys = (sorted(model.peft_config), folders)
    return folders
