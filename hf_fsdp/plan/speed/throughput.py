"""Estimated seconds of a step: arithmetic against links, with a best and a worst case and what is assumed.

Note "how the estimate is made". Worst case: everything one after the other, at the low end of every rate. Best case:
communication and copies run behind the arithmetic, except the first gather and the last reduction, which nothing can
hide; rates at their high end. The truth of a healthy run lies between; loading data, evaluation and saving are in
neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hf_fsdp.plan.simulation import Work
from hf_fsdp.plan.speed.links import Layout, Span, all_reduce_seconds, gather_seconds
from hf_fsdp.plan.speed.utilization import peak_flops, utilization_of

if TYPE_CHECKING:
    from hf_fsdp.config.gpus import Gpu
    from hf_fsdp.config.hardware import GpuRequest
    from hf_fsdp.plan.job import Job
    from hf_fsdp.plan.simulation import Simulation

MEMORY_SHARE = (0.6, 0.9)  # of a GPU's memory rate that streaming kernels reach; assumed
HOST_COPY_SHARE = (0.4, 0.85)  # of PCIe's rate, pinned memory; two GPUs behind one switch have half each. Assumed
HOST_OPTIMIZER_RATE = (20e9, 80e9)  # bytes a second of one machine's memory under torch's AdamW on CPUs; assumed
# Seconds in which Python and the dispatcher launch one block's forward and backward. Assumed from transformers' eager
# decoding, in which a 7B model of 32 blocks needs 20 to 30 ms a token whatever the GPU.
LAUNCH_SECONDS = (1.0e-3, 2.5e-3)

ARITHMETIC, WEIGHTS, LAUNCHES = "arithmetic", "reading weights", "launching kernels"
LINK, NETWORK = "links inside a machine", "network between machines"
COPIES, OPTIMIZER, HOST_OPTIMIZER = "copies to and from host memory", "optimizer step", "optimizer step on the host"


@dataclass(frozen=True, kw_only=True)
class TimePart:
    """Seconds of one step that one resource needs for itself, estimated."""

    name: str
    low_seconds: float
    high_seconds: float


@dataclass(frozen=True, kw_only=True)
class SpeedEstimate:
    """How fast a training is; estimated, and not measured on any GPU by this project.

    Args:
        low_tokens_per_second, high_tokens_per_second: over all GPUs.
        low_step_seconds, high_step_seconds: of an optimizer step; the low one belongs to the high tokens/s.
        low_mfu, high_mfu: operations without recompute over the dense peak, 0 to 1.
        low_exposed_share, high_exposed_share: share of communication that is not hidden behind arithmetic, 0 to 1.
        bound_by: the resource that needs the most time, by the middle of its range.
        parts: seconds of each resource.
        assumptions: plain sentences.
    """

    low_tokens_per_second: float
    high_tokens_per_second: float
    low_step_seconds: float
    high_step_seconds: float
    low_mfu: float
    high_mfu: float
    low_exposed_share: float
    high_exposed_share: float
    bound_by: str
    parts: tuple[TimePart, ...]
    assumptions: tuple[str, ...]


def why_no_speed(gpu: Gpu | None, precision: str = "bf16-mixed") -> str | None:
    """Return why nothing can be said about the speed on `gpu`, or None if something can."""
    if gpu is None:
        return "no GPU was named: only --gpus 8xA100-80G and the like say how fast it computes"
    if gpu.half_tflops is None:
        return f"how fast {gpu.name} computes is not known: name it to get a speed, e.g. --gpus 8xA100-80G"
    if peak_flops(gpu, precision) is None:
        return f"{gpu.name} does not compute in bf16: use fp16-mixed or fp32"
    return None


def estimate_step_time(
    work: Work,
    layout: Layout,
    *,
    precision: str = "bf16-mixed",
    num_parameters: int = 0,
    num_micro_batches: int = 1,
    num_blocks: int = 0,
    optimizer_on_host: bool = False,
) -> SpeedEstimate | None:
    """Return the estimated speed of a step; None where the GPU's is not known (`why_no_speed` says why) or no work is.

    Args:
        work: what one process computes and moves in one optimizer step.
        layout: GPUs, machines, and how the axes lie on them.
        precision: a preset's name; ``auto`` is ``bf16-mixed``.
        num_parameters: of the whole model: a small micro-batch cannot be faster than its weights are read.
        num_micro_batches: of the step.
        num_blocks: repeated blocks: launching their kernels bounds small models. 0: not counted.
        optimizer_on_host: parameters are offloaded, and the CPU makes the step.

    Raises:
        PlanError: axes over machines without a known network.
    """
    precision = "bf16-mixed" if precision == "auto" else precision
    peak = peak_flops(layout.gpu, precision)
    if why_no_speed(layout.gpu, precision) is not None or peak is None or not work.flops:
        return None
    compute = _compute_parts(work, layout.gpu, precision, num_parameters, num_micro_batches, num_blocks)
    communication, first_and_last = _communication(work, layout)
    copies = _copies(work, layout.gpu)
    optimizer = {HOST_OPTIMIZER if optimizer_on_host else OPTIMIZER: _optimizer(work, layout, optimizer_on_host)}
    total = sum((span.high for span in communication.values()), 0.0)
    best_compute = max(span.low for span in compute.values())
    worst_compute = max(compute[ARITHMETIC].high + compute[WEIGHTS].high, compute[LAUNCHES].high)
    behind = max([*(span.low for span in communication.values()), copies.low])
    best = max(best_compute + first_and_last, behind)
    update = next(iter(optimizer.values()))
    low, high = best + update.low, worst_compute + total + copies.high + update.high
    parts = {**compute, **communication, COPIES: copies, **optimizer}
    least_total = sum(span.low for span in communication.values())
    tokens = work.num_tokens * layout.world_size
    return SpeedEstimate(
        low_tokens_per_second=tokens / high,
        high_tokens_per_second=tokens / low,
        low_step_seconds=low,
        high_step_seconds=high,
        low_mfu=work.useful_flops / (high * peak),
        high_mfu=work.useful_flops / (low * peak),
        low_exposed_share=min(1.0, (best - best_compute) / least_total) if least_total else 0.0,
        high_exposed_share=1.0 if total else 0.0,
        bound_by=max(parts, key=lambda name: parts[name].middle),
        parts=tuple(
            TimePart(name=name, low_seconds=span.low, high_seconds=span.high)
            for name, span in parts.items()
            if span.high
        ),
        assumptions=tuple(_assumptions(work, layout, precision, num_blocks, optimizer_on_host)),
    )


def estimate_job_speed(
    job: Job, simulation: Simulation, request: GpuRequest, *, network_gb_per_s: float | None = None
) -> SpeedEstimate | None:
    """Return the estimated speed of a simulated job on the GPUs of `request`; None as in `estimate_step_time`.

    Raises:
        PlanError: the job's processes and axes do not fit the GPUs.
    """
    if request.gpu is None:
        return None
    replicate = job.fsdp.sharding.dp_replicate_size if job.strategy == "fsdp" else job.world_size
    layout = Layout(
        gpu=request.gpu,
        gpus_per_node=request.count,
        num_nodes=request.num_nodes,
        shard_size=job.world_size // replicate,
        replicate_size=replicate,
        network_gb_per_s=network_gb_per_s,
    )
    speed = estimate_step_time(
        simulation.work,
        layout,
        precision=job.fsdp.precision.preset,
        num_parameters=simulation.num_parameters,
        num_micro_batches=job.num_micro_batches,
        num_blocks=sum(total for _, total in simulation.simulated_layers.values()),
        optimizer_on_host=job.fsdp.offload.parameters,
    )
    if speed is None or job.method.name != "qlora":
        return speed
    extra = "Unpacking 4-bit weights before each use is not counted; it costs most with few tokens a micro-batch."
    return replace(speed, assumptions=(*speed.assumptions, extra))


def _compute_parts(
    work: Work, gpu: Gpu, precision: str, num_parameters: int, num_micro_batches: int, num_blocks: int
) -> dict[str, Span]:
    share, peak = utilization_of(gpu, precision).span, peak_flops(gpu, precision) or 1.0
    # Each pass over the weights (forward, recompute, both halves of backward) has a forward's operations; frozen
    # layers lack one half. So operations over those of a forward are passes.
    passes = work.flops / work.forward_flops if work.forward_flops else 0.0
    weight_bytes = num_parameters * (4 if precision == "fp32" else 2) * passes * num_micro_batches
    rates = [(gpu.memory_gb_per_s or 1.0) * 1e9 * part for part in MEMORY_SHARE]
    launches = num_blocks * num_micro_batches * passes / 3  # three passes make a forward and a backward
    return {
        ARITHMETIC: Span(work.flops / (peak * share.high), work.flops / (peak * share.low)),
        WEIGHTS: Span(weight_bytes / rates[1], weight_bytes / rates[0]),
        LAUNCHES: Span(launches * LAUNCH_SECONDS[0], launches * LAUNCH_SECONDS[1]),
    }


def _communication(work: Work, layout: Layout) -> tuple[dict[str, Span], float]:
    """Return the seconds on each kind of link, and those that nothing hides: the first gather, the last reduction."""
    shard, replicate = layout.shard_axis, layout.replicate_axis
    gather = gather_seconds(layout, shard, work.all_gather_bytes, work.num_all_gathers)
    scatter = gather_seconds(layout, shard, work.reduce_scatter_bytes, work.num_reduce_scatters)
    reduce = all_reduce_seconds(layout, replicate, work.all_reduce_bytes, work.num_all_reduces)
    seconds = {LINK: Span(0.0, 0.0), NETWORK: Span(0.0, 0.0)}
    for span, axis in ((gather, shard), (scatter, shard), (reduce, replicate)):
        name = NETWORK if axis.spans else LINK
        seconds[name] = seconds[name] + span
    counts = ((gather, work.num_all_gathers), (scatter, work.num_reduce_scatters), (reduce, work.num_all_reduces))
    return seconds, sum(span.low / count for span, count in counts if count)


def _copies(work: Work, gpu: Gpu) -> Span:
    """Return the seconds of offload: both directions at once at best, one after the other at worst."""
    rates = [(gpu.host_gb_per_s or 1.0) * 1e9 * part for part in HOST_COPY_SHARE]
    there, back = work.device_to_host_bytes, work.host_to_device_bytes
    return Span(max(there, back) / rates[1], (there + back) / rates[0])


def _optimizer(work: Work, layout: Layout, on_host: bool) -> Span:
    if on_host:  # the processes of a machine share its memory
        num_bytes = work.optimizer_bytes * layout.gpus_per_node
        return Span(num_bytes / HOST_OPTIMIZER_RATE[1], num_bytes / HOST_OPTIMIZER_RATE[0])
    rates = [(layout.gpu.memory_gb_per_s or 1.0) * 1e9 * part for part in MEMORY_SHARE]
    return Span(work.optimizer_bytes / rates[1], work.optimizer_bytes / rates[0])


def _assumptions(work: Work, layout: Layout, precision: str, num_blocks: int, optimizer_on_host: bool) -> Iterator[str]:
    gpu, utilization = layout.gpu, utilization_of(layout.gpu, precision)
    peak = gpu.fp32_tflops if precision == "fp32" else gpu.half_tflops
    share = utilization.span
    yield (
        f"Kernels reach {share.low:.0%} to {share.high:.0%} of {gpu.name}'s {peak:g} TFLOP/s in {precision}: "
        f"{utilization.reason}."
    )
    yield "Slowest: nothing overlaps. Fastest: communication hides behind arithmetic, but for the first and last unit."
    if num_blocks:
        yield (
            f"Python launches a block's forward and backward in {LAUNCH_SECONDS[0] * 1e3:g} to "
            f"{LAUNCH_SECONDS[1] * 1e3:g} ms; it bounds small models and small micro-batches."
        )
    if layout.world_size > 1:
        yield f"GPUs of a machine speak over {gpu.link} at {gpu.link_gb_per_s:g} GB/s each way, less protocol."
    if layout.num_nodes > 1:
        origin = "assumed for such machines" if layout.network_gb_per_s is None else "as given"
        yield f"Each machine's network carries {layout.network:g} GB/s each way ({origin})."
    if work.host_to_device_bytes or work.device_to_host_bytes:
        yield f"Offload copies pinned memory at up to {gpu.host_gb_per_s:g} GB/s each way."
    if optimizer_on_host:
        yield (
            f"The optimizer on the host streams {HOST_OPTIMIZER_RATE[0] / 1e9:g} to {HOST_OPTIMIZER_RATE[1] / 1e9:g} "
            "GB/s a machine; with one thread a process (torchrun's default) it may be slower: set OMP_NUM_THREADS."
        )
    yield "Loading data, evaluation, logging and saving are not counted. Not measured on a GPU by this project."
