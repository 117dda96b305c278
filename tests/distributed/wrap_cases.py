"""Units by size and by half blocks, each against a single process; batch norm against DDP."""

from __future__ import annotations

import functools
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from hf_fsdp import FSDPCallback, FSDPConfig, apply_fsdp
from hf_fsdp.errors import HfFsdpError
from hf_fsdp.sharding.audit import Audit, audit_sharding
from tests.distributed.behaviour_cases import all_sharded, losses_of, make_arguments, workspace
from tests.distributed.harness import forget_accelerate
from tests.distributed.image_models import RESNET_152, build_images, build_plain, build_resnet
from tests.distributed.tiny_models import build_model, build_t5
from tests.distributed.training import GradientRecorder, build_dataset, whole

NUM_STEPS = 5
NUM_RESNET_STEPS = 12
HALVES = {"granularity": "attention_and_mlp"}


def train_model(
    model: nn.Module, dataset: Any, wrap: Any, world_size: int, *, optimizer: str = "sgd", **config: Any
) -> dict[str, Any]:
    """Five steps through Trainer with a global batch of 12; what parity compares, and the units."""
    fsdp = FSDPConfig(**{"precision": "fp32", "wrap": wrap, **config})
    recorder, callback = GradientRecorder(), FSDPCallback(fsdp)
    with tempfile.TemporaryDirectory() as folder:
        arguments = make_arguments(
            folder,
            fsdp,
            max_steps=NUM_STEPS,
            per_device_train_batch_size=12 // world_size,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            optim="sgd" if optimizer == "sgd" else "adamw_torch",
            optim_args="momentum=0.9" if optimizer == "sgd" else None,
            learning_rate=0.02 if optimizer == "sgd" else 1e-3,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=dataset, callbacks=[callback, recorder])
        trainer.train()
        norms = [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
        result = {
            "losses": losses_of(trainer),
            "norms": norms,
            "gradients": recorder.gradients,
            "weights": {name: whole(parameter).clone() for name, parameter in model.named_parameters()},
            "is_sharded": all_sharded(model),
            "num_local": sum(_local(parameter) for parameter in model.parameters()),
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "audit": describe(callback.audit) if callback.audit else {},
        }
    forget_accelerate()
    return result


def describe(audit: Audit) -> dict[str, Any]:
    """What the audit says about the units, as plain values."""
    return {
        "units": [row.name for row in audit.units],
        "kinds": dict(Counter(row.kind for row in audit.units)),
        "num_checkpointed": audit.num_checkpointed_blocks,
        "num_blocks": audit.num_blocks,
        "ties": audit.ties,
        "root": list(audit.units[-1].names),
        "notes": audit.notes,
    }


def _local(parameter: Any) -> int:
    return parameter.to_local().numel() if hasattr(parameter, "to_local") else parameter.numel()


# -- parity: every setting under two optimizers ------------------------------------------------------------------------

TEXT_RUNS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "halves-llama-full": (
        lambda: build_model("llama", tied=False),
        {"wrap": HALVES, "activation_checkpointing": "full"},
    ),
    "halves-gpt2-tied-prefetch": (
        lambda: build_model("gpt2", tied=True),
        {"wrap": HALVES, "sharding": {"forward_prefetch": 2, "backward_prefetch": 2}},
    ),
    "halves-t5-every2": (lambda: build_t5(0.0), {"wrap": HALVES, "activation_checkpointing": {"every": 2}}),
    "size-t5-full": (
        lambda: build_t5(0.0),
        {"wrap": {"policy": "size", "min_num_params": 3000}, "activation_checkpointing": "full"},
    ),
    "size-llama-tied": (
        lambda: build_model("llama", tied=True),
        {"wrap": {"policy": "size", "min_num_params": 2000}, "sharding": {"forward_prefetch": 1}},
    ),
}
BY_SIZE = {"policy": "size", "min_num_params": 3000}
IMAGE_RUNS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "size-resnet-frozen-norms": (lambda: build_resnet([1, 2, 3, 1], norm="frozen"), {"wrap": BY_SIZE}),
    "size-plain-group-norm": (
        lambda: build_plain("group"),
        {"wrap": BY_SIZE, "activation_checkpointing": "full"},
    ),
}


def _parity(build: Callable[[], nn.Module], config: dict[str, Any], dataset: Callable[[], Any]) -> Any:
    def case(rank: int, world_size: int) -> dict[str, Any]:
        adamw = train_model(build(), dataset(), world_size=world_size, optimizer="adamw", **config)
        return {"sgd": train_model(build(), dataset(), world_size=world_size, **config), "adamw": adamw}

    return case


# -- ResNet-152 --------------------------------------------------------------------------------------------------------


