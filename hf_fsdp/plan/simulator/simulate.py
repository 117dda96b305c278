"""A job's `Simulation`: steps of a shallow model, extended to the whole one and checked against arithmetic.

Runs in a process of the planner's own (`worker.py`); everybody else calls `service.simulate`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_fsdp.errors import PlanError
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.simulation import CATEGORIES, PhasePeak, Simulation, TimelinePoint, Work
from hf_fsdp.plan.simulator.build import whole_model
from hf_fsdp.plan.simulator.depth import Tower, depths_to_simulate, extend, find_depths, shortened
from hf_fsdp.plan.simulator.pictures import keep_what_pictures_need, picture_notes
from hf_fsdp.plan.simulator.replay import Passage, draw_timeline, find_peaks
from hf_fsdp.plan.simulator.step import CLIP, Step, is_sharded, run_step, simulated_micro_batches
from hf_fsdp.plan.simulator.tracker import ROUNDING_BYTES
from hf_fsdp.plan.simulator.unsharded import ddp_bucket_bytes
from hf_fsdp.policies.packed_weights import four_bit_layers
from hf_fsdp.policies.precision import resolve_precision
from hf_fsdp.policies.wrap import build_wrap_plan
from hf_fsdp.sharding.mesh import shard_axis_size
from hf_fsdp.torch_private import local_shard


@dataclass(frozen=True)
class _Reading:
    """What one step of one depth showed; numbers that grow in a straight line with the layers."""

    peaks: Mapping[Passage, PhasePeak]
    work: Counter[str]
    totals: dict[str, float]
    timeline: tuple[TimelinePoint, ...] = ()


def simulate_job(job: Job) -> Simulation:
    """Return what a step of `job` holds and does.

    Raises:
        HfFsdpError: the model cannot be built, the settings cannot be sharded, or the result contradicts arithmetic.
    """
    began = time.process_time()
    notes: list[str] = [*picture_notes(job)]
    towers = _towers(job, notes)
    depths = depths_to_simulate(towers)
    readings = [_read(job, run_step(job, depth, towers)) for depth in depths]
    phases = _extended_peaks(readings, towers)
    work = Counter(_extended(lambda reading: reading.work, readings, towers))
    totals = _extended(lambda reading: reading.totals, readings, towers)
    _check_totals(job, totals)
    _check_states(job, totals, phases)
    built: Any = whole_model(job)
    if job.attention != "eager" and built.config._attn_implementation == "eager":
        notes.append("attention was simulated as eager, with its scores held: this model's class takes no other kernel")
    if job.fsdp.compile.blocks:
        notes.append("compiled blocks were simulated as if they were not compiled")
    if not is_sharded(job):
        notes.append("not sharded: the step of one process under autocast, with the casts that torch makes on a CPU")
    if job.strategy == "ddp" and job.world_size > 1:
        phases = [_with_buckets(phase, ddp_bucket_bytes(totals)) for phase in phases]
        work["all_reduce_bytes"] += ddp_bucket_bytes(totals)
        work["num_all_reduces"] += math.ceil(ddp_bucket_bytes(totals) / (25 * 2**20))
        notes.append("DDP's buckets are added by arithmetic: a second copy of every gradient, in 25 MiB pieces")
    trained = totals["num_trained"]
    adapters_only = job.method.name != "full"
    return Simulation(
        phases=tuple(phases),
        state_bytes={name: round(totals[f"{name}_bytes"]) for name in ("parameters", "gradients", "optimizer")},
        work=Work(**_work_fields(job, work, totals)),
        num_parameters=round(totals["num_parameters"]),
        num_trained=round(trained),
        host_bytes=max(phase.host_bytes for phase in phases),
        load_host_bytes=round(totals["largest_unit_bytes"] / totals["shards"]),
        checkpoint_bytes=round(totals["saved_bytes"] + totals["whole_optimizer_bytes"]),
        model_bytes=round(trained * 4 if adapters_only else totals["exported_bytes"]),
        largest_unit_bytes=round(totals["largest_unit_bytes"]),
        simulated_layers={tower.name: (depths[0][tower.name], tower.num_layers) for tower in towers},
        notes=tuple(notes),
        timeline=readings[0].timeline,
        cpu_seconds=time.process_time() - began,
    )


# -- depth ------------------------------------------------------------------------------------------------------------


def _towers(job: Job, notes: list[str]) -> list[Tower]:
    """The towers of the whole model; all layers are kept where a shallow model would be cut into other units."""
    whole = whole_model(job)
    section = job.fsdp.activation_checkpointing
    every = section.every if section.mode == "full" else 1
    ahead = max(job.fsdp.sharding.forward_prefetch, job.fsdp.sharding.backward_prefetch, 1)
    towers = [tower.repeating(math.lcm(tower.period, every), ahead) for tower in find_depths(whole)]
    towers = [keep_what_pictures_need(job, tower) for tower in towers]
    if job.exact or job.timeline:
        return [replace(tower, min_layers=tower.num_layers) for tower in towers]
    reason = _why_not_shallow(job, whole, towers)
    if reason:
        notes.append(f"all layers were simulated: {reason}")
        return [replace(tower, min_layers=tower.num_layers) for tower in towers]
    return towers


def _why_not_shallow(job: Job, whole: nn.Module, towers: Sequence[Tower]) -> str | None:
    if not any(tower.is_long for tower in towers) or not is_sharded(job):
        return None
    section = job.fsdp.activation_checkpointing
    if section.mode == "full" and section.fraction < 1:
        return "a share of the layers is recomputed"
    if section.mode == "full" and section.every > 1 and any(tower.special for tower in towers):
        return "recomputed layers alternate in a tower whose features are read in between"
    table = resolve_precision(job.fsdp.precision)
    units = {
        (unit.kind, _pattern(name))
        for unit in build_wrap_plan(whole, job.fsdp.wrap, table).units
        for name in unit.names
    }
    with shortened(whole, depths_to_simulate(towers)[0], towers):
        shallow = build_wrap_plan(whole, job.fsdp.wrap, table)
    found = {(unit.kind, _pattern(name)) for unit in shallow.units for name in unit.names}
    return None if units == found else "with fewer layers the model would be cut into other units"


def _pattern(name: str) -> str:
    return ".".join("N" if part.isdigit() else part for part in name.split("."))


def _extended(
    part: Callable[[_Reading], dict[str, float] | Counter[str]], readings: Sequence[_Reading], towers: Sequence[Tower]
) -> dict[str, float]:
    names = dict.fromkeys(name for reading in readings for name in part(reading))
    return {name: extend([float(part(reading).get(name, 0)) for reading in readings], towers) for name in names}


def _extended_peaks(readings: Sequence[_Reading], towers: Sequence[Tower]) -> list[PhasePeak]:
    """The peak of each phase at full depth, the larger of its micro-batches."""
    phases: dict[str, PhasePeak] = {}
    for place, first in readings[0].peaks.items():
        phase = _extended_peak([reading.peaks.get(place, first) for reading in readings], towers)
        known = phases.get(phase.name)
        if known is None or phase.num_bytes > known.num_bytes:
            phases[phase.name] = phase
    return list(phases.values())


def _extended_peak(same: Sequence[PhasePeak], towers: Sequence[Tower]) -> PhasePeak:
    total = round(extend([float(peak.num_bytes) for peak in same], towers))
    sizes = {
        category: max(0, round(extend([float(peak.categories.get(category, 0)) for peak in same], towers)))
        for category in CATEGORIES
    }
    # Two moments of a phase can hold nearly as much; where other depths are at their most at another moment, the lines
    # of categories do not add up to that of the whole, which is right.
    largest = max(sizes, key=lambda category: sizes[category])
    sizes[largest] += total - sum(sizes.values())
    return PhasePeak(
        name=same[0].name,
        num_bytes=total,
        categories={category: size for category, size in sizes.items() if size},
        host_bytes=round(extend([float(peak.host_bytes) for peak in same], towers)),
    )


# -- one step ---------------------------------------------------------------------------------------------------------


def _read(job: Job, step: Step) -> _Reading:
    events = step.tracker.events
    return _Reading(
        peaks=find_peaks(events, step.num_events_before),
        work=_step_work(job, step.tracker.work),
        totals=_totals(job, step),
        timeline=draw_timeline(events, step.num_events_before) if job.timeline else (),
    )


def _step_work(job: Job, by_micro_batch: Sequence[Counter[str]]) -> Counter[str]:
    """The work of all micro-batches: all but the last are like the first."""
    total: Counter[str] = Counter()
    repeats = job.num_micro_batches - simulated_micro_batches(job) + 1
    for index, counts in enumerate(by_micro_batch):
        times = repeats if index == 0 else 1
        for name, amount in counts.items():
            total[name] += amount * times
    return total


def _totals(job: Job, step: Step) -> dict[str, float]:
    model = step.model
    parameters = list(model.named_parameters())
    packed = {f"{name}.weight": layer.quant_state.shape.numel() for name, layer in four_bit_layers(model)}
    trained = [parameter for _, parameter in parameters if parameter.requires_grad]
    state = list(step.optimizer.state)
    stepped = step.optimizer.stepped
    saved = trained if job.method.name != "full" else [parameter for _, parameter in parameters]
    save_itemsize = {"float32": 4, "bfloat16": 2}.get(job.fsdp.precision.save_dtype, 2)
    units = step.applied.unit_names if step.applied else ()
    sizes = dict(parameters)
    compute = resolve_precision(job.fsdp.precision).compute.itemsize
    return {
        "parameters_bytes": sum(local_shard(parameter).nbytes for _, parameter in parameters),
        "gradients_bytes": sum(local_shard(parameter).nbytes for parameter in trained),
        "optimizer_bytes": sum(value.nbytes for _, value in state),
        # A scalar, such as AdamW's count of steps, is the same on all ranks; everything else is cut as its parameter.
        "whole_optimizer_bytes": sum(
            (parameter.numel() if value.ndim else 1) * value.element_size() for parameter, value in state
        ),
        "stepped_bytes": sum(local_shard(parameter).nbytes for parameter in stepped),
        "num_stepped": len(stepped),
        "trained_bytes": sum(local_shard(parameter).nbytes for parameter in trained),
        "saved_bytes": sum(parameter.nbytes for parameter in saved),
        "exported_bytes": sum(parameter.numel() for parameter in saved) * save_itemsize,
        "num_parameters": sum(packed.get(name, parameter.numel()) for name, parameter in parameters),
        "num_trained": sum(parameter.numel() for parameter in trained),
        "largest_unit_bytes": max((sum(sizes[name].numel() for name in names) for _, names in units), default=0)
        * compute,
        "shards": shard_axis_size(step.applied.mesh) if step.applied else 1,
    }


def _work_fields(job: Job, work: Mapping[str, float], totals: dict[str, float]) -> dict[str, Any]:
    batch = job.batch
    return {
        "forward_flops": 0.0,
        "backward_flops": 0.0,
        "recompute_flops": 0.0,
        **work,
        # State is read and written, weights too, gradients are read.
        "optimizer_bytes": 2 * totals["optimizer_bytes"] + 2 * totals["trained_bytes"] + totals["gradients_bytes"],
        "num_tokens": batch.micro_batch_size * batch.num_tokens * job.num_micro_batches,
    }


def _with_buckets(phase: PhasePeak, num_bytes: int) -> PhasePeak:
    categories = dict(phase.categories)
    categories["reduce_buffers"] = categories.get("reduce_buffers", 0) + num_bytes
    return replace(phase, num_bytes=phase.num_bytes + num_bytes, categories=categories)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def _check_totals(job: Job, totals: dict[str, float]) -> None:
    """Hold the extended numbers against closed forms over the whole model, so that no wrong extension is shown.

    Raises:
        PlanError: they differ.
    """
    whole = whole_model(job)
    expected = sum(parameter.numel() for parameter in whole.parameters())
    found = totals["num_parameters"] - (totals["num_trained"] if job.method.name != "full" else 0)
    if job.method.lora_full:
        return  # what is trained in full beside adapters is a second copy
    if round(found) != expected:
        raise PlanError(
            f"the simulated model has {round(found):,} parameters and the whole one {expected:,}",
            fix="--exact, which simulates every layer; and please report the model",
        )
    if job.method.name == "full" and not job.method.trainable and is_sharded(job):
        table = resolve_precision(job.fsdp.precision)
        norms = 4 - table.storage.itemsize if table.keep_norms_fp32 else 0
        shards = int(totals["shards"])
        exact = (
            sum(math.ceil(p.shape[0] / shards) * p[0].numel() for p in whole.parameters() if p.ndim)
            * table.storage.itemsize
        )
        if not norms and round(totals["parameters_bytes"]) != exact:
            raise PlanError(
                f"shards of {round(totals['parameters_bytes']):,} bytes were simulated, and arithmetic says {exact:,}",
                fix="--exact, which simulates every layer; and please report the model",
            )


def _check_states(job: Job, totals: Mapping[str, float], phases: Sequence[PhasePeak]) -> None:
    """Hold what was on the device while gradients were clipped against arithmetic: gradients, and AdamW's two moments.

    Raises:
        PlanError: they differ by more than rounding.
    """
    clip = next((phase for phase in phases if phase.name == CLIP), None)
    if clip is None or job.fsdp.offload.parameters or not is_sharded(job):
        return
    expected = {"gradients": totals["stepped_bytes"]}
    if job.optimizer.startswith("adamw"):
        expected["optimizer"] = 2 * totals["stepped_bytes"] + 4 * totals["num_stepped"]
    # The allocator rounds every tensor up, and a unit's gradients lie in one, with a pad for each parameter.
    rounding = 3 * ROUNDING_BYTES * totals["num_stepped"]
    # A unit that grows with the layers (all norms in fp32, a root cut by size) is rounded anew at each depth: the line
    # through two such sizes misses the whole model's by less than one rounding for each parameter that it adds.
    missed = ROUNDING_BYTES * totals["num_stepped"]
    for name, num_bytes in expected.items():
        found = clip.categories.get(name, 0)
        if not -missed <= found - num_bytes <= rounding:
            raise PlanError(
                f"{found:,} bytes of {name} were simulated, and arithmetic says {round(num_bytes):,}",
                fix="--exact, which simulates every layer; and please report the model",
            )
