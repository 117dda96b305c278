"""Which tensors of a model a checkpoint holds, under which names.

Names are those of the module tree, so wrappers of other packages never show in a file. A tied tensor is saved once,
under its first name. Of a PEFT model everything that was trained is saved, and not the frozen base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp.checkpoint.json_state import encode_state
from hf_fsdp.checkpoint.parts import is_writer
from hf_fsdp.policies.packed_weights import packed_names
from hf_fsdp.policies.wrap_plan import shared_owners
from hf_fsdp.sharding.adapters import adapter_keys
from hf_fsdp.sharding.apply import get_applied_sharding
from hf_fsdp.sharding.buffers import persistent_buffers
from hf_fsdp.sharding.mesh import agree_all
from hf_fsdp.sharding.shards import local_tensor
from hf_fsdp.storage.safetensors_file import tensor_bytes

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ModelState:
    """What is saved of a model, the same on all ranks and in the same order.

    Args:
        tensors: name -> the live tensor, sharded or not.
        ties: first name -> all names of a shared tensor.
        export_dtypes: name -> the dtype that an export writes by default.
        adapters: folder -> key in PEFT's file -> name; these tensors are saved in PEFT's own layout.
    """

    tensors: dict[str, torch.Tensor]
    ties: dict[str, tuple[str, ...]]
    export_dtypes: dict[str, torch.dtype]
    adapters: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def adapter_names(self) -> set[str]:
        return {name for keys in self.adapters.values() for name in keys.values()}


def read_model_state(model: nn.Module) -> ModelState:
    """Return what a checkpoint of `model` holds; nothing is copied."""
    applied = get_applied_sharding(model)
    ties = dict(applied.ties) if applied is not None else shared_owners(model)
    load_dtypes = applied.load_dtypes if applied is not None else {}
    override = None
    if applied is not None and applied.config.precision.save_dtype not in ("auto", None):
        override = getattr(torch, applied.config.precision.save_dtype)
    adapters = adapter_keys(model)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():  # shared ones once, under their first name
        tensors[name] = parameter
    tensors.update(persistent_buffers(model))
    if adapters:
        named = {name for keys in adapters.values() for name in keys.values()}
        packed = packed_names(model)
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if name in named or (tensor.requires_grad or not isinstance(tensor, nn.Parameter)) and name not in packed
        }
    dtypes = {
        name: (override if override is not None and tensor.is_floating_point() else load_dtypes.get(name, tensor.dtype))
        for name, tensor in tensors.items()
    }
    return ModelState(tensors, ties, dtypes, adapters)


def precision_of(model: nn.Module) -> str:
    """Return the preset that `model` computes in; empty when it is not sharded, and Trainer decides."""
    applied = get_applied_sharding(model)
    return applied.config.precision.preset if applied is not None else ""


def read_extra_state(model: nn.Module) -> dict[str, Any]:
    """Return path -> what a module keeps by `get_extra_state`, beside its tensors, for JSON.

    Raises:
        CheckpointError: it is nothing that a checkpoint without pickle can hold.
    """
    found = {}
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found[path] = encode_state(module.get_extra_state(), f"the extra state of {path}")
    return found


def buffers_that_differ(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of whole tensors that have other values on another rank; collective."""
    digests = {
        name: xxhash.xxh3_64_hexdigest(tensor_bytes(tensor.detach().cpu()))
        for name, tensor in tensors.items()
        if not isinstance(tensor, nn.Parameter | DTensor)
    }
    everyone = agree_all(digests)
    return [name for name in digests if len({theirs.get(name) for theirs in everyone}) > 1]


def frozen_fingerprint(model: Any, saved: Mapping[str, torch.Tensor]) -> int:
    """Return one number for the weights that a checkpoint of an adapter leaves out; collective, once for a model.

    It is a sum over integers (the weights' bits), so it does not depend on how many ranks hold them, and tells another
    base from the one that the adapter was trained on.
    """
    known = getattr(model, "_hf_fsdp_fingerprint", None)
    if known is None:
        total = 0
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if name not in saved and is_writer(parameter, index):
                bits = local_tensor(parameter).contiguous().view(-1)
                bits = bits.view(_BITS[bits.element_size()])
                total += (xxhash.xxh3_64_intdigest(name.encode()) >> 8) * int(bits.sum(dtype=torch.int64))
        known = sum(agree_all(total)) % 2**61
        model._hf_fsdp_fingerprint = known
    return known


def expected_names(model: nn.Module) -> set[str]:
    """Return every name that a state dict of `model` has, aliases included: what a whole save must account for."""
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} | set(persistent_buffers(model))