def resnet_152(rank: int, world_size: int) -> dict[str, Any]:
    """The depth of ResNet-152, narrow, with its batch norms: trained, evaluated, saved, loaded."""
    config = FSDPConfig(precision="fp32", wrap={"policy": "size", "min_num_params": 10_000})
    images = build_images(32)
    model = build_resnet(RESNET_152)
    callback = FSDPCallback(config)
    with workspace() as folder:
        arguments = make_arguments(
            folder, config, max_steps=NUM_RESNET_STEPS, per_device_train_batch_size=8, learning_rate=1e-3
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=images, eval_dataset=images, callbacks=[callback])
        trainer.train()
        differed = _differ(model, world_size)
        evaluation = trainer.evaluate()
        trainer.save_model(folder)
        dist.barrier()
        loaded = type(build_resnet(RESNET_152)).from_pretrained(folder)
        saved_equal = all(
            torch.equal(whole(value), loaded.state_dict()[name]) for name, value in model.state_dict().items()
        )
        with torch.no_grad():
            twin = loaded.eval()(**images[:])
        assert callback.audit is not None
        return {
            "losses": losses_of(trainer),
            "eval_loss": evaluation["eval_loss"],
            "loaded_loss": twin.loss.item(),
            "is_sharded": all_sharded(model),
            "audit": describe(callback.audit),
            "differed_in_training": differed,
            "differ_after_evaluation": _differ(model, world_size),
            "saved_equal": saved_equal,
            "num_batches": int(model.resnet.embedder.embedder.normalization.num_batches_tracked),
        }


def _differ(model: nn.Module, world_size: int) -> bool:
    mine = torch.cat([buffer.double().reshape(-1) for buffer in model.buffers()])
    everyone = [torch.zeros_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine)
    return any(not torch.equal(other, mine) for other in everyone)


def batch_norm_as_under_ddp(rank: int, world_size: int) -> dict[str, Any]:
    """Three steps in training mode with real batch norms; under FSDP also with recomputation, where they run twice."""
    found = {}
    images = build_images(12)[:]
    rows = {name: value.chunk(world_size)[rank] for name, value in images.items()}
    for kind in ("ddp", "none", "full"):
        model: Any = build_plain()
        if kind == "ddp":
            trained: Any = DistributedDataParallel(model)
        else:
            wrap = {"policy": "size", "min_num_params": 3000}
            trained = model
            apply_fsdp(model, FSDPConfig(precision="fp32", wrap=wrap, activation_checkpointing=kind))
            audit_sharding(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for _ in range(3):
            loss = trained(**rows)["loss"]
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        found[kind] = {
            "losses": losses,
            "weights": {name: whole(parameter).clone() for name, parameter in model.named_parameters()},
            "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        }
    return found


def batch_norm_in_bf16(rank: int, world_size: int) -> dict[str, Any]:
    """Refused as it is; trained with the advice, every norm in one fp32 unit that no unit by size takes."""
    wrap = {"policy": "size", "min_num_params": 3000}
    try:
        apply_fsdp(build_plain(), FSDPConfig(precision="bf16-mixed", wrap=wrap))
        refused = ""
    except HfFsdpError as error:
        refused = str(error)
    precision = {"preset": "bf16-mixed", "keep_norms_fp32": True}
    result = train_model(build_plain(), build_images(), wrap, world_size, precision=precision)
    return {"refused": refused, "losses": result["losses"], "audit": result["audit"]}


def checkpointing_by_size(rank: int, world_size: int) -> dict[str, str]:
    """Every unit a single layer: refused; the advice works."""
    found = {}
    for name, wrap in {"single": {"policy": "size", "min_num_params": 500}, "layers": "transformer_layers"}.items():
        model = build_model("llama", tied=False)
        try:
            applied = apply_fsdp(model, FSDPConfig(precision="fp32", wrap=wrap, activation_checkpointing="full"))
            found[name] = f"{applied.num_checkpointed} of {len(applied.plan.blocks)}"
        except HfFsdpError as error:
            found[name] = str(error)
    return found


def gathers(rank: int, world_size: int) -> dict[str, Any]:
    """The order in which units are gathered by half blocks, with recomputation, from torch's own log."""
    model = build_model("llama", tied=False)
    config = FSDPConfig(precision="fp32", wrap=HALVES, activation_checkpointing="full")
    apply_fsdp(model, config)
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if "FSDP::" in message:
                seen.append(message)

    logger = logging.getLogger("torch.distributed.fsdp.fully_shard")
    handler, level = Keep(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        ids = torch.full((2, 6), 5)
        model(input_ids=ids, labels=ids).loss.backward()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    wanted = re.compile(r"FSDP::pre_(forward|backward) \(model\.layers\.(.*)\)")
    found = [match for line in seen if (match := wanted.search(line))]
    return {kind: [match[2] for match in found if match[1] == kind] for kind in ("forward", "backward")}


def _rows(name: str) -> Any:
    # T5 averages its loss over a batch and not over tokens: every rank must have as many.
    return build_dataset(60, uneven="t5" not in name)


PARITY = {name: _parity(build, config, functools.partial(_rows, name)) for name, (build, config) in TEXT_RUNS.items()}
PARITY |= {name: _parity(build, config, build_images) for name, (build, config) in IMAGE_RUNS.items()}
CASES: dict[str, Callable[[int, int], Any]] = {
    **PARITY,
    "resnet_152": resnet_152,
    "batch_norm_as_under_ddp": batch_norm_as_under_ddp,
    "batch_norm_in_bf16": batch_norm_in_bf16,
    "checkpointing_by_size": checkpointing_by_size,
    "gathers": gathers,
}
