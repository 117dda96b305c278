"""Greedy answers of a model that may be sharded: every rank runs the same forwards."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp.monitor.samples import Prompt, cut_at
from hf_fsdp.policies.blocks import base_model
from hf_fsdp.sharding.mesh import agree_all

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def generate_greedily(
    model: nn.Module, prompts: Sequence[Prompt], *, pad_token_id: int, max_new_tokens: int, batch_size: int
) -> list[list[int]]:
    """Return the greedy answer to every prompt, on every rank; collective, also when ranks finish at different times.

    Args:
        model: sharded or not; its mode is put back.
        prompts: the same on every rank; each rank answers its part of them.
        pad_token_id: put to the left of the shorter prompts of a batch.
        max_new_tokens: the longest answer; prompts that would leave no room for it lose their beginning.
        batch_size: prompts at once, on one rank.
    """
    is_distributed = dist.is_initialized() and dist.get_world_size() > 1
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
    indices = list(range(rank, len(prompts), world_size))
    num_each = -(-len(prompts) // world_size)
    # Ranks with one prompt less answer the first once more: every rank has to run the same forwards.
    asked = [prompts[index] for index in indices] + [prompts[0]] * (num_each - len(indices))
    answers: list[list[int]] = []
    was_training = model.training
    model.eval()
    try:
        for start in range(0, num_each, batch_size):
            part = [prompt.tokens for prompt in asked[start : start + batch_size]]
            answers += _generate(model, part, pad_token_id, max_new_tokens, synced=is_distributed)
    finally:
        model.train(was_training)
    found = dict(pair for pairs in agree_all(list(zip(indices, answers, strict=False))) for pair in pairs)
    return [found[index] for index in range(len(prompts))]


def _generate(
    model: Any, prompts: Sequence[Sequence[int]], pad_token_id: int, max_new_tokens: int, *, synced: bool
) -> list[list[int]]:
    config = config_of(model)
    is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    room = getattr(config, "max_position_embeddings", None)
    if room is not None and not is_encoder_decoder:
        max_new_tokens = min(max_new_tokens, max(1, room // 2))
        prompts = [prompt[-(room - max_new_tokens) :] for prompt in prompts]
    width = max(len(prompt) for prompt in prompts)
    device = next(model.parameters()).device
    left = [width - len(prompt) for prompt in prompts]
    ids = [[pad_token_id] * pads + list(prompt) for pads, prompt in zip(left, prompts, strict=True)]
    mask = [[0] * pads + [1] * len(prompt) for pads, prompt in zip(left, prompts, strict=True)]
    settings = copy.deepcopy(model.generation_config)
    settings.update(
        **dict.fromkeys(_SAMPLING),
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        use_cache=True,
        max_length=None,
        min_length=0,
        max_new_tokens=max_new_tokens,
        pad_token_id=pad_token_id,
        return_dict_in_generate=False,
    )
    tokens = model.generate(
        input_ids=torch.tensor(ids, device=device),
        attention_mask=torch.tensor(mask, device=device),
        generation_config=settings,
        synced_gpus=synced,
    )
    ends = settings.eos_token_id
    ends = list(ends) if isinstance(ends, list | tuple) else [ends]
    return [cut_at(row[1 if is_encoder_decoder else width :], ends) for row in tokens.tolist()]


def config_of(model: Any) -> Any:
    """Return the config of a model or of the model inside an adapter; None without one."""
    return getattr(base_model(model), "config", None)


def can_generate(model: Any) -> bool:
    """Return whether the model has a head that generates."""
    return bool(getattr(base_model(model), "can_generate", lambda: False)())
