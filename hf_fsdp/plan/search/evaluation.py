"""A job becomes a candidate: its simulation, the memory that is left on this GPU, and an estimated speed.

What is simulated is remembered, so that nothing runs twice, and counted, so that a search can stop in time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hf_fsdp.config.gpus import unknown_gpu
from hf_fsdp.plan.candidate import Candidate, PlanRequest
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.search.accumulation import lengthen_step, shorten_step
from hf_fsdp.plan.simulation import Simulation

if TYPE_CHECKING:
    from hf_fsdp.plan.speed.reserve import Reserve
    from hf_fsdp.plan.speed.throughput import SpeedEstimate

Simulator = Callable[[Sequence[Job]], list[Simulation]]


def default_simulator(jobs: Sequence[Job]) -> list[Simulation]:
    """Simulate `jobs` in processes of their own; see `service.simulate`."""
    from hf_fsdp.plan.service import simulate

    return simulate(jobs)


class Evaluation:
    """Simulates jobs of one request, at most once each, and says how they do on its GPUs.

    Args:
        request: GPUs, their memory and the host's.
        simulate: runs several jobs at once.
    """

    def __init__(self, request: PlanRequest, simulate: Simulator = default_simulator):
        self.request = request
        self.gpu = request.gpus.gpu or unknown_gpu(request.gpu_memory_bytes)
        self.num_simulated = 0
        self._simulate = simulate
        self._known: dict[str, Simulation] = {}

    def run(self, jobs: Sequence[Job]) -> list[Simulation]:
        """Return the simulations of `jobs` in their order; those that are not known yet run together.

        Raises:
            PlanError: a job that cannot be simulated, with its reason.
        """
        short = [shorten_step(job) for job in jobs]
        keys = [job.to_json() for job in short]
        new = {key: job for key, job in zip(keys, short, strict=True) if key not in self._known}
        if new:
            self._known.update(zip(new, self._simulate(list(new.values())), strict=True))
            self.num_simulated += len(new)
        return [
            lengthen_step(self._known[key], job, small.num_micro_batches)
            for key, job, small in zip(keys, jobs, short, strict=True)
        ]

    def reserve_of(self, job: Job, peak_bytes: int) -> Reserve:
        """Return what an allocator count cannot see of `job` on these GPUs, of which a part grows with the peak."""
        from hf_fsdp.plan.speed.reserve import estimate_job_reserve

        nodes = self.request.num_machines
        return estimate_job_reserve(self.gpu, job, num_nodes=nodes, allocated_bytes=peak_bytes)

    def usable_bytes(self, job: Job, peak_bytes: int) -> int:
        """Return the memory of one GPU less the reserve of a step with this peak."""
        return self.request.gpu_memory_bytes - self.reserve_of(job, peak_bytes).total_bytes

    def has_room(self, job: Job, peak_bytes: int) -> bool:
        """Whether a step of `job` with this peak fits into one GPU, its reserve included."""
        return peak_bytes <= self.usable_bytes(job, peak_bytes)

    def speed_of(self, job: Job, simulation: Simulation) -> SpeedEstimate | None:
        """Return the estimated speed; None where nothing is known of the GPU but its memory."""
        from hf_fsdp.plan.speed.throughput import estimate_job_speed

        return estimate_job_speed(job, simulation, self.request.gpus)

    def candidate(self, job: Job, simulation: Simulation, basis: str) -> Candidate:
        """Return how `job` does, without reasons."""
        request = self.request
        per_machine = max(1, job.world_size // request.num_machines)
        return Candidate(
            job=job,
            reserve=self.reserve_of(job, simulation.peak.num_bytes),
            usable_bytes=self.usable_bytes(job, simulation.peak.num_bytes),
            simulation=simulation,
            basis=basis,
            host_bytes=per_machine * max(simulation.host_bytes, simulation.load_host_bytes),
            host_limit_bytes=request.host_memory_bytes,
            speed=self.speed_of(job, simulation),
        )

    def excluded(self, job: Job, floor_bytes: int, pruned: str) -> Candidate:
        """Return `job` as a candidate that arithmetic ruled out."""
        return Candidate(
            job=job,
            reserve=self.reserve_of(job, floor_bytes),
            usable_bytes=self.usable_bytes(job, floor_bytes),
            basis="arithmetic",
            floor_bytes=floor_bytes,
            pruned=pruned,
            host_limit_bytes=self.request.host_memory_bytes,
        )
