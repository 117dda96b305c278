"""A plan as JSON; `docs/plan.schema.json` says what each key means."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hf_fsdp.plan.candidate import Candidate, Plan, PlanRequest

# Raised when a key changes its meaning or goes; new keys alone leave it as it is.
PLAN_VERSION = 1


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values, by the schema of `PLAN_VERSION`.

    Sizes are bytes, times seconds. What stands under ``simulated`` ran the step without data, what stands under
    ``estimated`` is a formula; nothing here was measured.

    Example::

        plan_to_json(plan)["candidates"][0]["simulated"]["peak_bytes"]
        # 66571993088
    """
    ranks = {id(item): rank for rank, item in enumerate(plan.fitting, start=1)}
    return {
        "kind": "hf-fsdp plan",
        "version": PLAN_VERSION,
        "title": plan.title,
        "command": plan.command,
        "request": _request(plan.request),
        "model": {
            "name": plan.request.model.name,
            "num_parameters": plan.num_parameters,
            "num_trained": plan.num_trained,
            "num_layers": plan.num_layers,
            "layer_class": plan.layer_class,
        },
        "candidates": [_candidate(plan, item, ranks.get(id(item))) for item in plan.candidates],
        "notes": list(plan.notes),
        "verified": list(plan.verified),
        "versions": dict(plan.versions),
        "seconds": plan.seconds,
    }


def _request(request: PlanRequest) -> dict[str, Any]:
    said = {key: request.config.get(key) for key in sorted(request.config.said) if key != "wrap.callable"}
    return {
        "gpu": request.gpu_name,
        "num_gpus": request.num_gpus,
        "num_machines": request.num_machines,
        "gpu_memory_bytes": request.gpu_memory_bytes,
        "host_memory_bytes": request.host_memory_bytes,
        "method": _plain(request.method),
        "precision": request.precision,
        "max_length": request.max_length,
        "global_batch_size": request.global_batch_size,
        "packing": request.packing,
        "padded": request.padded,
        "num_images": request.num_images,
        "image_size": _plain(request.image_size),
        "optimizer": request.optimizer,
        "loss": request.loss,
        "attention": request.attention,
        "fixed": _plain(said),
        "price_per_gpu_hour": request.price_per_gpu_hour,
        "training_tokens": request.training_tokens,
    }


def _candidate(plan: Plan, candidate: Candidate, rank: int | None) -> dict[str, Any]:
    job = json.loads(candidate.job.to_json())
    job.pop("model")  # named once, above; its config may be long
    return {
        "rank": rank,
        "fits": candidate.fits,
        "job": job,
        "basis": candidate.basis,
        "floor_bytes": candidate.floor_bytes,
        "pruned": candidate.pruned,
        "usable_bytes": candidate.usable_bytes,
        "headroom_bytes": candidate.headroom_bytes,
        "missing_bytes": candidate.missing_bytes,
        "host_bytes": candidate.host_bytes,
        "host_limit_bytes": candidate.host_limit_bytes,
        "missing_host_bytes": candidate.missing_host_bytes,
        "simulated": _simulated(candidate),
        "estimated": _estimated(plan, candidate),
        "why": list(candidate.why),
    }


def _simulated(candidate: Candidate) -> dict[str, Any] | None:
    simulation = candidate.simulation
    if simulation is None:
        return None
    peak = simulation.peak
    whole = {"peak_bytes": peak.num_bytes, "peak_phase": peak.name, "peak_categories": dict(peak.categories)}
    mapping = _plain(simulation.to_mapping())
    return whole | mapping


def _estimated(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    cost = plan.estimate_cost(candidate)
    return {
        "reserve_bytes": candidate.reserve.total_bytes,
        "reserve": _plain(candidate.reserve.parts),
        "speed": None if candidate.speed is None else _plain(candidate.speed),
        "days": None if cost is None else [cost.low_days, cost.high_days],
        "cost": None if cost is None or cost.low_cost is None else [cost.low_cost, cost.high_cost],
    }


def _plain(value: Any) -> Any:
    """Return `value` as JSON holds it: dataclasses and mappings as objects, tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
