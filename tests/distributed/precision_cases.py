"""What the precision presets mean, written out by hand in plain PyTorch, next to what sharded training does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hf_fsdp import FSDPConfig, apply_fsdp
from hf_fsdp.errors import PrecisionError
from hf_fsdp.policies.precision import find_norms
from hf_fsdp.torch_private import GROUPS_CAST_EACH_MODULE
from tests.distributed.tiny_models import VOCABULARY, build_model
from tests.distributed.training import whole

NUM_STEPS = 3
LEARNING_RATE = 0.1


def _batches(world_size: int) -> list[list[torch.Tensor]]:
    """Token ids of every step and rank; each rank can see everyone's, so that it can compute the reference."""
    generator = torch.Generator().manual_seed(5)
    return [
        [torch.randint(3, VOCABULARY, (2, 10), generator=generator) for _ in range(world_size)]
        for _ in range(NUM_STEPS)
    ]


def reference(
    world_size: int, *, storage: torch.dtype, compute: torch.dtype, reduce: torch.dtype, norms_fp32: bool
) -> dict[str, Any]:
    """Train as the preset's table says: stored, computed, reduced in the given dtypes, step by step."""
    model = build_model("llama", tied=False)
    norm_names = {f"{name}.weight" for name, _ in find_norms(model)} if norms_fp32 else set()
    stored = {
        name: parameter.detach().to(torch.float32 if name in norm_names else storage).clone()
        for name, parameter in model.named_parameters()
    }
    if norms_fp32:
        for _, norm in find_norms(model):
            norm.register_forward_hook(lambda module, inputs, output: output.to(compute))
    gradients: dict[str, torch.Tensor] = {}
    for step, batch in enumerate(_batches(world_size)):
        total = {name: torch.zeros_like(value, dtype=reduce) for name, value in stored.items()}
        for ids in batch:
            leaves = {
                name: value.to(torch.float32 if name in norm_names else compute).clone().requires_grad_()
                for name, value in stored.items()
            }
            loss = functional_call(model, leaves, kwargs={"input_ids": ids, "labels": ids, "use_cache": False}).loss
            loss.float().backward()
            for name, leaf in leaves.items():
                total[name] += leaf.grad.to(reduce)
        for name, value in stored.items():
            gradient = (total[name] / world_size).to(value.dtype)
            if step == 0:
                gradients[name] = gradient.clone()
            value.add_(gradient, alpha=-LEARNING_RATE)
    return {"weights": stored, "gradients": gradients}


