"""The ways to run one training: how weights are spread, what is computed again, what lives in host memory.

A structure is everything about a candidate but its micro-batch. What a person fixed in the config is not varied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.plan.candidate import PlanRequest
from hf_fsdp.plan.job import Batch, Job
from hf_fsdp.plan.report.settings import describe_checkpointing, describe_offload, describe_sharding

# Fastest first: what is listed later computes or moves more for the same rows.
SHARDINGS = ("sharded", "kept", "copies", "copies kept")

_Overrides = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """One way to run the training at any micro-batch.

    Args:
        config: with every choice written out.
        sharding: ``sharded`` (weights freed after a unit's forward), ``kept`` (gathered until its backward),
            ``copies`` (hybrid: sharded inside a machine, one copy a machine), ``copies kept``.
        checkpointing: ``none``, ``every second`` block, ``selective`` (attention's outputs are kept), ``full``.
        offload: ``none``, ``activations``, ``parameters`` (with gradients and optimizer) or ``both``.
    """

    config: FSDPConfig
    sharding: str
    checkpointing: str
    offload: str

    @property
    def key(self) -> tuple[str, str, str]:
        """The three choices."""
        return self.sharding, self.checkpointing, self.offload

    @property
    def complexity(self) -> int:
        """How many things differ from plain sharding; of two that do the same the simpler one is better."""
        return sum(
            (
                self.sharding.startswith("copies"),
                "kept" in self.sharding,
                self.checkpointing != "none",
                self.checkpointing in ("every second", "selective"),
                2 * (self.offload != "none"),
                self.offload == "both",
            )
        )


def list_structures(request: PlanRequest) -> list[Structure]:
    """Return the structures that are open under `request`, by offload, then sharding, then checkpointing."""
    config = request.config
    offloads, shardings = list(_offloads(request).items()), list(_shardings(request).items())
    checkpointings = _checkpointings(config, is_whole=request.num_gpus == 1)
    structures = []
    for offload, offload_keys in offloads:
        # What is offloaded for want of room does not then keep all weights, or more copies, on the GPU.
        for sharding, sharding_keys in shardings if offload == offloads[0][0] else shardings[:1]:
            for checkpointing, checkpointing_keys in checkpointings.items():
                keys = {**sharding_keys, **checkpointing_keys, **offload_keys}
                if offload in ("activations", "both") and keys.get("offload.activations") == "auto":
                    keys["offload.activations"] = "saved_tensors" if checkpointing == "none" else "block_inputs"
                structures.append(
                    Structure(
                        config=with_keys(config, keys), sharding=sharding, checkpointing=checkpointing, offload=offload
                    )
                )
    return structures


def describe_structure(item: Structure, request: PlanRequest) -> str:
    """Return the choices of `item` in the words of every table, without a micro-batch."""
    job = build_job(request, item.config, 1, 1)
    words = [describe_sharding(job), f"checkpointing {describe_checkpointing(item.config)}"]
    if item.offload != "none":
        words.append(f"{describe_offload(item.config)} in host memory")
    return "; ".join(words)


def build_job(request: PlanRequest, config: FSDPConfig, micro_batch_size: int, num_micro_batches: int) -> Job:
    """Return the step of one process of `request` under `config`."""
    return Job(
        model=request.model,
        fsdp=config,
        world_size=request.num_gpus,
        method=request.method,
        batch=Batch(
            micro_batch_size=micro_batch_size,
            num_tokens=request.max_length,
            padded=is_padded(request, micro_batch_size),
            packed=request.packing,
            num_images=request.num_images,
            image_size=request.image_size if request.num_images else None,
        ),
        num_micro_batches=num_micro_batches,
        optimizer=request.optimizer,
        loss=request.loss,
        attention=request.attention,
    )


def leanest_structure(request: PlanRequest) -> Structure:
    """Return the structure that needs the least of a GPU without offload, among those that the config leaves open."""
    structures = list_structures(request)
    first = structures[0]
    return [item for item in structures if item.sharding == first.sharding and item.offload == first.offload][-1]


def leanest_job(request: PlanRequest) -> Job:
    """Return the job of one row, accumulated, under `leanest_structure`."""
    return build_job(request, leanest_structure(request).config, 1, 2)


def is_padded(request: PlanRequest, micro_batch_size: int) -> bool:
    """Whether a micro-batch of so many rows has a mask: one row alone is never padded."""
    return request.padded and micro_batch_size > 1 and not request.packing


def with_keys(config: FSDPConfig, keys: Mapping[str, Any]) -> FSDPConfig:
    """Return `config` with other values for dotted `keys`; what was stated otherwise stays."""
    stated = {key: config.get(key) for key in config.said}
    return FSDPConfig.from_mapping({**stated, **keys}, source="the search")


def _shardings(request: PlanRequest) -> dict[str, _Overrides]:
    config, said = request.config, request.config.said
    sharding = config.sharding
    reshards = {"": True, "kept": False}
    if "sharding.reshard_after_forward" in said:
        reshards = {"" if sharding.reshard_after_forward else "kept": sharding.reshard_after_forward}
    elif request.num_gpus == 1:
        reshards = {"": True}  # nothing is gathered
    copies: dict[str, int | None] = {"": None}
    if said & {"sharding.dp_shard_size", "sharding.dp_replicate_size"}:
        copies = {"copies" if sharding.dp_replicate_size > 1 else "": None}
    elif request.num_machines > 1 and request.num_gpus // request.num_machines > 1:
        copies["copies"] = request.num_machines
    found: dict[str, _Overrides] = {}
    for prefix, number in copies.items():
        for suffix, reshard in reshards.items():
            keys: dict[str, Any] = {"sharding.reshard_after_forward": reshard}
            if number is not None:
                keys["sharding.dp_replicate_size"] = number
            found[f"{prefix} {suffix}".strip() or "sharded"] = keys
    return {name: found[name] for name in SHARDINGS if name in found}


def _checkpointings(config: FSDPConfig, *, is_whole: bool = False) -> dict[str, _Overrides]:
    section = config.activation_checkpointing
    if any(key.startswith("activation_checkpointing.") for key in config.said):
        return {_checkpointing_of(config): {}}
    assert section.mode == "auto"  # nobody said anything
    if is_whole:  # a single process has Trainer's own checkpointing, of all blocks
        return {
            "none": {"activation_checkpointing.mode": "none"},
            "full": {"activation_checkpointing.mode": "full"},
        }
    return {
        "none": {"activation_checkpointing.mode": "none"},
        "every second": {"activation_checkpointing.mode": "full", "activation_checkpointing.every": 2},
        "selective": {"activation_checkpointing.mode": "full", "activation_checkpointing.selective": ["attention"]},
        "full": {"activation_checkpointing.mode": "full"},
    }


def _checkpointing_of(config: FSDPConfig) -> str:
    section = config.activation_checkpointing
    if section.mode in ("none", "auto"):
        return "none"
    if section.selective:
        return "selective"
    return "every second" if section.every > 1 or section.fraction < 1 else "full"


def _offloads(request: PlanRequest) -> dict[str, _Overrides]:
    config, section = request.config, request.config.offload
    if config.said & {"offload.parameters", "offload.optimizer", "offload.activations"}:
        on = (section.parameters, section.activations != "none")
        name = {(False, False): "none", (False, True): "activations", (True, False): "parameters"}.get(on, "both")
        return {name: {}}
    none = {"offload.parameters": False, "offload.optimizer": False, "offload.activations": "none"}
    if request.num_gpus == 1:
        return {"none": none}  # a single process trains unsharded, and nothing moves its parts
    shards = {"offload.parameters": True, "offload.optimizer": True}
    return {
        "none": none,
        "activations": {**none, "offload.activations": "auto"},
        "parameters": {**none, **shards},
        "both": {**shards, "offload.activations": "auto"},
    }
