"""Known GPUs: memory, arithmetic, links and the machine they usually come in, each with the document it is from.

Arithmetic is dense (data sheets like to print the figure for 2:4 sparse matrices, which is twice as high), bandwidths
are per direction in 10^9 bytes a second. The machine (GPUs, network) is the vendor's reference one or the largest
cloud machine with that GPU: an assumption, which a person can replace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hf_fsdp.units import GIB, format_bytes

# Sixteen lanes of each generation: 8, 16, 32 GT/s a lane, 128 of 130 bits are data.
_PCIE_3, _PCIE_4, _PCIE_5 = 15.75, 31.5, 63.0
_OOM = "the least that torch's out-of-memory messages in public issues state (read 2026-11-30)"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU model; None where nothing is known.

    Args:
        name: as ``--gpus`` takes it: model and size, e.g. ``A100-80G``.
        memory_gib: size as the name says it. What is left of it is `usable_gib`.
        usable_gib: ``total_memory`` as torch reports it: without what error correction and the driver keep.
        has_bf16: whether it computes in bf16.
        compute_capability: CUDA's version of the architecture.
        half_tflops: dense matrix products in 16 bits with 32-bit sums, 10^12 operations a second. bf16 and fp16 are
            equally fast where there is bf16.
        fp32_tflops: float32 without tensor cores: torch's default (``float32_matmul_precision`` is ``highest``).
        tf32_tflops: float32 rounded to TF32 on tensor cores, which a person has to ask for.
        memory_gb_per_s: of the GPU's own memory.
        link: how GPUs of one machine speak: ``nvlink``, ``pcie``, or ``host`` (over PCIe through host memory, since
            the driver gives these cards no access to each other).
        link_gb_per_s: of that link, per GPU and direction.
        host_gb_per_s: between GPU and host memory, per direction.
        node_size: GPUs of the usual machine.
        network_gb_per_s: network of the whole machine, per direction.
        aliases: other names for it.
        source: where the figures are from.
        memory_source: where `usable_gib` is from.
    """

    name: str
    memory_gib: int
    usable_gib: float
    has_bf16: bool = True
    compute_capability: tuple[int, int] | None = None
    half_tflops: float | None = None
    fp32_tflops: float | None = None
    tf32_tflops: float | None = None
    memory_gb_per_s: float | None = None
    link: str | None = None
    link_gb_per_s: float | None = None
    host_gb_per_s: float | None = None
    node_size: int | None = None
    network_gb_per_s: float | None = None
    aliases: tuple[str, ...] = ()
    source: str = ""
    memory_source: str = _OOM

    @property
    def usable_bytes(self) -> int:
        """Memory that a program can get, in bytes."""
        return int(self.usable_gib * GIB)

    @property
    def family(self) -> str:
        """The model without its size: ``A100``."""
        return self.name.split("-")[0]


def unknown_gpu(memory_bytes: int) -> Gpu:
    """Return a GPU of which only the memory is known: nothing is said about its speed.

    Args:
        memory_bytes: what a program can get of it.

    Example:
        >>> unknown_gpu(40 * 1024**3).usable_gib
        40.0
    """
    return Gpu(
        name=f"a GPU of {format_bytes(memory_bytes)}",
        memory_gib=round(memory_bytes / GIB),
        usable_gib=memory_bytes / GIB,
        source="only its memory was given",
        memory_source="as given",
    )


_A100_40 = Gpu(
    name="A100-40G",
    memory_gib=40,
    usable_gib=39.49,
    compute_capability=(8, 0),
    half_tflops=312,
    fp32_tflops=19.5,
    tf32_tflops=156,
    memory_gb_per_s=1555,
    link="nvlink",
    link_gb_per_s=300,
    host_gb_per_s=_PCIE_4,
    node_size=8,
    network_gb_per_s=200,
    aliases=("A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
    source="NVIDIA A100 data sheet (SXM4), quoted by glennklockwood.com/garden/processors/A100, read 2026-11-30; "
    "DGX A100: 8 x 200 Gb/s (from memory). Cloud machines with half or a quarter of that network exist",
    memory_source="deviceQuery output of the Paderborn PC2 documentation (40441 MB), read 2026-11-30",
)
_H100 = Gpu(
    name="H100-80G",
    memory_gib=80,
    usable_gib=79.1,
    compute_capability=(9, 0),
    half_tflops=989,
    fp32_tflops=67,
    tf32_tflops=494,
    memory_gb_per_s=3350,
    link="nvlink",
    link_gb_per_s=450,
    host_gb_per_s=_PCIE_5,
    node_size=8,
    network_gb_per_s=400,
    aliases=("H100-SXM5-80GB", "NVIDIA H100 80GB HBM3"),
    source="NVIDIA H100 data sheet (SXM5), quoted by stas00/ml-engineering compute/accelerator; DGX H100: 8 x 400 Gb/s "
    "(NVIDIA DGX BasePOD reference architecture); both read 2026-11-30. The PCIe card is slower and not this one",
)
_V100_16 = Gpu(
    name="V100-16G",
    memory_gib=16,
    usable_gib=15.77,
    has_bf16=False,
    compute_capability=(7, 0),
    half_tflops=125,
    fp32_tflops=15.7,
    memory_gb_per_s=900,
    link="nvlink",
    link_gb_per_s=150,
    host_gb_per_s=_PCIE_3,
    node_size=8,
    network_gb_per_s=50,
    aliases=("V100-SXM2-16GB", "Tesla V100-SXM2-16GB"),
    source="NVIDIA V100 data sheet (SXM2, from memory; 125 Tensor TFLOPS also in NVIDIA's Programming Tensor Cores in "
    "CUDA 9, read 2026-11-30); DGX-1: 4 x 100 Gb/s (from memory)",
)

GPUS: tuple[Gpu, ...] = (
    _A100_40,
    replace(
        _A100_40,
        name="A100-80G",
        memory_gib=80,
        usable_gib=79.14,
        memory_gb_per_s=2039,
        aliases=("A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        memory_source=_OOM,
    ),
    _H100,
    replace(
        _H100,
        name="H200-141G",
        memory_gib=141,
        usable_gib=139.72,
        memory_gb_per_s=4800,
        aliases=("H200-SXM-141GB", "NVIDIA H200"),
        source="NVIDIA H200 data sheet (SXM), quoted by stas00/ml-engineering compute/accelerator; DGX H200: 8 x 400 "
        "Gb/s (NVIDIA DGX BasePOD reference architecture); both read 2026-11-30",
    ),
    Gpu(
        name="B200-180G",
        memory_gib=180,
        usable_gib=178.35,
        compute_capability=(10, 0),
        half_tflops=2250,
        fp32_tflops=75,
        tf32_tflops=1100,
        memory_gb_per_s=7700,
        link="nvlink",
        link_gb_per_s=900,
        host_gb_per_s=_PCIE_5,
        node_size=8,
        network_gb_per_s=400,
        aliases=("B200-192G", "B200-SXM-180GB", "NVIDIA B200"),
        source="NVIDIA HGX B200 at 1000 W, quoted by glennklockwood.com/garden/processors/B200 (fp32 from memory); "
        "7.67 TB/s by the driver's bus width (pytorch/ao#4002); DGX B200: 8 x 400 Gb/s (NVIDIA DGX BasePOD reference "
        "architecture); read 2026-11-30. First announced with 192 GB, sold with 180 GB",
    ),
    Gpu(
        name="L40S-48G",
        memory_gib=48,
        usable_gib=44.39,
        compute_capability=(8, 9),
        half_tflops=362,
        fp32_tflops=91.6,
        tf32_tflops=183,
        memory_gb_per_s=864,
        link="pcie",
        link_gb_per_s=_PCIE_4,
        host_gb_per_s=_PCIE_4,
        node_size=8,
        network_gb_per_s=50,
        aliases=("NVIDIA L40S",),
        source="NVIDIA L40S data sheet, quoted by resellers, read 2026-11-30; AWS g6e.48xlarge: 400 Gb/s (from memory)",
    ),
    Gpu(
        name="L4-24G",
        memory_gib=24,
        usable_gib=22.03,
        compute_capability=(8, 9),
        half_tflops=121,
        fp32_tflops=30.3,
        tf32_tflops=60,
        memory_gb_per_s=300,
        link="pcie",
        link_gb_per_s=_PCIE_4,
        host_gb_per_s=_PCIE_4,
        node_size=8,
        network_gb_per_s=12.5,
        aliases=("NVIDIA L4",),
        source="NVIDIA L4 data sheet (its 242 and 120 TFLOPS are sparse), quoted by resellers, read 2026-11-30; "
        "AWS g6.48xlarge: 100 Gb/s (from memory)",
    ),
    Gpu(
        name="A10G-24G",
        memory_gib=24,
        usable_gib=22.03,
        compute_capability=(8, 6),
        half_tflops=70,
        fp32_tflops=35,
        tf32_tflops=35,
        memory_gb_per_s=600,
        link="pcie",
        link_gb_per_s=_PCIE_4,
        host_gb_per_s=_PCIE_4,
        node_size=8,
        network_gb_per_s=12.5,
        aliases=("NVIDIA A10G",),
        source="NVIDIA A10G sheet for AWS G5 (from memory; it has half the tensor rate of the A10's 125); memory and "
        "bandwidth: baseten.co, A10 vs A10G, read 2026-11-30; AWS g5.48xlarge: 100 Gb/s (from memory)",
    ),
    Gpu(
        name="RTX4090-24G",
        memory_gib=24,
        usable_gib=23.52,
        compute_capability=(8, 9),
        half_tflops=165.2,
        fp32_tflops=82.6,
        tf32_tflops=82.6,
        memory_gb_per_s=1008,
        link="host",
        link_gb_per_s=_PCIE_4,
        host_gb_per_s=_PCIE_4,
        node_size=8,
        network_gb_per_s=1.25,
        aliases=("4090", "RTX4090", "GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        source="NVIDIA Ada GPU Architecture white paper, appendix A, with 32-bit sums (from memory); 10 Gb/s Ethernet "
        "is assumed",
    ),
    Gpu(
        name="RTX3090-24G",
        memory_gib=24,
        usable_gib=23.5,
        compute_capability=(8, 6),
        half_tflops=71,
        fp32_tflops=35.6,
        tf32_tflops=35.6,
        memory_gb_per_s=936,
        link="host",
        link_gb_per_s=_PCIE_4,
        host_gb_per_s=_PCIE_4,
        node_size=8,
        network_gb_per_s=1.25,
        aliases=("3090", "RTX3090", "GeForce RTX 3090", "NVIDIA GeForce RTX 3090"),
        source="NVIDIA Ampere GA102 white paper, appendix A, with 32-bit sums (from memory); no NVLink bridges, and "
        "10 Gb/s Ethernet is assumed",
    ),
    _V100_16,
    replace(
        _V100_16,
        name="V100-32G",
        memory_gib=32,
        usable_gib=31.74,
        aliases=("V100-SXM2-32GB", "Tesla V100-SXM2-32GB"),
    ),
    Gpu(
        name="T4-16G",
        memory_gib=16,
        usable_gib=14.74,
        has_bf16=False,
        compute_capability=(7, 5),
        half_tflops=65,
        fp32_tflops=8.1,
        memory_gb_per_s=320,
        link="pcie",
        link_gb_per_s=_PCIE_3,
        host_gb_per_s=_PCIE_3,
        node_size=4,
        network_gb_per_s=6.25,
        aliases=("Tesla T4",),
        source="NVIDIA T4 data sheet, as in comparison tables read 2026-11-30; AWS g4dn.12xlarge: 4 GPUs, 50 Gb/s "
        "(from memory)",
    ),
)
