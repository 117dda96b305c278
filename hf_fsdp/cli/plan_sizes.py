"""Sizes as a person types them: tokens, bytes of a machine, height and width of a picture."""

from __future__ import annotations

import re

from hf_fsdp.errors import ConfigError

_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_BYTES = {
    "tib": 1024**4,
    "gib": 1024**3,
    "mib": 1024**2,
    "tb": 10**12,
    "gb": 10**9,
    "mb": 10**6,
    "t": 10**12,
    "g": 10**9,
}


def read_count(text: str | None, flag: str) -> int | None:
    """Return ``300M`` as 300000000; None for nothing.

    Raises:
        ConfigError: no number, or none from 1 to 10^18.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\+?\d{1,2})?)\s*([kmbgt]?)\s*", text.replace("_", ""), re.IGNORECASE)
    value = float(match[1]) * _COUNTS[match[2].lower()] if match else 0.0
    if not 1 <= value < 1e18:
        raise ConfigError(f"{flag} {text} is no number of tokens", fix=f"{flag} 300M, 1.5B or 2e9")
    return round(value)


def read_price(text: str | None) -> float | None:
    """Return ``2.5`` as a number; None for nothing. Whether a price can be that high is the planner's to say.

    Raises:
        ConfigError: no number.
    """
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"--price {text} is no number",
            fix="--price 2.5   # of one GPU and hour, in any currency, without its sign",
        ) from None


def read_memory(text: str | None, flag: str) -> int | None:
    """Return ``1TiB`` as 1099511627776; None for nothing.

    Raises:
        ConfigError: no size, no unit, or less than a gigabyte.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, re.IGNORECASE)
    size = int(float(match[1]) * _BYTES.get(match[2].lower(), 0)) if match else 0
    if size < 10**9:
        raise ConfigError(f"{flag} {text} is no size of a machine's memory", fix=f"{flag} 512GiB, or 1TiB")
    return size


def read_image_size(text: str | None) -> tuple[int, int] | None:
    """Return ``448x672`` as (height, width) in pixels; one number is a square; None for nothing.

    Raises:
        ConfigError: no size.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,5})(?:\s*[x*×]\s*(\d{1,5}))?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"--image-size {text} is no height and width", fix="--image-size 448x448 (height x width)")
    return int(match[1]), int(match[2] or match[1])
