"""The optimizer of a simulated step: made as Trainer makes it, and run over the rank's shards as plain tensors.

A sharded parameter is a `DTensor`, and an optimizer over them runs the same kernels on their local parts; what torch
works out around each kernel takes a large part of a simulation's time and no memory. So the shards themselves are
stepped: each has a parameter of its own that shares its storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hf_fsdp.errors import PlanError, nearest_names
from hf_fsdp.torch_private import local_shard

_OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw_torch_fused": (torch.optim.AdamW, {"fused": True}),
    "adamw_torch": (torch.optim.AdamW, {}),
    "sgd": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
}


def build_optimizer(name: str, parameters: Iterable[torch.Tensor], foreach: bool | None = None) -> Optimizer:
    """Return the optimizer that transformers calls `name`, over the trained parameters, in its two groups.

    Args:
        name: as ``optim`` of `TrainingArguments`.
        parameters: all of a model; frozen ones are left out.
        foreach: whether one kernel steps many parameters, with temporaries of their size; None: torch decides, by
            device and type, which is right for real tensors only. Fused ones never do.

    Raises:
        PlanError: one that is not simulated.
    """
    if name not in _OPTIMIZERS:
        near = nearest_names(name, _OPTIMIZERS)
        raise PlanError(
            f"optimizer {name} is not one that the planner simulates",
            near=", ".join(near or _OPTIMIZERS),
            fix=f"--optim {(near or ['adamw_torch_fused'])[0]}",
        )
    kind, options = _OPTIMIZERS[name]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    if not options.get("fused"):
        options = {**options, "foreach": foreach}
    return kind([group for group in groups if group["params"]], lr=1e-3, **options)  # type: ignore[call-arg]


class ShardOptimizer:
    """An optimizer over this rank's shards of a model's trained parameters, with its state made.

    Args:
        name: as ``optim`` of `TrainingArguments`.
        model: sharded or whole.
        foreach: as in `build_optimizer`.
    """

    def __init__(self, name: str, model: nn.Module, foreach: bool):
        self._shards: dict[nn.Parameter, torch.Tensor] = {
            parameter: _shard(parameter) for parameter in model.parameters() if parameter.requires_grad
        }
        self._optimizer = build_optimizer(name, self._shards.values(), foreach)
        self._make_state()

    def _make_state(self) -> None:
        """Let the optimizer make its state as after a first step, by a step on zeros."""
        for shard in self._shards.values():
            shard.grad = torch.zeros_like(shard)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def take_gradients(self) -> None:
        """Let the shards have the gradients of their parameters."""
        for parameter, shard in self._shards.items():
            shard.grad = None if parameter.grad is None else local_shard(parameter.grad)

    def clip(self, max_norm: float) -> None:
        """Clip gradients by the norm of this rank's; the real one adds those of others up, which is one number."""
        torch.nn.utils.clip_grad_norm_(self._shards.values(), max_norm)

    def step(self) -> None:
        """Step, and drop all gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()
        for parameter in self._shards:
            parameter.grad = None

    def forget_unused(self) -> list[torch.Tensor]:
        """Leave parameters without a gradient out, and return what state they had: no optimizer makes any for those.

        A tower's layers behind the one whose features are read have none.
        """
        unused = [parameter for parameter in self._shards if parameter.grad is None]
        return [value for parameter in unused for value in _tensors(self._state_of(self._shards.pop(parameter)))]

    @property
    def stepped(self) -> list[nn.Parameter]:
        """The parameters that are stepped."""
        return list(self._shards)

    @property
    def gradients(self) -> Iterator[torch.Tensor]:
        """Those that the shards have."""
        return (shard.grad for shard in self._shards.values() if shard.grad is not None)

    @property
    def state(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each tensor of the state on this rank, with the parameter that it is for."""
        for parameter, shard in self._shards.items():
            for value in _tensors(self._state_of(shard)):
                yield parameter, value

    def _state_of(self, shard: torch.Tensor) -> dict[str, Any]:
        return self._optimizer.state.get(shard, {})


def _shard(parameter: nn.Parameter) -> torch.Tensor:
    shard = local_shard(parameter)
    return parameter if shard is parameter else nn.Parameter(shard.detach())


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)]
