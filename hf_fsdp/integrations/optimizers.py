"""Trainer's optimizers: which cannot work on shards by name, and why; torch's own inside Accelerate's."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from transformers import TrainingArguments

from hf_fsdp.errors import Problem

# Elementwise, in torch itself: a shard's step is the whole tensor's step on these rows. Run in this project's tests.
PROVEN_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "rmsprop")

_WHOLE_MATRICES = "works on whole matrices (factors, projections, norms), of which no rank has more than some rows"
_RAW_MEMORY = "is bitsandbytes', whose kernels take the memory of a sharded parameter for the whole one"
_LOW_BIT = "keeps its state in blocks of a few bits, which neither shards nor a resumed run are proven with"
_IN_BACKWARD = "takes its step inside the backward pass, before gradients are summed over the ranks"

_REASONS = {
    "adafactor": _WHOLE_MATRICES,
    "galore": _WHOLE_MATRICES,
    "apollo": _WHOLE_MATRICES,
    "lomo": _IN_BACKWARD,
    "adalomo": _IN_BACKWARD,
    "adagrad": "makes its state when it is built, for parameters that are not sharded yet",
    "adamw_torch_4bit": _LOW_BIT,
    "adamw_torch_8bit": _LOW_BIT,
    "ademamix": _RAW_MEMORY,
    "lion_32bit": _RAW_MEMORY,
    "rmsprop_bnb": _RAW_MEMORY,
    "paged_": _RAW_MEMORY,
}


def check_optimizer(args: TrainingArguments) -> list[Problem]:
    """Return what is wrong with `args.optim`: 8-bit, paged, factored and projecting optimizers are refused by name."""
    name = str(getattr(args.optim, "value", args.optim))
    reason = why_refused(name)
    if reason is None:
        return []
    return [
        Problem(
            message=f"optim={name!r} does not work on sharded parameters in this release: it {reason}",
            fix=f"optim={PROVEN_OPTIMIZERS[0]!r} (or {', '.join(PROVEN_OPTIMIZERS[1:])}); its state is sharded, and "
            "under LoRA or QLoRA there is state for the adapters only",
            source=f"{type(args).__name__}(...)",
        )
    ]


def why_refused(name: str) -> str | None:
    """Return why the optimizer `name` cannot work on shards, or None."""
    for start, reason in _REASONS.items():
        if name.startswith(start):
            return reason
    return _RAW_MEMORY if "8bit" in name else None


def raw_optimizer(optimizer: Any) -> Any:
    """Return torch's optimizer inside Accelerate's wrappers; anything else (None, a dummy) as it is."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer
