"""The batches that a model is really given while it trains: how many forwards, and the largest one's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_fsdp.plan.job import Batch

_PICTURES = "pixel_values"
_LOOKS_AT_EQUALS = 8


class SeenBatches:
    """Looks at the inputs of a model's training forwards; evaluation's are left alone.

    Args:
        model: as Trainer calls it, sharded or not.
        packed: several samples share a row.

    Example:
        >>> import torch
        >>> model = torch.nn.Embedding(8, 4)
        >>> seen = SeenBatches(model)
        >>> seen.largest is None
        True
        >>> seen.close()
    """

    def __init__(self, model: nn.Module, *, packed: bool = False):
        self.num_forwards = 0
        self.most_forwards = 0
        self.largest: Batch | None = None
        self.is_chunked = False  # TRL asks the model for log-probabilities by a head that never holds all logits
        self.has_tokens = True
        self.failure: str | None = None
        self._num_equal = 0
        self._packed = packed
        self._patch_size = _patch_size(model)
        self._handle = model.register_forward_pre_hook(self._look, with_kwargs=True)

    def restart(self) -> None:
        """Forget the largest batch."""
        self.largest = None

    def end_step(self) -> None:
        """An optimizer step is over: `most_forwards` is the most of any step."""
        self.most_forwards, self.num_forwards = max(self.most_forwards, self.num_forwards), 0

    def close(self) -> None:
        """Stop looking."""
        self._handle.remove()

    def _look(self, model: nn.Module, args: Any, inputs: Mapping[str, Any]) -> None:
        """Look at a forward; it runs inside of it, so an error here would be one of the training."""
        if not (model.training and torch.is_grad_enabled()):
            return
        try:
            self._look_at(inputs)
        except Exception as error:
            self.failure = f"a batch that cannot be read: {type(error).__name__}: {error}"
            self.close()

    def _look_at(self, inputs: Mapping[str, Any]) -> None:
        self.num_forwards += 1
        self.is_chunked = self.is_chunked or bool(inputs.get("fused_lm_head"))
        ids = inputs.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            self.has_tokens = False
            return
        is_largest = self.largest is None or ids.numel() > num_tokens(self.largest)
        # Whether a mask hides anything is a value, and a GPU has to be waited for to read it.
        self._num_equal = 0 if is_largest else self._num_equal + self._is_equal(ids)
        if is_largest or (self._is_equal(ids) and self._num_equal <= _LOOKS_AT_EQUALS):
            self.largest = self._shape(ids, inputs)

    def _is_equal(self, ids: torch.Tensor) -> bool:
        """Whether a batch is as large as the largest, which had no padding."""
        largest = self.largest
        shape = None if largest is None or largest.padded else (largest.micro_batch_size, largest.num_tokens)
        return tuple(ids.shape) == shape

    def _shape(self, ids: torch.Tensor, inputs: Mapping[str, Any]) -> Batch:
        mask = inputs.get("attention_mask")
        num_images, image_size = self._pictures(inputs)
        return Batch(
            micro_batch_size=int(ids.shape[0]),
            num_tokens=int(ids.shape[1]),
            padded=isinstance(mask, torch.Tensor) and bool((mask == 0).any()),
            packed=self._packed and inputs.get("position_ids") is not None,
            num_images=-(-num_images // max(1, int(ids.shape[0]))),
            image_size=image_size,
        )

    def _pictures(self, inputs: Mapping[str, Any]) -> tuple[int, tuple[int, int] | None]:
        """Return how many pictures the batch has, and their size in pixels: (height, width) of the largest."""
        grid, pixels = inputs.get("image_grid_thw"), inputs.get(_PICTURES)
        if isinstance(grid, torch.Tensor) and len(grid) and self._patch_size:
            _, height, width = max(grid.tolist(), key=lambda item: item[1] * item[2])
            return len(grid), (height * self._patch_size, width * self._patch_size)
        if isinstance(pixels, torch.Tensor) and pixels.ndim >= 4:
            return pixels.shape[:-3].numel(), (int(pixels.shape[-2]), int(pixels.shape[-1]))
        return 0, None


def num_tokens(batch: Batch) -> int:
    """Return the tokens of a batch, padding counted."""
    return batch.micro_batch_size * batch.num_tokens


def describe_batch(batch: Batch) -> str:
    """Return a batch in words: ``2 rows of 512 tokens, padded``."""
    rows = "1 row" if batch.micro_batch_size == 1 else f"{batch.micro_batch_size} rows"
    words = [f"{rows} of {batch.num_tokens} tokens"]
    if batch.num_images:
        words.append("1 picture a row" if batch.num_images == 1 else f"{batch.num_images} pictures a row")
    words += ["packed"] * batch.packed + ["padded"] * batch.padded
    return ", ".join(words)


def _patch_size(model: Any) -> int | None:
    vision = getattr(getattr(model, "config", None), "vision_config", None)
    size = getattr(vision, "patch_size", None)
    return size if isinstance(size, int) else None
