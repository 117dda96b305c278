"""The seams into Trainer, and what a Trainer's arguments say about sharding.

`Trainer.save_model` writes nothing under `SHARDED_STATE_DICT` and says nothing; here it always leaves a folder that
`from_pretrained` loads. Pinned by `tests/unit/test_seams.py`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME

from hf_fsdp.checkpoint.model_folder import replaced_files
from hf_fsdp.config.precedence import Stated
from hf_fsdp.data.packing import check_packing
from hf_fsdp.errors import Problem
from hf_fsdp.integrations.accelerate import active_backend, current_plugin, replace_method
from hf_fsdp.integrations.dynamo import read_compile_arguments
from hf_fsdp.integrations.losses import check_unproven
from hf_fsdp.integrations.optimizers import check_optimizer
from hf_fsdp.integrations.trl import is_trl, items_for_loss
from hf_fsdp.monitor.generate import evaluation_mode
from hf_fsdp.policies.blocks import base_model, class_name
from hf_fsdp.sharding.apply import get_applied_sharding
from hf_fsdp.sharding.gather import gather_for_saving
from hf_fsdp.sharding.mesh import agree_all
from hf_fsdp.sharding.outcome import agreed, wait_for_all_ranks

_PROBED = "_hf_fsdp_loss_scales"
_DOUBTED = "_hf_fsdp_doubts_accepts_loss_kwargs"


def install_trainer_seam() -> None:
    """Put the seams of saving and of the loss in place; calling it again changes nothing."""
    replace_method(Trainer, "save_model", _save_model)
    replace_method(Trainer, "training_step", _training_step)


def _training_step(
    original: Callable[..., Any], trainer: Trainer, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
) -> Any:
    """Take back Trainer's belief that a model scales its loss by `num_items_in_batch`, where it does not.

    Trainer believes it of every forward with ``**kwargs`` and multiplies the loss by the number of processes to make
    up for it; T5, BERT, classification heads and others ignore the argument, so loss and gradients would be that many
    times too large. The loss itself is asked, once: twice the items must give half of it.
    """
    own_loss = type(trainer).compute_loss is not Trainer.compute_loss or trainer.compute_loss_func is not None
    if getattr(trainer, _DOUBTED, False) and num_items_in_batch is not None:
        num_items_in_batch = _resolve_doubt(trainer, model, inputs, num_items_in_batch)
    if active_backend() is None:
        return original(model, inputs, num_items_in_batch)
    if own_loss:
        return original(model, inputs, items_for_loss(trainer, num_items_in_batch))
    if num_items_in_batch is not None and trainer.model_accepts_loss_kwargs and not hasattr(trainer, _PROBED):
        scales = _loss_scales(trainer, model, inputs, num_items_in_batch)
        if scales is not None:
            setattr(trainer, _PROBED, scales)
            trainer.model_accepts_loss_kwargs = scales
            if not scales and trainer.is_world_process_zero():
                name = class_name(model)
                print(f"hf-fsdp: {name} ignores num_items_in_batch: its loss is averaged over batches, not tokens")
    if getattr(trainer, _PROBED, None) is False:
        num_items_in_batch = None
    return original(model, inputs, num_items_in_batch)


def doubt_class_attribute(trainer: Trainer) -> None:
    """Before training: let Trainer count items for a model whose class says that its loss ignores them.

    Qwen2.5-VL, Qwen3-VL, GLM-4V and some thirty more say ``accepts_loss_kwargs = False`` and hand every keyword
    to a loss that divides by ``num_items_in_batch`` all the same. Believed, Trainer averages batches where all others
    are averaged over tokens, and a rank with few answer tokens counts as much as one with many. The first batch tells.
    """
    model: Any = base_model(trainer.model)
    keeps_loss = type(trainer).compute_loss is Trainer.compute_loss or any(
        cls.__name__ == "SFTTrainer" and is_trl(cls) for cls in type(trainer).__mro__
    )
    says_no = getattr(model, "accepts_loss_kwargs", None) is False and trainer.model_accepts_loss_kwargs is False
    takes_any = any(
        item.kind == inspect.Parameter.VAR_KEYWORD for item in inspect.signature(model.forward).parameters.values()
    )
    if says_no and takes_any and keeps_loss and trainer.compute_loss_func is None:
        trainer.model_accepts_loss_kwargs = True
        setattr(trainer, _DOUBTED, True)


def _resolve_doubt(trainer: Trainer, model: nn.Module, inputs: Any, num_items: Any) -> Any:
    """Return the items where the model's own loss follows them, else None, and let Trainer know. Collective."""
    prepared = trainer._prepare_inputs(dict(inputs))
    follows = _follows_items(lambda items: model(**prepared, num_items_in_batch=items).loss, model, num_items)
    if follows is None:  # a batch without a label; the next one tells
        return num_items
    setattr(trainer, _DOUBTED, False)
    setattr(trainer, _PROBED, follows)
    trainer.model_accepts_loss_kwargs = follows
    if follows and trainer.is_world_process_zero():
        print(f"hf-fsdp: {class_name(model)} is averaged over tokens: its loss follows num_items_in_batch", flush=True)
    return num_items if follows else None


