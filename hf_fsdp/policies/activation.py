"""What happens to the activations of each block: recomputed, partly kept, moved to host memory; and which are compiled.

Accelerate's FSDP2 path recomputes without the RNG state, so a dropout mask differs between forward and
recompute: the loss is the same and the gradients are wrong. Here the composable form is used (see
`torch_private.checkpoint_block`), which is exact and adds neither a wrapper nor an all-gather.

The order is offload, checkpoint, compile, and all before `fully_shard`: the gather is then outermost, a recompute runs
inside the unit's own unshard, and of a checkpointed block the offload sees the inputs only.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_fsdp.config.schema import ActivationCheckpointingConfig, CompileConfig, FSDPConfig
from hf_fsdp.errors import ConfigError, Problem
from hf_fsdp.policies.blocks import class_name
from hf_fsdp.policies.compilation import check_backend, compile_block
from hf_fsdp.policies.offload import ActivationStore
from hf_fsdp.policies.operators import KeptOperators, resolve_operators
from hf_fsdp.policies.towers import find_towers
from hf_fsdp.torch_private import checkpoint_block, is_checkpointed


@dataclass(frozen=True, eq=False)
class ActivationPlan:
    """What is done to the blocks of a model; names are paths of blocks.

    `kept` are the operators of selective checkpointing; `store` holds what is in host memory.
    """

    blocks: Mapping[str, nn.Module]
    towers: Mapping[str, tuple[str, ...]]
    checkpointed: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    kept: KeptOperators | None = None
    store: ActivationStore | None = None
    compile: CompileConfig = CompileConfig()

    def describe(self) -> str:
        """Return one line that names what is checkpointed, kept, offloaded and compiled; empty when nothing is."""
        parts = []
        if self.checkpointed:
            kept = f", outputs of {' and '.join(self.kept.names)} kept" if self.kept else ""
            parts.append(f"{self._count(self.checkpointed)} blocks recomputed in backward{kept}")
        if inputs := [name for name in self.offloaded if name in self.checkpointed]:
            parts.append(f"inputs of {len(inputs)} blocks in host memory")
        if saved := [name for name in self.offloaded if name not in self.checkpointed]:
            parts.append(f"all that {len(saved)} blocks save for backward in host memory")
        if self.compile.blocks:
            mode = "" if self.compile.mode == "default" else f", mode {self.compile.mode}"
            parts.append(f"{len(self.blocks)} blocks compiled ({self.compile.backend}{mode})")
        return "; ".join(parts)

    def findings(self) -> list[str]:
        """One plain line for each setting that turned out to do nothing; to be asked after the first step."""
        return self.kept.findings() if self.kept else []

    def _count(self, names: Collection[str]) -> str:
        if len(self.towers) == 1:
            return f"{len(names)} of {len(self.blocks)}"
        return ", ".join(
            f"{len(set(names) & set(members))} of {len(members)} {tower}" for tower, members in self.towers.items()
        )


def plan_activations(
    model: nn.Module, config: FSDPConfig, blocks: Sequence[nn.Module], nested_units: Sequence[nn.Module] = ()
) -> ActivationPlan:
    """Decide what happens to the activations of `model`, changing nothing.

    Args:
        model: the root.
        config: its sections `activation_checkpointing`, `offload` and `compile` decide.
        blocks: the repeated blocks of `model`, in order.
        nested_units: modules inside blocks that are gathered apart (norms in fp32, attention and MLP).

    Raises:
        ConfigError: an operator, tower or backend does not exist, or two settings cannot work together; all at once.
    """
    section, problems = (
        config.activation_checkpointing,
        check_backend(config.compile, config.sources.get("compile.backend")),
    )
    wanted = {id(block) for block in blocks}
    named = {name: module for name, module in model.named_modules() if id(module) in wanted}
    towers = find_towers(model, named)
    problems += _check_towers(model, section, towers, config.sources.get("activation_checkpointing.towers"))
    kept, checkpointed = None, []
    if section.mode == "full":
        checkpointed = select_blocks(section, towers)
        if section.selective:
            source = config.sources.get("activation_checkpointing.selective")
            kept, unknown = resolve_operators(section.selective, source)
            problems += unknown
    offloaded = _offloaded_blocks(config.offload.activations, named, checkpointed)
    if not problems:
        problems += _check_offload(config, offloaded, checkpointed)
        problems += _check_nested(config, kept, nested_units)
    if problems:
        raise ConfigError(problems)
    return ActivationPlan(
        blocks=named,
        towers=towers,
        checkpointed=tuple(checkpointed),
        offloaded=tuple(offloaded),
        kept=kept,
        store=ActivationStore(pin_memory=config.offload.pin_memory is not False) if offloaded else None,
        compile=config.compile,
    )


def apply_activations(model: nn.Module, plan: ActivationPlan) -> None:
    """Carry out `plan`, replacing transformers' own checkpointing if it is on; call before ``fully_shard``."""
    turn_off_model_checkpointing(model)
    for name, block in plan.blocks.items():
        if plan.store is not None and name in plan.offloaded:
            plan.store.attach(block)
        inside_graph = plan.compile.blocks and plan.kept is not None
        recompute = name in plan.checkpointed
        if recompute and not inside_graph and not is_checkpointed(block):
            checkpoint_block(block, plan.kept.contexts if plan.kept else None)
        if plan.compile.blocks:
            compile_block(block, name, plan.compile, plan.kept if recompute else None)
    if plan.checkpointed or plan.compile.blocks:
        disable_cache_in_training(model)


