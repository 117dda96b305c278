"""Quantized bases: which can be sharded right, and every other one refused by name.

The layers themselves are in `packed_weights.py`, with what breaks them without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_fsdp.errors import Problem
from hf_fsdp.policies.packed_weights import four_bit_layers, listed, packed_names, short_dtype
from hf_fsdp.policies.precision import PrecisionTable

_UNQUANTIZED = "load 16-bit weights: from_pretrained(..., dtype=torch.bfloat16) without quantization_config"
# Packages that put tensors of their own into a model, whoever loaded it.
_FOREIGN_TENSORS = ("torchao", "hqq", "optimum", "compressed_tensors")


def check_quantization(model: nn.Module, table: PrecisionTable) -> list[Problem]:
    """Return what in a quantized `model` would train wrong or cannot be sharded; none for a model in plain weights."""
    foreign = _check_quantizer(model)
    if foreign is not None:
        return [foreign]
    layers = four_bit_layers(model)
    problems = [_check_ready(layers), _check_trained(model, layers)]
    problems += [_check_dtype(layers, table, key) for key in ("bnb_4bit_quant_storage", "bnb_4bit_compute_dtype")]
    return [problem for problem in problems if problem is not None]


def four_bit_config(dtype: torch.dtype) -> str:
    """Return the loading that fits units computed in `dtype`, as a person types it."""
    return (
        f"BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', "
        f"bnb_4bit_compute_dtype={dtype}, bnb_4bit_quant_storage={dtype})"
    )


def _check_quantizer(model: nn.Module) -> Problem | None:
    """Refuse by name every way to quantize but 4-bit bitsandbytes."""
    for module in model.modules():
        quantizer = vars(module).get("hf_quantizer")
        config = getattr(quantizer, "quantization_config", None)
        method = getattr(config, "quant_method", None)
        method = str(getattr(method, "value", method))
        if config is None or getattr(config, "dequantize", False):
            continue
        if getattr(config, "load_in_8bit", False):
            return _eight_bit()
        if method != "bitsandbytes":
            return _foreign(method)
    packed = packed_names(model)
    for name, parameter in model.named_parameters():
        kind = type(parameter).__name__
        if kind == "Int8Params":
            return _eight_bit()
        package = type(parameter.data).__module__.partition(".")[0]
        if package in _FOREIGN_TENSORS:
            return _foreign(package, name)
        if kind == "Params4bit" and name not in packed:
            return _foreign("bitsandbytes outside its Linear4bit", name)
    return _eight_bit() if getattr(model, "is_loaded_in_8bit", False) else None


def _eight_bit() -> Problem:
    return Problem(
        message="the model's base is loaded in 8 bits (load_in_8bit): its int8 weights carry scales that a shard loses",
        fix=f"load_in_4bit: quantization_config={four_bit_config(torch.bfloat16)}; or {_UNQUANTIZED}",
    )


def _foreign(method: str, name: str = "") -> Problem:
    where = f" ({name})" if name else ""
    return Problem(
        message=f"the model's base is quantized by {method}{where}; of the quantized bases, this release shards "
        "bitsandbytes' 4-bit layers only",
        near="load_in_4bit (bitsandbytes)",
        fix=f"{_UNQUANTIZED}; or, for QLoRA, quantization_config={four_bit_config(torch.bfloat16)}",
    )


def _check_ready(layers: list[tuple[str, Any]]) -> Problem | None:
    empty = [name for name, layer in layers if layer.weight.is_meta or layer.quant_state is None]
    if empty:
        return Problem(
            message=f"{listed(empty)}: built in 4 bits and not quantized yet, so there are no scales to read it by",
            fix="load it by from_pretrained(..., quantization_config=...) on every rank, not on the meta device",
        )
    rewritten = [name for name, layer in layers if getattr(layer.quant_state, "packing_format_for_cpu", False)]
    if rewritten:
        return Problem(
            message=f"{listed(rewritten)}: a forward in eval mode has rewritten the packed weight for this processor, "
            "rounding its scales to bfloat16; gradients cannot pass through that layout",
            fix="load the model again and call model.train() before its first forward, or evaluate after sharding",
        )
    return None


def _check_dtype(layers: list[tuple[str, Any]], table: PrecisionTable, key: str) -> Problem | None:
    """Storage has to be the unit's compute dtype, or the gather casts packed bits; the layer must compute in it too."""
    found = {name: _dtype_of(layer, key) for name, layer in layers}
    odd = [name for name, dtype in found.items() if dtype not in (table.compute, None)]
    if not odd:
        return None
    other = found[odd[0]]
    why = "each layer would leave the precision of its unit"
    if key == "bnb_4bit_quant_storage":
        why = "packed bits are gathered only as numbers of their unit's dtype"
        if other is not None and other.is_floating_point:
            why = "gathering would cast packed bits as if they were numbers"
    fix = f"quantization_config={four_bit_config(table.compute)}"
    preset = {"float32": "fp32", "bfloat16": "bf16-mixed", "float16": "fp16-mixed"}.get(short_dtype(other))
    if preset is not None and len(odd) == len(layers):
        fix += f"; or precision: {preset}"
    return Problem(
        message=f"{key}={short_dtype(other)} under precision.preset={table.preset!r}, which computes in "
        f"{short_dtype(table.compute)}: {why} ({listed(odd)})",
        fix=fix,
    )


def _dtype_of(layer: Any, key: str) -> torch.dtype | None:
    """None where a layer takes the dtype of its first input, which is the unit's."""
    if key == "bnb_4bit_quant_storage":
        return layer.weight.dtype
    return layer.compute_dtype if layer.compute_type_is_set else None


def _check_trained(model: nn.Module, layers: list[tuple[str, Any]]) -> Problem | None:
    if not layers:
        return None
    adapters = "model = get_peft_model(model, LoraConfig(target_modules='all-linear', task_type='CAUSAL_LM'))"
    packed = [name for name, layer in layers if layer.weight.requires_grad]
    if packed:
        return Problem(
            message=f"{listed(packed)}: packed 4-bit weights have no gradient and cannot be trained",
            fix=f"freeze the base, model.requires_grad_(False), then train adapters on it: {adapters}",
        )
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if trained and not _has_adapters(model):
        return Problem(
            message=f"the base is in 4 bits and has no adapters, yet {listed(trained)} would be trained: "
            "full fine-tuning needs whole weights",
            fix=f"{adapters}; or {_UNQUANTIZED}; to evaluate only: model.requires_grad_(False)",
        )
    return None


def _has_adapters(model: nn.Module) -> bool:
    """PEFT's layers, wrapped (`get_peft_model`) or injected (`add_adapter`); PEFT itself need not be imported."""
    return any(cls.__name__ == "BaseTunerLayer" for module in model.modules() for cls in type(module).__mro__)
