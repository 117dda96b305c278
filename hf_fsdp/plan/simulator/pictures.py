"""What pictures add to a batch, family by family: the tensors that the processor hands over, without their values.

Shapes follow from the config and from the settings that processors are published with; tokens of a picture from
`image_tokens`. What a model reads the values of is the matter of `picture_values`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_fsdp.errors import PlanError
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.models.model_config import model_kind, read_config
from hf_fsdp.plan.models.positions import max_positions
from hf_fsdp.plan.simulator.depth import Tower
from hf_fsdp.plan.simulator.picture_sizes import (
    Picture,
    known_picture,
    picture_in_tiles,
    picture_of_any_resolution,
    picture_of_any_size,
)

_DEEPSTACK = "deepstack_visual_indexes"


@dataclass(frozen=True)
class _Family:
    """How a family takes pictures.

    Args:
        measure: what one picture is.
        pixels: the tensors of pictures: of (config, picture, rows, pictures a row, device).
        token_types: name of the tensor that tells tokens of pictures from words; empty: none.
        special: name of the config's list of the tower's layers that do more than their like.
    """

    measure: Callable[[Job, Any], Picture]
    pixels: Callable[[Any, Picture, int, int, str], dict[str, torch.Tensor]]
    token_types: str = ""
    special: str = ""


def takes_pictures(job: Job) -> bool:
    """Return whether the step of `job` is simulated with pictures."""
    return bool(job.batch.num_images) and str(job.model.config.get("model_type")) in _FAMILIES


def measure_picture(job: Job) -> Picture | None:
    """Return what one picture of the batch is; None without pictures, and for families that are not simulated with any.

    Raises:
        PlanError: the model takes none, the family needs a size and there is none, or they do not fit in the row.
    """
    if not takes_pictures(job):
        if job.batch.num_images and model_kind(job.model) == "causal-lm":
            raise PlanError(f"{job.model.name} is a model of text alone and takes no pictures", fix="--num-images 0")
        return None
    family = _FAMILIES[str(job.model.config["model_type"])]
    picture = family.measure(job, read_config(job.model))
    batch = job.batch
    needed = batch.num_images * picture.num_tokens
    if needed > batch.num_tokens:
        most = max_positions(job.model)
        fitting = batch.num_tokens // picture.num_tokens
        ways = [f"--max-length {needed} or more"] if most is None or needed <= most else []
        ways += [f"--num-images {fitting}"] if fitting else []
        raise PlanError(
            f"{batch.num_images} x {picture.num_tokens} tokens of pictures exceed the {batch.num_tokens} of a row",
            fix=", or ".join(ways) or f"--image-size, smaller: the model has {most} positions for pictures and text",
        )
    return picture


def picture_inputs(job: Job, device: str) -> dict[str, torch.Tensor]:
    """Return what pictures add to the inputs of a forward, on `device`.

    Example::

        picture_inputs(job, "cpu")["pixel_values"].shape
        # torch.Size([1, 3, 336, 336])
    """
    picture = measure_picture(job)
    if picture is None:
        return {}
    family = _FAMILIES[str(job.model.config["model_type"])]
    batch = job.batch
    inputs = family.pixels(read_config(job.model), picture, batch.micro_batch_size, batch.num_images, device)
    if family.token_types:
        inputs[family.token_types] = torch.zeros(
            (batch.micro_batch_size, batch.num_tokens), dtype=torch.long, device=device
        )
    return inputs


def picture_notes(job: Job) -> tuple[str, ...]:
    """Return what a reader must know about pictures in the simulation of `job`."""
    if not job.batch.num_images:
        return ()
    picture = measure_picture(job)
    count = job.batch.num_images
    if picture is None:
        return (
            f"pictures were not simulated: there are no rules for model_type {job.model.config.get('model_type')}. The "
            f"vision tower's activations for {count} picture(s) a row come on top of these figures",
        )
    tiles = f"{picture.num_tiles} tiles of " if picture.num_tiles > 1 else ""
    height, width = picture.tile
    return (f"{count} picture(s) a row, each {tiles}{height} x {width} pixels and {picture.num_tokens} tokens",)


def keep_what_pictures_need(job: Job, tower: Tower) -> Tower:
    """Return `tower` so that no layer is left out that does more than its like for a picture."""
    if not takes_pictures(job):
        return tower
    config = read_config(job.model)
    special = _special_layers(job, config)
    if tower.name.startswith("vision"):
        if _reads_inner_layers(config):
            return replace(tower, min_layers=tower.num_layers)
        return tower.keeping(special) if special else tower
    if tower.name == "language" and special_list(job) == _DEEPSTACK:
        first = len(special)
        return replace(tower, prefix=tower.prefix + first, min_layers=min(tower.min_layers + first, tower.num_layers))
    return tower


def special_list(job: Job) -> str:
    """Return the name of the list of layers that do more than their like, in the vision config and in the tower."""
    return _FAMILIES[str(job.model.config["model_type"])].special if takes_pictures(job) else ""


def _special_layers(job: Job, config: Any) -> tuple[int, ...]:
    name = special_list(job)
    return tuple(getattr(config.vision_config, name)) if name else ()


def _reads_inner_layers(config: Any) -> bool:
    """Whether features are taken of layers not counted from the end: in a shallow tower they would be others."""
    chosen = getattr(config, "vision_feature_layer", -1)
    return any(not -3 <= layer < 0 for layer in (chosen if isinstance(chosen, list | tuple) else [chosen]))


# -- the tensors of pictures ------------------------------------------------------------------------------------------


def _one_after_another(config: Any, picture: Picture, rows: int, count: int, device: str) -> dict[str, torch.Tensor]:
    """Every tile is a picture of its own."""
    return {"pixel_values": torch.empty((rows * count * picture.num_tiles, 3, *picture.tile), device=device)}


def _flat_patches(config: Any, picture: Picture, rows: int, count: int, device: str) -> dict[str, torch.Tensor]:
    assert picture.grid is not None
    vision = config.vision_config
    channels = getattr(vision, "in_channels", 3)
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "pixel_values": torch.empty((rows * count * math.prod(picture.grid), width), device=device),
        "image_grid_thw": torch.zeros((rows * count, 3), dtype=torch.long, device=device),
    }


def _tiles_of_a_row(config: Any, picture: Picture, rows: int, count: int, device: str) -> dict[str, torch.Tensor]:
    shape = (rows, count * picture.num_tiles)
    return {
        "pixel_values": torch.empty((*shape, 3, *picture.tile), device=device),
        "pixel_attention_mask": torch.zeros((*shape, *picture.tile), dtype=torch.long, device=device),
    }


def _tiles_of_a_picture(config: Any, picture: Picture, rows: int, count: int, device: str) -> dict[str, torch.Tensor]:
    assert picture.size is not None
    return {
        "pixel_values": torch.empty((rows * count, picture.num_tiles, 3, *picture.tile), device=device),
        "image_sizes": torch.zeros((rows * count, 2), dtype=torch.long, device=device),
    }


_FAMILIES: Mapping[str, _Family] = {
    "llava": _Family(known_picture, _one_after_another),
    "llava_next": _Family(picture_of_any_resolution, _tiles_of_a_picture),
    "gemma3": _Family(known_picture, _one_after_another, "token_type_ids"),
    "paligemma": _Family(known_picture, _one_after_another, "token_type_ids"),
    "internvl": _Family(picture_in_tiles, _one_after_another),
    "idefics3": _Family(known_picture, _tiles_of_a_row),
    "smolvlm": _Family(known_picture, _tiles_of_a_row),
    "qwen2_vl": _Family(picture_of_any_size, _flat_patches, "mm_token_type_ids"),
    # Only some layers of its tower see the whole picture.
    "qwen2_5_vl": _Family(picture_of_any_size, _flat_patches, "mm_token_type_ids", "fullatt_block_indexes"),
    # Three layers of its tower also go to the first layers of the language model.
    "qwen3_vl": _Family(picture_of_any_size, _flat_patches, "mm_token_type_ids", _DEEPSTACK),
}
