"""Samples as one batch: tokens padded to one length, pictures one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_fsdp.data.images.encode import IGNORED, Encoded

if TYPE_CHECKING:
    from torch import Tensor


def merge(
    samples: Sequence[Encoded], *, pad_id: int, left: bool = False, multiple_of: int | None = None
) -> dict[str, Tensor]:
    """Return the batch of some samples.

    Args:
        samples: at least one.
        pad_id: the id that fills shorter samples; it is never learned and never seen.
        left: fill before the tokens, as generation needs it; after them otherwise.
        multiple_of: make the length a multiple of this.

    Returns:
        ``input_ids``, ``attention_mask``, ``labels`` of shape (samples, tokens), the processor's other tensors per
        token, and its tensors of pictures, where any sample has one.
    """
    import torch

    longest = max(len(sample.input_ids) for sample in samples)
    length = -(-longest // multiple_of) * multiple_of if multiple_of else longest
    columns = {
        "input_ids": [_fill(sample.input_ids, length, pad_id, left) for sample in samples],
        "attention_mask": [_fill(torch.ones_like(sample.input_ids), length, 0, left) for sample in samples],
        "labels": [_fill(sample.labels, length, IGNORED, left) for sample in samples],
    }
    for key in dict.fromkeys(key for sample in samples for key in sample.per_token if key != "attention_mask"):
        zeros = (sample.per_token.get(key, torch.zeros_like(sample.input_ids)) for sample in samples)
        columns[key] = [_fill(values, length, 0, left) for values in zeros]
    batch = {key: torch.stack(values) for key, values in columns.items()}
    for key in dict.fromkeys(key for sample in samples for key in sample.pixels):
        batch[key] = _join([sample.pixels[key] for sample in samples if key in sample.pixels])
    return batch


def _fill(values: Tensor, length: int, value: int, left: bool) -> Tensor:
    import torch

    missing = values.new_full((length - len(values),), value)
    return torch.cat([missing, values] if left else [values, missing])


def _join(parts: list[Tensor]) -> Tensor:
    """Join along the first axis. Where samples have other numbers of tiles or sizes, zeros fill the smaller ones, as
    the processors do within one call."""
    import torch
    from torch.nn.functional import pad

    if len({part.shape[1:] for part in parts}) > 1:
        largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        filled = []
        for part in parts:
            missing = [want - have for want, have in zip(largest, part.shape[1:], strict=True)]
            filled.append(pad(part, [amount for size in reversed(missing) for amount in (0, size)]))
        parts = filled
    return torch.cat(parts)