def _loss_scales(trainer: Trainer, model: nn.Module, inputs: Any, num_items: Any) -> bool | None:
    prepared = trainer._prepare_inputs(dict(inputs))
    return _follows_items(
        lambda items: trainer.compute_loss(model, dict(prepared), num_items_in_batch=items), model, num_items
    )


def _follows_items(compute: Callable[[Any], Any], model: nn.Module, num_items: Any) -> bool | None:
    """Whether a loss follows the number of items, on any rank; None when this batch cannot tell. Collective."""
    with evaluation_mode(model), torch.no_grad():  # no dropout, so that the random stream stays where it is
        once, twice = (float(compute(items)) for items in (num_items, 2 * num_items))
    told = abs(once - twice) > 0.1 * abs(once) if math.isfinite(once) and once != 0 else None
    votes = [vote for vote in agree_all(told) if vote is not None]
    return any(votes) if votes else None


def _save_model(
    original: Callable[..., None], trainer: Trainer, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """Leave a folder that `from_pretrained` loads, whatever the format of checkpoints; the same error on all ranks."""
    model = trainer.model
    if current_plugin() is None or active_backend() is None or (applied := get_applied_sharding(model)) is None:
        return original(output_dir, _internal_call)
    folder = Path(output_dir or trainer.args.output_dir)
    wait_for_all_ranks("save_model")
    state_dict = gather_for_saving(model, applied)

    def write() -> None:
        if trainer.args.should_save:
            with replaced_files(folder) as staging:
                trainer._save(str(staging), state_dict=state_dict)
                (staging / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle, which nothing reads

    agreed(f"save the model into {folder}", write)
    if trainer.args.push_to_hub and not _internal_call:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


def read_training_arguments(args: TrainingArguments) -> dict[str, Stated]:
    """Return what `args` says about sharding, as dotted config keys.

    TRL's configs turn bf16 and gradient checkpointing on by default, so there these two count as not typed.
    """
    name = type(args).__name__
    typed = not any(cls.__module__.startswith("trl.") for cls in type(args).__mro__)
    stated: dict[str, Stated] = {}
    if args.bf16:
        stated["precision.preset"] = Stated("bf16-mixed", f"{name}(bf16=True)", typed)
    if args.fp16:
        stated["precision.preset"] = Stated("fp16-mixed", f"{name}(fp16=True)", typed)
    if checkpointing_is_on(args):
        source = f"{name}(gradient_checkpointing=True)"
        stated["activation_checkpointing.mode"] = Stated("full", source, typed)
        every = (_checkpointing_kwargs(args) or {}).get("every_n_layers", 1)
        if every != 1:
            stated["activation_checkpointing.every"] = Stated(every, f"{name}(every_n_layers={every})", typed)
        if (_checkpointing_kwargs(args) or {}).get("offload"):
            stated["offload.activations"] = Stated("block_inputs", f"{name}(offload=True)", typed)
    return stated | read_compile_arguments(args)


def checkpointing_is_on(args: TrainingArguments) -> bool:
    """Return whether Trainer would switch on transformers' own checkpointing (its name changed in 5.2x)."""
    return bool(getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", None))


def turn_checkpointing_off(args: TrainingArguments) -> None:
    """Tell Trainer that somebody else recomputes, so that nothing is recomputed twice."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if hasattr(args, name):
            setattr(args, name, False)


def check_training_arguments(args: TrainingArguments) -> list[Problem]:
    """Return what in `args` cannot work with sharded training, whatever the config says."""
    name = type(args).__name__
    problems = [*check_unproven(args), *check_packing(args)]
    for flag in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, flag, False):
            problems.append(
                Problem(
                    message=f"{flag}=True casts the whole model between training and evaluation, "
                    "which a sharded model with its own precision does not survive",
                    fix=f"{flag}=False; evaluation runs in the compute dtype of fsdp.precision already",
                    source=f"{name}(...)",
                )
            )
    problems += check_optimizer(args)
    if args.auto_find_batch_size:
        problems.append(
            Problem(
                message="auto_find_batch_size=True restarts training on one rank while the others go on, "
                "and on a model that is sharded already",
                fix="auto_find_batch_size=False with a per_device_train_batch_size that fits; "
                "keep the global batch by gradient_accumulation_steps",
                source=f"{name}(...)",
            )
        )
    if args.enable_jit_checkpoint:
        problems.append(
            Problem(
                message="enable_jit_checkpoint=True saves on a signal without asking the other ranks, "
                "which then save another step or none",
                fix="enable_jit_checkpoint=False; FSDPCallback saves on SIGTERM, SIGINT and SIGUSR1, "
                "the same step on all ranks",
                source=f"{name}(...)",
            )
        )
    if args.save_on_each_node:
        problems.append(
            Problem(
                message="save_on_each_node=True asks for a whole checkpoint on every machine, "
                "and each process holds a part of one",
                fix="save_on_each_node=False with an output_dir on a file system that all machines share",
                source=f"{name}(...)",
            )
        )
    if args.fsdp_config and not args.fsdp and args.world_size > 1:
        problems.append(
            Problem(
                message="fsdp_config is given without fsdp, so Trainer drops it and would train DDP",
                fix="fsdp=True, or TrainingArguments(..., **config.trainer_kwargs()) which sets both",
                source=f"{name}(...)",
            )
        )
    return problems


def check_plugin(plugin: FullyShardedDataParallelPlugin | None, world_size: int) -> list[Problem]:
    """Return what in Accelerate's FSDP plugin cannot work with this backend."""
    if plugin is None:
        return [
            Problem(
                message=f"FSDPCallback is in a run of {world_size} processes in which FSDP is off: it would train DDP",
                fix="TrainingArguments(..., **config.trainer_kwargs()), "
                "or launch with a file that says distributed_type: FSDP (hf-fsdp config MODEL --gpus N -o FILE)",
            )
        ]
    problems = []
    if plugin.fsdp_version != 2:
        problems.append(
            Problem(
                message=f"fsdp_version={plugin.fsdp_version}: this backend runs FSDP2 and FSDP1 is deprecated",
                fix="fsdp_version: 2",
                source="Accelerate's file or fsdp_config",
            )
        )
    if plugin.activation_checkpointing:
        problems.append(
            Problem(
                message="Accelerate's own fsdp_activation_checkpointing is on: it recomputes without the random state, "
                "so with any dropout the gradients are wrong",
                fix="fsdp_activation_checkpointing: false, and activation_checkpointing: full in FSDPConfig",
                source="Accelerate's file or fsdp_config",
            )
        )
    return problems


def _checkpointing_kwargs(args: TrainingArguments) -> dict[str, Any] | None:
    return getattr(args, "activation_checkpointing_kwargs", None) or getattr(
        args, "gradient_checkpointing_kwargs", None
    )
