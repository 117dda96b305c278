"""Greedy answers of a model that may be sharded: every rank runs the same forwards."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

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
    with evaluation_mode(model):
        for start in range(0, num_each, batch_size):
            part = [prompt.tokens for prompt in asked[start : start + batch_size]]
            answers += _generate(model, part, pad_token_id, max_new_tokens, synced=is_distributed)
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
    left = [width - len(prompt) for prompt in prompts]
    ids = [[pad_token_id] * pads + list(prompt) for pads, prompt in zip(left, prompts, strict=True)]
    mask = [[0] * pads + [1] * len(prompt) for pads, prompt in zip(left, prompts, strict=True)]
    batch = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    return generate_batch(model, batch, pad_token_id=pad_token_id, max_new_tokens=max_new_tokens, synced=synced)


def generate_batch(
    model: Any,
    batch: Mapping[str, Any],
    *,
    pad_token_id: int,
    max_new_tokens: int,
    synced: bool,
    stop_token_ids: Sequence[int] = (),
) -> list[list[int]]:
    """Return the greedy answer to every row of a batch, without what ends it.

    Args:
        model: in evaluation mode.
        batch: ``input_ids`` padded on the left, ``attention_mask`` and what else the model takes (pixels, grids);
            on any device, floats in any dtype.
        pad_token_id: written after an answer that has ended.
        max_new_tokens: the longest answer.
        synced: whether other ranks generate at the same time: then none stops before the last one has ended.
        stop_token_ids: what ends an answer beside what the model's generation config names: a base model that is
            trained with a chat template learns to end its turns with the template's own token.
    """
    device, dtype = next(model.parameters()).device, input_dtype(model)
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
    ends = settings.eos_token_id
    ends = list(ends) if isinstance(ends, list | tuple) else [ends] if ends is not None else []
    ends += [token for token in stop_token_ids if token not in ends]
    settings.eos_token_id = ends or None
    inputs = {name: _moved(value, device, dtype) for name, value in batch.items()}
    with _one_dtype(model, device):
        tokens = model.generate(**inputs, generation_config=settings, synced_gpus=synced)
    is_encoder_decoder = bool(getattr(config_of(model), "is_encoder_decoder", False))
    start = 1 if is_encoder_decoder else inputs["input_ids"].shape[1]
    return [cut_at(row[start:], ends) for row in tokens.tolist()]


def _one_dtype(model: nn.Module, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return autocast for weights of several dtypes: a projector in fp32 behind a tower in bf16, in one process.

    Accelerate computes a forward so, and `generate` runs the towers outside of any forward. A sharded model casts by
    itself.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    low = [p.dtype for p in parameters if p.dtype in (torch.bfloat16, torch.float16)]
    is_mixed = bool(low) and len({parameter.dtype for parameter in parameters}) > 1
    if not is_mixed or any(isinstance(parameter, DTensor) for parameter in parameters):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=low[0])


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode, and each back in its own when the block ends.

    ``model.train()`` would also wake up a frozen tower that somebody has put in evaluation mode.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def input_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype that pixels are given in: that of the first convolution over pixels, else of the model."""
    floating = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    convolutions = (parameter for parameter in floating if parameter.dim() >= 4)
    return next(convolutions, floating[0]).dtype if floating else torch.float32


def _moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def config_of(model: Any) -> Any:
    """Return the config of a model or of the model inside an adapter; None without one."""
    return getattr(base_model(model), "config", None)


def can_generate(model: Any) -> bool:
    """Return whether the model has a head that generates."""
    return bool(getattr(base_model(model), "can_generate", lambda: False)())
