"""The run config of a candidate: what our recipes train as it was planned, with the origin of every value."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.plan.candidate import Candidate, Plan
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.models.known_models import find_known_model
from hf_fsdp.plan.report.settings import describe_job
from hf_fsdp.units import format_bytes, format_count

DATA_PLACEHOLDER = "YOUR_DATASET"
_COMMENT_COLUMN = 45
_PLANNED, _CHOSEN = "[plan]", "[usual]"


def recipe_script(plan: Plan) -> str:
    """Return the recipe that trains the model: the one for pictures where the model has a vision tower."""
    return f"recipes/{'vlm' if 'vision_config' in plan.request.model.config else 'text'}/train.py"


def loadable_name(name: str) -> str:
    """Return what ``from_pretrained`` takes for a model as a person calls it: a hub id for a short name of the
    built-in list, the folder of a config.json."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".json":
        return str(path.parent)
    known = None if path.is_dir() else find_known_model(name)
    return name if known is None else known.hub_id


def settle_config(job: Job) -> FSDPConfig:
    """Return the job's config with what it was planned with written down, so that nothing else decides it later."""
    config = job.fsdp
    if config.precision.preset == "auto":
        config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, preset="bf16-mixed"))
    if config.activation_checkpointing.mode == "auto":
        activation = dataclasses.replace(config.activation_checkpointing, mode="none")
        config = dataclasses.replace(config, activation_checkpointing=activation)
    return config


def write_run_file(plan: Plan, candidate: Candidate, config: FSDPConfig, command: str) -> str:
    """Return the text of a run config.

    Args:
        plan: what the candidate is of.
        candidate: what is run.
        config: its sharding, settled.
        command: that starts the run, for the title.
    """
    lines = [
        f"# {one_line(plan.request.model.name)}: {one_line(describe_job(candidate.job))}.",
        f"#   {one_line(command)}",
        f"# {_prediction(plan, candidate)}",
        f"# Written by: {one_line(plan.command) or 'hf-fsdp plan'}",
        f"# {_PLANNED}: the plan holds for this value only. {_CHOSEN}: a common choice, yours to change.",
        *_other_loss(candidate.job),
        "",
        *(_line(key, value, why) for key, value, why in _run_settings(plan, candidate.job)),
        "",
        "# gradient_checkpointing and bf16 are not set: the section below decides both.",
        "fsdp:",
    ]
    lines += [f"  {_line(section, value, _PLANNED).rstrip()}" for section, value in _yaml_sections(config).items()]
    return "\n".join(lines) + "\n"


def _other_loss(job: Job) -> Iterator[str]:
    if job.loss != "chunked":
        yield "# Planned with the loss of a plain Trainer, which holds all logits; the recipe's, in chunks, needs less."


def _prediction(plan: Plan, candidate: Candidate) -> str:
    text = (
        f"{format_bytes(candidate.peak_bytes)} a GPU at the peak, simulated ({format_bytes(candidate.headroom_bytes)} "
        f"of {format_bytes(candidate.usable_bytes)} usable stay free on {plan.request.num_gpus} x "
        f"{plan.request.gpu_name})"
    )
    if candidate.speed is not None:
        low, high = candidate.speed.low_tokens_per_second, candidate.speed.high_tokens_per_second
        text += f"; {low:,.0f} to {high:,.0f} tokens/s, estimated"
    return f"{text}; {format_count(plan.num_trained)} parameters trained."


