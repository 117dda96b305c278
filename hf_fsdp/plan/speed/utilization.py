"""Which share of a GPU's peak the kernels of fine-tuning reach: from what others published, by kind of GPU.

Shares are of all operations that are run (recompute included) while the GPU computes: communication that is not
hidden, the optimizer and waiting come on top. The low end is plain eager transformers code; the high end is compiled
or fused. Nothing here was measured by this project.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_fsdp.config.gpus import Gpu
from hf_fsdp.plan.speed.links import Span


@dataclass(frozen=True)
class Utilization:
    """Share of the dense peak, from `span.low` to `span.high`, and where it is from."""

    span: Span
    reason: str


_A100 = Utilization(
    Span(0.40, 0.70),
    "published with FSDP on A100: 57 % MFU of a 7B model in eager mode and 68 % compiled (PyTorch blog, Maximizing "
    "training throughput); 3199 to 3423 tokens/s of an 8B model by Trainer with fused kernels "
    "(fms-acceleration, a100_80gb_liger.csv), which is 65 to 70 % with recompute counted",
)
_HOPPER = Utilization(
    Span(0.30, 0.55),
    "published with FSDP on H100: 33 % MFU of an 8B model in eager mode, 39 % compiled, recompute not counted "
    "(torchtitan llama3_h100_202412), 46 % (fms-fsdp); 41 % in LoRA (NeMo performance summary)",
)
_CONSUMER = Utilization(
    Span(0.40, 0.70),
    "published on one RTX 4090: 1650 tokens/s of an 8B model, compiled (torchtune README), which is 48 % MFU",
)
_BY_FAMILY = {
    "A100": _A100,
    "H100": _HOPPER,
    "H200": _HOPPER,
    "B200": Utilization(Span(0.25, 0.50), "nothing published for such runs; somewhat below H100, as it was below A100"),
    "RTX4090": _CONSUMER,
    "RTX3090": _CONSUMER,
    "A10G": Utilization(Span(0.35, 0.65), "nothing published for such runs; as on RTX 3090, with slower memory"),
    "L40S": Utilization(
        Span(0.25, 0.50),
        "nothing published for such runs; 419 operations a byte of memory traffic, more than H100's 295",
    ),
    "L4": Utilization(Span(0.25, 0.50), "nothing published for such runs; 72 W do not hold the peak clock"),
    "V100": Utilization(Span(0.30, 0.55), "nothing published for such runs; no FlashAttention 2 on this architecture"),
    "T4": Utilization(Span(0.20, 0.45), "nothing published for such runs; 70 W do not hold the peak clock"),
}
_FP32 = Utilization(Span(0.50, 0.85), "float32 without tensor cores; assumed")


def utilization_of(gpu: Gpu, precision: str) -> Utilization:
    """Return the share of its peak that `gpu` reaches under `precision`."""
    return _FP32 if precision == "fp32" else _BY_FAMILY[gpu.family]


def peak_flops(gpu: Gpu, precision: str) -> float | None:
    """Return the dense peak in operations a second under `precision`; None where it is not known or cannot be.

    ``fp32`` is real float32: torch rounds to TF32 only when a person asks for it.
    """
    if precision.startswith("bf16") and not gpu.has_bf16:
        return None
    tflops = gpu.fp32_tflops if precision == "fp32" else gpu.half_tflops
    return None if tflops is None else tflops * 1e12
