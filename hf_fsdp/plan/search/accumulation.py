"""A step of many micro-batches from one of two: the third and later ones repeat the second.

The first micro-batch of a step has no gradients yet, every later one has. So two show the memory of any number, and
what they compute and move is counted on for the others.
"""

from __future__ import annotations

import dataclasses

from hf_fsdp.plan.job import Job
from hf_fsdp.plan.simulation import Simulation

MICRO_BATCHES_TO_SIMULATE = 2

# Counted once a step, however many micro-batches it has.
_ONCE_A_STEP = ("optimizer_bytes",)
# Counted once a step where gradients are reduced after the last micro-batch only.
_ONCE_WHERE_DEFERRED = (
    "reduce_scatter_bytes",
    "all_reduce_bytes",
    "num_reduce_scatters",
    "num_all_reduces",
)


def shorten_step(job: Job) -> Job:
    """Return the job with the fewest micro-batches that show the memory of all of them."""
    return dataclasses.replace(job, num_micro_batches=min(job.num_micro_batches, MICRO_BATCHES_TO_SIMULATE))


def lengthen_step(simulation: Simulation, job: Job, simulated: int) -> Simulation:
    """Return the simulation of `job` from one of the same job with `simulated` micro-batches.

    The memory stays; operations and traffic grow with the micro-batches.

    Args:
        simulation: of `simulated` micro-batches.
        job: the whole step.
        simulated: micro-batches that were simulated.
    """
    wanted = job.num_micro_batches
    if wanted == simulated:
        return simulation
    deferred = job.strategy == "ddp" or not job.fsdp.sharding.sync_each_batch
    once = _ONCE_A_STEP + (_ONCE_WHERE_DEFERRED if deferred else ())
    work = {
        item.name: getattr(simulation.work, item.name) * (1 if item.name in once else wanted / simulated)
        for item in dataclasses.fields(simulation.work)
    }
    work["num_tokens"] = round(work["num_tokens"])
    return dataclasses.replace(simulation, work=dataclasses.replace(simulation.work, **work))