def _sharded(precision: dict[str, Any], rank: int, world_size: int, checkpointing: str) -> dict[str, Any]:
    model = build_model("llama", tied=False)
    model.train()
    apply_fsdp(model, FSDPConfig(precision=precision, activation_checkpointing=checkpointing))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    gradients: dict[str, torch.Tensor] = {}
    losses = []
    for step, batch in enumerate(_batches(world_size)):
        output = model(input_ids=batch[rank], labels=batch[rank])
        output.loss.backward()
        losses.append(output.loss.dtype is torch.float32 and output.logits.dtype is torch.float32)
        if step == 0:
            gradients = {name: whole(parameter.grad).clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return {
        "weights": {name: whole(parameter).clone() for name, parameter in model.named_parameters()},
        "gradients": gradients,
        "outputs_fp32": all(losses),
    }


def _case(precision: dict[str, Any], table: dict[str, Any], checkpointing: str = "none") -> Callable:
    def case(rank: int, world_size: int) -> dict[str, Any]:
        wrong = {
            **table,
            "reduce": torch.bfloat16,
            "storage": torch.bfloat16 if table["storage"] is torch.float32 else torch.float32,
        }
        return {
            "sharded": _sharded(precision, rank, world_size, checkpointing),
            "reference": reference(world_size, **table),
            "wrong": reference(world_size, **wrong),
        }

    return case


def _buffers_keep_their_dtype(rank: int, world_size: int) -> dict[str, Any]:
    model = build_model("llama", tied=False)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    apply_fsdp(model, FSDPConfig(precision="bf16-true"))
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
    return {
        name: bool(buffer.dtype == before[name].dtype and torch.equal(buffer, before[name]))
        for name, buffer in model.named_buffers()
    }


def _upcast_happens_after_sharding(rank: int, world_size: int) -> dict[str, Any]:
    """Record the largest float32 tensor made while a bf16 model is sharded: a shard, never a whole parameter."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype is torch.float32 and type(result) is torch.Tensor:
                Largest.numel = max(Largest.numel, result.numel())
            return result

    model: nn.Module = build_model("llama", tied=False, dtype=torch.bfloat16)
    largest_parameter = max(parameter.numel() for parameter in model.parameters())
    with Largest():
        apply_fsdp(model, FSDPConfig(precision="bf16-mixed"))
    return {
        "largest_fp32": Largest.numel,
        "largest_parameter": largest_parameter,
        "all_fp32": all(parameter.dtype is torch.float32 for parameter in model.parameters()),
    }


def _norms_on_old_torch(rank: int, world_size: int) -> dict[str, Any]:
    """What apply_fsdp says to keep_norms_fp32 where torch cannot do it, and that its advice works."""
    from hf_fsdp.sharding import fitness

    config = FSDPConfig(precision={"preset": "bf16-mixed", "keep_norms_fp32": True})
    fitness.GROUPS_CAST_EACH_MODULE = False
    try:
        apply_fsdp(build_model("llama", tied=False), config)
        error = ""
    except PrecisionError as refused:
        error = str(refused)
    finally:
        fitness.GROUPS_CAST_EACH_MODULE = GROUPS_CAST_EACH_MODULE
    followed = apply_fsdp(build_model("llama", tied=False), FSDPConfig(precision="bf16-mixed"))
    return {"error": error, "followed": len(followed.plan.units)}


_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16
CASES = {
    "bf16-mixed": _case({"preset": "bf16-mixed"}, dict(storage=_FP32, compute=_BF16, reduce=_FP32, norms_fp32=False)),
    "bf16-mixed-checkpointed": _case(
        {"preset": "bf16-mixed"}, dict(storage=_FP32, compute=_BF16, reduce=_FP32, norms_fp32=False), "full"
    ),
    "bf16-mixed-norms": _case(
        {"preset": "bf16-mixed", "keep_norms_fp32": True},
        dict(storage=_FP32, compute=_BF16, reduce=_FP32, norms_fp32=True),
    ),
    "bf16-mixed-norms-checkpointed": _case(
        {"preset": "bf16-mixed", "keep_norms_fp32": True},
        dict(storage=_FP32, compute=_BF16, reduce=_FP32, norms_fp32=True),
        "full",
    ),
    "bf16-true": _case({"preset": "bf16-true"}, dict(storage=_BF16, compute=_BF16, reduce=_FP32, norms_fp32=False)),
    "bf16-true-norms": _case(
        {"preset": "bf16-true", "keep_norms_fp32": True},
        dict(storage=_BF16, compute=_BF16, reduce=_FP32, norms_fp32=True),
    ),
    # Norms in float32 without being asked: float16 leaves its range there first.
    "fp16-mixed-norms": _case(
        {"preset": "fp16-mixed"}, dict(storage=_FP32, compute=_FP16, reduce=_FP32, norms_fp32=True)
    ),
    "fp16-mixed-norms-checkpointed": _case(
        {"preset": "fp16-mixed"}, dict(storage=_FP32, compute=_FP16, reduce=_FP32, norms_fp32=True), "full"
    ),
    "fp16-mixed-without": _case(
        {"preset": "fp16-mixed", "keep_norms_fp32": False},
        dict(storage=_FP32, compute=_FP16, reduce=_FP32, norms_fp32=False),
    ),
    "buffers": _buffers_keep_their_dtype,
    "upcast": _upcast_happens_after_sharding,
}
REFERENCED = [
    name for name in CASES if name.startswith(("bf16", "fp16")) and (GROUPS_CAST_EACH_MODULE or "norms" not in name)
]
CASES = {name: case for name, case in CASES.items() if name in REFERENCED or not name.startswith(("bf16", "fp16"))}
CASES["norms_on_old_torch"] = _norms_on_old_torch
