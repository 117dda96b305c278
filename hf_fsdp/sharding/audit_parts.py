"""The parts of a model in the audit: what of each is trained, at which rate, and how it is stored."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from hf_fsdp.policies.model_parts import find_parts


@dataclass
class PartRow:
    """One part of the model (language model, projector, vision tower), as it is trained. Counts are of parameters.

    Args:
        storage: dtypes between steps; with a slash where trained and frozen ones differ: ``float32/bfloat16``.
        learning_rates: peak rates of its trained parameters; empty before there is an optimizer.
    """

    name: str
    num_parameters: int
    num_trained: int
    storage: str
    learning_rates: tuple[float, ...] = ()


def describe_trained_parts(model: nn.Module, optimizer: Optimizer | None) -> list[PartRow]:
    """Return the rows, read off the live model and its optimizer."""
    named = dict(model.named_parameters())
    rates = {
        id(parameter): float(group.get("initial_lr", group["lr"]))  # a warm-up starts at 0
        for group in (optimizer.param_groups if optimizer else ())
        for parameter in group["params"]
    }
    rows = []
    for part, names in find_parts(model).names.items():
        trained = [named[name] for name in names if named[name].requires_grad]
        frozen = [named[name] for name in names if not named[name].requires_grad]
        kinds = [_dtypes(trained), _dtypes(frozen)]
        rows.append(
            PartRow(
                name=part,
                num_parameters=sum(named[name].numel() for name in names),
                num_trained=sum(parameter.numel() for parameter in trained),
                storage="/".join(dict.fromkeys(kind for kind in kinds if kind)),
                learning_rates=tuple(sorted({rates[id(p)] for p in trained if id(p) in rates})),
            )
        )
    return rows


def _dtypes(parameters: list[nn.Parameter]) -> str:
    return "+".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))
