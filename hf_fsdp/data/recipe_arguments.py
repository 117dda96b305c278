"""What every recipe reads from its run config and command line before it looks at data or weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.data.arguments import parse_arguments
from hf_fsdp.data.attention import compute_dtype
from hf_fsdp.data.batch import resolve_accumulation_steps
from hf_fsdp.data.four_bits import settle_four_bits
from hf_fsdp.data.run_config import override, read_run_config

if TYPE_CHECKING:
    from trl import TrlParser


class RecipeRun(NamedTuple):
    """The settings of one run: ours, the recipe's own, and TRL's and transformers'."""

    fsdp: FSDPConfig
    recipe: Any
    script: Any
    training: Any
    model: Any


def read_recipe_arguments(
    argv: Sequence[str],
    parser: TrlParser,
    *,
    script: str,
    output_dir: str,
    refused: Mapping[str, tuple[str, str]],
    required: Sequence[str] = ("model_name_or_path", "dataset_name"),
) -> RecipeRun:
    """Return the `fsdp` section and the four groups of training arguments: file first, command line over it.

    Args:
        argv: the command line without the program.
        parser: of the recipe's own arguments (with `global_batch_size` and `require_sharding`), TRL's
            `ScriptArguments`, `SFTConfig` and `ModelConfig`, in this order.
        script: the recipe, for the commands in messages.
        output_dir: the folder of a run that names none.
        refused: key -> (why, what to write instead), for settings that must not be on.
        required: keys that must have a value.

    Raises:
        ConfigError: every unknown key, unreadable value, refused or missing setting at once.
    """
    num_processes = launched_processes()
    known = {item.name for group in parser.dataclass_types for item in fields(group)}
    asked = read_run_config(argv, known, script=script)
    preset, checkpointing = asked.fsdp.precision.preset, asked.fsdp.activation_checkpointing.mode == "full"
    defaults: dict[str, Any] = {"output_dir": output_dir, "use_cpu": not torch.accelerator.is_available()}
    switches = ("activation_checkpointing", "gradient_checkpointing")  # the new and the old name of one switch
    if not asked.typed & set(switches):
        # TRL switches it on. Sharded, ours does it; one process uses transformers' own, which keeps gradients right.
        defaults[next(name for name in switches if name in known)] = checkpointing and num_processes == 1
    if preset != "auto":  # TRL switches bf16 on; the `fsdp` section decides
        defaults |= {"bf16": preset == "bf16-mixed", "fp16": preset == "fp16-mixed"}
    # trainer_kwargs goes in before parsing, so that TrainingArguments' own checks see it; one process has none.
    parser.set_defaults_with_config(**{**defaults, **asked.values, **asked.fsdp.trainer_kwargs()})
    recipe, script_arguments, training, model = parse_arguments(parser, asked, refused=refused, required=required)
    if recipe.global_batch_size is not None:
        typed = training.gradient_accumulation_steps if "gradient_accumulation_steps" in asked.typed else None
        training.gradient_accumulation_steps = resolve_accumulation_steps(
            recipe.global_batch_size, training.per_device_train_batch_size, num_processes, typed=typed
        )
    if "dtype" not in asked.typed:
        model.dtype = _load_dtype(preset, lora=model.use_peft, num_processes=num_processes)
    settle_four_bits(model, compute_dtype(preset, bf16=training.bf16, fp16=training.fp16), asked.typed)
    if "assistant_only_loss" not in asked.typed:
        training.assistant_only_loss = None  # on for conversations: the data decides
    changes = {"sharding.require_sharding": "true"} if recipe.require_sharding else {}
    return RecipeRun(override(asked.fsdp, changes), recipe, script_arguments, training, model)


def launched_processes() -> int:
    """Return how many processes the launcher started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def _load_dtype(preset: str, *, lora: bool, num_processes: int) -> str:
    """Return the dtype to load weights in; sharded ones are converted later, a shard at a time and not here."""
    if preset == "bf16-true":
        return "bfloat16"
    if lora:  # PEFT rounds fresh adapters to the dtype of their base, which fp32 runs must not see
        return "float32" if preset == "fp32" else "auto"
    return "auto" if num_processes > 1 else "float32"
