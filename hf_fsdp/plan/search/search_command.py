"""The command that asks the planner for a request: what a table or a page offers to be copied."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from hf_fsdp.plan.candidate import PlanRequest
from hf_fsdp.plan.job import Method


def search_command(request: PlanRequest) -> str:
    """Return ``hf-fsdp plan ...`` for the search of `request`; what its config fixes is not in it, but a precision is.

    Example::

        search_command(request)
        # 'hf-fsdp plan meta-llama/Llama-2-7b-hf --gpus 8xA100-80G --method full --max-length 4096 ...'
    """
    return shlex.join(["hf-fsdp", "plan", request.model.name, *_hardware(request), *_training(request)])


def _hardware(request: PlanRequest) -> Iterator[str]:
    gpus = request.gpus
    machines = f"{gpus.num_nodes}x" if gpus.num_nodes > 1 else ""
    if gpus.gpu is not None:
        yield from ("--gpus", f"{machines}{gpus.count}x{gpus.gpu.name}")
    else:
        yield from ("--gpus", f"{machines}{gpus.count}")
        yield from ("--gpu-memory", f"{request.gpu_memory_bytes // 2**20}MiB")
    is_half = gpus.gpu is not None and not gpus.gpu.has_bf16
    if is_half or "precision.preset" in request.config.said:
        yield from (
            "--precision",
            "fp16-mixed" if is_half and request.precision.startswith("bf16") else request.precision,
        )


def _training(request: PlanRequest) -> Iterator[str]:
    yield from ("--method", request.method.name)
    yield from ("--max-length", str(request.max_length))
    yield from ("--global-batch-size", str(request.global_batch_size))
    usual = PlanRequest(model=request.model, gpus=request.gpus, gpu_memory_bytes=request.gpu_memory_bytes)
    if request.packing:
        yield "--packing"
    elif not request.padded:
        yield "--no-padded"
    if "vision_config" in request.model.config or request.num_images:
        yield from ("--num-images", str(request.num_images))
    if request.image_size is not None:
        yield from ("--image-size", f"{request.image_size[0]}x{request.image_size[1]}")
    if request.optimizer != usual.optimizer:
        yield from ("--optim", request.optimizer)
    if request.loss != "chunked":
        yield from ("--loss", request.loss)
    if request.attention != usual.attention:
        yield from ("--attention", request.attention)
    yield from _method(request.method)
    if request.model.revision is not None:
        yield from ("--revision", request.model.revision)
    if request.model.trust_remote_code:
        yield "--trust-remote-code"


def _method(method: Method) -> Iterator[str]:
    usual = Method()
    if method.name == "full":
        if method.trainable:
            yield from ("--trainable", ",".join(method.trainable))
        return
    if method.lora_r != usual.lora_r:
        yield from ("--lora-r", str(method.lora_r))
    if method.lora_dropout != usual.lora_dropout:
        yield from ("--lora-dropout", f"{method.lora_dropout:g}")
    if method.lora_parts:
        yield from ("--lora-parts", ",".join(method.lora_parts))
