"""bitsandbytes' 4-bit layers without weights: what they hold, and what their forward and backward make.

The real ones pack weights by running a kernel on values. These have the packed storage (two weights a byte, as numbers
of the compute dtype, so that FSDP cuts and gathers them alike), the scales, and a product that unpacks the whole
weight for its time, in the forward and again in the backward, as bitsandbytes does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

# bitsandbytes' defaults: weights a scale, and scales a scale of scales under double quantization.
BLOCK_SIZE = 64
NESTED_BLOCK_SIZE = 256


def pack_linears(model: nn.Module, kept: Iterable[str], dtype: torch.dtype, *, nested: bool) -> None:
    """Put 4-bit layers in place of `model`'s linear ones, which are on meta.

    Args:
        model: changed in place.
        kept: paths of modules whose layers stay whole: the head, other parts.
        dtype: of packed numbers and of computing.
        nested: double quantization.

    Raises:
        PlanError: bitsandbytes is not installed.
    """
    layer_class = _layer_class()
    whole = tuple(kept)
    for path, module in list(model.named_modules()):
        is_kept = any(path == name or path.startswith(f"{name}.") for name in whole)
        if type(module) is nn.Linear and not is_kept:
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, layer_class(module, dtype, nested))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    model.is_quantized = True  # type: ignore[assignment]


def _layer_class() -> type[nn.Module]:
    """Return the stand-in; a subclass of bitsandbytes' own layer, so that PEFT and our code take it for one."""
    try:
        import bitsandbytes
    except ImportError:
        from hf_fsdp.errors import PlanError

        raise PlanError(
            "method qlora: the layers of bitsandbytes are needed to plan for them, and it is not installed",
            fix="pip install bitsandbytes   # or method: lora",
        ) from None

    class SimulatedLinear4bit(bitsandbytes.nn.Linear4bit):
        """A `Linear4bit` whose packed weight has no values."""

        def __init__(self, linear: nn.Linear, dtype: torch.dtype, nested: bool):
            nn.Module.__init__(self)
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.compute_dtype, self.compute_type_is_set = dtype, True
            self.quant_storage, self.support_avx512bf16_for_cpu = dtype, False
            self.bias = linear.bias
            num_weights = linear.weight.numel()
            numbers = math.ceil(num_weights / 2 / dtype.itemsize)
            packed = torch.empty(numbers, 1, dtype=dtype, device="meta")
            weight: Any = nn.Parameter(packed, requires_grad=False)
            weight.quant_type, weight.compress_statistics = "nf4", nested
            weight.quant_storage, weight.blocksize = dtype, BLOCK_SIZE
            weight.quant_state = self.quant_state = _state(linear.weight.shape, dtype, nested)
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given = x.dtype
            bias = None if self.bias is None else self.bias.to(self.compute_dtype)
            return _UnpackAndMultiply.apply(x.to(self.compute_dtype), self.weight, bias, self.quant_state).to(given)

    return SimulatedLinear4bit


def _state(shape: torch.Size, dtype: torch.dtype, nested: bool) -> Any:
    num_blocks = math.ceil(shape.numel() / BLOCK_SIZE)
    state = SimpleNamespace(
        shape=shape,
        dtype=dtype,
        blocksize=BLOCK_SIZE,
        quant_type="nf4",
        nested=nested,
        code=torch.empty(16, device="meta"),
        absmax=torch.empty(num_blocks, dtype=torch.uint8 if nested else torch.float32, device="meta"),
        offset=None,
        state2=None,
        packing_format_for_cpu=False,
    )
    if nested:
        scales = torch.empty(math.ceil(num_blocks / NESTED_BLOCK_SIZE), device="meta")
        state.state2 = SimpleNamespace(absmax=scales, code=torch.empty(256, device="meta"))
        state.offset = torch.empty((), device="meta")
    state.to = lambda device: None
    return state


def state_tensors(model: nn.Module) -> list[tuple[Any, str]]:
    """Return (holder, attribute) of the scales of every simulated layer, which are no buffers."""
    found: list[tuple[Any, str]] = []
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        if isinstance(state, SimpleNamespace):
            found += [(state, "code"), (state, "absmax")]
            if state.nested:
                found += [(state, "offset"), (state.state2, "absmax"), (state.state2, "code")]
    return found


class _UnpackAndMultiply(torch.autograd.Function):
    """`bitsandbytes.matmul_4bit`: keeps the packed weight, and unpacks it in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: Any, state: Any) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.state = state
        return nn.functional.linear(x, _unpack(packed, state, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ _unpack(packed, ctx.state, gradient.dtype), None, None, None


def _unpack(packed: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    if state.nested:  # the scales come first, in fp32
        scales = torch.empty(state.absmax.shape, dtype=torch.float32, device=packed.device)
        scales.add_(0.0)
    return torch.empty(state.shape, dtype=dtype, device=packed.device)
