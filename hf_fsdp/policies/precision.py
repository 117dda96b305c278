"""Precision presets: which dtype is stored, computed in, reduced in and returned.

| preset | storage of trained weights | compute | gradient reduce | buffers | root output |
|---|---|---|---|---|---|
| `fp32` | float32 | float32 | float32 | as loaded | float32 |
| `bf16-mixed` | float32 | bfloat16 | float32 | as loaded | float32 |
| `bf16-true` | bfloat16 | bfloat16 | float32 | as loaded | float32 |
| `fp16-mixed` | float32 | float16 | float32 | as loaded | float32 |

`fp16-mixed` keeps norms in float32 (float16 leaves its range there first) and its loss is scaled: Trainer's and
Accelerate's loops by `integrations/loss_scaling.py`, your own loop by `torch.amp.GradScaler(device)`.
Gradients are reduced in float32 everywhere: a sum over ranks in bfloat16 keeps 8 bits of the result.
Frozen weights keep the dtype they were loaded in (under `bf16-true` they are stored in bfloat16 too): they have
no optimizer step to round, and an fp32 copy would double the memory of a LoRA base. Buffers are never cast,
since rotary frequencies lose their meaning in bfloat16. The root's output is float32 so that a loss computed
outside the model (label smoothing, metrics) starts from float32; blocks pass the compute dtype on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hf_fsdp.config.schema import PrecisionConfig
from hf_fsdp.errors import PrecisionError
from hf_fsdp.policies.raw_reads import RawRead, find_raw_reads, is_read_from_outside
from hf_fsdp.torch_private import GROUPS_CAST_EACH_MODULE


@dataclass(frozen=True, kw_only=True)
class PrecisionTable:
    """The dtypes of one preset, by what they are for."""

    preset: str
    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    output: torch.dtype
    keep_norms_fp32: bool = False

    def policy(self, kind: str) -> MixedPrecisionPolicy:
        """Return torch's policy for a unit of this `kind` (`block`, `embedding`, `head`, `norms`, `root`).

        Blocks pass the compute dtype on; the root's output is upcast. Norms kept in float32 hand on the compute dtype,
        and their inputs are not cast: norms upcast by themselves, and the residual stream must keep its dtype.
        """
        if kind == "norms":
            return MixedPrecisionPolicy(
                param_dtype=torch.float32,
                reduce_dtype=self.reduce,
                output_dtype=self.compute,
                cast_forward_inputs=False,
            )
        if kind == "root":  # its inputs hold labels too, which must keep their precision: see root_forward.py
            return MixedPrecisionPolicy(
                param_dtype=self.compute,
                reduce_dtype=self.reduce,
                output_dtype=self.output,
                cast_forward_inputs=False,
            )
        return MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.reduce)

    def storage_dtype(self, parameter: nn.Parameter, *, is_norm: bool) -> torch.dtype:
        """Return the dtype that `parameter` is stored in between steps."""
        if not parameter.is_floating_point():
            return parameter.dtype
        if is_norm and self.keep_norms_fp32:
            return torch.float32
        if self.storage is torch.bfloat16 or parameter.requires_grad:
            return self.storage
        return parameter.dtype


_PRESETS = {
    "fp32": (torch.float32, torch.float32),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
    "fp16-mixed": (torch.float32, torch.float16),
}
_TORCH_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_precision(config: PrecisionConfig) -> PrecisionTable:
    """Turn a `PrecisionConfig` into its table of dtypes; `auto` means `bf16-mixed` when nothing else was said.

    Raises:
        PrecisionError: the preset is not one that this release runs.
    """
    preset = "bf16-mixed" if config.preset == "auto" else config.preset
    if preset not in _PRESETS:
        raise PrecisionError(
            f"precision.preset={preset!r} is not a precision this release runs",
            near=", ".join(_PRESETS),
            fix="precision: bf16-mixed",
        )
    storage, compute = _PRESETS[preset]
    keep_norms = config.keep_norms_fp32
    if keep_norms == "auto":
        keep_norms = compute is torch.float16 and GROUPS_CAST_EACH_MODULE
    return PrecisionTable(
        preset=preset,
        storage=storage,
        compute=compute,
        reduce=_DTYPES[config.reduce_dtype],
        output=torch.float32,
        keep_norms_fp32=bool(keep_norms) and compute is not torch.float32,
    )


def find_norms(model: nn.Module, reads: frozenset[RawRead] | None = None) -> list[tuple[str, nn.Module]]:
    """Return the normalisation layers of `model` (name, module) that can be a unit of their own.

    Found by torch's own classes and by the names transformers gives (`LlamaRMSNorm`, `MambaRMSNormGated`, …); a norm
    whose weight a fused kernel reads past its forward is left out.

    Args:
        model: any module.
        reads: `find_raw_reads(model)`, when the caller has it already.
    """
    reads = find_raw_reads(model) if reads is None else reads
    return [
        (name, module)
        for name, module in model.named_modules()
        if name and _is_norm(module) and not is_read_from_outside(name, reads)
    ]


def _is_norm(module: nn.Module) -> bool:
    is_leaf = not any(True for _ in module.children())
    has_parameters = any(True for _ in module.parameters(recurse=False))
    return is_leaf and has_parameters and (isinstance(module, _TORCH_NORMS) or "Norm" in type(module).__name__)


def check_storable(named_parameters: Iterable[tuple[str, nn.Parameter]], table: PrecisionTable) -> None:
    """Refuse trained weights that the preset's storage would round without being asked to.

    A unit's gradients are reduced together, so its trained weights must have one dtype. bf16, fp16 and fp32 mixed
    in one unit become the storage dtype of the preset; float64 and complex weights do not fit any preset.

    Raises:
        PrecisionError: naming the parameters.
    """
    odd = [
        (name, parameter.dtype)
        for name, parameter in named_parameters
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16)
    ]
    if odd:
        shown = ", ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for name, dtype in odd[:3])
        raise PrecisionError(
            f"precision.preset={table.preset!r} stores trained weights in {str(table.storage).removeprefix('torch.')}, "
            f"but {len(odd)} of them are of a dtype that this would change without being asked: {shown}",
            fix="convert the model first: model.float(), or freeze these parameters with requires_grad_(False)",
        )
