"""The batch of one forward, as the collators make it: shapes and dtypes, no values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_fsdp.plan.job import Job
from hf_fsdp.plan.simulator.pictures import picture_inputs


def make_batch(job: Job, model: nn.Module, device: str) -> dict[str, Any]:
    """Return the inputs of a forward, on `device`.

    A mask is part of it where rows differ in length, or where packed rows meet a kernel that needs one; rows without
    one are causal by themselves.
    """
    batch = job.batch
    shape = (batch.micro_batch_size, batch.num_tokens)
    inputs: dict[str, Any] = {
        "input_ids": torch.zeros(shape, dtype=torch.long, device=device),
        "labels": torch.zeros(shape, dtype=torch.long, device=device),
    }
    has_varlen = job.attention.startswith("flash")
    if batch.padded and not has_varlen:
        inputs["attention_mask"] = torch.zeros(shape, dtype=torch.long, device=device)
    if batch.packed:
        inputs["position_ids"] = torch.zeros(shape, dtype=torch.long, device=device)
    inputs |= picture_inputs(job, device)
    return inputs
