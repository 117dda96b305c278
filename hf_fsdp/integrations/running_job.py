"""The planner's `Job` of a training that is running: read off the model, the optimizer and Trainer's arguments.

What a `Job` has no word for is a reason not to predict, and is said: a figure for another training would be worse than
none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from transformers import TrainingArguments

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.errors import PlanError, Problem
from hf_fsdp.integrations.optimizers import raw_optimizer
from hf_fsdp.integrations.running_method import read_method
from hf_fsdp.plan.job import Batch, Job, ModelSpec
from hf_fsdp.policies.blocks import base_model
from hf_fsdp.policies.packed_weights import four_bit_layers
from hf_fsdp.torch_private import local_shard

_UNSAID = "leave plan_memory off, or plan it with `hf-fsdp plan`, which says what it covers"


def build_running_job(
    model: nn.Module,
    *,
    args: TrainingArguments,
    optimizer: Optimizer | None,
    batch: Batch,
    config: FSDPConfig | None,
    world_size: int,
    chunked_loss: bool = False,
    load_dtypes: Mapping[str, torch.dtype] | None = None,
) -> Job:
    """Return the job of a training as it runs.

    Args:
        model: as Trainer has it: sharded, under PEFT, partly frozen.
        args: Trainer's arguments in force.
        optimizer: the one that steps; None: the one that `args.optim` names.
        batch: the largest that was seen.
        config: the sharding in force; None: a single process, which trains unsharded under autocast.
        world_size: processes.
        chunked_loss: TRL's loss, which never holds all logits.
        load_dtypes: dtype that each parameter was loaded in, by name; default: the dtype that it has.

    Raises:
        PlanError: what no job can say, every problem at once.
    """
    problems: list[Problem] = []
    base: Any = base_model(model)
    problems += _check_class(base)
    method, found = read_method(model, load_dtypes)
    problems += found
    name, found = _optimizer_name(optimizer, args)
    problems += found
    if args.label_smoothing_factor:
        problems.append(_unsaid(f"label_smoothing_factor={args.label_smoothing_factor} takes a loss of its own"))
    if problems:
        raise PlanError(problems)
    return Job(
        model=ModelSpec(name=str(base.config._name_or_path or type(base).__name__), config=_plain_config(base.config)),
        fsdp=config if config is not None else _unsharded_config(args),
        strategy="fsdp" if config is not None else "ddp",
        world_size=world_size,
        method=method,
        batch=batch,
        num_micro_batches=args.gradient_accumulation_steps,
        optimizer=name,
        max_grad_norm=args.max_grad_norm or None,
        loss="chunked" if chunked_loss else "logits",
        attention=str(getattr(base.config, "_attn_implementation", None) or "sdpa"),
        device="cpu" if args.device.type == "cpu" else "gpu",
    )


def count_parameters(model: nn.Module) -> tuple[int, int, int]:
    """Return parameters (4-bit weights counted as weights), trained ones, and the bytes that this process keeps."""
    packed = {id(layer.weight): layer.quant_state.shape.numel() for _, layer in four_bit_layers(model)}
    parameters = list(model.parameters())
    return (
        sum(packed.get(id(parameter), parameter.numel()) for parameter in parameters),
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        sum(local_shard(parameter).nbytes for parameter in parameters),
    )


def _unsharded_config(args: TrainingArguments) -> FSDPConfig:
    """What Trainer alone does with one process: weights as they are, autocast, recompute if it was asked for."""
    return FSDPConfig(
        precision="bf16-mixed" if args.bf16 else "fp32",
        activation_checkpointing="full" if args.gradient_checkpointing else "none",
    )


def _plain_config(config: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return data


def _check_class(base: Any) -> list[Problem]:
    """The planner builds the class that transformers' auto classes give for a config; another one is another model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

    # `fully_shard` puts a class of its own in front of the model's.
    cls = next(item for item in type(base).__mro__ if not issubclass(item, FSDPModule))
    name = cls.__name__
    if not isinstance(base, PreTrainedModel):
        return [_unsaid(f"{name} is not a model of transformers")]
    for kind in (AutoModelForImageTextToText, AutoModelForCausalLM):
        if type(base.config) in kind._model_mapping:
            built = kind._model_mapping[type(base.config)]
            classes = built if isinstance(built, tuple) else (built,)
            if cls in classes:
                return []
            return [_unsaid(f"{name} is not {classes[0].__name__}, which would be simulated for its config")]
    return [_unsaid(f"{name} is neither a causal language model nor one with pictures")]


def _optimizer_name(optimizer: Optimizer | None, args: TrainingArguments) -> tuple[str, list[Problem]]:
    """Return transformers' word for the optimizer in force, which may be another one than `args.optim` says."""
    optimizer = raw_optimizer(optimizer)
    if optimizer is None:
        return str(getattr(args.optim, "value", args.optim)), []
    kind, settings = type(optimizer), optimizer.defaults
    odd = [name for name in ("amsgrad", "momentum", "centered", "maximize", "differentiable") if settings.get(name)]
    names = {torch.optim.SGD: "sgd", torch.optim.RMSprop: "rmsprop", torch.optim.Adagrad: "adagrad"}
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        name = "adamw_torch_fused" if settings.get("fused") else "adamw_torch"
    elif kind in names:
        name = names[kind]
    else:
        return "", [_unsaid(f"the optimizer {kind.__name__} is not simulated")]
    said = [_unsaid(f"{kind.__name__}({', '.join(f'{key}={settings[key]}' for key in odd)}) is not simulated")]
    return name, said if odd else []


def _unsaid(message: str) -> Problem:
    return Problem(message=message, fix=_UNSAID)
