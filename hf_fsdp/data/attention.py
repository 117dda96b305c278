"""Which attention runs? Chosen by what is installed, the device and the dtype; said in one line, checked when typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_fsdp.config.schema import PrecisionConfig
from hf_fsdp.errors import ConfigError, Problem, nearest_names
from hf_fsdp.policies.precision import resolve_precision


@dataclass(frozen=True, kw_only=True)
class Attention:
    """An attention implementation and why it is the one.

    Args:
        implementation: what `from_pretrained` takes as ``attn_implementation``.
        reason: in words.
    """

    implementation: str
    reason: str

    def __str__(self) -> str:
        return f"attention: {self.implementation} ({self.reason})"


def choose_attention(
    asked: str | None,
    config: Any,
    *,
    compute: torch.dtype,
    packed: bool = False,
    source: str | None = None,
) -> Attention:
    """Return the attention implementation to load a model with.

    `auto` (and nothing) takes flash attention 3 or 2 where it is installed and the GPU, the dtype and the model fit,
    else sdpa, else eager. A typed name is kept, or refused before the model loads.

    Args:
        asked: ``attn_implementation`` as typed; None is ``auto``.
        config: the model's config.
        compute: the dtype that attention computes in.
        packed: whether rows hold several samples; names whose masks transformers does not build are refused then.
        source: where the name was typed.

    Raises:
        ConfigError: a name that is unknown, not installed, or not for this device, dtype or packing.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig
        >>> from hf_fsdp.data import choose_attention
        >>> str(choose_attention("sdpa", LlamaConfig(), compute=torch.float32))
        'attention: sdpa (as typed)'
    """
    word = (asked or "auto").strip()
    if word != "auto":
        if problem := _check_typed(word, config, compute, packed):
            raise ConfigError(Problem(message=problem[0], fix=problem[1], source=source))
        return Attention(implementation=word, reason="as typed")
    reasons = []
    for name in ("flash_attention_3", "flash_attention_2"):
        obstacle = _flash_obstacle(name, config, compute)
        if obstacle is None:
            return Attention(implementation=name, reason=f"auto: installed, {_in_words(compute)}, and the GPU fits")
        reasons.append(obstacle)
    why = "no flash attention: " + "; ".join(dict.fromkeys(reasons))
    if _supports(config, "_supports_sdpa"):
        return Attention(implementation="sdpa", reason=f"auto: {why}")
    return Attention(implementation="eager", reason=f"auto: {why}; the model has no sdpa")


def compute_dtype(preset: str, *, bf16: bool, fp16: bool = False) -> torch.dtype:
    """Return the dtype that a run computes in, from ``precision.preset`` and, under `auto`, Trainer's switches."""
    if preset == "auto":
        return torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
    return resolve_precision(PrecisionConfig(preset=preset)).compute


def _check_typed(name: str, config: Any, compute: torch.dtype, packed: bool) -> tuple[str, str] | None:
    """Return (message, fix) for a typed name that cannot work."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    typed = f"attn_implementation={name!r}"
    known = {"auto", "eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}
    is_kernel = "/" in name  # from the hub: only loading it tells
    if name not in known and not is_kernel:
        near = nearest_names(name, known)
        return f"{typed} is not one of: {', '.join(sorted(known))}", f"attn_implementation: {(near or ['auto'])[0]}"
    if "flash" in name and compute is torch.float32:
        return (
            f"{typed} computes in 16 bits only, and this run computes in fp32",
            "attn_implementation: auto   or   fsdp: {precision: bf16-mixed}",
        )
    if "flash" in name and not is_kernel and (obstacle := _flash_obstacle(name, config, compute)):
        return f"{typed} cannot run here: {obstacle}", "attn_implementation: auto"
    flag = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}.get(name)
    if flag and not _supports(config, flag):
        return f"{typed}: {config.model_type} has no such attention", "attn_implementation: auto"
    if packed and not is_kernel and name not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
        return (
            f"{typed} gets no mask from transformers, so packed samples would see each other",
            "attn_implementation: auto   or   packing: false",
        )
    return None


def _flash_obstacle(name: str, config: Any, compute: torch.dtype) -> str | None:
    """Return why this flash attention cannot be used, or None."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    if compute is torch.float32:
        return "the run computes in fp32"
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    major, _ = torch.cuda.get_device_capability()
    if name == "flash_attention_3" and major != 9:
        return "flash_attention_3 needs a Hopper GPU"
    if major < 8:
        return "the GPU is older than Ampere"
    installed = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
    if name in installed and not installed[name]():
        return f"{name} is not installed"
    return None if _supports(config, "_supports_flash_attn") else f"{config.model_type} does not support it"


def _supports(config: Any, flag: str) -> bool:
    """Whether the model class of `config` says so; remote code that is not loaded yet counts as yes."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kinds = (AutoModelForImageTextToText, AutoModelForCausalLM)
    cls = next((found for kind in kinds if (found := kind._model_mapping.get(type(config), None))), None)
    return cls is None or bool(getattr(cls, flag, False))


def _in_words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
