"""The one speed by which candidates are ordered: tokens over the expected time of a step.

The middle of the estimated times and not of the speeds: a wide range is wide on its slow side, where a step takes many
times as long, and a plan that may be very slow is not to win by what it reaches at best.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hf_fsdp.config.gpus import GPUS
from hf_fsdp.plan.candidate import PlanRequest
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.simulation import Simulation

if TYPE_CHECKING:
    from hf_fsdp.config.hardware import GpuRequest

# Orders candidates on GPUs of which only the memory is known.
REFERENCE_GPU = "A100-80G"


def expected_speed(request: PlanRequest, job: Job, simulation: Simulation) -> float:
    """Return tokens a second of all GPUs in a step of the middle of the estimated times; 0 where nothing is estimated.

    Args:
        request: its GPUs; for those that are not named it is what `REFERENCE_GPU` would reach: the order is much the
            same on all.
        job: what is run.
        simulation: of `job`.
    """
    from hf_fsdp.plan.speed.throughput import estimate_job_speed

    speed = estimate_job_speed(job, simulation, _named(request.gpus))
    if speed is None:
        return 0.0
    return simulation.work.num_tokens * job.world_size / ((speed.low_step_seconds + speed.high_step_seconds) / 2)


def _named(gpus: GpuRequest) -> GpuRequest:
    if gpus.gpu is not None:
        return gpus
    return dataclasses.replace(gpus, gpu=next(gpu for gpu in GPUS if gpu.name == REFERENCE_GPU))
