"""What the first optimizer step shows: parameters without a gradient, parameters that did not move, values not finite.

Trainer replaces a loss that is not finite by the running mean before it logs it (`logging_nan_inf_filter`) and takes
the step all the same; a parameter outside the loss or outside the optimizer trains nothing and nobody says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from hf_fsdp.errors import NumericsError
from hf_fsdp.sharding.mesh import agree_all
from hf_fsdp.torch_private import local_shard


@dataclass
class FirstStepReport:
    """Names are canonical parameter names; dtypes those of the optimizer's moments."""

    without_gradient: list[str] = field(default_factory=list)
    not_moved: list[str] = field(default_factory=list)
    optimizer_state_dtypes: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """One plain line for each kind of finding; none when all is well."""
        lines = []
        if self.without_gradient:
            lines.append(
                f"{len(self.without_gradient)} trained parameters got no gradient in the first step "
                f"({_some(self.without_gradient)}): freeze them with requires_grad_(False) or use them in the loss"
            )
        if self.not_moved:
            lines.append(
                f"{len(self.not_moved)} trained parameters have a gradient and did not move in the first step "
                f"({_some(self.not_moved)}): are they in the optimizer, and is the step larger than their rounding?"
            )
        return lines


class StepMonitor:
    """Watches one `train()`; every method is called by all ranks at the same point of the step."""

    def __init__(self) -> None:
        self._loss_not_finite: torch.Tensor | None = None
        self._closed_steps: list[tuple[int, torch.Tensor]] = []
        self._signatures: dict[str, torch.Tensor] | None = None
        self._without_gradient: list[str] = []
        self.report: FirstStepReport | None = None

    def observe_loss(self, loss: torch.Tensor) -> None:
        """Remember whether any micro-batch's own loss is not finite; no device wait."""
        bad = ~torch.isfinite(loss.detach()).all()
        self._loss_not_finite = bad if self._loss_not_finite is None else self._loss_not_finite | bad

    def close_step(self, step: int) -> None:
        """Note that the losses seen since the last call belong to step `step` (counted from 1); no device wait."""
        if self._loss_not_finite is not None:
            self._closed_steps.append((step, self._loss_not_finite))
        self._loss_not_finite = None

    def check_finite(self, model: nn.Module, step: int, *, is_taken: bool = False) -> None:
        """Refuse to go on from a loss or gradients that are not finite, now or since the last check; collective.

        Args:
            model: its gradients are looked at.
            step: the step that is about to be taken, counted from 1.
            is_taken: it was taken already, and its weights are about to be saved.

        Raises:
            NumericsError: on every rank, naming the ranks and the parameters.
        """
        self.close_step(step)
        first_bad = next((closed for closed, bad in self._closed_steps if bad.item()), None)
        self._closed_steps.clear()
        bad_gradients = [
            name
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and not torch.isfinite(local_shard(parameter.grad)).all()
        ]
        found = agree_all((first_bad, bad_gradients[:3], len(bad_gradients)))
        since = min((first for first, _, _ in found if first is not None), default=step)
        losses = [rank for rank, (first, _, _) in enumerate(found) if first == since]
        gradients = [(rank, names, count) for rank, (_, names, count) in enumerate(found) if count]
        if not losses and not gradients:
            return
        what = [f"the loss is not finite on rank {', '.join(map(str, losses))}"] if losses else []
        what += [
            f"{count} gradients are not finite on rank {rank} ({_some(names)})" for rank, names, count in gradients
        ]
        if since < step or is_taken:
            last = step if is_taken else step - 1
            taken = f"Steps {since} to {last} were" if since < last else f"Step {since} was"
            what_happened = f"{taken} taken on it since the last look: go on from a checkpoint before step {since}"
        else:
            what_happened = "The step was not taken"
        raise NumericsError(
            f"step {since}: {'; '.join(what)}. {what_happened}",
            fix="lower the learning rate or raise warmup_steps, set max_grad_norm: 1.0, look at the batch "
            "(all labels masked?), or try precision: fp32 to see whether it is a matter of range",
        )

    def before_step(self, model: nn.Module) -> None:
        """Note the gradients and the values before the first step that has a learning rate."""
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._without_gradient = [name for name, parameter in trained if parameter.grad is None]
        # A gradient of exact zeros moves nothing and is no fault: LoRA's A while its B is still zero.
        self._signatures = {
            name: _signature(parameter)
            for name, parameter in trained
            if parameter.grad is not None and bool(local_shard(parameter.grad).any())
        }

    def after_step(self, model: nn.Module, optimizer: Optimizer) -> FirstStepReport:
        """Compare with `before_step`; collective. A parameter has moved when any rank's part of it has."""
        assert self._signatures is not None, "before_step comes first"
        parameters = dict(model.named_parameters())
        still = [name for name, before in self._signatures.items() if torch.equal(before, _signature(parameters[name]))]
        moved = [name for name in self._signatures if name not in still]
        everyone: list[tuple[list[str], list[str], list[str]]] = agree_all((self._without_gradient, still, moved))
        missing = set.intersection(*(set(names) for names, _, _ in everyone))
        not_moved = {name for _, names, _ in everyone for name in names}
        not_moved -= {name for _, _, names in everyone for name in names}
        order = list(parameters)
        self.report = FirstStepReport(
            without_gradient=sorted(missing, key=order.index),
            not_moved=sorted(not_moved, key=order.index),
            optimizer_state_dtypes=_state_dtypes(parameters, optimizer),
        )
        self._signatures = None
        return self.report


_PIECE = 97 * 2**14  # values, a multiple of the period of the weights


def _signature(parameter: nn.Parameter) -> torch.Tensor:
    """Three numbers that change when any value of this rank's shard does (up to exact cancellation)."""
    shard = local_shard(parameter.detach()).flatten()
    total = torch.zeros(3, dtype=torch.float64, device=shard.device)
    # In pieces: in float64 a large table's shard would take several times its memory, in a step that fits without.
    for piece in shard.split(_PIECE):
        values = piece.double()
        weights = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=shard.device).remainder_(97)
        total += torch.stack([values.sum(), (values * weights).sum(), values.abs().sum()])
    return total


def _state_dtypes(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> dict[str, str]:
    dtypes = {}
    for name, parameter in parameters.items():
        moments = [
            value for value in optimizer.state.get(parameter, {}).values() if torch.is_tensor(value) and value.dim() > 0
        ]
        if moments:
            dtypes[name] = str(moments[0].dtype).removeprefix("torch.")
    return dtypes


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
