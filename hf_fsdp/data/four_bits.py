"""A recipe's `load_in_4bit`: the dtypes that go together are set, those that a person typed are checked."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import torch

from hf_fsdp.errors import ConfigError, Problem


def settle_four_bits(model_args: Any, compute: torch.dtype, typed: Collection[str]) -> None:
    """Give TRL's `ModelConfig` with ``load_in_4bit`` the dtype that its packed weights can be gathered in.

    Weights, packed storage and compute share one dtype, the one that `fsdp.precision` computes in: FSDP gathers a
    unit in it, and would cast packed bits of any other (see `hf_fsdp/policies/packed_weights.py`).

    Args:
        model_args: changed in place; nothing happens without ``load_in_4bit``.
        compute: what the run computes in, from `compute_dtype`.
        typed: keys that the person gave, which are never overwritten.

    Raises:
        ConfigError: with every setting that cannot be trained.
    """
    if not model_args.load_in_4bit:
        return
    name = str(compute).removeprefix("torch.")
    problems = []
    if find_spec("bitsandbytes") is None:
        problems.append(
            Problem(message="load_in_4bit needs bitsandbytes, which is not installed", fix="pip install bitsandbytes")
        )
    if not model_args.use_peft:
        problems.append(
            Problem(
                message="load_in_4bit without use_peft: weights in 4 bits have no gradient and cannot be trained",
                fix="use_peft: true   # QLoRA; or remove load_in_4bit",
            )
        )
    for key in ("dtype", "bnb_4bit_quant_storage"):
        value = getattr(model_args, key)
        if key in typed and value is not None and str(value) != name:
            problems.append(
                Problem(
                    message=f"{key}={value} under load_in_4bit, and fsdp.precision computes in {name}: packed weights "
                    "are gathered in the compute dtype and would be cast",
                    fix=f"{key}: {name}, or remove it: it follows from fsdp.precision",
                )
            )
    if problems:
        raise ConfigError(problems)
    model_args.dtype = model_args.bnb_4bit_quant_storage = name
