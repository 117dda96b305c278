"""The random generators of a process: Python's, NumPy's, torch's on the CPU and on this process's accelerator."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from hf_fsdp.checkpoint.json_state import decode_state, encode_state


def read_random_state() -> dict[str, Any]:
    """Return the state of all generators, for JSON."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.random.get_rng_state(),
    }
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return encode_state(state)


def set_random_state(saved: dict[str, Any]) -> None:
    """Set all generators that `saved` speaks of; one of another kind of accelerator is left alone."""
    state = decode_state(saved)
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["torch"])
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        if device.type in state:
            torch.get_device_module(device).set_rng_state(state[device.type])


def shift_random_state(saved: dict[str, Any], rank: int) -> None:
    """Set this process's generators from another rank's state: the same on every run, different on every rank.

    For a rank that the run that saved did not have. Dropout then draws other masks than one uninterrupted run would.
    """
    set_random_state(saved)
    seed = int(torch.randint(2**31 - 1, (1,)).item()) + rank
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
