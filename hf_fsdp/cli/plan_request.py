"""What `hf-fsdp plan` was asked: a command line as a request to the planner, with every problem of it at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING

from hf_fsdp.cli.plan_flags import Options, Problems, check_together, flag_of
from hf_fsdp.cli.plan_sizes import read_count, read_image_size, read_memory, read_price
from hf_fsdp.errors import ConfigError, Problem

if TYPE_CHECKING:
    from hf_fsdp.config.hardware import GpuRequest
    from hf_fsdp.config.schema import FSDPConfig
    from hf_fsdp.plan.candidate import PlanRequest
    from hf_fsdp.plan.job import Method, ModelSpec


def read_request(options: Options, typed: Collection[str]) -> PlanRequest:
    """Return what is asked of the planner.

    Args:
        options: of the command, by name.
        typed: names of those that were typed.

    Raises:
        ConfigError: every problem of the command line.
    """
    from hf_fsdp.plan.candidate import PlanRequest
    from hf_fsdp.plan.job import ModelSpec

    problems = Problems()
    problems.found += check_together(options, typed, is_run=False)
    model = problems.attempt(lambda: _read_model(options))
    hardware = problems.attempt(lambda: read_hardware(options))
    named = hardware[0] if hardware is not None and not options["min_gpus"] else None
    config = problems.attempt(lambda: _read_config(options, named))
    price = problems.attempt(lambda: read_price(options["price"]))
    tokens = problems.attempt(lambda: read_count(options["tokens"], "--tokens"))
    host = problems.attempt(lambda: read_memory(options["host_memory"], "--host-memory"))
    size = problems.attempt(lambda: read_image_size(options["image_size"]))
    gpus, memory = hardware or read_hardware({"gpus": "8", "gpu_memory": "80GiB", "min_gpus": False})
    pictures = _num_images(options, model)
    request = PlanRequest(
        model=model or ModelSpec(name=options["model"], config={}),
        gpus=gpus,
        gpu_memory_bytes=memory,
        method=_read_method(options, bool(pictures)),
        max_length=_max_length(options, typed, model),
        global_batch_size=options["global_batch_size"],
        packing=options["packing"],
        padded=options["padded"] if "padded" in typed else not options["packing"],
        num_images=pictures,
        image_size=size if model is not None else None,  # of a model that is not known nobody knows the pictures
        optimizer=options["optim"],
        loss=options["loss"],
        attention=options["attention"],
        host_memory_bytes=host,
        price_per_gpu_hour=price,
        training_tokens=tokens,
    )
    if config is not None:
        request = dataclasses.replace(request, config=config)
    problems.found += _check(request if hardware is not None else _without_hardware(request), options)
    problems.refuse()
    return request


def _without_hardware(request: PlanRequest) -> PlanRequest:
    """The request with a batch and a config that are right on the GPUs that stand in for those that were not read."""
    from hf_fsdp.config.schema import FSDPConfig

    batch = request.num_gpus if request.global_batch_size > 0 else request.global_batch_size
    return dataclasses.replace(request, global_batch_size=batch, config=FSDPConfig())


def _check(request: PlanRequest, options: Options) -> list[Problem]:
    """Return what is wrong with the request as far as the question that is asked reads it."""
    from hf_fsdp.plan.search.batch_size import check_batch
    from hf_fsdp.plan.search.check import check_request
    from hf_fsdp.plan.search.smallest import check_smallest

    if options["max_batch"]:
        return check_batch(request, options["micro_batch_size"])
    return check_smallest(request) if options["min_gpus"] else check_request(request)


def _read_model(options: Options) -> ModelSpec:
    from hf_fsdp.plan.models.resolve import resolve_model

    if not options["model"]:
        raise ConfigError("MODEL is missing", fix="hf-fsdp plan llama-2-7b --gpus 8xA100-80G   # or --list-models")
    method = options["method"].strip().lower()
    return resolve_model(
        options["model"],
        revision=options["revision"],
        trust_remote_code=options["trust_remote_code"],
        method=method if method in ("full", "lora", "qlora") else "full",
    )


def _max_length(options: Options, typed: Collection[str], model: ModelSpec | None) -> int:
    """Return the tokens of a row; a default that nobody typed is no reason to refuse a model with fewer positions."""
    from hf_fsdp.plan.models.positions import max_positions

    wanted = int(options["max_length"])
    if "max_length" in typed or model is None:
        return wanted
    return min(wanted, max_positions(model) or wanted)


def _num_images(options: Options, model: ModelSpec | None) -> int:
    """Return the pictures a row: as typed, else one for a model that takes some, which is rarely trained on none."""
    from hf_fsdp.plan.models.model_config import model_kind

    if options["num_images"] is not None:
        return int(options["num_images"])
    return int(model is not None and model_kind(model) == "image-text-to-text")


def _read_method(options: Options, has_pictures: bool) -> Method:
    from hf_fsdp.plan.job import Method
    from hf_fsdp.plan.search.usual_parts import with_usual_parts

    name = options["method"].strip().lower()
    method = Method(
        name=name,
        lora_r=options["lora_r"],
        lora_dropout=options["lora_dropout"],
        lora_parts=words_of(options["lora_parts"]),
        trainable=words_of(options["trainable"]) if name == "full" else (),
    )
    return with_usual_parts(method, has_pictures=has_pictures)


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a list that is typed with commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def read_hardware(options: Options) -> tuple[GpuRequest, int]:
    """Return the GPUs and the memory of one; under ``--min-gpus`` any, since it looks at all.

    Raises:
        ConfigError: no GPUs, no memory of theirs, or both ways to say it.
    """
    from hf_fsdp.config.hardware import GPUS, parse_gpu_memory, parse_gpus

    text, memory = options["gpus"], options["gpu_memory"]
    if options["min_gpus"]:
        text, memory = GPUS[0].name, None
    if text is None:
        raise ConfigError("--gpus is missing: on which GPUs?", fix="--gpus 8xA100-80G, or --gpus 8 --gpu-memory 40GiB")
    request = parse_gpus(text, takes_memory=True)
    if request.gpu is None and memory is None:
        raise ConfigError(
            f"--gpus {text} says how many and not which",
            fix=f"--gpus {text}xA100-80G, or --gpus {text} --gpu-memory 40GiB",
        )
    if request.gpu is not None and memory is not None:
        machines = f"{request.num_nodes}x" if request.num_nodes > 1 else ""
        raise ConfigError(
            f"--gpu-memory {memory} and --gpus {text} both say how much memory there is",
            fix=f"--gpus {text}, or --gpus {machines}{request.count} --gpu-memory {memory}",
        )
    return request, request.gpu.usable_bytes if request.gpu is not None else parse_gpu_memory(memory)


def _read_config(options: Options, gpus: GpuRequest | None) -> FSDPConfig:
    """Return what is fixed: the file's section, and the flags over it."""
    from hf_fsdp.cli.config import read_flags
    from hf_fsdp.config.schema import FSDPConfig

    problems = Problems()
    file = options["config"]
    base = (None if file is None else problems.attempt(lambda: FSDPConfig.from_yaml(file))) or FSDPConfig()
    names = ("precision", "offload", "activation_checkpointing")
    flags = {flag_of(name): options[name] for name in names if options[name] is not None}
    if gpus is not None and gpus.gpu is not None and not gpus.gpu.has_bf16 and "precision.preset" not in base.said:
        flags.setdefault("--precision", "fp16-mixed")
    typed = read_flags(flags, problems.found)
    problems.refuse()
    said = {key: base.get(key) for key in base.said if key != "wrap.callable"}
    said |= {key: typed.get(key) for key in typed.said}
    return FSDPConfig.from_mapping(said, source=file or "the command line")
