"""How a running model is fine-tuned, in the planner's words: in full, frozen parts, LoRA, LoRA on 4-bit weights."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_fsdp.errors import Problem
from hf_fsdp.plan.job import Method
from hf_fsdp.policies.blocks import base_model
from hf_fsdp.policies.linear_layers import head_of
from hf_fsdp.policies.model_parts import find_parts
from hf_fsdp.policies.packed_weights import four_bit_layers, listed

_FIX = "leave plan_memory off for this run"
# Settings of LoRA that change what is held, and of which a `Method` knows nothing.
_ODD_LORA = (
    "use_dora",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "layers_to_transform",
    "lora_bias",
)


def read_method(model: nn.Module, load_dtypes: Mapping[str, torch.dtype] | None = None) -> tuple[Method, list[Problem]]:
    """Return how `model` is fine-tuned, and what of it a `Method` cannot say.

    Args:
        model: as it trains; sharded or not.
        load_dtypes: dtype that each parameter was loaded in, by name; default: the dtype that it has.
    """
    base = base_model(model)
    load_dtype = _load_dtype(model, load_dtypes or {})
    adapted = list(_adapted_layers(base))
    layers = four_bit_layers(base)
    if not adapted:
        trainable, problems = _trained_parts(model)
        if layers:
            problems.append(_unsaid("weights in 4 bits without LoRA on them are not simulated"))
        return Method(name="full", load_dtype=load_dtype, trainable=trainable), problems
    settings, problems = _adapter_settings(model)
    if settings is None:
        return Method(), problems
    parts = _parts_of_layers(base, adapted)
    full = _parts_in_full(base)
    if both := sorted(parts & full):
        problems.append(_unsaid(f"modules_to_save in the {both[0]}, which has adapters too, are not simulated"))
    has_parts = len(find_parts(base).names) > 1
    method = Method(
        name="qlora" if layers else "lora",
        load_dtype=load_dtype,
        lora_r=int(settings.r),
        lora_dropout=float(settings.lora_dropout),
        lora_targets=_targets(base, adapted, parts),
        lora_parts=tuple(sorted(parts)) if has_parts else (),
        lora_full=tuple(sorted(full)),
        double_quantization=bool(layers[0][1].quant_state.nested) if layers else True,
    )
    return method, problems


def _unsaid(message: str) -> Problem:
    return Problem(message=message, fix=_FIX)


def _load_dtype(model: nn.Module, load_dtypes: Mapping[str, torch.dtype]) -> str:
    """The dtype of most frozen weights; of most weights where all are trained."""
    packed = {id(layer.weight) for _, layer in four_bit_layers(model)}
    sizes: dict[bool, Counter[torch.dtype]] = {True: Counter(), False: Counter()}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and id(parameter) not in packed:
            sizes[parameter.requires_grad][load_dtypes.get(name, parameter.dtype)] += parameter.numel()
    most = (sizes[False] or sizes[True]).most_common(1)
    return str(most[0][0]).removeprefix("torch.") if most else "auto"


def _trained_parts(model: nn.Module) -> tuple[tuple[str, ...], list[Problem]]:
    """Return the parts that are trained (empty: all), and those of which only some weights are."""
    named = dict(model.named_parameters())
    trained, frozen, problems = [], [], []
    for part, names in find_parts(model).names.items():
        still = [name for name in names if not named[name].requires_grad]
        if not still:
            trained.append(part)
        elif len(still) == len(names):
            frozen.append(part)
        else:
            problems.append(_unsaid(f"only some weights of the {part} are trained (frozen: {listed(still)})"))
    if not trained and not problems:
        problems.append(_unsaid("no weight is trained"))
    return tuple(trained) if frozen else (), problems


# -- adapters ---------------------------------------------------------------------------------------------------------


def _tuners() -> Any | None:
    """PEFT's module of layers; without it nobody can have put an adapter anywhere."""
    if "peft" not in sys.modules:
        return None
    from peft.tuners import tuners_utils

    return tuners_utils


def _adapted_layers(base: nn.Module) -> Iterator[str]:
    tuners = _tuners()
    if tuners is not None:
        for path, module in base.named_modules():
            if isinstance(module, tuners.BaseTunerLayer):
                yield path


def _adapter_settings(model: Any) -> tuple[Any, list[Problem]]:
    configs = dict(getattr(model, "peft_config", {}))
    if len(configs) != 1:
        return None, [_unsaid(f"a model with {len(configs)} adapters is not simulated")]
    settings = next(iter(configs.values()))
    kind = str(getattr(settings.peft_type, "value", settings.peft_type))
    if kind != "LORA":
        return None, [_unsaid(f"adapters of the kind {kind} are not simulated, LoRA is")]
    problems = [
        _unsaid(f"LoraConfig({name}={getattr(settings, name)!r}) is not simulated")
        for name in _ODD_LORA
        if getattr(settings, name, None)
    ]
    if settings.bias != "none":
        problems.append(_unsaid(f"LoraConfig(bias={settings.bias!r}) is not simulated"))
    return settings, problems


def _parts_of_layers(base: nn.Module, paths: Sequence[str]) -> set[str]:
    by_name = find_parts(base).by_parameter()
    wanted = tuple(f"{path}." for path in paths)
    return {part for name, part in by_name.items() if name.startswith(wanted)}


def _parts_in_full(base: nn.Module) -> set[str]:
    """The parts of modules that are trained in full beside adapters (PEFT's `modules_to_save`)."""
    if _tuners() is None:
        return set()
    from peft.utils import ModulesToSaveWrapper

    paths = [path for path, module in base.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    return _parts_of_layers(base, paths)


def _targets(base: nn.Module, adapted: Sequence[str], parts: set[str]) -> tuple[str, ...]:
    """Return the names of the adapted layers, as short as they can be without naming others; else their full paths."""
    inside = tuple(f"{path}." for path in adapted)
    plain = [
        path
        for path, module in base.named_modules()
        if isinstance(module, nn.Linear) and path not in adapted and not path.startswith(inside)
    ]
    by_name = find_parts(base).by_parameter()
    others = {path for path in plain if by_name.get(f"{path}.weight") in parts}
    names = sorted({path.rpartition(".")[2] for path in adapted})
    if not any(path.rpartition(".")[2] in names for path in others):
        head = head_of(base)
        is_all = not [path for path in others if base.get_submodule(path) is not head]
        return ("all-linear",) if is_all else tuple(names)
    return tuple(adapted)
