"""What a simulated step showed: memory by category and phase, work of the processor, traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Every byte on the device belongs to one of these, in the order in which they are shown.
CATEGORIES = (
    "parameters",  # this process's shards (with quantization state)
    "gradients",  # reduced gradients between backward and optimizer, and unsharded ones while accumulation defers them
    "optimizer",  # state between steps
    "unsharded",  # gathered weights, of this unit and of those fetched ahead
    "reduce_buffers",  # inputs and outputs of reduce-scatters and all-reduces
    "activations",  # what autograd keeps for the backward
    "logits_and_loss",  # logits, their gradient, and what the loss keeps
    "temporaries",  # freed again within the phase; the optimizer's and the clip's scratch
    "inputs",  # the batch
    "buffers",  # rotary tables and the like
)


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """The most that was held during one phase.

    Args:
        name: ``forward``, ``backward: head``, ``backward: language, last layer`` …, ``clip``, ``optimizer``.
        num_bytes: on the device.
        categories: what it was made of; sums to `num_bytes`.
        host_bytes: the most in host memory during the phase (offload).
    """

    name: str
    num_bytes: int
    categories: Mapping[str, int]
    host_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one process computes and moves in one optimizer step (all its micro-batches).

    Operations are counted on the simulated graph: causal attention is halved, recomputed forwards and the missing
    weight gradients of frozen layers are counted as they are.

    Args:
        forward_flops: floating-point operations of forwards, without recompute.
        backward_flops: of backwards, without recompute.
        recompute_flops: of forwards run again inside backwards.
        all_gather_bytes: bytes this process receives in all-gathers of the shard axis.
        reduce_scatter_bytes: bytes it sends in reduce-scatters of the shard axis.
        all_reduce_bytes: bytes of buffers that are all-reduced (the replicate axis, DDP).
        num_all_gathers, num_reduce_scatters, num_all_reduces: how many collectives.
        host_to_device_bytes, device_to_host_bytes: offloaded shards, gradients and activations.
        optimizer_bytes: read and written by the optimizer's step.
        num_tokens: of this process, in all micro-batches.
    """

    forward_flops: float
    backward_flops: float
    recompute_flops: float
    all_gather_bytes: float = 0
    reduce_scatter_bytes: float = 0
    all_reduce_bytes: float = 0
    num_all_gathers: float = 0
    num_reduce_scatters: float = 0
    num_all_reduces: float = 0
    host_to_device_bytes: float = 0
    device_to_host_bytes: float = 0
    optimizer_bytes: float = 0
    num_tokens: int = 0

    @property
    def flops(self) -> float:
        """All operations that are run."""
        return self.forward_flops + self.backward_flops + self.recompute_flops

    @property
    def useful_flops(self) -> float:
        """Without the recompute: what MFU is counted over."""
        return self.forward_flops + self.backward_flops


@dataclass(frozen=True, kw_only=True)
class TimelinePoint:
    """What was held after one operator that changed it."""

    operator: int
    phase: str
    categories: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The memory and the work of one step of one process; simulated, not measured.

    Args:
        phases: in the order of the step.
        state_bytes: shards of parameters, gradients and optimizer state of this process, wherever they are.
        host_bytes: most in host memory during the step (offload), of this process.
        load_host_bytes: host memory of this process while weights are loaded by `load_sharded`; estimated.
        checkpoint_bytes: one training checkpoint on disk, of all processes together; by arithmetic.
        model_bytes: the folder that `save_model` leaves; by arithmetic.
        num_parameters: of the model, tied ones once, adapters included; packed 4-bit weights as weights.
        num_trained: of them, trained ones.
        work: computing and traffic of one step.
        simulated_layers: tower -> (layers that were simulated, layers of the model).
        notes: what was simulated apart, or not at all, in words.
        timeline: in order; empty unless asked for.
        cpu_seconds: of the simulation, without imports.
    """

    phases: tuple[PhasePeak, ...]
    state_bytes: Mapping[str, int]
    work: Work
    num_parameters: int
    num_trained: int
    host_bytes: int = 0
    load_host_bytes: int = 0
    checkpoint_bytes: int = 0
    model_bytes: int = 0
    largest_unit_bytes: int = 0
    simulated_layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    timeline: tuple[TimelinePoint, ...] = ()
    cpu_seconds: float = 0.0

    @property
    def peak(self) -> PhasePeak:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.num_bytes)

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Simulation:
        """Return what `to_mapping` wrote."""
        return cls(
            **{
                **data,
                "phases": tuple(PhasePeak(**phase) for phase in data["phases"]),
                "work": Work(**data["work"]),
                "timeline": tuple(TimelinePoint(**point) for point in data["timeline"]),
                "notes": tuple(data["notes"]),
                "simulated_layers": {name: tuple(pair) for name, pair in data["simulated_layers"].items()},
            }
        )
