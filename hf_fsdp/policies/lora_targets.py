"""Which layers get LoRA adapters: those of the chosen parts, and none that a name happens to hit elsewhere.

PEFT's `all-linear` takes the vision tower and the projector too, and a list such as ``[q_proj, v_proj]`` also names the
attention of CLIP and SigLIP. Here the layers are chosen by part first; PEFT gets a pattern that matches exactly them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from hf_fsdp.errors import ConfigError, Problem, nearest_names
from hf_fsdp.policies.linear_layers import ALL_LINEAR, is_named, linears_by_part, part_of_modules, read_by_attention
from hf_fsdp.policies.lora_pattern import pattern_of
from hf_fsdp.policies.model_parts import LANGUAGE, as_part_names, find_parts, part_paths, resolve_parts


@dataclass(frozen=True)
class LoraTargets:
    """Where adapters go, in the words of `peft.LoraConfig`.

    Args:
        target_modules: a pattern that matches the full paths of the chosen layers and nothing else in this model.
        modules_to_save: modules that are trained in full beside the adapters; None where there are none.
        counts: adapted layers by part.
        notes: what was left out and why, a line each.
    """

    target_modules: str
    modules_to_save: list[str] | None
    counts: Mapping[str, int]
    notes: tuple[str, ...] = field(default=())

    def lines(self) -> list[str]:
        """Return what to tell a person."""
        where = ", ".join(f"{count} layers of the {part}" for part, count in self.counts.items())
        full = f"; trained in full: {', '.join(self.modules_to_save)}" if self.modules_to_save else ""
        return [f"LoRA on {where}{full}", *self.notes]


def plan_lora(
    model: nn.Module,
    parts: str | Sequence[str] = (LANGUAGE,),
    kinds: str | Sequence[str] = ALL_LINEAR,
    *,
    train_in_full: str | Sequence[str] = (),
) -> LoraTargets:
    """Decide where LoRA adapters go in a model of several parts.

    Args:
        model: before `get_peft_model`; meta tensors or weights that are still unread are enough.
        parts: that get adapters; ``language`` alone by default, as papers do. ``all`` takes every part.
        kinds: ``all-linear``, or names of linear layers (``[q_proj, v_proj]``, ``self_attn.o_proj``), or one pattern
            over full paths.
        train_in_full: parts that are trained without adapters beside them, as LLaVA-1.5 does with its projector.

    Returns:
        The targets, for ``LoraConfig(target_modules=..., modules_to_save=...)``.

    Raises:
        ConfigError: an unknown part, a name that no layer of the chosen parts has, a part without linear layers, or
            one that is to be both adapted and trained in full; every problem at once.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, vocab_size=16,
        ...                      num_attention_heads=1, num_key_value_heads=1)
        >>> plan_lora(LlamaForCausalLM(config), kinds=["q_proj", "v_proj"]).target_modules
        'model\\\\.layers\\\\.\\\\d+\\\\.self_attn\\\\.(?:q_proj|v_proj)'
    """
    found = find_parts(model)
    wanted = resolve_parts(model, found, as_part_names(parts), "lora_parts")
    full = as_part_names(train_in_full)
    in_full = resolve_parts(model, found, full, "trainable") if full else set()
    linears = linears_by_part(model)
    chosen: dict[str, list[str]] = {}
    problems = [*_check_full_parts(in_full, wanted)]
    for part in found.names:
        if part in wanted:
            chosen[part] = [path for path in linears.get(part, []) if is_named(path, kinds)]
    problems += _check_names(chosen, linears, wanted, kinds)
    if problems:
        raise ConfigError(problems)
    names = [name for part in in_full for name in found.names[part]]
    save, loose = _modules_to_save(model, part_paths(model, names))
    return LoraTargets(
        target_modules=pattern_of([path for paths in chosen.values() for path in paths], model),
        modules_to_save=save or None,
        counts={part: len(paths) for part, paths in chosen.items()},
        notes=tuple([*_left_out(model, found.names, wanted, linears, kinds), *loose]),
    )


def lora_targets(
    model: nn.Module, parts: str | Sequence[str] = (LANGUAGE,), kinds: str | Sequence[str] = ALL_LINEAR
) -> str:
    """Return `plan_lora(...).target_modules`, for ``peft.LoraConfig(target_modules=...)``."""
    return plan_lora(model, parts, kinds).target_modules


# -- what is said and refused -----------------------------------------------------------------------------------------


def _check_full_parts(in_full: set[str], wanted: set[str]) -> Iterator[Problem]:
    for part in sorted(in_full & wanted):
        yield Problem(
            message=f"the {part} is in lora_parts and in trainable: it gets adapters or is trained in full",
            fix=f"leave {part} out of trainable, or out of lora_parts",
        )


def _check_names(
    chosen: Mapping[str, Sequence[str]],
    linears: Mapping[str, Sequence[str]],
    wanted: set[str],
    kinds: str | Sequence[str],
) -> list[Problem]:
    problems = [
        Problem(
            message=f"lora_parts has {part}, which has no linear layer that an adapter could be put on",
            fix=f"train it in full: trainable: [{part}], and leave it out of lora_parts",
        )
        for part in sorted(wanted)
        if not linears.get(part)
    ]
    available = [path for part in wanted for path in linears.get(part, [])]
    names = sorted({path.rpartition(".")[2] for path in available})
    asked = [kinds] if isinstance(kinds, str) else list(kinds)
    for kind in asked:
        if not problems and not any(is_named(path, kind) for path in available):
            elsewhere = [part for part, paths in linears.items() if any(is_named(path, kind) for path in paths)]
            problems.append(
                Problem(
                    message=f"lora_target_modules={kind} names no linear layer of the {', '.join(sorted(wanted))}"
                    + (f" (but {', '.join(elsewhere)} has it)" if elsewhere else ""),
                    near=", ".join(nearest_names(kind, names)) or None,
                    fix=f"lora_target_modules: [{', '.join(names)}], some of them, or {ALL_LINEAR}",
                )
            )
    if not asked:
        problems.append(
            Problem(message="lora_target_modules=[] adapts nothing", fix=f"lora_target_modules: {ALL_LINEAR}")
        )
    return problems


def _left_out(
    model: nn.Module,
    part_names: Mapping[str, Sequence[str]],
    wanted: set[str],
    linears: Mapping[str, Sequence[str]],
    kinds: str | Sequence[str],
) -> Iterator[str]:
    is_all = isinstance(kinds, str) and kinds.lower() == ALL_LINEAR
    for part in part_names:
        count = sum(is_named(path, kinds) for path in linears.get(part, ()))
        if part not in wanted and count and not is_all:
            shown = kinds if isinstance(kinds, str) else ", ".join(kinds)
            yield f"{shown}: also the names of {count} layers of the {part}, which get no adapter (lora_parts)"
    read = [path for path in read_by_attention(model) if part_of_modules(model).get(path) in wanted]
    if read:
        yield f"{read[0]}: no adapter, since torch's MultiheadAttention reads this weight without calling the layer"
    named = dict(model.named_parameters())
    fused = [name for part in wanted for name in part_names[part] if _is_fused(named[name], name, model)]
    if fused:
        yield (
            f"{len(fused)} tensors of fused experts ({fused[0]}, …) are no linear layers and get no adapter; "
            "PEFT adapts them by LoraConfig(target_parameters=...), which is not merged or exported here"
        )


def _is_fused(parameter: nn.Parameter, name: str, model: nn.Module) -> bool:
    owner = model.get_submodule(name.rpartition(".")[0])
    return parameter.dim() == 3 and "expert" in name and not isinstance(owner, nn.modules.conv._ConvNd)


def _modules_to_save(model: nn.Module, paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return what PEFT can train in full, and lines about what it cannot: it wraps modules that have a forward."""
    modules: list[str] = []
    loose: list[str] = []
    names = {name for name, _ in model.named_parameters()}
    waiting = list(paths)
    while waiting:
        path = waiting.pop(0)
        if path in names:
            loose.append(
                f"{path} is a parameter outside of any module, which PEFT cannot train or save: it stays frozen"
            )
        elif isinstance(module := model.get_submodule(path), (nn.ModuleList, nn.ModuleDict, nn.ParameterList)):
            waiting[:0] = [f"{path}.{name}" for name, _ in module.named_children()]
        else:
            modules.append(path)
    return modules, loose
