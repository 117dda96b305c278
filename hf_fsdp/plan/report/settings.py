"""The settings of a candidate in the few words that tables and pages have room for."""

from __future__ import annotations

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.plan.job import Job, Method
from hf_fsdp.units import format_count


def describe_sharding(job: Job) -> str:
    """Return how the model is spread over the GPUs: ``reshard``, ``2 copies x 4, keep``, ``DDP`` …"""
    if job.strategy == "ddp":
        return "DDP, all on each GPU"
    sharding = job.fsdp.sharding
    if job.world_size == 1:
        return "one GPU, whole"
    kept = "reshard" if sharding.reshard_after_forward else "keep gathered"
    copies = sharding.dp_replicate_size
    words = [f"{copies} copies x {job.world_size // copies}, {kept}" if copies > 1 else kept]
    if job.num_micro_batches > 1 and not sharding.sync_each_batch:
        words.append("reduce once a step")
    return ", ".join(words)


def describe_checkpointing(config: FSDPConfig) -> str:
    """Return which activations are computed again: ``none``, ``full``, ``full, 1 block in 2`` …"""
    activation = config.activation_checkpointing
    mode = "none" if activation.mode == "auto" else activation.mode
    if mode == "none":
        return "none"
    if activation.selective:
        mode = f"keeps {', '.join(activation.selective)}"
    if activation.every > 1:
        mode += f", 1 block in {activation.every}"
    elif activation.fraction < 1:
        mode += f", {activation.fraction:.0%} of blocks"
    return f"{mode}, {'+'.join(activation.towers)} only" if activation.towers else mode


def describe_offload(config: FSDPConfig) -> str:
    """Return what is kept in host memory: ``none``, ``parameters``, ``activations`` or both."""
    offload = config.offload
    kept = []
    if offload.parameters:
        kept.append("parameters+optimizer")
    if offload.activations != "none":
        kept.append("activations")
    return " and ".join(kept) or "none"


def describe_batch(job: Job) -> str:
    """Return micro-batch x accumulation, ``2 x 4``: rows of one forward on one GPU, and forwards a step."""
    return f"{job.batch.micro_batch_size} x {job.num_micro_batches}"


def describe_job(job: Job) -> str:
    """Return all settings of a candidate on one line."""
    words = [describe_sharding(job), f"checkpointing {describe_checkpointing(job.fsdp)}"]
    if describe_offload(job.fsdp) != "none":
        words.append(f"{describe_offload(job.fsdp)} in host memory")
    words.append(f"micro-batch {describe_batch(job)}")
    return "; ".join(words)


def describe_method(method: Method, num_trained: int, num_parameters: int) -> str:
    """Return what is trained: ``LoRA r=16, 40.0M of 6.78B parameters trained``."""
    words = {"full": "full fine-tuning", "lora": f"LoRA r={method.lora_r}", "qlora": f"QLoRA r={method.lora_r}"}
    name = words.get(method.name, method.name)
    if num_trained == num_parameters:
        return name
    return f"{name}, {format_count(num_trained)} of {format_count(num_parameters)} parameters trained"
