"""How long bytes take between processes: which link an axis of the mesh goes over, and collectives on it."""

from __future__ import annotations

from dataclasses import dataclass

from hf_fsdp.config.gpus import Gpu
from hf_fsdp.errors import PlanError

# Share of a link's rate that large collectives reach: (least, most). NCCL's author names 350 of H100's 450 GB/s and
# 12 of PCIe Gen3's 15.75 (NVIDIA/nccl#986) as the peak; the least is for messages of tens of MiB beside busy kernels.
# `host`: without peer access each byte crosses the bus twice.
LINK_SHARE = {"nvlink": (0.5, 0.8), "pcie": (0.35, 0.75), "host": (0.2, 0.45)}
NETWORK_SHARE = (0.5, 0.9)
# Seconds a step of a ring needs however small its message is: (least, most). Assumed.
_LATENCY = {"nvlink": (1e-6, 4e-6), "pcie": (3e-6, 10e-6), "host": (5e-6, 20e-6)}
_NETWORK_LATENCY = (4e-6, 15e-6)


@dataclass(frozen=True)
class Span:
    """A quantity between its `low` and its `high` value."""

    low: float
    high: float

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.high + other.high)

    @property
    def middle(self) -> float:
        """Halfway between the two."""
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh: `size` processes, of which `num_local` share a machine; `spans` several machines."""

    size: int
    num_local: int
    spans: bool


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Processes on machines. Ranks of one copy of the model are neighbours, as torch's mesh lays them.

    Args:
        gpu: of every process.
        gpus_per_node: processes of one machine.
        num_nodes: machines.
        shard_size: processes that share one copy; 1 under DDP.
        replicate_size: copies: hybrid sharding, or all processes under DDP.
        network_gb_per_s: of one machine and direction; None: as in the GPU's preset.

    Raises:
        PlanError: sizes that do not multiply to the number of processes.
    """

    gpu: Gpu
    gpus_per_node: int
    num_nodes: int = 1
    shard_size: int
    replicate_size: int = 1
    network_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        if min(self.gpus_per_node, self.num_nodes, self.shard_size, self.replicate_size) < 1:
            raise PlanError("GPUs, machines, shards and copies are at least 1", fix="--gpus 8xA100-80G")
        if self.shard_size * self.replicate_size != self.world_size:
            raise PlanError(
                f"dp_shard_size={self.shard_size} and dp_replicate_size={self.replicate_size} do not multiply to the "
                f"{self.world_size} processes of {self.num_nodes} x {self.gpus_per_node} GPUs",
                fix="sharding: {dp_shard_size: auto, dp_replicate_size: 1}",
            )
        if self.network_gb_per_s is not None and self.network_gb_per_s <= 0:
            raise PlanError(
                f"network_gb_per_s={self.network_gb_per_s} is not a rate",
                fix="network_gb_per_s=50   # 400 Gb/s, of one machine",
            )

    @property
    def world_size(self) -> int:
        """Processes of all machines."""
        return self.gpus_per_node * self.num_nodes

    @property
    def shard_axis(self) -> Axis:
        """The processes that share one copy."""
        size, local = self.shard_size, self.gpus_per_node
        inside = self.num_nodes == 1 or local % size == 0
        return Axis(size, size if inside else min(size, local), not inside)

    @property
    def replicate_axis(self) -> Axis:
        """The processes that hold the same shard."""
        copies = self.gpus_per_node // self.shard_size if self.gpus_per_node % self.shard_size == 0 else 1
        num_local = self.replicate_size if self.num_nodes == 1 else max(1, min(self.replicate_size, copies))
        return Axis(self.replicate_size, num_local, num_local < self.replicate_size)

    @property
    def network(self) -> float | None:
        """10^9 bytes a second of one machine's network: as given, else as in the preset."""
        return self.gpu.network_gb_per_s if self.network_gb_per_s is None else self.network_gb_per_s


def bandwidth(layout: Layout, axis: Axis) -> Span:
    """Return the bytes a second that each process of `axis` receives in a large collective.

    A ring enters and leaves each machine once, over the network cards of its members there: sharding over whole
    machines uses all of a machine's network, while the replicate axis of hybrid sharding has one ring for every GPU of
    the machine, each with its share of the network.

    Raises:
        PlanError: the GPU's links are not known.
    """
    gpu = layout.gpu
    if gpu.link is None or gpu.link_gb_per_s is None:
        raise PlanError(f"the links of {gpu.name} are not known", fix="name the GPU: --gpus 8xA100-80G")
    low, high = (gpu.link_gb_per_s * 1e9 * share for share in LINK_SHARE[gpu.link])
    if not axis.spans:
        return Span(low, high)
    if layout.network is None:
        raise PlanError(f"the network of {gpu.name} machines is not known", fix="network_gb_per_s=50")
    network = layout.network * 1e9 * axis.num_local / layout.gpus_per_node
    return Span(min(low, network * NETWORK_SHARE[0]), min(high, network * NETWORK_SHARE[1]))


def gather_seconds(layout: Layout, axis: Axis, num_bytes: float, count: float) -> Span:
    """Return the seconds of `count` all-gathers (or reduce-scatters) that receive (or send) `num_bytes` in all."""
    return _seconds(layout, axis, num_bytes, count * (axis.size - 1))


def all_reduce_seconds(layout: Layout, axis: Axis, num_bytes: float, count: float) -> Span:
    """Return the seconds of `count` all-reduces of buffers of `num_bytes` in all: a ring passes each byte twice."""
    moved = 2 * (axis.size - 1) / axis.size * num_bytes
    return _seconds(layout, axis, moved, count * 2 * (axis.size - 1))


def _seconds(layout: Layout, axis: Axis, num_bytes: float, num_steps: float) -> Span:
    if axis.size < 2 or not (num_bytes or num_steps):
        return Span(0.0, 0.0)
    rate = bandwidth(layout, axis)
    least, most = _NETWORK_LATENCY if axis.spans else _LATENCY[layout.gpu.link or "pcie"]
    return Span(num_bytes / rate.high + num_steps * least, num_bytes / rate.low + num_steps * most)
