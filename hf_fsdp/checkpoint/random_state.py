"""The random generators of a process: Python's, NumPy's, torch's on the CPU and on this process's accelerator."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from hf_fsdp.checkpoint.json_state import decode_state, encode_state

# "python", "numpy", "torch" and the kind of an accelerator -> the state of that generator.
RandomState = dict[str, Any]


def get_generators(*, with_device: bool = True) -> RandomState:
    """Return the state of all generators, or of those on the CPU alone."""
    state: RandomState = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.random.get_rng_state(),
    }
    if with_device and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_generators(state: RandomState) -> None:
    """Set all generators that `state` speaks of; one of another kind of accelerator is left alone."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["torch"])
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        if device.type in state:
            torch.get_device_module(device).set_rng_state(state[device.type])


def read_random_state() -> dict[str, Any]:
    """Return the state of all generators, for JSON."""
    return dict(encode_state(get_generators()))


def set_random_state(saved: dict[str, Any]) -> None:
    """Set all generators from what `read_random_state` returned."""
    set_generators(decode_state(saved))


def shift_random_state(saved: dict[str, Any], rank: int) -> None:
    """Set this process's generators from another rank's state: the same on every run, different on every rank.

    For a rank that the run that saved did not have. Dropout then draws other masks than one uninterrupted run would.
    """
    set_random_state(saved)
    seed = int(torch.randint(2**31 - 1, (1,)).item()) + rank
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
