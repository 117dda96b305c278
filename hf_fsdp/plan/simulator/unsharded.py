"""What DDP holds beside the step of one process."""

from __future__ import annotations

from collections.abc import Mapping


def ddp_bucket_bytes(totals: Mapping[str, float]) -> int:
    """Return the bytes of DDP's buckets: a second copy of every trained gradient, unless they are views of each other.

    Trainer and Accelerate leave `gradient_as_bucket_view` at False.
    """
    return round(totals["gradients_bytes"])
