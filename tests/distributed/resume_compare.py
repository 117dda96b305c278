"""A run and its rest from a checkpoint, compared to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp.checkpoint.manifest import MANIFEST_FILE
from tests.distributed.resuming import Kind, Life, Outcome, live, on_rank_0, saving, shared_folder


def cut_in_two(
    kind: Kind, *, saves: bool = True, newest: bool = False, after: Callable[[Life, Life], Outcome] | None = None
) -> Any:
    """A case: the whole run with a checkpoint on its way, and the rest of it once more from that checkpoint.

    Args:
        kind: the run.
        saves: whether the whole run saves on its way; else a third life does, which ends at its checkpoint.
        newest: ask for the newest checkpoint instead of a path, after the later ones lost their mark of a commit.
        after: what else is looked at, given both lives.
    """

    def case(rank: int, world_size: int) -> Outcome:
        with shared_folder() as folder:
            checkpoint = f"{folder}/checkpoint-{kind.save_step}"
            how = {} if "save_strategy" in kind.arguments else saving(kind.save_step)
            unbroken = live(kind, folder, world_size, **(how if saves else {}))
            if not saves:
                live(kind, folder, world_size, ends_at=kind.save_step, **how)
            files = files_of(checkpoint)
            if newest:
                on_rank_0(lambda: spoil_others(folder, checkpoint))
            again = live(kind, folder, world_size, resume=True if newest else checkpoint, **how)
            found = {**compare(unbroken, again, kind.save_step), "files": files}
            return {**found, **(after(unbroken, again) if after else {})}

    return case


def spoil_others(folder: str, kept: str) -> None:
    """Take the mark of a commit from all checkpoints but one."""
    for path in Path(folder).glob("checkpoint-*"):
        if str(path) != kept:
            (path / MANIFEST_FILE).unlink()


def compare(unbroken: Life, again: Life, save_step: int) -> Outcome:
    """Return what differs between a run and its repeated rest: nothing may."""
    expected = {step: values for step, values in unbroken.logs.items() if step > save_step}
    evaluations = {step: value for step, value in unbroken.evaluations.items() if step > save_step}
    return {
        "logs": expected,
        "other_logs": {step: again.logs.get(step) for step in expected if again.logs.get(step) != expected[step]},
        "other_evaluations": {step: value for step, value in evaluations.items() if again.evaluations[step] != value},
        "other_samples": [step for step in again.samples if again.samples[step] != unbroken.samples[step]],
        "first_step": min(again.logs, default=None),
        "other_weights": _different(unbroken.weights, again.weights),
        "other_optimizer": _different(unbroken.optimizer, again.optimizer),
        "other_groups": [(a, b) for a, b in zip(unbroken.groups, again.groups, strict=True) if not _equal(a, b)],
        "num_weights": len(again.weights),
        "num_optimizer": len(again.optimizer),
        **held(again.trainer.model),
    }


def held(model: nn.Module) -> Outcome:
    """Return how the parameters are held: sharded, and how many values are on this rank."""
    parameters = [parameter for parameter in model.parameters() if parameter.dim()]
    return {
        "sharded": all(isinstance(parameter, DTensor) for parameter in parameters),
        "num_local": sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters),
        "num_parameters": sum(parameter.numel() for parameter in parameters),
    }


def files_of(folder: str | Path) -> list[str]:
    """Return the files under `folder`, by relative name."""
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


def _different(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    """Return the names whose values are not the same to the bit, or that one side lacks."""
    return [
        name
        for name in sorted(expected.keys() | found.keys())
        if name not in expected or name not in found or not torch.equal(_bits(expected[name]), _bits(found[name]))
    ]


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def _equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return {key: str(value) for key, value in first.items()} == {key: str(value) for key, value in second.items()}
