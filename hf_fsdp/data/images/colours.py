"""A picture of any colour mode as RGB: transparent ones on white, more than 8 bits scaled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image


def to_rgb(image: Any) -> Image:
    """Return a loaded picture of any mode as RGB.

    Raises:
        ValueError: pixels that are not numbers, or a mode that PIL cannot convert.
    """
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        rgb: Image.Image = image.copy()
        return rgb
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        if image.mode.startswith("I"):
            return _from_grey(image)
        opaque = image.convert("RGBA")
        white = Image.new("RGBA", opaque.size, (255, 255, 255, 255))
        flat: Image.Image = Image.alpha_composite(white, opaque).convert("RGB")
        return flat
    if image.mode == "F" or image.mode.startswith("I"):
        return _from_grey(image)
    converted: Image.Image = image.convert("RGB")
    return converted


def _from_grey(image: Any) -> Image:
    """Scale grey of more than 8 bits. A 16-bit file uses its whole range; of 32 bits and floats nobody knows it."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image).astype("float64")
    if not np.isfinite(values).all():
        raise ValueError("it has pixels that are not finite numbers")
    low, high = float(values.min()), float(values.max())
    if image.mode == "F" and 0 <= low and high <= 1:
        top = 1.0
    elif image.mode == "F" and 0 <= low and high <= 255:
        top = 255.0
    elif 0 <= low and high <= 65535:
        top = 65535.0
    else:
        values, top = values - low, max(high - low, 1.0)
    return Image.fromarray(np.round(values * (255.0 / top)).astype("uint8")).convert("RGB")
