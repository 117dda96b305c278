"""Running statistics of batch norms under sharding: what DDP gives, and the same evaluation on every rank.

Batch norm keeps its mean and variance in buffers, and buffers are not sharded. In training every rank normalises with
the statistics of its own batch and updates its own buffers; a saved model holds those of rank 0. That is what DDP
does. Evaluation reads the buffers, so before it every rank takes rank 0's: else ranks would evaluate different models.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp.sharding.mesh import agreement_group
from hf_fsdp.torch_private import is_in_backward


def install_running_stats(model: nn.Module) -> None:
    """Keep the running statistics of a sharded model right; without effect where it has none.

    Args:
        model: the root, after `fully_shard`: every rank runs its forward as often as the others.
    """
    norms = [module for module in model.modules() if _tracks(module)]
    if not norms:
        return
    for norm in norms:
        norm.register_forward_pre_hook(_pause_in_recompute)
        norm.register_forward_hook(_resume, always_call=True)
    state = {"differ": False}

    def agree_before_evaluation(module: nn.Module, inputs: Any) -> None:
        if module.training:
            state["differ"] = True
        elif state["differ"]:
            state["differ"] = False
            _take_from_rank_0(norms)

    model.register_forward_pre_hook(agree_before_evaluation)


def _tracks(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats


def _pause_in_recompute(module: nn.Module, inputs: Any) -> None:
    """A recomputed block runs its batch norms a second time: the same batch must not count twice.

    The recompute gets copies to update: it must save the same tensors for backward as the forward did.
    """
    if module.training and is_in_backward():
        module._hf_fsdp_buffers = dict(module._buffers)  # type: ignore[assignment]
        module._buffers.update({name: None if b is None else b.clone() for name, b in module._buffers.items()})


def _resume(module: nn.Module, inputs: Any, output: Any) -> None:
    kept = vars(module).pop("_hf_fsdp_buffers", None)
    if kept is not None:
        module._buffers.update(kept)


def _take_from_rank_0(norms: list[nn.Module]) -> None:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for norm in norms:
        for buffer in norm.buffers(recurse=False):
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.detach().cpu().reshape(-1) for buffer in buffers])
        dist.broadcast(flat, src=0, group=agreement_group())
        for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(values.view(buffer.shape))
