"""Batches without an image (video, sound) on some ranks while others have one.

Such a rank skips a tower, and the gathers and reductions of the ranks no longer pair up: gloo aborts, NCCL waits for
ever, with a frozen tower too. So before each forward the ranks agree on who has what. Where all have it, or none, that
was all. Otherwise a rank that has none runs the tower on inputs of another rank's shapes, at the moment where the
others run it on theirs, and ties what comes out to the language model's inputs with weight zero: the forward gives the
same numbers to the bit, and the backward passes the tower as the others do, with gradients that are zero.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp.errors import Problem, ShardingError
from hf_fsdp.sharding.mesh import agree_all, agreement_group, is_simulated, world_size
from hf_fsdp.sharding.modalities import Fusion, Modality, find_fusion
from hf_fsdp.sharding.stand_in_inputs import count_values, outline, stand_in, tensors_in

_ABSENT = 2**62
# What a tower returns besides its features. The model reads none of it, so on ranks with pictures no gradient comes
# from there, and the tower's last layer may get none at all (LLaVA takes its features before it).
_NOT_FEATURES = frozenset({"last_hidden_state", "hidden_states", "attentions"})
# Where transformers' generate() runs the towers before its first forward.
GENERATE_ENCODES = "_prepare_multimodal_encoder_kwargs_for_generation"


def install_missing_images(model: nn.Module, device_type: str) -> None:
    """Keep the ranks of a sharded model in step when the batches of some hold no image, video or sound.

    Args:
        model: the root, after `fully_shard`: every rank runs its forward as often as the others. Without effect on one
            process, and on models that take text only or cannot do without their other input.
        device_type: where it computes, which under offload is not where its parameters are.

    Raises:
        ShardingError: in a forward, on all ranks alike: ranks differ and the model's tower cannot be run alone
            (Mllama skips its cross attention too).
    """
    fusion = find_fusion(model) if world_size() > 1 and not is_simulated() else None
    if fusion is None:
        return
    ranks = _RanksInStep(fusion, torch.device(device_type))
    fusion.module.register_forward_pre_hook(ranks.before_fusion, with_kwargs=True)
    fusion.module.register_forward_hook(ranks.after_fusion)
    if fusion.language_model is not None:
        # First of all hooks: were this module a unit, the other ranks would gather it after the tower.
        fusion.language_model.register_forward_pre_hook(ranks.before_language_model, prepend=True, with_kwargs=True)
    for module in model.modules():
        if hasattr(module, GENERATE_ENCODES) and fusion.module in set(module.modules()):
            original = getattr(module, GENERATE_ENCODES)
            setattr(module, GENERATE_ENCODES, functools.partial(ranks.before_generate_encodes, original))


class _RanksInStep:
    """What is agreed in one forward: which towers this rank still has to run on a stand-in, and what they returned."""

    def __init__(self, fusion: Fusion, device: torch.device):
        self._fusion = fusion
        self._device = device
        self._names = tuple(inspect.signature(fusion.module.forward).parameters)
        self._owed: dict[Modality, Mapping[str, Any]] = {}
        self._features: list[torch.Tensor] = []
        self._norms = [m for m in fusion.module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]

    # -- hooks --------------------------------------------------------------------------------------------------------

    def before_fusion(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        self._begin(given)
        empty = {m.name: None for m in self._fusion.modalities if kwargs.get(m.name) is not None and not _has(m, given)}
        return args, {**kwargs, **empty}

    def before_language_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        if not self._owed and not self._features:
            return None
        embeds = kwargs.get("inputs_embeds")
        if embeds is None:
            raise ShardingError(self._problem(next(iter(self._owed)), "it calls its language model with token ids"))
        self._run_owed()
        features, self._features = self._features, []
        trained = [tensor for tensor in features if tensor.requires_grad]
        return args, {**kwargs, "inputs_embeds": _WithoutWeight.apply(embeds, *trained)} if trained else kwargs

    def after_fusion(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._owed:
            raise ShardingError(self._problem(next(iter(self._owed)), "it did not call its language model"))

    def before_generate_encodes(self, original: Callable[..., Any], model_kwargs: dict[str, Any]) -> Any:
        """`generate` runs the towers itself, before the first forward and under no gradient."""
        self._begin(model_kwargs)
        self._run_owed()
        self._features = []
        return original(model_kwargs)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _begin(self, given: Mapping[str, Any]) -> None:
        self._restore_methods()
        self._owed, self._features = {}, []
        mixed = _agree_on_mixed(self._fusion.modalities, given)
        if not mixed:
            return
        if hopeless := [modality for modality in mixed if modality.method is None]:
            raise ShardingError([self._problem(modality, modality.reason) for modality in hopeless])
        offers = _exchange_outlines(mixed, given)
        self._owed = {modality: offers[modality.name] for modality in mixed if not _has(modality, given)}
        self._keep_order(given)

    def _keep_order(self, given: Mapping[str, Any]) -> None:
        """Run what is owed before any real tower that comes later: other ranks run them in this order."""
        owed: list[Modality] = []
        for modality in self._fusion.modalities:
            if modality in self._owed:
                owed.append(modality)
            elif owed and modality.method is not None and _has(modality, given):
                real = getattr(self._fusion.module, modality.method)
                vars(self._fusion.module)[modality.method] = functools.partial(self._run_first, tuple(owed), real)

    def _run_first(self, owed: tuple[Modality, ...], real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._run_owed(owed)
        return real(*args, **kwargs)

    def _restore_methods(self) -> None:
        for name, value in list(vars(self._fusion.module).items()):
            if isinstance(value, functools.partial) and value.func == self._run_first:
                del vars(self._fusion.module)[name]

    def _run_owed(self, modalities: tuple[Modality, ...] | None = None) -> None:
        if modalities is None:
            self._restore_methods()
        for modality in modalities or tuple(self._owed):
            if (outlined := self._owed.pop(modality, None)) is not None:
                with _leaving_no_trace(self._norms, self._device):
                    self._features += self._run_tower(modality, outlined)

    def _run_tower(self, modality: Modality, outlined: Mapping[str, Any]) -> list[torch.Tensor]:
        method = getattr(self._fusion.module, modality.method or "")
        try:
            output = method(**{name: stand_in(value, self._device) for name, value in outlined.items()})
        except Exception as error:
            raise ShardingError(self._problem(modality, f"{modality.method} failed on a stand-in: {error}")) from error
        if isinstance(output, Mapping):
            output = {name: value for name, value in output.items() if name not in _NOT_FEATURES}
        return tensors_in(output)

    def _problem(self, modality: Modality, reason: str) -> Problem:
        return Problem(
            message=f"some ranks have {modality.name} in this batch and others have none, and "
            f"{type(self._fusion.module).__name__} has no tower that can be run alone: {reason}. The ranks would "
            "wait for each other for ever",
            fix=f"give every rank's batch {modality.name} (one padding sample whose labels are all -100 is enough), or "
            "train on samples that all have it",
        )


# -- agreement --------------------------------------------------------------------------------------------------------


def _agree_on_mixed(modalities: tuple[Modality, ...], given: Mapping[str, Any]) -> list[Modality]:
    """Return what some ranks have and others lack; one small all-reduce on the CPU, nothing waits on the device."""
    sizes = [count_values(given.get(modality.name)) for modality in modalities]
    smallest = torch.tensor([*(size or _ABSENT for size in sizes), *(min(size, 1) for size in sizes)])
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=agreement_group())
    values = smallest.tolist()
    return [
        modality
        for modality, least, all_have in zip(modalities, values, values[len(modalities) :], strict=False)
        if least != _ABSENT and not all_have
    ]


def _exchange_outlines(mixed: list[Modality], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return for each of `mixed` the arguments of its method on the rank that has least of it, as outlines."""
    mine: dict[str, tuple[int, dict[str, Any] | str]] = {}
    for modality in mixed:
        if _has(modality, given):
            arguments = {
                name: given[name] for name in (modality.name, *modality.companions) if given.get(name) is not None
            }
            try:
                mine[modality.name] = count_values(given[modality.name]), outline(arguments)
            except TypeError as error:
                mine[modality.name] = 0, str(error)
    offers = agree_all(mine)
    chosen = {}
    for modality in mixed:
        _, arguments = min((o[modality.name] for o in offers if modality.name in o), key=lambda offer: offer[0])
        if isinstance(arguments, str):
            raise ShardingError(
                f"{modality.name}: a rank without any cannot be given a stand-in for a {arguments}",
                fix="let the collator make tensors, or lists of tensors",
            )
        chosen[modality.name] = arguments
    return chosen


def _has(modality: Modality, given: Mapping[str, Any]) -> bool:
    return count_values(given.get(modality.name)) > 0


# -- the stand-in leaves no trace -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _leaving_no_trace(norms: list[Any], device: torch.device) -> Iterator[None]:
    """Keep the random state, and the running statistics of batch norms, as if the tower had not run."""
    kept = [(norm, dict(norm._buffers)) for norm in norms if norm.training]
    for norm, buffers in kept:
        norm._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
    on_cpu = device.type == "cpu"
    devices = [] if on_cpu else [torch.get_device_module(device).current_device()]
    try:
        with torch.random.fork_rng(devices, device_type="cuda" if on_cpu else device.type):
            yield
    finally:
        for norm, buffers in kept:
            norm._buffers.update(buffers)


class _WithoutWeight(torch.autograd.Function):
    """Passes `embeds` on with the features in its graph; adding zero times a feature would be NaN where it is inf."""

    @staticmethod
    def forward(ctx: Any, embeds: torch.Tensor, *features: torch.Tensor) -> torch.Tensor:
        ctx.outlines = [(feature.shape, feature.dtype, feature.device) for feature in features]
        return embeds.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.outlines]
        return gradients[0], *zeros
