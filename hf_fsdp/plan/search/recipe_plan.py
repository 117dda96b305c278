"""The plan of a run config as it stands: one candidate, and whether it fits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from hf_fsdp.plan.candidate import Plan, PlanRequest
from hf_fsdp.plan.search.check import check_request, refuse
from hf_fsdp.plan.search.evaluation import Evaluation, Simulator, default_simulator
from hf_fsdp.plan.search.facts import find_num_layers, find_versions
from hf_fsdp.plan.search.recipe_run import read_recipe_run

if TYPE_CHECKING:
    from hf_fsdp.config.hardware import GpuRequest


def plan_recipe_run(
    path: str | Path,
    gpus: GpuRequest,
    gpu_memory_bytes: int,
    *,
    exact: bool = False,
    timeline: bool = False,
    trust_remote_code: bool = False,
    command: str = "",
    simulate: Simulator = default_simulator,
) -> Plan:
    """Return a plan whose only candidate is the run of `path` on these GPUs.

    Args:
        path: a run config, e.g. of configs/train/.
        gpus: machines and GPUs.
        gpu_memory_bytes: of one GPU.
        exact: simulate every layer.
        timeline: keep what was held along the step; simulates every layer too.
        trust_remote_code: build a class that comes with the model.
        command: what was typed.
        simulate: runs jobs.

    Raises:
        PlanError: the file cannot be planned, or its model cannot be simulated.
    """
    job = read_recipe_run(path, gpus.num_gpus, trust_remote_code=trust_remote_code)
    job = dataclasses.replace(job, exact=exact, timeline=timeline)
    request = PlanRequest(
        model=job.model,
        gpus=gpus,
        gpu_memory_bytes=gpu_memory_bytes,
        method=job.method,
        max_length=job.batch.num_tokens,
        global_batch_size=job.batch.micro_batch_size * job.num_micro_batches * job.world_size,
        packing=job.batch.packed,
        padded=job.batch.padded,
        num_images=job.batch.num_images,
        optimizer=job.optimizer,
        loss=job.loss,
        attention=job.attention,
        config=job.fsdp,
    )
    refuse(check_request(request))
    simulation = simulate([job])[0]
    return Plan(
        request=request,
        num_parameters=simulation.num_parameters,
        num_trained=simulation.num_trained,
        num_layers=find_num_layers(simulation),
        candidates=(Evaluation(request).candidate(job, simulation, "simulated"),),
        notes=simulation.notes,
        versions=find_versions(),
        command=command,
        title=f"the run of {path}",
    )
