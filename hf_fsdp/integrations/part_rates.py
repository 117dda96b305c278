"""Learning rate and weight decay of each part of a model, under any Trainer and any of its optimizers.

Trainer's optimizer has two groups, with weight decay and without. Here each is split by part after Trainer has built
it: the class, its settings and which tensors decay stay Trainer's, and a scheduler scales each group from its own
rate. Checkpoints keep groups by parameter name, so a resumed run finds its rates again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer

from hf_fsdp.errors import ConfigError, Problem, nearest_names
from hf_fsdp.integrations.optimizers import raw_optimizer
from hf_fsdp.policies.model_parts import find_parts
from hf_fsdp.sharding.mesh import rank
from hf_fsdp.units import format_count

RATE_KEY, DECAY_KEY = "part_learning_rate", "part_weight_decay"
# In a parameter group: the part that it belongs to. Saved with the group, and read for logs.
PART = "part"


def set_part_rates(
    trainer: Trainer,
    learning_rates: Mapping[str, float] | None = None,
    weight_decays: Mapping[str, float] | None = None,
) -> None:
    """Give parts of the model a learning rate or a weight decay of their own.

    Call it between ``Trainer(...)`` and ``train()``. Parts that are not named keep `TrainingArguments`' values.
    Adapters count as the part that they sit on. Where Trainer logs ``learning_rate``, ``learning_rate_<part>`` is
    logged beside it.

    Args:
        trainer: a `Trainer` or any subclass, sharded or not; its optimizer is not built yet.
        learning_rates: part -> rate at its peak, e.g. ``{"projector": 2e-5}``; the scheduler scales it as the others.
        weight_decays: part -> decay of its weights; biases and norms stay without, as Trainer has it.

    Raises:
        ConfigError: a part that the model does not have or that is frozen, a value that is no rate, or an optimizer
            that exists already; every problem at once.

    Example::

        trainer = SFTTrainer(model=model, args=args, callbacks=[FSDPCallback()], ...)
        set_part_rates(trainer, {"projector": 2e-5, "vision": 2e-6}, {"vision": 0.0})
        trainer.train()
    """
    rates, decays = dict(learning_rates or {}), dict(weight_decays or {})
    if not rates and not decays:
        return
    problems = check_part_rates(trainer.model, rates, decays)
    if trainer.optimizer is not None:
        problems.append(
            Problem(
                message=f"{RATE_KEY} is given beside an optimizer that is built already, whose groups are its owner's",
                fix=f"leave Trainer(optimizers=...) out; or set lr in its param_groups and leave {RATE_KEY} out",
            )
        )
    if problems:
        raise ConfigError(problems)
    create, log, read = trainer.create_optimizer, trainer.log, trainer._get_learning_rate
    seen: dict[str, float] = {}

    @functools.wraps(create)
    def create_optimizer(model: Any = None) -> Optimizer:
        is_new = trainer.optimizer is None
        optimizer = create(model) if model is not None else create()
        if is_new:
            held, built = trainer.model if model is None else model, raw_optimizer(optimizer)
            split_groups(held, built, trainer.get_decay_parameter_names(held), rates, decays)
            if rank() == 0:
                print(*(f"hf-fsdp: {line}" for line in describe_rates(held, built)), sep="\n", flush=True)
        return optimizer

    @functools.wraps(read)
    def read_rates() -> float:
        # Trainer reads the rate of a step before the scheduler goes on, and logs it later.
        seen.update(current_rates(raw_optimizer(trainer.optimizer)))
        return read()

    @functools.wraps(log)
    def log_rates(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "learning_rate" in logs:
            logs.update(seen)
        log(logs, *args, **kwargs)

    # On the instance: subclasses have their own, and no other Trainer of the process is meant.
    trainer.create_optimizer = create_optimizer
    trainer.log = log_rates
    trainer._get_learning_rate = read_rates


def check_part_rates(
    model: nn.Module, learning_rates: Mapping[str, Any], weight_decays: Mapping[str, Any]
) -> list[Problem]:
    """Return what is wrong with rates by part, for this model as it is trained now."""
    names = find_parts(model).names
    named = dict(model.named_parameters())
    trained = [part for part in names if any(named[name].requires_grad for name in names[part])]
    problems = []
    for key, values in ((RATE_KEY, learning_rates), (DECAY_KEY, weight_decays)):
        for part, value in values.items():
            if part not in names:
                problems.append(
                    Problem(
                        message=f"{key} names {part}, which is no part of {type(model).__name__}",
                        near=", ".join(nearest_names(part, names)) or None,
                        fix=f"{key} of {', '.join(trained)}",
                    )
                )
            elif part not in trained:
                problems.append(
                    Problem(
                        message=f"{key} gives the {part} {value}, and the {part} is frozen",
                        fix=f"trainable: [{', '.join([*trained, part])}], or leave {part} out of {key}",
                    )
                )
            elif (what := _not_a_value(key, value)) is not None:
                problems.append(Problem(message=f"{key}: {part}: {value!r} {what}", fix=_VALUE_FIXES[key].format(part)))
    return problems


_VALUE_FIXES = {
    RATE_KEY: RATE_KEY + ": {{{0}: 2.0e-5}}; to train nothing of a part, leave it out of trainable",
    DECAY_KEY: DECAY_KEY + ": {{{0}: 0.0}}",
}


def _not_a_value(key: str, value: Any) -> str | None:
    if isinstance(value, str):
        return "is text: YAML reads 2e-5 as text and 2.0e-5 as a number"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "is no number"
    if not math.isfinite(value) or value < 0 or (key == RATE_KEY and value == 0):
        return "is no learning rate" if key == RATE_KEY else "is no weight decay"
    return None


# -- groups -----------------------------------------------------------------------------------------------------------


def split_groups(
    model: nn.Module,
    optimizer: Optimizer,
    decaying: Collection[str],
    rates: Mapping[str, float],
    decays: Mapping[str, float],
) -> None:
    """Split the groups of a fresh optimizer by part, in place; parts without a rate come first.

    Args:
        model: whose parameters the optimizer holds.
        optimizer: with no state yet.
        decaying: names of the parameters that decay at all (`Trainer.get_decay_parameter_names`).
        rates: learning rate by part.
        decays: weight decay by part.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts = find_parts(model).by_parameter()
    decaying = set(decaying)
    split: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        kinds: dict[tuple[str | None, bool], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            name = names[id(parameter)]
            part = parts[name] if parts[name] in rates or parts[name] in decays else None
            kinds.setdefault((part, part is not None and name in decaying), []).append(parameter)
        for (part, decays_at_all), parameters in kinds.items():
            own = {**group, "params": parameters}
            if part is not None:
                own |= {PART: part, "lr": rates.get(part, group["lr"])}
            if part is not None and part in decays and "weight_decay" in group:
                own["weight_decay"] = float(decays[part]) if decays_at_all else 0.0
            split.append(own)
    split.sort(key=lambda group: group.get(PART) in rates)  # Trainer logs the first group's rate
    optimizer.param_groups[:] = split


def describe_rates(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return a line for each part that is trained: how many parameters, at which rate and decay."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = find_parts(model)
    parts = found.by_parameter()
    counts: dict[str, dict[tuple[float, float], int]] = {}
    for group in optimizer.param_groups:
        values = (float(group.get("initial_lr", group["lr"])), float(group.get("weight_decay", 0.0)))
        for parameter in group["params"]:
            of_part = counts.setdefault(parts[names[id(parameter)]], {})
            of_part[values] = of_part.get(values, 0) + parameter.numel()
    return [f"{part}: {_in_words(counts[part])}" for part in found.names if part in counts]


def _in_words(counts: Mapping[tuple[float, float], int]) -> str:
    rates = sorted({rate for rate, _ in counts})
    total = format_count(sum(counts.values()))
    decays = sorted({decay for _, decay in counts}, reverse=True)
    words = f"{total} parameters trained at learning rate {' and '.join(f'{rate:g}' for rate in rates)}, weight decay "
    if len(decays) == 1:
        return words + f"{decays[0]:g}"
    per_decay = {decay: sum(count for (_, own), count in counts.items() if own == decay) for decay in decays}
    return words + ", ".join(f"{decay:g} for {format_count(count)}" for decay, count in per_decay.items())


def current_rates(optimizer: Any) -> dict[str, float]:
    """Return ``learning_rate_<part>`` -> rate now, for parts that have a group of their own."""
    groups = getattr(optimizer, "param_groups", ())
    return {f"learning_rate_{group[PART]}": float(group["lr"]) for group in groups if PART in group}
