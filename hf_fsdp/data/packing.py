"""Samples packed into one row must not see each other. Refused where they would, proven on the model where not.

Nothing in a packed batch but its restarting `position_ids` says where a sample begins. Whether attention follows them
depends on the attention implementation, on the model's code, on the cache being off and on there being no attention
mask; each of them has gone wrong without a word. So the model itself is asked, with a few tokens, before it trains.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from hf_fsdp.errors import DataError, Problem
from hf_fsdp.policies.blocks import base_model, class_name
from hf_fsdp.sharding.apply import get_applied_sharding
from hf_fsdp.sharding.mesh import agree_all

_SAFE = ("sdpa", "eager")
# How much of what a neighbour's text does to a sample may be left: rounding, which low precision has more of.
_ALLOWED_SHARE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}
_PROVEN = "_hf_fsdp_packing_proven"
_NUM_BEFORE, _NUM_TOKENS = 7, 9


def packs_samples(args: Any) -> bool:
    """Return whether training arguments (TRL's) put several samples into one row, in training or evaluation."""
    return any(getattr(args, name, False) for name in ("packing", "padding_free", "eval_packing"))


def check_packing(args: Any) -> list[Problem]:
    """Return what in TRL's packing arguments lets samples of one row see each other, whatever the model."""
    if not packs_samples(args):
        return []
    source = f"{type(args).__name__}(...)"
    problems = []
    packing, strategy = bool(getattr(args, "packing", False)), getattr(args, "packing_strategy", "bfd")
    if (packing or getattr(args, "eval_packing", False)) and strategy == "wrapped":
        problems.append(
            Problem(
                message="packing_strategy='wrapped' cuts samples anywhere and lets those of one row see each other",
                fix="packing_strategy: bfd   (or bfd_split, which cuts long samples and keeps the pieces)",
                source=source,
            )
        )
    elif not packing and getattr(args, "eval_packing", False):
        problems.append(
            Problem(
                message="eval_packing=True without packing=True: TRL batches packed rows as plain ones then, and the "
                "samples of a row see each other in evaluation",
                fix="eval_packing: false   (or packing: true)",
                source=source,
            )
        )
    return problems


def prove_packing(model: nn.Module, compute: torch.dtype | None = None, *, autocast: bool = False) -> float:
    """Check on the model itself that a packed sample gets the logits it gets alone; collective on a sharded model.

    Three small forwards without gradients: a sample behind another one in a packed row, the sample alone, and both
    as one text. The first two must agree to within a small share of what the third changes. Asked once for a model
    and an attention implementation.

    Args:
        model: as it will be trained, sharded or not.
        compute: the dtype it computes in; default: what it was sharded for, else what it is stored in.
        autocast: whether that is autocast's doing, as in Trainer's unsharded bf16 runs.

    Returns:
        How far the packed sample is from the sample alone, over how far the unpacked pair is.

    Raises:
        DataError: it sees its neighbour, or the model does not take packed rows, with what to set instead.
    """
    name, attention = class_name(model), _attention_of(model)
    proven: dict[str, float] = vars(model).setdefault(_PROVEN, {})
    if attention in proven:
        return proven[attention]
    if missing := _missing_inputs(model):
        raise DataError(
            f"packing: {name} takes no {missing}, so it cannot tell the samples of a row apart", fix=_fix(attention)
        )
    if compute is None:
        applied = get_applied_sharding(model)
        compute = applied.precision.compute if applied is not None else torch.float32
    stored = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if compute is torch.float32 and torch.float32 not in stored and stored:
        compute = stored.pop()  # loaded in 16 bits and computed so
    try:
        packed, alone, joined = _probe(model, compute if autocast and compute is not torch.float32 else None)
    except ValueError as error:  # models that know that they cannot
        raise DataError(f"packing: {name} refuses packed rows: {error}", fix=_fix(attention)) from error
    leaked, reach = (packed - alone).abs().max().item(), (joined - alone).abs().max().item()
    share = leaked / reach if reach > 1e-6 * alone.abs().max().item() else 0.0
    worst = max(float(item) for item in agree_all(share))
    if worst <= _ALLOWED_SHARE[compute]:
        proven[attention] = worst
        return worst
    raise DataError(
        f"packing: under attn_implementation={attention!r} {name} does not keep the samples of a row apart: the logits "
        f"of a packed sample are off by {leaked:.2g} (without any boundary it would be {reach:.2g})",
        fix=_fix(attention),
    )


def _fix(attention: str) -> str:
    fix = "packing: false   (and padding_free: false)"
    return fix if attention in _SAFE else f"attn_implementation: sdpa   or   {fix}"


def _probe(model: Any, autocast: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device = next(model.parameters()).device
    vocabulary = _text_config(model).vocab_size
    generator = torch.Generator().manual_seed(0)
    lowest, highest = min(10, vocabulary - 1), min(vocabulary, 1000)
    ids = torch.randint(lowest, highest, (_NUM_BEFORE + _NUM_TOKENS,), generator=generator).tolist()
    before, sample = ids[:_NUM_BEFORE], ids[_NUM_BEFORE:]
    was_training = model.training
    model.eval()  # no dropout: the random stream stays where it is
    try:
        with torch.no_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            logits = [
                model(**_packed_batch(samples, device), use_cache=False).logits[0, -_NUM_TOKENS:].float()
                for samples in ([before, sample], [sample], [before + sample])
            ]
    finally:
        model.train(was_training)
    return logits[0], logits[1], logits[2]


def _packed_batch(samples: list[list[int]], device: torch.device) -> dict[str, Any]:
    """The batch that the collators of TRL and transformers make of packed samples: no mask, positions that restart."""
    lengths = torch.tensor([0, *(len(sample) for sample in samples)])
    bounds = lengths.cumsum(0).to(device=device, dtype=torch.int32)
    longest = int(lengths.max())
    return {
        "input_ids": torch.tensor([sum(samples, [])], device=device),
        "position_ids": torch.cat([torch.arange(len(sample)) for sample in samples])[None].to(device),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": torch.repeat_interleave(torch.arange(len(samples)), lengths[1:])[None].to(device, torch.int32),
    }


def _missing_inputs(model: nn.Module) -> str | None:
    base = base_model(model)
    parameters = inspect.signature(base.forward).parameters
    takes_more = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())
    missing = [name for name in ("position_ids", "use_cache") if name not in parameters and not takes_more]
    return ", ".join([*missing, *(["cu_seq_lens_q"] if not takes_more else [])]) or None


def _text_config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config()


def _attention_of(model: nn.Module) -> str:
    return str(getattr(_text_config(model), "_attn_implementation", None) or "eager")
