"""The seams into TRL: models beside the trained one, reference log-probabilities before training, generation servers.

TRL wraps a reference model, a teacher or a reward model by `prepare_fsdp` as one unit, so every rank gathers all of
it at once; it computes reference log-probabilities ahead of training on a policy that nothing has sharded yet. Here
both go through the same backend as the trained model. Pinned by `tests/unit/test_trl_seams.py`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_fsdp.errors import Problem
from hf_fsdp.integrations.accelerate import active_backend, is_seam, mark_seam, replace_method
from hf_fsdp.sharding.apply import get_applied_sharding

_TRL_HOME = "trl.models.utils"
_PREPARE = "prepare_fsdp"
_PRECOMPUTE = "_precompute_ref_logps"
# Their `compute_loss` divides by the items of all ranks (TRL 1.14 to 1.16).
_DIVIDE_BY_ALL_ITEMS = frozenset({"GKDTrainer", "GOLDTrainer", "IWOPDTrainer"})
# Batched generation by transformers' own scheduler: each rank runs as many steps as its own requests need.
_OWN_SCHEDULERS = ("use_transformers_continuous_batching", "use_transformers_paged")


def install_trl_seams() -> None:
    """Put the seams in place in every module of TRL that is loaded now; calling it again changes nothing.

    Called when a Trainer has been built, because only then the modules of its class are sure to be there: each of
    them holds its own reference to `prepare_fsdp`.
    """
    home = sys.modules.get(_TRL_HOME)
    original = vars(home).get(_PREPARE) if home is not None else None
    if original is not None and not is_seam(original):
        _replace_everywhere(original, _prepare_fsdp_with(original))
    for cls in _trainer_classes(Trainer):
        if _PRECOMPUTE in vars(cls):
            replace_method(cls, _PRECOMPUTE, _precompute)


def check_trl_arguments(args: TrainingArguments) -> list[Problem]:
    """Return what in the config of a TRL trainer cannot work on a sharded model.

    Mostly keyed on what is asked for and not on the trainer's name: a config with a server's address and no switch
    generates there always.
    """
    name = type(args).__name__
    source = f"{name}(...)"
    problems = []
    if getattr(args, "use_vllm", False):
        mode = getattr(args, "vllm_mode", "server")
        problems.append(
            Problem(
                message=f"use_vllm=True (vllm_mode={mode!r}): vLLM would have to be given the gathered weights at "
                "every step, which this release does not do",
                fix="use_vllm=False: the sharded model then generates by itself, all ranks in step",
                source=source,
            )
        )
    elif not hasattr(args, "use_vllm") and hasattr(args, "vllm_server_base_url"):
        problems.append(
            Problem(
                message=f"{name} always generates on a vLLM server, which would have to be given the gathered weights, "
                "and this release does not do that",
                fix="GRPOTrainer(args=GRPOConfig(use_vllm=False, ...)), which generates with the sharded model; "
                "or train without FSDPCallback",
                source=source,
            )
        )
    if on := [field for field in _OWN_SCHEDULERS if getattr(args, field, False)]:
        problems.append(
            Problem(
                message=f"{on[0]}=True: every rank would generate as many steps as its own prompts need, "
                "while each step gathers weights from all ranks",
                fix=f"{on[0]}=False: plain generate() keeps the ranks in step",
                source=source,
            )
        )
    if not problems and any(cls.__name__ == "DistillationConfig" and is_trl(cls) for cls in type(args).__mro__):
        problems.append(
            Problem(
                message=f"{name}: its trainer multiplies by lm_head.weight beside the model's forward, where the head "
                "is sharded, and no test of this release shows that its gradients are whole",
                fix="GKDTrainer(args=GKDConfig(...)) of trl.experimental.gkd, whose loss is made of the model's logits",
                source=source,
            )
        )
    return problems


def is_trl(cls: type) -> bool:
    """Return whether `cls` is TRL's own."""
    return cls.__module__.partition(".")[0] == "trl"


def items_for_loss(trainer: Trainer, num_items: Any) -> Any:
    """Return the items that a trainer's own loss has to divide by so that the mean over ranks is the global mean.

    Trainer hands every rank the items of all ranks, and gradients are averaged over ranks: a loss that divides by
    them and does not multiply by the number of ranks, as these do, trains with that many times too small a gradient.
    """
    counted = num_items is not None and trainer.args.average_tokens_across_devices
    if counted and any(cls.__name__ in _DIVIDE_BY_ALL_ITEMS and is_trl(cls) for cls in type(trainer).__mro__):
        return num_items / trainer.args.world_size
    return num_items


def _prepare_fsdp_with(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(original)
    def prepare_fsdp(model: nn.Module, accelerator: Accelerator) -> nn.Module:
        backend = active_backend(accelerator.state)
        if backend is None:
            return original(model, accelerator)
        backend.shard_frozen(model, accelerator.device.type)
        return model

    mark_seam(prepare_fsdp)
    return prepare_fsdp


def _precompute(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Shard the policy first where it is its own reference: unsharded, every rank would hold and run all of it."""
    is_own_reference = getattr(trainer, "ref_model", None) is None
    if (
        active_backend(trainer.accelerator.state) is not None
        and is_own_reference
        and get_applied_sharding(trainer.model) is None
    ):
        trainer.accelerator.prepare(trainer.model)
    return original(*args, **kwargs)


def _replace_everywhere(original: Any, replacement: Any) -> None:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get(_PREPARE) is original:
            setattr(module, _PREPARE, replacement)


def _trainer_classes(cls: type) -> Iterator[type]:
    yield cls
    subclasses: list[type] = cls.__subclasses__()
    for subclass in subclasses:
        yield from _trainer_classes(subclass)
