"""GPUs with and without bfloat16, and the precision that a request has on them where it is left open."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hf_fsdp.config.gpus import Gpu
from hf_fsdp.plan.candidate import PlanRequest
from hf_fsdp.plan.search.structures import with_keys


def first_with_bf16(gpus: Sequence[Gpu]) -> Gpu:
    """Return the first GPU that computes in bfloat16, or the first of all."""
    return next((gpu for gpu in gpus if gpu.has_bf16), gpus[0])


def is_auto(request: PlanRequest) -> bool:
    """Whether the precision is left open."""
    return request.config.precision.preset == "auto"


def needs_bf16(request: PlanRequest) -> bool:
    """Whether the config says bfloat16."""
    return request.config.precision.preset.startswith("bf16")


def for_kinds(request: PlanRequest, is_half: bool) -> PlanRequest:
    """Return the request as GPUs without bfloat16 would run it (`is_half`), or as it is."""
    if not is_half:
        return request
    return dataclasses.replace(request, config=with_keys(request.config, {"precision.preset": "fp16-mixed"}))
