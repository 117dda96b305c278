"""What a structure must compute and move at least, from the simulation of a plainer one: how fast it can be at most."""

from __future__ import annotations

from dataclasses import replace

from hf_fsdp.plan.job import Job
from hf_fsdp.plan.search.structures import Structure
from hf_fsdp.plan.simulation import Simulation, Work

# Of what autograd keeps, offload leaves small tensors on the GPU.
_LEAST_OFFLOADED = 0.8
# What is outside of all blocks is gathered once a forward and not twice.
_MOSTLY_GATHERED = 0.9


def least_work(item: Structure, plainer: Structure, job: Job, simulation: Simulation, offloadable_bytes: float) -> Work:
    """Return what `item` computes and moves at least in a step.

    Args:
        item: the structure that is asked about.
        plainer: one with the same checkpointing, which was simulated.
        job: of `item`, at the micro-batch of `simulation`.
        simulation: of `plainer`.
        offloadable_bytes: what offload of activations may move in a forward, of which it leaves some.
    """
    work: Work = simulation.work
    fewer, shards = _num_shards(item, job), _num_shards(plainer, job)
    ratio = _received(fewer) / _received(shards) if shards > 1 else 1.0
    # Weights that stay gathered are not gathered again in the backward; that is half of all gathers at most.
    gathers = ratio * (0.5 if item.sharding.endswith("kept") and not plainer.sharding.endswith("kept") else 1.0)
    gradients = simulation.state_bytes.get("gradients", 0) * shards / fewer
    is_reduced = item.sharding.startswith("copies") and not plainer.sharding.startswith("copies")
    reductions = job.num_micro_batches if item.config.sharding.sync_each_batch else 1
    moved = replace(
        work,
        all_gather_bytes=work.all_gather_bytes * gathers,
        num_all_gathers=work.num_all_gathers * min(1.0, gathers),
        reduce_scatter_bytes=work.reduce_scatter_bytes * ratio,
        all_reduce_bytes=max(work.all_reduce_bytes, gradients * reductions if is_reduced else 0.0),
    )
    there: float = work.host_to_device_bytes
    back: float = work.device_to_host_bytes
    forwards = job.num_micro_batches
    if item.offload in ("parameters", "both") and plainer.offload not in ("parameters", "both"):
        # Shards go to the GPU before each gather, and gradients to the host after each reduction, once at least.
        times = forwards * (1 if item.sharding.endswith("kept") else 2)
        there += _MOSTLY_GATHERED * simulation.state_bytes.get("parameters", 0) * times
        back += simulation.state_bytes.get("gradients", 0)
    if item.offload in ("activations", "both") and plainer.offload not in ("activations", "both"):
        kept = _LEAST_OFFLOADED * offloadable_bytes * forwards
        there, back = there + kept, back + kept
    return replace(moved, host_to_device_bytes=there, device_to_host_bytes=back)


def kept_activations(simulation: Simulation) -> int:
    """Return what autograd keeps when the backward starts."""
    for phase in simulation.phases:
        if phase.name.startswith("backward"):
            return phase.categories.get("activations", 0)
    return 0


def _num_shards(item: Structure, job: Job) -> int:
    return max(1, job.world_size // item.config.sharding.dp_replicate_size)


def _received(num_shards: int) -> float:
    """The share of all weights that one process receives in a gather."""
    return (num_shards - 1) / num_shards
