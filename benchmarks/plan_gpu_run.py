"""One case of `plan_gpu.py`: real tensors, our own sharding, and seven other processes that exist only by name.

Under torch's fake process group collectives allocate what they always do and move nothing: a gathered weight holds
this process's shard over and over, a reduced gradient whatever was in its memory. So memory is right, numbers are not
(losses may be nan), and the speed is that of a step whose communication costs nothing.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import nn

from hf_fsdp.monitor.memory import MemoryMeter
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.simulator.optimizer import build_optimizer
from hf_fsdp.sharding.apply import apply_fsdp
from hf_fsdp.sharding.mesh import build_mesh
from hf_fsdp.torch_private import local_shard


def build_model(job: Job) -> nn.Module:
    """Return the model of a job on meta, its buffers real, as a recipe loads it; not by the simulator's own code."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(job.model.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    dtype = torch.float32 if job.method.name == "full" else torch.bfloat16
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()
    if job.method.name == "lora":
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=job.method.lora_r, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, settings, low_cpu_mem_usage=True)
    model.train()
    return model


def materialize(model: nn.Module, device: str) -> None:
    """Give every shard on meta real memory with small random numbers."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            shard = local_shard(parameter)
            shard.normal_(std=0.02, generator=generator) if parameter.ndim > 1 else shard.fill_(1)


def build_batch(job: Job, device: str) -> dict[str, torch.Tensor]:
    """Random tokens, all of them labels."""
    vocabulary = int(job.model.config["vocab_size"])
    ids = torch.randint(3, vocabulary, (job.batch.micro_batch_size, job.batch.num_tokens), device=device)
    return {"input_ids": ids, "labels": ids.clone()}


class RealStep:
    """The step that Trainer makes of a job, as far as it makes tensors.

    Args:
        job: on one process of a fake group that has begun.
        device: ``cuda`` or ``cpu``.
    """

    def __init__(self, job: Job, device: str):
        self._job, self._device = job, device
        self.model = build_model(job)
        apply_fsdp(self.model, job.fsdp, build_mesh(job.fsdp.sharding, device))
        materialize(self.model, "cpu" if job.fsdp.offload.parameters else device)
        self.optimizer = build_optimizer(job.optimizer, self.model.parameters())
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def run(self, meter: MemoryMeter | None = None) -> None:
        """Make one step, measured by a meter that has been started."""
        if meter is not None:
            meter.begin_step()
        inputs = build_batch(self._job, self._device)
        num_items = torch.ones((), dtype=torch.long, device=self._device)
        loss = self.model(**inputs, num_items_in_batch=num_items).loss * self._job.world_size
        del inputs
        loss.backward()
        del loss
        if meter is not None:
            meter.begin_optimizer()
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self._job.max_grad_norm or 1.0)
        del norm
        self.optimizer.step()
        self.optimizer.zero_grad()
        if meter is not None:
            meter.end_step()


def measure_case(job: Job, device: str, num_timed: int) -> dict[str, Any]:
    """Return what the steps of a job really held and how long they took.

    The first step makes the optimizer's state; the two after it are measured, those after them timed.

    Args:
        job: as simulated.
        device: ``cuda`` or ``cpu``.
        num_timed: steps.
    """
    step = RealStep(job, device)
    step.run()
    meter = MemoryMeter("cuda" if device == "cuda" else "count")  # offloaded shards are on the CPU, and not what counts
    meter.start(step.model, [step.optimizer])
    for _ in range(2):
        step.run(meter)
    meter.stop()
    _wait(device)
    began = time.perf_counter()
    for _ in range(num_timed):
        step.run()
    _wait(device)
    found = {
        "kind": meter.kind,
        "measured_bytes": max(one.peak_bytes for one in meter.steps),
        "by_phase": meter.by_phase,
        "step_seconds": (time.perf_counter() - began) / num_timed if num_timed else None,
    }
    if device == "cuda":
        found |= _allocator(torch.cuda.max_memory_reserved(), found["measured_bytes"])
    return found


def free_memory(device: str) -> None:
    """Let go of what a case left behind."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure_workspaces() -> int:
    """Return the bytes that cuBLAS keeps from torch's allocator, in the forward's and in the backward's thread."""
    before = torch.cuda.memory_allocated()
    weight = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (weight @ weight).sum().backward()
    del weight
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def _allocator(reserved: int, allocated: int) -> dict[str, int]:
    """What this process holds beside its tensors; of the whole card, so nothing else may run on it."""
    free, total = torch.cuda.mem_get_info()
    return {
        "reserved_bytes": reserved,
        "fragmentation_bytes": reserved - allocated,
        "outside_allocator_bytes": total - free - torch.cuda.memory_reserved(),
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
