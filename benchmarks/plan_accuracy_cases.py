"""The trainings whose real peaks the simulations are held against: models, settings, and the same as a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WORLD_SIZE = 2
LORA_RANK = 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training: plain Trainer with our callback, bf16-mixed, fused AdamW, rows of one length.

    Args:
        name: in the table.
        family: key of `MODELS`.
        method: ``full``, or ``lora`` on every linear layer of a bf16 base.
        checkpointing: recompute every block.
        micro_batch: rows of a process in a forward.
        num_tokens: of a row.
        accumulation: forwards a step.
        offload: parameters in host memory, which is the same memory here: what counts is that nothing is doubled.
        reshard: free gathered weights after a forward.
        num_images: pictures a row.
    """

    name: str
    family: str = "llama"
    method: str = "full"
    checkpointing: bool = False
    micro_batch: int = 2
    num_tokens: int = 512
    accumulation: int = 1
    offload: bool = False
    reshard: bool = True
    num_images: int = 0


def _llama(vocabulary: int = 32000, layers: int = 12, **more: Any) -> dict[str, Any]:
    """Llama-like, 640 wide; 97M parameters in 12 layers."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": 640,
        "intermediate_size": 1792,
        "num_hidden_layers": layers,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        **more,
    }


def _gemma3() -> dict[str, Any]:
    """Gemma 3's pattern: five sliding layers, one full; tied embeddings; 98M parameters."""
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 64000,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "sliding_window": 128,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }


IMAGE_TOKEN = 31999


def _llava() -> dict[str, Any]:
    """A CLIP tower of 6 layers in front of a Llama of 10; 99M parameters."""
    return {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": IMAGE_TOKEN,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "image_size": 224,
            "patch_size": 14,
            "projection_dim": 384,
        },
        "text_config": _llama(layers=10),
        "tie_word_embeddings": False,
    }


_SMALL_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}
MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "llama": _llama,
    "llama-tied-128k": lambda: _llama(vocabulary=128256, layers=6, tie_word_embeddings=True),
    "gemma3": _gemma3,
    "llava": _llava,
    # For the short form of the tests, not of the table: 14M parameters.
    "llama-small": lambda: _llama(vocabulary=8192, layers=6, hidden_size=384, intermediate_size=1024, **_SMALL_HEADS),
}
SHAPES = ((2, 512), (4, 512), (1, 1024))
CASES: tuple[Case, ...] = (
    *(
        Case(
            name=f"{method}{' checkpointed' if checkpointing else ''} {rows}x{tokens}",
            method=method,
            checkpointing=checkpointing,
            micro_batch=rows,
            num_tokens=tokens,
        )
        for method in ("full", "lora")
        for checkpointing in (False, True)
        for rows, tokens in SHAPES
    ),
    Case(name="accumulation 2", micro_batch=2, num_tokens=256, accumulation=2),
    Case(name="tied 128k vocabulary", family="llama-tied-128k", checkpointing=True, micro_batch=1),
    Case(name="parameters offloaded", checkpointing=True, offload=True),
    Case(name="kept gathered", checkpointing=True, reshard=False),
    Case(name="llava with pictures", family="llava", num_images=1),
    Case(name="gemma3", family="gemma3"),
)


def find_case(name: str) -> Case:
    """Return the case of that name."""
    found = {case.name: case for case in CASES}
    if name not in found:
        raise SystemExit(f"no case {name!r}; there are: {', '.join(found)}")
    return found[name]


def fsdp_config(case: Case) -> Any:
    """The sharding of a case."""
    from hf_fsdp import FSDPConfig

    return FSDPConfig(
        precision="bf16-mixed",
        activation_checkpointing="full" if case.checkpointing else "none",
        offload="parameters" if case.offload else "none",
        sharding={"reshard_after_forward": case.reshard},
    )


def build_job(case: Case) -> Any:
    """The same training as the planner is asked for it, on the kernels of a CPU."""
    from hf_fsdp.plan.job import Batch, Job, Method, ModelSpec

    return Job(
        model=ModelSpec(name=case.family, config=MODELS[case.family]()),
        fsdp=fsdp_config(case),
        world_size=WORLD_SIZE,
        method=Method(name=case.method, lora_r=LORA_RANK),
        batch=Batch(micro_batch_size=case.micro_batch, num_tokens=case.num_tokens, num_images=case.num_images),
        num_micro_batches=case.accumulation,
        device="cpu",
        exact=True,
    )


def build_model(case: Case) -> Any:
    """The model with random weights, as our recipes load it: float32 to be trained in full, bf16 below adapters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    values = dict(MODELS[case.family]())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    auto = AutoModelForImageTextToText if case.num_images else AutoModelForCausalLM
    dtype = torch.bfloat16 if case.method == "lora" else torch.float32
    model = auto.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if case.method == "full":
        return model
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapters)


def build_rows(case: Case, num_steps: int) -> list[dict[str, Any]]:
    """Rows for so many steps: random tokens of one length, all labels, so without a mask; pictures as the tower's."""
    import torch

    generator = torch.Generator().manual_seed(1)
    config = MODELS[case.family]()
    vocabulary = config.get("vocab_size") or config["text_config"]["vocab_size"] - 1  # without the image token
    rows = []
    for _ in range(WORLD_SIZE * case.micro_batch * case.accumulation * num_steps):
        ids = torch.randint(3, vocabulary, (case.num_tokens,), generator=generator)
        row = {"input_ids": ids, "labels": ids.clone()}
        if case.num_images:
            vision = config["vision_config"]
            patches = (vision["image_size"] // vision["patch_size"]) ** 2
            row["input_ids"][1 : 1 + case.num_images * patches] = IMAGE_TOKEN
            row["labels"][1 : 1 + case.num_images * patches] = -100
            row["pixel_values"] = torch.randn(3, vision["image_size"], vision["image_size"], generator=generator)
        rows.append(row)
    return rows
