"""What happens around the forward of a sharded model as a whole: its inputs, its loss, what it leaves gathered."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from hf_fsdp.policies.forward_source import forward_functions
from hf_fsdp.policies.packed_rows import keep_packed_rows_apart
from hf_fsdp.sharding.compute_dtype import answer_compute_dtype

# Functions whose result is a loss. A sum over a batch in bf16 keeps 8 bits; autocast runs them in float32, and so do
# transformers' causal language models by themselves, but not its T5, BERT or ViT.
_LOSSES = frozenset(
    function
    for name in (
        "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss "
        "gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss "
        "multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss nll_loss poisson_nll_loss "
        "smooth_l1_loss soft_margin_loss triplet_margin_loss"
    ).split()
    if (function := getattr(F, name, None)) is not None
)


_TARGET = re.compile(r"(^|_)(labels?|targets?|weights?)$", re.IGNORECASE)
# The names under which a forward computes a loss by itself; transformers' `self.loss_function` upcasts already.
_LOSS_NAMES = re.compile(r"Loss\(|cross_entropy|mse_loss|l1_loss|nll_loss|kl_div|ctc_loss|huber_loss")


def install_root_hooks(model: nn.Module, compute: torch.dtype, units: Iterable[nn.Module]) -> None:
    """Register what a sharded model needs around its own forward; after `fully_shard`, so that these run inside.

    Args:
        model: the root.
        compute: inputs (not labels, not weights of samples) are cast to it; losses are computed in float32.
        units: a module of every unit, to be freed after a forward without gradients.
    """
    if compute is not torch.float32:
        names = tuple(inspect.signature(model.forward).parameters)
        answer_compute_dtype(model, compute)
        model.register_forward_pre_hook(functools.partial(_cast_inputs, compute, names), with_kwargs=True)
        if any(_has_loss_function(function) for module in model.modules() for function in forward_functions(module)):
            _compute_losses_in_float32(model)
    keep_packed_rows_apart(model)
    sharded = [module for module in units if isinstance(module, FSDPModule)]
    model.register_forward_hook(functools.partial(_free_after_forward, sharded), always_call=True)
    _free_before_optimizer_steps(model, sharded)
    if hasattr(model, "generate"):
        method: Any = model.generate
        model.generate = _freeing_method(method, sharded)  # type: ignore[assignment]


def _free_after_forward(units: Sequence[FSDPModule], module: nn.Module, inputs: Any, output: Any) -> None:
    """Without a backward to come, nobody would free the root and the head.

    Whole, they hide the sharded parameters: an optimizer step in between would not reach the next forward, and
    `model.zero_grad()` would clear the gradients of the wrong ones.
    """
    if not torch.is_grad_enabled():
        for unit in units:
            unit.reshard()


_step_hooks: list[Any] = []
_units_of_models: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def _free_before_optimizer_steps(model: nn.Module, units: Sequence[FSDPModule]) -> None:
    """Also after a forward with gradients that got no backward: the step must reach what the next forward reads."""
    if not _step_hooks:
        _step_hooks.append(register_optimizer_step_pre_hook(_free_all))
    _units_of_models[model] = [weakref.ref(unit) for unit in units]


def _free_all(optimizer: Any, args: Any, kwargs: Any) -> None:
    for units in list(_units_of_models.values()):
        for reference in units:
            if (unit := reference()) is not None:
                unit.reshard()


def _freeing_method(method: Callable[..., Any], units: Sequence[FSDPModule]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            for unit in units:
                unit.reshard()

    return call


def _cast_inputs(
    compute: torch.dtype, names: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Cast what layers compute with. Labels and weights of samples keep their precision, by name or by position."""

    def cast(value: Any) -> Any:
        return value.to(compute) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def cast_input(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            # Of its own class: `generate` hands over what a tower or an encoder returned, read by attribute.
            same = copy.copy(value)
            for key, item in value.items():
                same[key] = cast_input(str(key), item)  # ModelOutput refuses `update`
            return same
        return value if _TARGET.search(name) else tree_map(cast, value)

    named = (*names, *("" for _ in args))
    return tuple(cast_input(named[index], value) for index, value in enumerate(args)), {
        name: cast_input(name, value) for name, value in kwargs.items()
    }


@functools.lru_cache(maxsize=4096)
def _has_loss_function(function: Callable[..., Any]) -> bool:
    try:
        return _LOSS_NAMES.search(inspect.getsource(function.__code__)) is not None
    except (OSError, TypeError):
        return True


def _compute_losses_in_float32(model: nn.Module) -> None:
    active: list[_Float32Losses] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        active.append(_Float32Losses())
        active[-1].__enter__()

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        if active:
            active.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


class _Float32Losses(TorchFunctionMode):
    """Upcasts the floating inputs of loss functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOSSES:
            args, kwargs = tree_map(_upcast, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _upcast(value: Any) -> Any:
    low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value