def select_blocks(config: ActivationCheckpointingConfig, towers: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of the blocks to recompute: of each chosen tower all, every n-th, or an even share."""
    if config.mode != "full":
        return []
    chosen: list[str] = []
    for tower, names in towers.items():
        if not config.towers or tower in config.towers:
            chosen += _even_share(names[:: config.every], config.fraction)
    return chosen


def _even_share(names: Sequence[str], fraction: float) -> list[str]:
    """`fraction` of `names`, at least one, evenly spread: of 4 the 2nd and 4th."""
    count = max(1, int(fraction * len(names) + 0.5))
    return [name for index, name in enumerate(names) if (index + 1) * count // len(names) > index * count // len(names)]


def _offloaded_blocks(kind: str, blocks: Collection[str], checkpointed: Collection[str]) -> list[str]:
    """The blocks whose saved tensors leave the device: `auto` is both kinds, each where it applies."""
    return [
        name
        for name in blocks
        if kind == "auto" or kind == ("block_inputs" if name in checkpointed else "saved_tensors")
    ]


# -- what cannot work -------------------------------------------------------------------------------------------------


def _check_towers(
    model: nn.Module, section: ActivationCheckpointingConfig, towers: Mapping[str, Sequence[str]], source: str | None
) -> list[Problem]:
    absent = [tower for tower in section.towers if tower not in towers]
    if not absent:
        return []
    present = [tower for tower in section.towers if tower in towers] or [tower for tower in towers if tower != "other"]
    return [
        Problem(
            message=f"activation_checkpointing.towers names {', '.join(absent)}, and {class_name(model)} has none",
            near=", ".join(f"{tower} ({len(names)} blocks)" for tower, names in towers.items()),
            fix=f"activation_checkpointing: {{towers: [{', '.join(present)}]}}" if present else "towers: []   # all",
            source=source,
        )
    ]


def _check_offload(config: FSDPConfig, offloaded: Sequence[str], checkpointed: Sequence[str]) -> list[Problem]:
    kind, source = config.offload.activations, config.sources.get("offload.activations")
    if kind == "none" or offloaded:
        return []
    if kind == "block_inputs":
        message = "offload.activations=block_inputs and no block is checkpointed, so more than its inputs is kept"
        fix = "activation_checkpointing: full   # or offload: {activations: saved_tensors}"
    elif checkpointed:
        message = "offload.activations=saved_tensors and every block is checkpointed, so only its inputs are kept"
        fix = "offload: {activations: block_inputs}   # or activation_checkpointing: none"
    else:
        message, fix = f"offload.activations={kind} and the model has no blocks", "offload: none"
    return [Problem(message=message, fix=fix, source=source)]


def _check_nested(config: FSDPConfig, kept: KeptOperators | None, nested_units: Sequence[nn.Module]) -> list[Problem]:
    """Gathers inside a block break its graph, and checkpointing inside a broken graph runs uncompiled, unsaid."""
    if not (config.compile.blocks and kept and nested_units):
        return []
    cls = class_name(nested_units[0])
    return [
        Problem(
            message="compile.blocks and activation_checkpointing.selective need each block as one graph, and "
            f"{len(nested_units)} modules inside blocks ({cls}, …) are gathered apart",
            fix="precision: {keep_norms_fp32: false} and wrap: {granularity: layer}, "
            "or activation_checkpointing: full without selective",
            source=config.sources.get("activation_checkpointing.selective"),
        )
    ]


def turn_off_model_checkpointing(model: nn.Module) -> bool:
    """Switch transformers' own checkpointing off; return whether it was on. Two kinds would recompute twice."""
    was_on = False
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False  # type: ignore[assignment]
            was_on = True
    return was_on


def disable_cache_in_training(model: nn.Module) -> None:
    """Make every forward of `model` with gradients run with ``use_cache=False``.

    A key-value cache filled in forward is found full by the recompute, which then has the wrong shape. Done by
    a hook and not in ``model.config``: the config is saved with the model, and generation wants its cache. The hook
    sits on the outermost modules that know the argument: LLaVA and others only hand it on to their language model.
    """
    if "use_cache" not in inspect.signature(model.forward).parameters:
        for child in model.children():
            disable_cache_in_training(child)
    elif getattr(model, "_hf_fsdp_cache_hook", None) is None:
        model._hf_fsdp_cache_hook = model.register_forward_pre_hook(_without_cache, with_kwargs=True)  # type: ignore[assignment]


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not (module.training and torch.is_grad_enabled()):
        return None
    return args, {**kwargs, "use_cache": False}
