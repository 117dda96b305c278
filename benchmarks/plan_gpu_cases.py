"""What `plan_gpu.py` runs on one card: four ways to fine-tune, each at the largest batch that the planner lets in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

WORLD_SIZE = 8
LORA_RANK = 16
# Largest first. Past 32k tokens a step takes seconds and shows nothing new.
SHAPES = ((16, 2048), (12, 2048), (8, 2048), (6, 2048), (4, 2048), (3, 2048), (2, 2048), (1, 2048), (1, 1024), (1, 512))
TINY_SHAPES = ((4, 128), (2, 128), (1, 64))
MODELS = ("llama-2-7b", "llama-3.2-3b", "llama-3.2-1b")
# For a run on a CPU, which shows that the script works and how close predictions are there.
TINY: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """One way to fine-tune, bf16-mixed and fused AdamW.

    Args:
        name: in the table.
        method: ``full``, or ``lora`` on all linear layers of a bf16 base.
        checkpointing: recompute every block.
        offload: parameters, gradients and optimizer in host memory.
    """

    name: str
    method: str = "full"
    checkpointing: bool = True
    offload: bool = False


CASES = (
    GpuCase(name="full, checkpointing"),
    GpuCase(name="LoRA, checkpointing", method="lora"),
    GpuCase(name="full, no checkpointing", checkpointing=False),
    GpuCase(name="full, checkpointing, offload", offload=True),
)


def build_job(case: GpuCase, spec: Any, shape: tuple[int, int], device: str) -> Any:
    """Return the planner's job of a case on one of `WORLD_SIZE` processes."""
    from hf_fsdp import FSDPConfig
    from hf_fsdp.plan.job import Batch, Job, Method

    return Job(
        model=spec,
        fsdp=FSDPConfig(
            precision="bf16-mixed",
            activation_checkpointing="full" if case.checkpointing else "none",
            offload="parameters" if case.offload else "none",
        ),
        world_size=WORLD_SIZE,
        method=Method(name=case.method, lora_r=LORA_RANK),
        batch=Batch(micro_batch_size=shape[0], num_tokens=shape[1]),
        device="gpu" if device == "cuda" else "cpu",
    )


def candidate_models(device: str, names: Sequence[str]) -> Iterator[Any]:
    """Yield the models to try, largest first; one of a few million parameters on a CPU."""
    from hf_fsdp.plan.job import ModelSpec
    from hf_fsdp.plan.models.resolve import resolve_model

    if device == "cpu" and not names:
        yield ModelSpec(name="tiny-llama", config=TINY)
        return
    for name in names or MODELS:
        yield resolve_model(name)


def choose_job(
    case: GpuCase, device: str, names: Sequence[str], room_bytes: int, host_bytes: int
) -> tuple[Any, Any] | str:
    """Return (job, simulation) of the largest batch of the largest model that fits, or what the smallest lacks.

    Peak memory grows with the tokens, so the shapes are halved and not all simulated.

    Args:
        case: what is run.
        device: ``cuda`` or ``cpu``.
        names: models to try; empty: the built-in ones.
        room_bytes: of the device, the reserve taken off.
        host_bytes: free host memory, for offload.
    """
    from hf_fsdp.plan.service import simulate

    shapes = TINY_SHAPES if device == "cpu" else SHAPES
    lacks = ""
    for spec in candidate_models(device, names):
        low, high, found = 0, len(shapes) - 1, None
        while low <= high:
            middle = (low + high) // 2
            job = build_job(case, spec, shapes[middle], device)
            simulation = simulate([job])[0]
            needed, host = simulation.peak.num_bytes, simulation.host_bytes
            if needed <= room_bytes and host <= host_bytes:
                found, high = (job, simulation), middle - 1
            else:
                sizes = [f"{size / 2**30:.1f}" for size in (needed, room_bytes, host, host_bytes)]
                lacks = f"{spec.name} needs {sizes[0]} of {sizes[1]} GiB, and {sizes[2]} of {sizes[3]} on the host"
                low = middle + 1
        if found is not None:
            return found
    return lacks
