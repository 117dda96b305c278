"""A process of the planner's own: one job a line on stdin, one result a line on stdout.

It is a process apart because the simulated device changes torch for good, and because it must see no GPU.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import traceback
from typing import Any

READY = "ready"
_LOOK_SECONDS = 0.5


def main() -> None:
    """Serve jobs until stdin ends."""
    _end_with(os.getppid())
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    _prepare()
    answer({READY: True})
    for line in sys.stdin:
        answer(_serve(line))


def _end_with(parent: int) -> None:
    """End when the asking process is gone: killed, it closes no pipe that this one would look at while it is busy."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="hf-fsdp-parent", daemon=True).start()


def _prepare() -> None:
    """Import what every job needs, quietly, and make the simulated device known."""
    import warnings

    warnings.simplefilter("ignore")
    from transformers.utils import logging

    logging.set_verbosity_error()
    import torch

    torch.set_num_threads(1)
    from hf_fsdp.plan.simulator import simulate  # noqa: F401
    from hf_fsdp.plan.simulator.attention import register_kernels
    from hf_fsdp.plan.simulator.device import install_device
    from hf_fsdp.plan.simulator.fused_loss import install_fused_loss

    install_device()
    register_kernels()
    install_fused_loss()
    _import_late(torch)
    gc.collect()
    gc.freeze()  # what was imported need not be looked through before every step


def _import_late(torch: Any) -> None:
    """Import what torch and TRL import at first use, so that the first job does not pay for it."""
    from importlib.util import find_spec

    if find_spec("trl") is not None:
        import trl.trainer.utils  # noqa: F401
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    torch.optim.AdamW([weight]).step()


def _serve(line: str) -> dict[str, Any]:
    from hf_fsdp.errors import HfFsdpError
    from hf_fsdp.plan.job import Job
    from hf_fsdp.plan.simulator.simulate import simulate_job

    try:
        return {"simulation": simulate_job(Job.from_json(line)).to_mapping()}
    except HfFsdpError as error:
        problems = [vars_of(problem) for problem in error.problems]
        return {"problems": problems, "kind": type(error).__name__}
    except Exception as error:
        return {"crash": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


def vars_of(problem: Any) -> dict[str, Any]:
    """Return a problem's parts for JSON."""
    return {name: getattr(problem, name) for name in ("message", "fix", "near", "source")}


if __name__ == "__main__":
    main()
