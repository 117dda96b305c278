"""Activation checkpointing that keeps gradients right: whole blocks, RNG state kept, names untouched.

Accelerate's FSDP2 path recomputes without the RNG state, so a dropout mask differs between forward and
recompute: the loss is the same and the gradients are wrong. Here the composable form is used (see
`torch_private.checkpoint_block`), which is exact and adds neither a wrapper nor an all-gather.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_fsdp.config.schema import ActivationCheckpointingConfig
from hf_fsdp.torch_private import checkpoint_block, is_checkpointed


def select_blocks(config: ActivationCheckpointingConfig, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks to checkpoint, in order: none, all, or every n-th counted from the first."""
    if config.mode != "full":
        return []
    return list(blocks[:: config.every])


def apply_activation_checkpointing(
    model: nn.Module, config: ActivationCheckpointingConfig, blocks: Sequence[nn.Module]
) -> int:
    """Checkpoint the selected `blocks` of `model`, replacing transformers' own switch if it is on.

    Call before ``fully_shard``, so that a recompute runs inside the unit's own unshard.

    Returns:
        The number of checkpointed blocks.
    """
    turn_off_model_checkpointing(model)
    selected = select_blocks(config, blocks)
    for block in selected:
        if not is_checkpointed(block):
            checkpoint_block(block)
    if selected:
        disable_cache_in_training(model)
    return len(selected)


def turn_off_model_checkpointing(model: nn.Module) -> bool:
    """Switch transformers' own checkpointing off; return whether it was on. Two kinds would recompute twice."""
    was_on = False
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False  # type: ignore[assignment]
            was_on = True
    return was_on


def disable_cache_in_training(model: nn.Module) -> None:
    """Make every forward of `model` with gradients run with ``use_cache=False``.

    A key-value cache filled in forward is found full by the recompute, which then has the wrong shape. Done by
    a hook and not in ``model.config``: the config is saved with the model, and generation wants its cache. The hook
    sits on the outermost modules that know the argument: LLaVA and others only hand it on to their language model.
    """
    if "use_cache" not in inspect.signature(model.forward).parameters:
        for child in model.children():
            disable_cache_in_training(child)
    elif getattr(model, "_hf_fsdp_cache_hook", None) is None:
        model._hf_fsdp_cache_hook = model.register_forward_pre_hook(_without_cache, with_kwargs=True)  # type: ignore[assignment]


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not (module.training and torch.is_grad_enabled()):
        return None
    return args, {**kwargs, "use_cache": False}
