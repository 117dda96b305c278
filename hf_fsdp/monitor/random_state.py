"""The random state of a process, put back after something that training must not notice."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Give Python's, NumPy's and torch's generators their state back when the block ends.

    Every iteration over a `DataLoader` draws a seed from torch's global generator, so an evaluation in the middle of
    training would change each dropout mask after it.
    """
    python, numpy = random.getstate(), np.random.get_state()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = [torch.accelerator.current_device_index()] if accelerator is not None else []
    device_type = accelerator.type if accelerator is not None else "cuda"
    try:
        with torch.random.fork_rng(devices=devices, device_type=device_type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
