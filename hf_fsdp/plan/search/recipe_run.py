"""The job of a run config (configs/train/*.yaml): what a recipe would train, as it stands in the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.errors import PlanError, Problem
from hf_fsdp.plan.job import Batch, Job, Method, ModelSpec
from hf_fsdp.plan.models.image_tokens import image_tokens
from hf_fsdp.plan.models.model_config import model_kind
from hf_fsdp.plan.models.resolve import resolve_model
from hf_fsdp.plan.search.divisions import check_division
from hf_fsdp.plan.search.run_values import RunValues
from hf_fsdp.plan.search.usual_parts import with_usual_parts

# transformers' and TRL's defaults of what a file leaves out.
_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_length": 1024,
    "optim": "adamw_torch_fused",
    "max_grad_norm": 1.0,
    "lora_r": 16,
    "lora_dropout": 0.05,
}
_PICTURES = "image-text-to-text"
# For families that cut pictures by their size; a row says what it was planned with.
_COMMON_SIZE = (1024, 1024)


def is_run_config(text: str) -> bool:
    """Return whether MODEL names a YAML file, which only a run config can be."""
    return text.lower().endswith((".yaml", ".yml"))


def read_recipe_run(
    path: str | Path, world_size: int, *, revision: str | None = None, trust_remote_code: bool = False
) -> Job:
    """Return the job that a recipe would run with this file on so many GPUs.

    Only keys that change memory or speed are read; the recipe checks the rest. The loss is TRL's, in chunks, as both
    recipes use `SFTTrainer`. A run with pictures is planned with one a row, of `max_pixels` where that is set.

    Args:
        path: a run config with `model_name_or_path`.
        world_size: GPUs, one process each; accumulation follows from `global_batch_size`.
        revision: of a model on the hub; default: the file's `model_revision`.
        trust_remote_code: build a class that comes with the model. By a person's word and not by the file's: who plans
            a file of somebody else has not yet decided to run what it names.

    Raises:
        PlanError: the file cannot be read, names no model, a value is not of its kind, or its batch does not divide.

    Example::

        job = read_recipe_run("configs/train/llama2_7b_full.yaml", 8)
        job.num_micro_batches
        # 8
    """
    content = _read(Path(path))
    fsdp = FSDPConfig.from_yaml(path) if "fsdp" in content else FSDPConfig()
    values = RunValues({**_DEFAULTS, **content}, _DEFAULTS, str(path))
    name = content.get("model_name_or_path")
    if not isinstance(name, str):
        raise PlanError(f"{path} names no model", fix="model_name_or_path: a hub id or a folder", source=str(path))
    method = _method(values)
    rows, packed = values.whole("per_device_train_batch_size"), values.flag("packing")
    num_tokens, clipped = values.whole("max_length"), "max_grad_norm" in values and values.number("max_grad_norm")
    num_micro_batches = _accumulation(values, rows, world_size, str(path))
    max_pixels = values.whole("max_pixels") if "max_pixels" in values else None
    if values.problems:
        raise PlanError(values.problems)
    wanted = values.text("model_revision")
    model = resolve_model(
        name,
        revision=revision or (None if wanted == "main" else wanted),  # main is what any model is without a word
        trust_remote_code=trust_remote_code,
        method=method.name,
    )
    has_pictures = model_kind(model) == _PICTURES and "dataset_text_field" not in content
    method = with_usual_parts(method, has_pictures=has_pictures)
    return Job(
        model=model,
        fsdp=fsdp,
        world_size=world_size,
        method=method,
        batch=Batch(
            micro_batch_size=rows,
            num_tokens=num_tokens,
            padded=rows > 1 and not packed,
            packed=packed,
            num_images=int(has_pictures),
            image_size=_image_size(max_pixels, model) if has_pictures else None,
        ),
        num_micro_batches=num_micro_batches,
        optimizer=values.text("optim") or _DEFAULTS["optim"],
        max_grad_norm=clipped or None,
        loss="chunked",
        attention=values.text("attn_implementation") or "sdpa",
    )


def peek(path: Path) -> Mapping[str, Any]:
    """Return what a YAML file says, for messages and proposals; nothing where it is none, which is told elsewhere."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return content if isinstance(content, Mapping) else {}


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = str(error).splitlines()[0]
        raise PlanError(
            f"{path} cannot be read as a run config: {said}",
            fix="another path; those of configs/train/ are in a checkout of the repository, so run it there",
        ) from None
    if not isinstance(content, Mapping):
        raise PlanError(f"{path} holds no mapping of settings", fix="name a run config, e.g. of configs/train/")
    if "distributed_type" in content:
        raise PlanError(
            f"{path} is a launch file of Accelerate, which names no model",
            fix="name the run config that it is launched with, e.g. configs/train/llama2_7b_full.yaml",
            source=str(path),
        )
    return content


def _method(values: RunValues) -> Method:
    name = "qlora" if values.flag("load_in_4bit") else "lora" if values.flag("use_peft") else "full"
    dtype = values.text("dtype") or "auto"
    trainable = values.words("trainable")
    adapted = name != "full"
    return Method(
        name=name,
        load_dtype=dtype if dtype in ("float32", "bfloat16") and name != "qlora" else "auto",
        lora_r=values.whole("lora_r"),
        lora_dropout=values.number("lora_dropout", below=1),
        lora_targets=values.words("lora_target_modules") or ("all-linear",),
        lora_parts=values.words("lora_parts") if adapted else (),
        lora_full=trainable if adapted else (),
        trainable=() if adapted else trainable,
        double_quantization=values.flag("use_bnb_nested_quant"),
    )


def _accumulation(values: RunValues, rows: int, world_size: int, source: str) -> int:
    if "global_batch_size" not in values:
        return values.whole("gradient_accumulation_steps")
    whole = values.whole("global_batch_size")
    if values.problems:
        return 1
    problem = check_division(whole, world_size)
    if problem is None and whole % (rows * world_size):
        problem = Problem(
            message=f"global_batch_size={whole} is not a multiple of {rows} rows on each of {world_size} GPUs",
            fix=f"per_device_train_batch_size: {math.gcd(whole // world_size, rows)}",
            source=source,
        )
    if problem is not None:
        raise PlanError(problem)
    return whole // (rows * world_size)


def _image_size(max_pixels: int | None, model: ModelSpec) -> tuple[int, int] | None:
    """The largest square picture that `max_pixels` lets through; without it the model's own size, or a common one."""
    if max_pixels:
        edge = math.isqrt(max_pixels)
        return edge, edge
    return None if image_tokens(model).num_tokens is not None else _COMMON_SIZE
