"""What was asked of the planner, and what it found: candidates in order, each with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.plan.job import Job, Method, ModelSpec
from hf_fsdp.plan.simulation import Simulation

if TYPE_CHECKING:
    from hf_fsdp.config.hardware import GpuRequest
    from hf_fsdp.plan.speed.cost import CostEstimate
    from hf_fsdp.plan.speed.reserve import Reserve
    from hf_fsdp.plan.speed.throughput import SpeedEstimate


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """One question to the planner: this model, trained like this, on these GPUs.

    Args:
        model: the model, by its config.
        gpus: machines, GPUs of each, and which GPU, if it was named.
        gpu_memory_bytes: memory of one GPU as torch reports it; the reserve is still to be taken off.
        method: which weights are trained, and how.
        max_length: tokens a row, image tokens counted.
        global_batch_size: rows of one optimizer step, over all processes and micro-batches.
        packing: rows are filled with several samples.
        padded: rows of a micro-batch are of different lengths.
        num_images: pictures a row.
        image_size: (height, width) of each in pixels; None: the model's own, where it has one.
        optimizer: transformers' word.
        loss: ``logits`` or ``chunked``, as in `Job`.
        attention: as in `Job`.
        config: what a person fixed; the keys in ``config.said`` are not searched. Its precision is the run's.
        host_memory_bytes: memory of one machine's host, for offload; None: not known, so not a limit.
        price_per_gpu_hour: in any currency, if a cost was asked for.
        training_tokens: tokens of the whole training, if its days were asked for.
    """

    model: ModelSpec
    gpus: GpuRequest
    gpu_memory_bytes: int
    method: Method = field(default_factory=Method)
    max_length: int = 2048
    global_batch_size: int = 64
    packing: bool = False
    padded: bool = False
    num_images: int = 0
    image_size: tuple[int, int] | None = None
    optimizer: str = "adamw_torch_fused"
    loss: str = "logits"
    attention: str = "sdpa"
    config: FSDPConfig = field(default_factory=FSDPConfig)
    host_memory_bytes: int | None = None
    price_per_gpu_hour: float | None = None
    training_tokens: int | None = None

    @property
    def num_gpus(self) -> int:
        """GPUs of all machines; one process each."""
        return self.gpus.num_gpus

    @property
    def num_machines(self) -> int:
        """Machines, each with the same number of GPUs."""
        return self.gpus.num_nodes

    @property
    def gpu_name(self) -> str:
        """The GPU as a person reads it; its memory where it has no name."""
        if self.gpus.gpu is not None:
            return self.gpus.gpu.name
        return f"GPU of {round(self.gpu_memory_bytes / 1024**3, 1):g} GiB"

    @property
    def precision(self) -> str:
        """The precision that is planned for: ``auto`` is ``bf16-mixed``."""
        preset = self.config.precision.preset
        return "bf16-mixed" if preset == "auto" else preset


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run the training, whether it fits, and how fast it is estimated to be.

    Args:
        job: sharding, micro-batch and accumulation.
        reserve: what an allocator count cannot see on this GPU; never mixed into the simulated bytes.
        usable_bytes: memory of the GPU less the reserve.
        simulation: None where arithmetic alone ruled the candidate out.
        basis: where the bytes come from: ``simulated`` (this very micro-batch), ``extended`` (along the line through
            simulated micro-batches of the same structure), ``arithmetic`` (a lower bound, without a simulation).
        floor_bytes: the lower bound by arithmetic, where there is no simulation.
        pruned: by which arithmetic it was ruled out, in words; None where it was not.
        host_bytes: host memory that all processes of one machine need together, while loading or training.
        host_limit_bytes: what one machine has; None: not known.
        speed: estimated; None where it was not asked for or the candidate cannot run.
        why: plain sentences, the most important first.
    """

    job: Job
    reserve: Reserve
    usable_bytes: int
    simulation: Simulation | None = None
    basis: str = "simulated"
    floor_bytes: int = 0
    pruned: str | None = None
    host_bytes: int = 0
    host_limit_bytes: int | None = None
    speed: SpeedEstimate | None = None
    why: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most that one GPU holds; at least this much where there is no simulation."""
        return self.floor_bytes if self.simulation is None else self.simulation.peak.num_bytes

    @property
    def headroom_bytes(self) -> int:
        """What stays free of the usable memory; below 0 where the candidate does not fit."""
        return self.usable_bytes - self.peak_bytes

    @property
    def missing_bytes(self) -> int:
        """What each GPU lacks; 0 where it lacks nothing."""
        return max(0, -self.headroom_bytes)

    @property
    def missing_host_bytes(self) -> int:
        """What the host of each machine lacks; 0 where it lacks nothing, or where its memory is not known."""
        return 0 if self.host_limit_bytes is None else max(0, self.host_bytes - self.host_limit_bytes)

    @property
    def fits(self) -> bool:
        """Whether it was simulated, and lacks neither GPU nor host memory."""
        return self.simulation is not None and self.pruned is None and not self.missing_bytes + self.missing_host_bytes

    @property
    def global_batch_size(self) -> int:
        """Rows of one optimizer step over all processes."""
        return self.job.batch.micro_batch_size * self.job.num_micro_batches * self.job.world_size


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The planner's answer.

    Args:
        request: what was asked.
        num_parameters: of the model, tied ones once, adapters included.
        num_trained: of them, trained ones.
        num_layers: blocks of the language model; None where there are none to count.
        layer_class: class of those blocks, for the launch file.
        candidates: those that fit, best first; then those that do not, least missing first.
        notes: what a reader must know about all figures: what was simulated apart, what is not covered.
        verified: what was checked in this run, e.g. ``parameter bytes equal arithmetic``.
        versions: program -> version that was simulated with.
        seconds: that the whole search took, without imports.
        command: the command that made the plan, ready to be typed again.
        title: what the plan is of, where it is no ordinary search: ``comparison``, ``smallest hardware`` …
    """

    request: PlanRequest
    num_parameters: int
    num_trained: int
    candidates: tuple[Candidate, ...]
    num_layers: int | None = None
    layer_class: str | None = None
    notes: tuple[str, ...] = ()
    verified: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    command: str = ""
    title: str = ""

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        """The candidates that fit, best first."""
        return tuple(item for item in self.candidates if item.fits)

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        """The candidates that do not fit, least missing first."""
        return tuple(item for item in self.candidates if not item.fits)

    @property
    def best(self) -> Candidate | None:
        """The candidate to run; None where nothing fits."""
        return next(iter(self.fitting), None)

    def estimate_cost(self, candidate: Candidate) -> CostEstimate | None:
        """Return hours and price of the whole training; None without `training_tokens` or a speed."""
        from hf_fsdp.plan.speed.cost import estimate_cost

        if self.request.training_tokens is None or candidate.speed is None:
            return None
        return estimate_cost(
            candidate.speed,
            num_gpus=candidate.job.world_size,
            num_tokens=self.request.training_tokens,
            price_per_gpu_hour=self.request.price_per_gpu_hour,
        )
