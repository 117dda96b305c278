"""How many tokens a picture takes in the sequence, known from a model's config.json alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_fsdp.plan.job import ModelSpec
from hf_fsdp.plan.models.model_config import read_config

Size = tuple[int, int]

# Qwen's processors as published: at least 4 and at most 16384 tokens a picture.
_QWEN_TOKENS = (4, 16384)
# Idefics3's and SmolVLM's processors as published: the longer edge becomes four tiles, larger pictures never more.
_TILES_AN_EDGE = 4


@dataclass(frozen=True, kw_only=True)
class ImageTokens:
    """Tokens of one picture.

    Args:
        num_tokens: what it takes in the sequence, marks around it that its processor writes included; None: unknown.
        num_features: of them, those that the vision tower fills (placeholders); None: unknown.
        reason: where the number comes from, or why there is none.
        num_tiles: pictures that the tower sees for it; 1 where it is not cut.
        size: (height, width) in pixels of what the tower sees, of each tile; None: unknown.
    """

    num_tokens: int | None
    num_features: int | None
    reason: str
    num_tiles: int = 1
    size: Size | None = None


def image_tokens(spec: ModelSpec, image_size: Size | None = None) -> ImageTokens:
    """Return how many tokens a picture takes in the sequence.

    It follows from config.json and from the settings that the family's processors are published with. Other settings
    (``max_pixels``, no splitting) give other numbers: `hf_fsdp.data` counts with a real processor.

    Args:
        spec: of `resolve_model`.
        image_size: (height, width) of the picture in pixels. Families that resize every picture alike ignore it.

    Example::

        image_tokens(resolve_model("llava-1.5-7b")).num_tokens
        # 576
    """
    model_type = str(spec.config.get("model_type"))
    family = _FAMILIES.get(model_type)
    if family is None:
        return _unknown(f"no rule for model_type {model_type}; count with its processor")
    return family(read_config(spec), image_size)


def _unknown(reason: str) -> ImageTokens:
    return ImageTokens(num_tokens=None, num_features=None, reason=reason)


def _of_patches(config: Any, size: Size | None) -> ImageTokens:
    """LLaVA 1.5: one token a patch of the square picture; the class token only where all features are taken."""
    side, patch = _side(config.vision_config.image_size), _side(config.vision_config.patch_size)
    count = (side // patch) ** 2 + (0 if config.vision_feature_select_strategy == "default" else 1)
    reason = f"({side} / {patch})² patches of the square picture"
    return ImageTokens(num_tokens=count, num_features=count, reason=reason, size=(side, side))


def _of_fixed_count(config: Any, size: Size | None) -> ImageTokens:
    """Gemma 3: pooled to a fixed number; its processor writes a begin, an end and two blank lines around it."""
    count, side = int(config.mm_tokens_per_image), _side(config.vision_config.image_size)
    reason = f"mm_tokens_per_image={count} and 4 tokens around them; without pan and scan"
    return ImageTokens(num_tokens=count + 4, num_features=count, reason=reason, size=(side, side))


def _of_square_prefix(config: Any, size: Size | None) -> ImageTokens:
    """PaliGemma: every patch of the square picture, before the text."""
    side, patch = _side(config.vision_config.image_size), _side(config.vision_config.patch_size)
    count = (side // patch) ** 2
    reason = f"({side} / {patch})² patches of the square picture"
    return ImageTokens(num_tokens=count, num_features=count, reason=reason, size=(side, side))


def _of_pixels(config: Any, size: Size | None) -> ImageTokens:
    """Qwen2-VL and Qwen2.5-VL: native size, rounded to whole tokens of merged patches."""
    vision = config.vision_config
    edge = int(vision.patch_size) * int(vision.spatial_merge_size)
    if size is None:
        return _unknown(f"its pictures keep their size, one token a {edge} x {edge} pixels: say --image-size")
    height, width = _qwen_size(size, edge)
    count = (height // edge) * (width // edge)
    return ImageTokens(
        num_tokens=count,
        num_features=count,
        reason=f"{height} x {width} pixels, one token a {edge} x {edge}",
        size=(height, width),
    )


def _qwen_size(size: Size, edge: int) -> Size:
    """Return (height, width) as the processor resizes to: whole tokens, the shape kept, between the two limits."""
    height, width = size
    least, most = (count * edge * edge for count in _QWEN_TOKENS)
    rounded = round(height / edge) * edge, round(width / edge) * edge
    if math.prod(rounded) > most:
        shrink = math.sqrt(height * width / most)
        return tuple(max(edge, math.floor(length / shrink / edge) * edge) for length in size)  # type: ignore[return-value]
    if math.prod(rounded) < least:
        grow = math.sqrt(least / (height * width))
        return tuple(math.ceil(length * grow / edge) * edge for length in size)  # type: ignore[return-value]
    return rounded


def _of_tiles(config: Any, size: Size | None) -> ImageTokens:
    """Idefics3 and SmolVLM: cut into tiles, row by row, with a mark before and a fence around each, then the whole."""
    side, patch = _side(config.vision_config.image_size), _side(config.vision_config.patch_size)
    features = (side // patch) ** 2 // int(config.scale_factor) ** 2
    if size is None:
        return _unknown(f"its pictures are cut into tiles of {side} x {side} by their shape: say --image-size")
    rows, columns = _tile_grid(size, side)
    num_tiles = rows * columns + 1
    # A tile: fence, mark, features; a row ends in a new line. The whole picture: fence, mark, features, fence.
    num_tokens = features + 3 + rows * (columns * (features + 2) + 1)
    return ImageTokens(
        num_tokens=num_tokens,
        num_features=features * num_tiles,
        reason=f"{rows} x {columns} tiles of {side} x {side} and the whole, {features} tokens each, with marks; split",
        num_tiles=num_tiles,
        size=(side, side),
    )


def _tile_grid(size: Size, side: int) -> tuple[int, int]:
    """Return (rows, columns) after the longer edge was made four tiles long and the other one even."""
    height, width = size
    longest = _TILES_AN_EDGE * side
    other = int(longest * (min(size) / max(size)))
    other += other % 2
    short = max(1, math.ceil(other / side))
    return (short, _TILES_AN_EDGE) if width >= height else (_TILES_AN_EDGE, short)


def _of_cross_attention(config: Any, size: Size | None) -> ImageTokens:
    """Llama 3.2 Vision: one mark in the text; the picture is read by cross attention."""
    side = _side(config.vision_config.image_size)
    return ImageTokens(
        num_tokens=1,
        num_features=0,
        reason=f"one mark; up to {config.vision_config.max_num_tiles} tiles are read by cross attention",
        num_tiles=int(config.vision_config.max_num_tiles),
        size=(side, side),
    )


def _of_internvl(config: Any, size: Size | None) -> ImageTokens:
    return _unknown(
        f"{config.image_seq_length} tokens a tile, and how many tiles is a setting of its processor, not of the model"
    )


def _side(value: Any) -> int:
    return int(value[0]) if isinstance(value, (list, tuple)) else int(value)


_FAMILIES: dict[str, Callable[[Any, Size | None], ImageTokens]] = {
    "llava": _of_patches,
    "gemma3": _of_fixed_count,
    "paligemma": _of_square_prefix,
    "qwen2_vl": _of_pixels,
    "qwen2_5_vl": _of_pixels,
    "idefics3": _of_tiles,
    "smolvlm": _of_tiles,
    "mllama": _of_cross_attention,
    "internvl": _of_internvl,
}
