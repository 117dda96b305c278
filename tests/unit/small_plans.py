"""Plans put together by hand, for tests of what is shown and written of them; no figure in them was computed."""

from __future__ import annotations

import dataclasses
from typing import Any

from hf_fsdp.config.hardware import parse_gpus
from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.plan.candidate import Candidate, Plan, PlanRequest
from hf_fsdp.plan.job import Batch, Job, Method, ModelSpec
from hf_fsdp.plan.simulation import CATEGORIES, PhasePeak, Simulation, TimelinePoint, Work
from hf_fsdp.plan.speed.reserve import Reserve, ReservePart
from hf_fsdp.plan.speed.throughput import SpeedEstimate, TimePart
from hf_fsdp.units import GIB

LLAMA = ModelSpec(name="meta-llama/Llama-2-7b-hf", config={"model_type": "llama", "num_hidden_layers": 32})
RESERVE = Reserve(
    parts=(
        ReservePart(name="CUDA context", num_bytes=GIB // 2, reason="assumed"),
        ReservePart(name="NCCL buffers", num_bytes=GIB, reason="1 communicator"),
    )
)
PHASES = ("forward: layers", "backward: head and loss", "backward: layers", "clip", "optimizer")


def simulation(peak_gib: float = 60.0, *, num_points: int = 0) -> Simulation:
    """Return a simulation whose peak is in the second phase; every category has a share of it."""
    phases = tuple(
        PhasePeak(name=name, num_bytes=sum(shares.values()), categories=shares)
        for name, scale in zip(PHASES, (0.8, 1.0, 0.9, 0.5, 0.6), strict=True)
        if (shares := _shares(peak_gib * scale))
    )
    timeline = tuple(
        TimelinePoint(
            operator=10 * index,
            phase=PHASES[index * len(PHASES) // num_points],
            categories=_shares(peak_gib if index == num_points // 2 else peak_gib * (0.3 + 0.4 * index / num_points)),
        )
        for index in range(num_points)
    )
    return Simulation(
        phases=phases,
        state_bytes={"parameters": 3 * GIB, "gradients": 3 * GIB, "optimizer": 6 * GIB},
        work=Work(forward_flops=1e15, backward_flops=2e15, recompute_flops=1e15, num_tokens=32768),
        num_parameters=6_738_415_616,
        num_trained=6_738_415_616,
        checkpoint_bytes=80 * GIB,
        model_bytes=25 * GIB,
        simulated_layers={"language": (2, 32)},
        timeline=timeline,
    )


def _shares(gib: float) -> dict[str, int]:
    weights = {name: index + 1 for index, name in enumerate(CATEGORIES[:7])} | {"inputs": 0, "buffers": 0}
    shares = {name: int(gib * GIB * weights.get(name, 0.01) / 28) for name in CATEGORIES}
    shares["activations"] += int(gib * GIB) - sum(shares.values())  # so that the sum is exact
    return shares


def candidate(
    peak_gib: float | None,
    *,
    micro: int = 2,
    steps: int = 4,
    pruned: str | None = None,
    floor_gib: float = 0.0,
    num_points: int = 0,
    method: Method | None = None,
    speed: Any = "some",
    model: ModelSpec = LLAMA,
    attention: str = "sdpa",
    **fsdp: Any,
) -> Candidate:
    """Return a candidate on 8 GPUs with 77.5 GiB usable; without a peak it was ruled out by arithmetic."""
    config = FSDPConfig(**({"activation_checkpointing": "full", "precision": "bf16-mixed"} | fsdp))
    return Candidate(
        job=Job(
            model=model,
            fsdp=config,
            method=method or Method(),
            batch=Batch(micro_batch_size=micro, num_tokens=4096),
            num_micro_batches=steps,
            attention=attention,
        ),
        reserve=RESERVE,
        usable_bytes=int(77.5 * GIB),
        simulation=None if peak_gib is None else simulation(peak_gib, num_points=num_points),
        basis="arithmetic" if peak_gib is None else "simulated",
        floor_bytes=int(floor_gib * GIB),
        pruned=pruned,
        speed=(None if peak_gib is None else some_speed()) if speed == "some" else speed,
        why=("Checkpointing in full costs a quarter of the speed.",),
    )


def some_speed(scale: float = 1.0) -> SpeedEstimate:
    """Return an estimate of about 20,000 tokens a second, times `scale`."""
    return SpeedEstimate(
        low_tokens_per_second=21_034 * scale,
        high_tokens_per_second=26_512 * scale,
        low_step_seconds=9.9 / scale,
        high_step_seconds=12.4 / scale,
        low_mfu=0.38 * scale,
        high_mfu=0.47 * scale,
        low_exposed_share=0.1,
        high_exposed_share=0.6,
        bound_by="arithmetic",
        parts=(TimePart(name="arithmetic", low_seconds=9.0, high_seconds=11.0),),
        assumptions=("matrix products at 60 to 80 % of the data sheet",),
    )


def plan(*candidates: Candidate, method: Method | None = None, **changes: Any) -> Plan:
    """Return a plan of Llama-2-7B on 8 A100 with these candidates, or with one that fits and two that do not."""
    if not candidates:
        candidates = (
            candidate(60.0, num_points=50),
            candidate(96.5, micro=8, steps=1, activation_checkpointing="none"),
            candidate(None, pruned="parameters alone are more", floor_gib=100.4, steps=1),
        )
    request = PlanRequest(
        model=candidates[0].job.model,
        gpus=parse_gpus("8xA100-80G"),
        gpu_memory_bytes=79 * GIB,
        method=method or Method(),
        max_length=4096,
        global_batch_size=64,
        **{key: changes.pop(key) for key in [item.name for item in dataclasses.fields(PlanRequest)] if key in changes},
    )
    defaults: dict[str, Any] = {
        "num_parameters": 6_738_415_616,
        "num_trained": 6_738_415_616,
        "num_layers": 32,
        "layer_class": "LlamaDecoderLayer",
        "notes": ("2 of 32 layers were simulated and extended",),
        "verified": ("parameter bytes equal arithmetic",),
        "versions": {"torch": "2.13", "transformers": "5.24"},
        "seconds": 12.3,
        "command": "hf-fsdp plan llama-2-7b --gpus 8xA100-80G --max-length 4096",
    }
    return Plan(request=request, candidates=candidates, **(defaults | changes))
