"""Sizes a person reads: bytes, GiB, counts. No torch here, so that the CLI stays fast."""

from __future__ import annotations

GIB = 1024**3


def format_bytes(num_bytes: float) -> str:
    """Return `num_bytes` in the largest binary unit that keeps it at 1 or more: ``12.6 GiB``, ``3.0 MiB``."""
    for unit, size in (("GiB", GIB), ("MiB", 1024**2), ("KiB", 1024)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: int) -> str:
    """Return a count in short form: ``134.5M``, ``6.74B``, ``512``."""
    if abs(count) >= 10**9:
        return f"{count / 10**9:.2f}B"
    if abs(count) >= 10**6:
        return f"{count / 10**6:.1f}M"
    if abs(count) >= 10**4:
        return f"{count / 10**3:.1f}K"
    return str(count)
