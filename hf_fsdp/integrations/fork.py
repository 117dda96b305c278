"""Notebooks start processes by fork, and a process whose parent has used CUDA cannot use it."""

from __future__ import annotations

import torch

from hf_fsdp.errors import IntegrationError


def check_fork() -> None:
    """Refuse a process that was forked after CUDA was in use.

    Raises:
        IntegrationError: before torch says it in words that do not name the notebook's cell.
    """
    if torch.cuda._is_in_bad_fork():
        raise IntegrationError(
            "this process was forked from one in which CUDA was in use already, and CUDA cannot follow: "
            "a notebook cell before notebook_launcher(...) touched a GPU",
            fix="restart the kernel and make model, data and everything else on the GPU inside the function given to "
            "notebook_launcher; before it only import, and never call .to('cuda') or torch.cuda.*",
        )