def _run_settings(plan: Plan, job: Job) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and reason of the training half, in the order of our shipped run configs."""
    request, batch = plan.request, job.batch
    name = loadable_name(request.model.name)
    yield "model_name_or_path", name, _PLANNED
    if request.model.revision is not None:
        yield "model_revision", request.model.revision, f"{_PLANNED} its config is what was planned"
    yield "# dataset_name", DATA_PLACEHOLDER, "to be filled in: a hub id or a file; or --dataset_name"
    if recipe_script(plan) == "recipes/text/train.py":
        yield "# chat_template", "llama2", "for conversations, where the tokenizer has none, as those of base models"
    yield "# plan_memory", True, "to hold the memory that is predicted for the rows that come against what is measured"
    yield "output_dir", f"runs/{Path(name).name.lower()}_{request.method.name}", _CHOSEN
    if request.model.trust_remote_code:
        yield "trust_remote_code", True, f"{_PLANNED} its code comes with the model, by your word"
    yield from _method_settings(job, is_vision=recipe_script(plan) == "recipes/vlm/train.py")
    yield "attn_implementation", job.attention, f"{_PLANNED} decides what attention keeps in memory"
    yield "learning_rate", 2.0e-5 if request.method.name == "full" else 2.0e-4, _CHOSEN
    yield "lr_scheduler_type", "cosine", _CHOSEN
    yield "warmup_steps", 0.03, f"{_CHOSEN} a share of the steps"
    yield "max_grad_norm", job.max_grad_norm or 0.0, f"{_PLANNED} 0: gradients are not clipped"
    yield "num_train_epochs", 1, _CHOSEN
    yield "optim", job.optimizer, _PLANNED
    accumulation = f"accumulation is {job.num_micro_batches} on {job.world_size} processes"
    yield "global_batch_size", batch.micro_batch_size * job.num_micro_batches * job.world_size, accumulation
    yield "per_device_train_batch_size", batch.micro_batch_size, _PLANNED
    yield "per_device_eval_batch_size", batch.micro_batch_size, f"{_CHOSEN} as in training"
    yield "max_length", batch.num_tokens, _PLANNED
    if batch.image_size:
        yield "max_pixels", batch.image_size[0] * batch.image_size[1], _PLANNED
    if recipe_script(plan) == "recipes/text/train.py":
        yield "packing", batch.packed, _PLANNED
    yield "seed", 42, _CHOSEN
    yield "save_strategy", "epoch", _CHOSEN
    yield "logging_steps", 1, _CHOSEN
    yield "report_to", "wandb", f"{_CHOSEN} offline without a key; none turns it off"


def _method_settings(job: Job, *, is_vision: bool) -> Iterator[tuple[str, Any, str]]:
    method = job.method
    if method.name == "qlora":
        yield "load_in_4bit", True, f"{_PLANNED} dtype and storage follow from fsdp.precision"
        yield "bnb_4bit_quant_type", "nf4", _PLANNED
        yield "use_bnb_nested_quant", method.double_quantization, f"{_PLANNED} scales are quantized too"
    elif method.load_dtype != "auto":
        yield "dtype", method.load_dtype, f"{_PLANNED} what weights are loaded in"
    if method.name != "full":
        yield "use_peft", True, _PLANNED
        yield "lora_r", method.lora_r, _PLANNED
        yield "lora_alpha", 2 * method.lora_r, _CHOSEN
        yield "lora_dropout", method.lora_dropout, f"{_PLANNED} above 0 each adapter keeps a copy of its input"
        targets = method.lora_targets[0] if len(method.lora_targets) == 1 else list(method.lora_targets)
        yield "lora_target_modules", targets, _PLANNED
    if is_vision:  # the text recipe has one part only
        # A job that names no part means every part; the recipe would leave the tower out.
        if method.name == "full":
            yield "trainable", list(method.trainable) or ["all"], f"{_PLANNED} trained in full"
        else:
            yield "lora_parts", list(method.lora_parts) or ["all"], f"{_PLANNED} where adapters go"
            if method.lora_full:
                yield "trainable", list(method.lora_full), f"{_PLANNED} trained in full"


def _yaml_sections(config: FSDPConfig) -> Mapping[str, Any]:
    """Return section -> what differs from the defaults or was planned; one word where one says it."""
    defaults = FSDPConfig().to_mapping()
    always = {"precision.preset", "activation_checkpointing.mode", "sharding.reshard_after_forward"}
    sections: dict[str, Any] = {}
    for section, fields in config.to_mapping().items():
        kept = {
            key: value
            for key, value in fields.items()
            if value != defaults[section][key] or f"{section}.{key}" in always
        }
        only = next(iter(kept)) if len(kept) == 1 else None
        if kept:
            sections[section] = kept[only] if only in ("preset", "mode") else kept
    return sections


def _line(key: str, value: Any, why: str) -> str:
    text = f"{key}: {_yaml(value)}"
    return f"{text:<{_COMMENT_COLUMN}}  # {why}" if why else text


def _yaml(value: Any) -> str:
    """Return a value on one line that YAML reads back as the same value: ``no`` and ``1e5`` are words, when text."""
    import yaml

    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).removesuffix("...\n").strip()


def one_line(text: str) -> str:
    """Return text from outside as part of one comment line, which no line break in it can leave."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
