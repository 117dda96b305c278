"""The seam into Trainer, and what a Trainer's arguments say about sharding.

`Trainer.save_model` writes nothing under `SHARDED_STATE_DICT` and says nothing; here it always leaves a folder that
`from_pretrained` loads. Pinned by `tests/unit/test_seams.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import Trainer, TrainingArguments
from transformers.utils import CONFIG_NAME

from hf_fsdp.config.precedence import Stated
from hf_fsdp.errors import Problem
from hf_fsdp.integrations.accelerate import active_backend, current_plugin, replace_method
from hf_fsdp.sharding.apply import AppliedSharding, get_applied_sharding
from hf_fsdp.sharding.gather import saved_dtype


def install_trainer_seam() -> None:
    """Make `Trainer.save_model` write a model under every state dict type, once."""
    replace_method(Trainer, "save_model", _save_model)


def _save_model(
    original: Callable[..., None], trainer: Trainer, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    plugin = current_plugin()
    applied = get_applied_sharding(trainer.model)
    if plugin is None or active_backend() is None or applied is None:
        return original(output_dir, _internal_call)
    kept = plugin.state_dict_type
    try:
        if not _internal_call:  # a sharded checkpoint is the model already: no full copy beside it
            plugin.state_dict_type = "FULL_STATE_DICT"
        original(output_dir, _internal_call)
    finally:
        plugin.state_dict_type = kept
    if trainer.args.should_save:
        _write_saved_dtype(Path(output_dir or trainer.args.output_dir), applied)


def _write_saved_dtype(folder: Path, applied: AppliedSharding) -> None:
    """Let `config.json` name the dtype of the weights beside it: `save_pretrained` names that of the fp32 masters."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        return  # an adapter folder, or a sharded checkpoint
    config = json.loads(path.read_text(encoding="utf-8"))
    name = str(saved_dtype(applied)).removeprefix("torch.")
    if config.get("dtype", name) != name:
        path.write_text(json.dumps({**config, "dtype": name}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
    return stated


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
    problems = []
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
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        problems.append(
            Problem(
                message="offloading parameters to the CPU arrives in a later release",
                fix="fsdp_offload_params: false (cpu_offload: false in fsdp_config)",
                source="Accelerate's file or fsdp_config",
            )
        )
    return problems


def _checkpointing_kwargs(args: TrainingArguments) -> dict[str, Any] | None:
    return getattr(args, "activation_checkpointing_kwargs", None) or getattr(
        args, "gradient_checkpointing_kwargs", None
    )
