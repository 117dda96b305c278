"""Vision-language models trained through plain Trainer, with pictures on all ranks, on some and on none."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_fsdp import FSDPCallback, set_trainable
from hf_fsdp.sharding.mesh import agree_all
from hf_fsdp.torch_private import local_shard
from tests.distributed.training import QUIET_ARGUMENTS, Run, fsdp_config
from tests.distributed.vlm_models import (
    MORE_FAMILIES,
    PARITY_FAMILIES,
    build_rows,
    build_vlm,
    collate,
)

GLOBAL_ROWS = 6
# How many pictures each of a batch's six rows has. Two processes hold three rows each, three processes two.
ALL, NONE = [1] * 6, [0] * 6
FIRST, LAST, SOME = [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 2], [0, 1, 0, 1, 0, 0]
METHODS = ("full", "frozen-tower", "projector", "lora")


@dataclass(frozen=True, kw_only=True)
class VlmRun(Run):
    """A run of `training.Run` on a vision-language model."""

    micro_batch: int = GLOBAL_ROWS

    @property
    def images(self) -> list[list[int]]:
        """Pictures by batch and row: ranks that differ, that all have some and that have none."""
        # Without a picture anywhere nothing of these methods is trained, in a single process neither.
        needs_pictures = self.method in ("projector", "lora-tower")
        return [FIRST, LAST, SOME, ALL, LAST if needs_pictures else NONE]


def build_vlm_run(run: VlmRun) -> Any:
    """The model of a run with its parts frozen, or with LoRA on the language model or on the tower."""
    model = build_vlm(run.family)
    if run.method == "full":
        return model
    if run.method == "frozen-tower":
        set_trainable(model, ["language", "projector"])
        return model
    if run.method == "projector":
        set_trainable(model, ["projector"])
        return model
    from peft import LoraConfig, get_peft_model

    where = "visual|vision_tower" if run.method == "lora-tower" else "language_model|text_model"
    torch.manual_seed(1)
    targets = rf".*({where})\..*(q_proj|v_proj|qkv)"
    peft: Any = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    torch.manual_seed(2)
    with torch.no_grad():  # B starts at zero, where A has no gradient
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return peft


def build_trainer(run: VlmRun, world_size: int, folder: str, **more: Any) -> Trainer:
    """A plain Trainer with the callback, on the rows of a run in their order."""
    config = fsdp_config(run)
    arguments = {
        "output_dir": folder,
        **QUIET_ARGUMENTS,
        "max_steps": run.num_steps,
        "per_device_train_batch_size": run.micro_batch // world_size,
        "per_device_eval_batch_size": run.micro_batch // world_size,
        "gradient_accumulation_steps": run.accumulation,
        "max_grad_norm": run.clip,
        "learning_rate": run.learning_rate,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "remove_unused_columns": False,
        "train_sampling_strategy": "sequential",
        **run.arguments,
    }
    has_image = [count for batch in run.images for count in batch] * run.accumulation
    return Trainer(
        model=build_vlm_run(run),
        args=TrainingArguments(**arguments, **config.trainer_kwargs()),
        train_dataset=build_rows(run.family, has_image),
        data_collator=collate(run.family),
        callbacks=[FSDPCallback(config)],
        **more,
    )


class AllGradients(TrainerCallback):
    """Keeps this rank's part of the gradients of every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        self.steps.append({name: local_shard(gradient).clone() for name, gradient in named})


def join_parts(parts: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """The whole tensors of each of several dicts, from all ranks' rows: one exchange, where gathering each is slow."""
    by_rank = agree_all(parts)
    return [{name: torch.cat([rank[i][name] for rank in by_rank]) for name in part} for i, part in enumerate(parts)]


def train_vlm(run: VlmRun, rank: int, world_size: int) -> dict[str, Any]:
    """Train; return losses, norms, how parameters were held, and on rank 0 every step's gradients and the weights."""
    gc.freeze()  # Trainer collects garbage twice a run, and all of torch is no garbage
    recorder = AllGradients()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(run, world_size, folder)
        trainer.add_callback(recorder)
        trainer.train()
        model: Any = trainer.model
        trained = {name: local_shard(p.detach()) for name, p in model.named_parameters() if p.requires_grad}
        *gradients, weights = join_parts([*recorder.steps, trained])
        history = trainer.state.log_history
        return {
            "losses": [entry["loss"] for entry in history if "loss" in entry],
            "norms": [float(entry["grad_norm"]) for entry in history if "grad_norm" in entry],
            "is_sharded": {name: isinstance(p, DTensor) for name, p in model.named_parameters()},
            **({"gradients": gradients, "weights": weights} if rank == 0 else {}),
        }


# -- parity: what is trained in every family that the mission names, and the others, over what changes the order -------

_ORDER: tuple[dict[str, Any], ...] = (
    {},
    {"checkpointing": "full", "accumulation": 2},
    {"checkpointing": {"towers": ["vision"]}, "reshard": False},
    {"accumulation": 2, "sharding": {"forward_prefetch": 2, "backward_prefetch": 2}},
    {"checkpointing": "full", "sharding": {"forward_prefetch": 2, "backward_prefetch": 0}},
    {"reshard": False, "accumulation": 2, "sharding": {"sync_each_batch": False}},
    {"wrap": {"granularity": "attention_and_mlp"}},
)


def _runs(families: Sequence[str], methods: Sequence[str], offset: int = 0) -> dict[str, VlmRun]:
    """Every family with every method; the settings that change the order of collectives go round."""
    rows = [(family, method) for family in families for method in methods]
    runs = {}
    for index, (family, method) in enumerate(rows):
        order = _ORDER[(index + offset) % len(_ORDER)]
        # Three steps of two batches each see all five kinds of batches too.
        steps = {"num_steps": 3} if order.get("accumulation") == 2 else {}
        runs[f"{family}-{method}"] = VlmRun(family=family, method=method, **order, **steps)
    return runs


NAMED = _runs(PARITY_FAMILIES, METHODS)
MORE = _runs(MORE_FAMILIES, ("full", "projector"), 3) | _runs(("qwen2-vl", "llava"), ("lora-tower",), 1)
PARITY = NAMED | MORE
# On three processes every named family and every setting of `_ORDER`, with every other method, in turn.
THREE = {
    name: run
    for index, (name, run) in enumerate(NAMED.items())
    if (index // len(METHODS) + index % len(METHODS)) % 2 == 0
}


def _parity(run: VlmRun) -> Callable[[int, int], dict[str, Any]]:
    return lambda rank, world_size: train_vlm(run, rank, world_size)


CASES: dict[str, Callable[[int, int], Any]] = {name: _parity(run) for name, run in PARITY.items()}
