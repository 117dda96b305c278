"""The fewest and most pixels of a picture: set on the image processor, and seen in what it then makes of a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from hf_fsdp.errors import ConfigError, Problem

# A larger trial picture takes seconds and gigabytes; there the processor's own arithmetic is asked.
_MOST_TRIAL_PIXELS = 4_000_000
# What decides about the size of pictures where the limits are unknown.
_SIZES = ("size", "crop_size", "max_image_size", "max_patches", "image_grid_pinpoints")


def set_pixel_limits(processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
    """Set the fewest and most pixels that a picture is resized to, in place; saved with the processor.

    Args:
        processor: a processor with an image processor.
        min_pixels: pixels (height times width) below which a picture is enlarged; None leaves it as it is.
        max_pixels: pixels above which it is reduced; None leaves it as it is.

    Raises:
        ConfigError: the family has no such limits, the limits contradict each other, or they have no effect.
    """
    given = {
        name: value for name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels)) if value is not None
    }
    if not given:
        return
    images = processor.image_processor
    if not _has_limits(images):
        raise ConfigError([_no_such_limit(processor, name, value) for name, value in given.items()])
    limits = {**_read_limits(images), **given}
    _check_values(processor, given, limits)
    settings = {key: value for key, value in images.to_dict().items() if key != "image_processor_type"}
    # The image processor's own constructor knows both forms: the two names, and `size` with edges that are areas.
    settings["size"] = {"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]}
    processor.image_processor = type(images)(**{**settings, **limits})
    _check_effect(processor, limits)


def _has_limits(images: Any) -> bool:
    names = getattr(getattr(images, "valid_kwargs", None), "__annotations__", {})
    return "min_pixels" in names and "max_pixels" in names


def _read_limits(images: Any) -> dict[str, int]:
    size = dict(images.size)
    return {
        "min_pixels": int(size.get("shortest_edge") or getattr(images, "min_pixels", None) or 1),
        "max_pixels": int(size.get("longest_edge") or getattr(images, "max_pixels", None) or 2**31),
    }


def _no_such_limit(processor: Any, name: str, value: int) -> Problem:
    images = processor.image_processor
    known = {key: getattr(images, key, None) for key in _SIZES}
    sized_by = ", ".join(f"{key}={_short(found)}" for key, found in known.items() if found is not None)
    return Problem(
        message=f"{name}={value}: {type(processor).__name__} has no such limit; its pictures are sized by {sized_by}",
        fix=f"leave {name} out",
    )


def _short(value: Any) -> str:
    if isinstance(value, Iterable) and not isinstance(value, (str, list, tuple)):  # a mapping, or a kind of its own
        value = {key: part for key, part in dict(value).items() if part is not None}
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_values(processor: Any, given: dict[str, int], limits: dict[str, int]) -> None:
    images = processor.image_processor
    step = int(getattr(images, "patch_size", 1)) * int(getattr(images, "merge_size", 1))
    problems = [
        Problem(
            message=f"{name}={value!r} must be a whole number of pixels, at least {step * step}: one token is "
            f"{step} x {step}",
            fix=f"{name}: {step * step}, or more",
        )
        for name, value in given.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < step * step
    ]
    if not problems and limits["min_pixels"] > limits["max_pixels"]:
        both = " and ".join(
            f"{name}={value}" + ("" if name in given else " (the model's own)") for name, value in limits.items()
        )
        raise_to = "max_pixels" if "min_pixels" in given else "min_pixels"
        other = limits["min_pixels" if raise_to == "max_pixels" else "max_pixels"]
        problems.append(Problem(message=f"{both}: the least is above the most", fix=f"{raise_to}: {other}"))
    if problems:
        raise ConfigError(problems)


def _check_effect(processor: Any, limits: dict[str, int]) -> None:
    """Look at what becomes of a picture that is too small and of one that is too large."""
    least, most = limits["min_pixels"], limits["max_pixels"]
    small = _resized_pixels(processor.image_processor, max(1, math.isqrt(least) // 2))
    large = _resized_pixels(processor.image_processor, math.isqrt(most) * 3 // 2)
    if small < least or large > most:
        raise ConfigError(
            f"min_pixels={least} and max_pixels={most} have no effect on {type(processor.image_processor).__name__}: "
            f"trial pictures became {small} and {large} pixels",
            fix="leave them out, and set the size in the model's preprocessor_config.json",
        )


def _resized_pixels(images: Any, side: int) -> int:
    from PIL import Image

    patch = int(images.patch_size)
    if side * side > _MOST_TRIAL_PIXELS:
        return int(images.get_number_of_image_patches(side, side)) * patch * patch
    grid = images(images=[Image.new("RGB", (side, side))], return_tensors="np")["image_grid_thw"][0]
    return int(grid[1]) * int(grid[2]) * patch * patch
