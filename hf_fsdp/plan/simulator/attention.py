"""The attention kernels that a GPU would take, called by name on a device that is none.

On a device that torch does not know `F.scaled_dot_product_attention` falls back to plain matrix products, which hold
the scores of every pair of tokens: many times what the kernels of CUDA hold. Which kernel CUDA takes is decided here
as torch does: flash without a mask, memory-efficient with one. A mask becomes a bias in the dtype of the queries, and
grouped key and value heads are repeated for it, since that kernel knows no groups.

The name must not hold "flash": transformers would look for a kernel on the hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

KERNELS = "hf_fsdp_kernels"
_MAX_FLASH_HEAD = 256


def register_kernels() -> None:
    """Make `attn_implementation="hf_fsdp_kernels"` known to transformers, with the masks of its sdpa."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(KERNELS, _attend)
    AttentionMaskInterface.register(KERNELS, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@contextmanager
def rows_are_packed(packed: bool) -> Iterator[None]:
    """Answer for transformers whether rows hold several samples, which it reads from the values of positions.

    Without values it takes every row for a packed one, and builds a mask that no kernel of one sample a row gets.
    """
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices
    if not packed:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    head_size = value.shape[-1]
    needs_gradient = query.requires_grad or key.requires_grad or value.requires_grad
    # Heads of another size in the values (DeepSeek's latent attention) are the other kernel's too.
    fits_flash = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= _MAX_FLASH_HEAD
    fits_flash = fits_flash and query.shape[-1] == value.shape[-1]
    if attention_mask is None and fits_flash:
        query, key, value = (_padded_head(tensor) for tensor in (query, key, value))
        output = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, False, scale=scaling
        )[0]
    else:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        bias = None if attention_mask is None else _as_bias(attention_mask, query, key)
        output = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_gradient, dropout, causal, scale=scaling
        )[0]
    return output[..., :head_size].transpose(1, 2).contiguous(), None


def _padded_head(tensor: torch.Tensor) -> torch.Tensor:
    """Flash takes head sizes that are multiples of 8; torch pads others."""
    missing = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _as_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as torch hands it to the kernel: of the queries' dtype, shared by all heads."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.to(query.dtype).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
