"""The 4-bit layers of bitsandbytes (QLoRA) under sharding: how they are found, made ready and described.

bitsandbytes packs the weights of a layer, two a byte, into one column of numbers of `bnb_4bit_quant_storage`. For FSDP2
that is a tensor like any other: it is cut by rows and gathered again. Three things break it without an error:

- **A cast.** A unit is gathered in its compute dtype. Numbers that are really packed bits survive that only when
  they have this dtype already, so that the cast is none.
- **Repacking.** On processors with avx512_bf16 a layer in eval mode rewrites its weight in place, for a faster kernel.
  Gathered memory is not its own: the next gather brings the old layout, which is then read as the new one.
- **Lost scales.** `absmax` and `code` (the quantization state) are plain attributes, no parameters and no buffers:
  nobody moves them, compares them or saves them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_fsdp.units import format_count


def four_bit_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the layers of `model` (name, module) whose weight bitsandbytes holds in 4 bits."""
    bitsandbytes = sys.modules.get("bitsandbytes")  # without it nobody can have built one
    if bitsandbytes is None:
        return []
    return [(name, module) for name, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]


def packed_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters whose numbers are packed bits and must never be cast."""
    return frozenset(f"{name}.weight" if name else "weight" for name, _ in four_bit_layers(model))


# -- made ready -------------------------------------------------------------------------------------------------------


def keep_layout(model: nn.Module) -> None:
    """Keep bitsandbytes from rewriting packed weights in eval mode; see the head of this file.

    Also in a single process, where training after an evaluation would run without gradients through these layers.
    """
    for _, layer in four_bit_layers(model):
        layer.support_avx512bf16_for_cpu = False


def move_quantization_state(model: nn.Module, device: str | torch.device) -> None:
    """Put scales and codes where the gathered weights will be: FSDP moves parameters and buffers only."""
    for _, layer in four_bit_layers(model):
        layer.quant_state.to(device)


def ready_for_training(model: nn.Module, preset: str) -> list[str]:
    """Undo what others do to a 4-bit model before its optimizer exists; return a line for a person where it shows.

    TRL casts the adapters of a quantized model to bf16, where AdamW's small steps round away; every preset but
    `bf16-true` promises to store trained weights in float32, and `save_model` writes what is stored here.
    """
    if not four_bit_layers(model):
        return []
    keep_layout(model)
    low = [p for p in model.parameters() if p.requires_grad and p.dtype is torch.bfloat16]
    if preset == "bf16-true" or not low:
        return []
    for parameter in low:
        parameter.data = parameter.data.float()
    return [f"{len(low)} adapter weights beside 4-bit layers were in bfloat16 and are stored in float32"]


# -- looked at --------------------------------------------------------------------------------------------------------


def quantization_tensors(name: str, module: Any) -> dict[str, tuple[Any, str]]:
    """Return the tensors that read a 4-bit layer: full name -> (holder, attribute); empty for other modules."""
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is None or not isinstance(module, bitsandbytes.nn.Linear4bit) or module.quant_state is None:
        return {}
    prefix = f"{name}.weight" if name else "weight"
    state = module.quant_state
    found: dict[str, tuple[Any, str]] = {f"{prefix}.quant_state.{key}": (state, key) for key in ("absmax", "code")}
    if state.nested:
        found[f"{prefix}.quant_state.offset"] = (state, "offset")
        found |= {f"{prefix}.quant_state.nested.{key}": (state.state2, key) for key in ("absmax", "code")}
    return found


def quantization_structure(model: nn.Module) -> Iterator[tuple[str, tuple[tuple[int, ...], str, bool]]]:
    """Yield what has to be equal on every rank for the packed bits to mean the same: name -> (shape, kind, False)."""
    for name, layer in four_bit_layers(model):
        state = layer.quant_state
        kind = f"{state.quant_type} of {short_dtype(state.dtype)} in blocks of {state.blocksize}"
        yield f"{name}.weight.quant_state", (tuple(state.shape), kind, False)
        for tensor, (holder, attribute) in quantization_tensors(name, layer).items():
            value = getattr(holder, attribute)
            yield tensor, (tuple(value.shape), str(value.dtype), False)


def packed_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return scales and codes under the names by which a 4-bit checkpoint stores them, on the CPU."""
    entries = {}
    for name, layer in four_bit_layers(model):
        prefix = f"{name}.weight." if name else "weight."
        for key, value in layer.quant_state.as_dict(packed=True).items():
            entries[prefix + key] = value.detach().cpu()
    return entries


def describe_quantization(model: nn.Module) -> list[str]:
    """Return what the audit should say about 4-bit layers: a line of what is held, and what takes memory needlessly."""
    layers = four_bit_layers(model)
    if not layers:
        return []
    weights = sum(layer.quant_state.shape.numel() for _, layer in layers)
    packed = sum(layer.weight.numel() for _, layer in layers)
    state = layers[0][1].quant_state
    nested = ", scales quantized again" if state.nested else ""
    lines = [
        f"{len(layers)} layers in 4 bits ({state.quant_type}{nested}): {format_count(weights)} weights packed into "
        f"{format_count(packed)} numbers of {short_dtype(layers[0][1].weight.dtype)}; counts here are of numbers held"
    ]
    upcast = [
        (name, parameter.numel())
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and parameter.dtype is torch.float32 and parameter.dim() > 1
    ]
    if upcast and layers[0][1].weight.dtype is not torch.float32:
        count = sum(numel for _, numel in upcast)
        lines.append(
            f"{listed([name for name, _ in upcast])} ({format_count(count)}) frozen in float32, twice what computing "
            "needs: prepare_model_for_kbit_training upcasts them; leave it out, PEFT freezes the base itself"
        )
    return lines


def listed(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def short_dtype(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
