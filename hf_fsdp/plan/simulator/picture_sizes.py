"""What one picture is to a model: pixels, tiles, patches and tokens, from the config and the size after resizing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from hf_fsdp.errors import PlanError
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.models.image_tokens import image_tokens

Size = tuple[int, int]
_INTERNVL_TILES = 12  # at most, of its processor as published


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture as a model of some family takes it.

    Args:
        num_features: placeholders in the sequence that the tower fills.
        num_tokens: all its tokens in the sequence, with marks around it.
        tile: (height, width) in pixels of what the tower sees at once.
        num_tiles: of them.
        grid: patches (frames, height, width), where the family takes any size; else None.
        size: (height, width) of the whole picture, where the family is told.
    """

    num_features: int
    num_tokens: int
    tile: Size
    num_tiles: int = 1
    grid: tuple[int, int, int] | None = None
    size: Size | None = None


def known_picture(job: Job, config: Any) -> Picture:
    """Families whose pictures `image_tokens` knows."""
    counts = image_tokens(job.model, job.batch.image_size)
    if counts.num_tokens is None or counts.num_features is None or counts.size is None:
        raise _size_missing(job, counts.reason)
    return Picture(
        num_features=counts.num_features,
        num_tokens=counts.num_tokens,
        tile=counts.size,
        num_tiles=counts.num_tiles,
    )


def _size_missing(job: Job, reason: str) -> PlanError:
    return PlanError(
        f"{job.model.name} needs a size of its pictures: {reason}", fix="--image-size 448x448 (height x width)"
    )


def picture_of_any_size(job: Job, config: Any) -> Picture:
    """Qwen-VL: whole tokens of merged patches, as many as the picture has."""
    vision = config.vision_config
    edge = vision.patch_size * vision.spatial_merge_size
    if job.batch.image_size is None:
        raise _size_missing(job, f"they keep their size, one token a {edge} x {edge} pixels")
    known = image_tokens(job.model, job.batch.image_size).size
    height, width = known or (max(1, round(length / edge)) * edge for length in job.batch.image_size)
    count = (height // edge) * (width // edge)
    return Picture(
        num_features=count,
        num_tokens=count + 2,  # a mark before and one after it
        tile=(height, width),
        grid=(1, height // vision.patch_size, width // vision.patch_size),
    )


def picture_in_tiles(job: Job, config: Any) -> Picture:
    """InternVL: cut into at most 12 tiles by its shape, and the whole once more where there are several."""
    height, width = config.vision_config.image_size
    num_tiles = 1
    if job.batch.image_size is not None:
        num_tiles = _closest_canvas(job.batch.image_size, height * width, _INTERNVL_TILES)
        num_tiles += num_tiles > 1
    rows, columns = config.vision_config.patch_size
    patches = (height // rows) * (width // columns)
    count = num_tiles * int(patches * config.downsample_ratio**2)
    return Picture(num_features=count, num_tokens=count + 2, tile=(height, width), num_tiles=num_tiles)


def _closest_canvas(size: Size, tile_area: int, most: int) -> int:
    """Return how many tiles have the shape closest to the picture's; of equal ones, more for a large picture."""
    height, width = size
    shapes = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if x * y <= most]
    best, least = 1, math.inf
    for columns, rows in sorted(shapes, key=math.prod):
        difference = abs(width / height - columns / rows)
        is_large = height * width > 0.5 * tile_area * columns * rows
        if difference < least or (difference == least and is_large):
            best, least = columns * rows, difference
    return best


def picture_of_any_resolution(job: Job, config: Any) -> Picture:
    """LLaVA-NeXT: the whole, and tiles of the allowed resolution that fits best, without what is only padding."""
    from transformers.models.llava_next import modeling_llava_next as own

    side = int(config.vision_config.image_size)
    patches = side // int(config.vision_config.patch_size)
    size = job.batch.image_size or (side, side)
    rows, columns = own.get_anyres_image_grid_shape(size, config.image_grid_pinpoints, side)
    whole = torch.empty(1, rows * patches, columns * patches, device="meta")
    height, width = own.unpad_image(whole, size).shape[1:]
    count = patches**2 + height * (width + 1)
    return Picture(num_features=count, num_tokens=count, tile=(side, side), num_tiles=1 + rows * columns, size=size)
