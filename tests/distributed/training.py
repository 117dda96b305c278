"""One description of a short training run, run through Trainer on any number of processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_fsdp import FSDPCallback, FSDPConfig
from tests.distributed.tiny_models import VOCABULARY, build_model

SEQUENCE_TOKENS = 12
# What every test run says to Trainer: on the CPU, every step logged, nothing sent, nothing saved.
QUIET_ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run whose global batch does not depend on the number of processes."""

    family: str = "llama"
    method: str = "full"
    tied: bool = False
    checkpointing: Any = "none"
    accumulation: int = 1
    clip: float = 0.0
    reshard: bool = True
    precision: Any = "fp32"
    optimizer: str = "sgd"
    offload: Any = "none"
    compile: Any = "none"
    wrap: Any = "transformer_layers"
    dropout: float = 0.0
    num_steps: int = 5
    micro_batch: int = 12
    sharding: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 0.05
    load_dtype: str = "float32"
    seed: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)


def fsdp_config(run: Run) -> FSDPConfig:
    """The sharding half of a run."""
    return FSDPConfig(
        wrap=run.wrap,
        precision=run.precision,
        activation_checkpointing=run.checkpointing,
        offload=run.offload,
        compile=run.compile,
        sharding={"reshard_after_forward": run.reshard, **run.sharding},
    )


def build_run_model(run: Run) -> torch.nn.Module:
    """The model of a run, with LoRA on every linear layer when asked for."""
    model = build_model(run.family, tied=run.tied, dropout=run.dropout, dtype=getattr(torch, run.load_dtype))
    if run.method == "full":
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=run.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        init_lora_weights="gaussian",
    )
    model = get_peft_model(model, config)
    torch.manual_seed(2)
    with torch.no_grad():  # B starts at zero, where A has no gradient and parity would be shown for half of it
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def build_dataset(num_rows: int = 96, uneven: bool = True) -> Dataset:
    """Random tokens with a random part of every row's labels masked, so that ranks count different tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (num_rows, SEQUENCE_TOKENS), generator=generator)
    labels = ids.clone()
    if uneven:
        cut = torch.randint(1, SEQUENCE_TOKENS - 3, (num_rows, 1), generator=generator)
        labels[torch.arange(SEQUENCE_TOKENS)[None] < cut] = -100
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})


class GradientRecorder(TrainerCallback):
    """Keeps the whole gradients of the first step."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.gradients:
            self.gradients = {
                name: whole(parameter.grad).clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank; collective for a sharded one."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(
    run: Run, world_size: int, *, callback: FSDPCallback | None = None, before: Callable | None = None
) -> dict[str, Any]:
    """Train and return losses, gradient norms, first gradients, final weights, and how the parameters were held."""
    config = fsdp_config(run)
    recorder = GradientRecorder()
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {
            "output_dir": folder,
            **QUIET_ARGUMENTS,
            "max_steps": run.num_steps,
            "per_device_train_batch_size": run.micro_batch // world_size,
            "gradient_accumulation_steps": run.accumulation,
            "max_grad_norm": run.clip,
            "learning_rate": run.learning_rate,
            "lr_scheduler_type": "constant",
            "seed": run.seed,
            "optim": "sgd" if run.optimizer == "sgd" else "adamw_torch",
            "optim_args": "momentum=0.9" if run.optimizer == "sgd" else None,
            **run.arguments,
        }
        trainer = Trainer(
            model=build_run_model(run),
            args=TrainingArguments(**arguments, **config.trainer_kwargs()),
            train_dataset=build_dataset(),
            callbacks=[callback or FSDPCallback(config), recorder],
        )
        if before is not None:
            before(trainer)
        trainer.train()
        model = trainer.model
        held = {name: isinstance(parameter, DTensor) for name, parameter in model.named_parameters()}
        local = sum(_local_numel(parameter) for parameter in model.parameters())
        return {
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "norms": [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry],
            "gradients": recorder.gradients,
            "weights": {name: whole(parameter).clone() for name, parameter in model.named_parameters()},
            "is_sharded": held,
            "num_local": local,
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        }


def _local_numel(parameter: torch.Tensor) -> int:
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
