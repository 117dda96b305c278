"""Whether the units cover a model: a unit, above all the root, that holds too much of it is reported or refused."""

from __future__ import annotations

from torch import nn

from hf_fsdp.errors import WrapPolicyError
from hf_fsdp.policies.blocks import MAX_UNIT_SHARE, MIN_SHARE, has_forward, is_block_list, num_parameters
from hf_fsdp.policies.wrap_plan import WrapPlan, unit_parameters
from hf_fsdp.units import format_count

# What a unit may hold beside its largest tensor before that is reported: a tied embedding comes with a final norm.
BESIDE_LARGEST_SHARE = 0.05


def unit_limit(model: nn.Module) -> float:
    """Return how many parameters a unit of `model` may hold before that is reported."""
    total = num_parameters(model.parameters())
    largest = max((parameter.numel() for parameter in model.parameters()), default=0)
    return max(MAX_UNIT_SHARE * total, largest + BESIDE_LARGEST_SHARE * total)


def check_coverage(plan: WrapPlan, model: nn.Module) -> list[str]:
    """Return a warning for every unit that holds too much of `model`.

    Raises:
        WrapPolicyError: it is the root, and because repeated blocks stay unwrapped.
    """
    total = num_parameters(model.parameters())
    limit = unit_limit(model)
    warnings = []
    for unit, parameters in unit_parameters(plan):
        held = num_parameters(parameters.values())
        if held <= limit or total == 0:
            continue
        share = f"{held / total:.0%} of the parameters ({format_count(held)} of {format_count(total)})"
        unwrapped = [] if plan.by_size else _unwrapped_lists(model, plan, parameters, total)
        if unit.kind == "root" and unwrapped:
            raise WrapPolicyError(
                f"the root unit would hold {share}, because repeated blocks stay unwrapped: "
                + "; ".join(f"{name} ({count} x {cls})" for name, count, cls in unwrapped),
                fix="wrap: transformer_layers, or add these classes: wrap: {layer_classes: ["
                + ", ".join(dict.fromkeys([*_plan_classes(plan), *(cls for _, _, cls in unwrapped)]))
                + "]}",
            )
        # Two or three layers of a small model are each more than a quarter of it, and there is nothing to be done.
        if unit.kind != "block" or plan.by_size or len(plan.blocks) > 4:
            warnings.append(f"unit {unit.label} holds {share}: its all-gather is the peak of the step")
    return warnings


def _unwrapped_lists(
    model: nn.Module, plan: WrapPlan, root_parameters: dict[str, nn.Parameter], total: int
) -> list[tuple[str, int, str]]:
    in_root = {id(parameter) for name, parameter in root_parameters.items() if name not in plan.root_owned}
    found: list[tuple[str, int, str]] = []
    for name, module in model.named_modules():
        if not is_block_list(module, name.rpartition(".")[2], set()):
            continue
        children = [child for child in module.children() if has_forward(child)]
        held = sum(parameter.numel() for parameter in module.parameters() if id(parameter) in in_root)
        inside = any(name.startswith(f"{outer}.") for outer, _, _ in found)
        if children and not inside and held >= MIN_SHARE * total:
            found.append((name, len(children), type(children[0]).__name__))
    return found


def _plan_classes(plan: WrapPlan) -> list[str]:
    return list(dict.fromkeys(type(module).__name__ for module in plan.blocks))
