"""What hf-fsdp sends to Weights & Biases, into the run that Trainer's own callback opened."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hf_fsdp.monitor.samples import Sample
from hf_fsdp.sharding.audit import Audit, UnitRow


def prepare_wandb(output_dir: Path) -> str | None:
    """Keep W&B's files with the run, and go offline where there is no key, instead of asking for one.

    Call it before Trainer is built. What the environment says already stays (``WANDB_PROJECT``, ``WANDB_DIR``,
    ``WANDB_MODE``).

    Args:
        output_dir: the folder of the run.

    Returns:
        A line for a person, where the run goes offline.
    """
    os.environ.setdefault("WANDB_PROJECT", "hf-fsdp")
    os.environ.setdefault("WANDB_DIR", str(output_dir))
    if "WANDB_MODE" in os.environ:
        return None
    import wandb

    if wandb.login(prompt=False):
        return None
    os.environ["WANDB_MODE"] = "offline"
    return "wandb: no key, so this run is recorded offline; log in with: wandb login"


def wandb_sync_line() -> str | None:
    """Return how to send the active run, where it is an offline one."""
    run = _active_run()
    if run is None or run.settings.mode != "offline":
        return None
    return f"wandb: send this run with: wandb sync {Path(run.dir).parent}"


def log_audit(audit: Audit) -> bool:
    """Send the audit to the active run: totals to its config, units as a table; return whether there is a run.

    Wandb is not imported for it: a run can only be active when somebody else has.
    """
    run = _active_run()
    if run is None:
        return False
    mapping = audit.to_mapping()
    units = mapping.pop("units")
    run.config.update({"hf_fsdp": mapping}, allow_val_change=True)
    columns = [item.name for item in fields(UnitRow) if item.name != "names"]
    table = sys.modules["wandb"].Table(columns=columns, data=[[unit[name] for name in columns] for unit in units])
    run.log({"hf_fsdp/units": table}, commit=False)
    return True


def log_first_step(report: Any) -> bool:
    """Send what the first step showed to the run's summary; return whether there is a run."""
    run = _active_run()
    if run is None:
        return False
    run.summary.update({f"hf_fsdp/{name}": value for name, value in asdict(report).items()})
    return True


def log_memory(numbers: Mapping[str, float]) -> bool:
    """Send predicted and measured memory to the run's summary; return whether there is a run."""
    run = _active_run()
    if run is None:
        return False
    run.summary.update({f"hf_fsdp/{name}": value for name, value in numbers.items()})
    return True


def log_loss_scale(scale: float | None, num_skipped: int) -> bool:
    """Send the loss scale and the number of skipped steps; return whether there is a run."""
    run = _active_run()
    if run is None or scale is None:
        return False
    run.log({"hf_fsdp/loss_scale": scale, "hf_fsdp/skipped_steps": num_skipped}, commit=False)
    return True


def log_samples(samples: Sequence[Sample], step: int) -> bool:
    """Send what the model answered as a table; return whether there is a run."""
    run = _active_run()
    if run is None:
        return False
    columns = [item.name for item in fields(Sample)]
    rows = [[step, *(getattr(sample, name) for name in columns)] for sample in samples]
    run.log({"samples": sys.modules["wandb"].Table(columns=["step", *columns], data=rows)}, commit=False)
    return True


def log_answer_grid(path: Path, caption: str) -> bool:
    """Send a picture of what the model answered; return whether there is a run."""
    run = _active_run()
    if run is None:
        return False
    run.log({"answers": sys.modules["wandb"].Image(str(path), caption=caption)}, commit=False)
    return True


def mark_preempting() -> bool:
    """Tell W&B that the run was asked to stop and will go on elsewhere; return whether there is a run."""
    run = _active_run()
    if run is None:
        return False
    run.mark_preempting()
    return True


def _active_run() -> Any | None:
    module = sys.modules.get("wandb")
    return getattr(module, "run", None) if module is not None else None
