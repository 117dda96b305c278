"""Units by size: bottom-up, never around a shared tensor, never a module that its own forward does not gather."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from torch import nn

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.errors import WrapPolicyError
from hf_fsdp.policies.precision import resolve_precision
from hf_fsdp.policies.wrap import build_wrap_plan
from hf_fsdp.policies.wrap_plan import WrapPlan, shared_owners, unit_parameters
from hf_fsdp.sharding.fitness import refuse_unfit_plan
from tests.distributed.image_models import RESNET_152, build_plain, build_resnet
from tests.unit.small_models import on_meta, text_models, tiny_llama


def plan_of(model: nn.Module, size: int, *, norms: bool = False) -> WrapPlan:
    wrap = {"policy": "size", "min_num_params": size}
    config = FSDPConfig(wrap=wrap, precision={"preset": "bf16-mixed", "keep_norms_fp32": norms})
    return build_wrap_plan(model, config.wrap, resolve_precision(config.precision))


def blocks_of(plan: WrapPlan) -> dict[str, int]:
    """Units of modules by name, with the parameters that are theirs."""
    return {
        unit.names[0]: sum(parameter.numel() for parameter in parameters.values())
        for unit, parameters in unit_parameters(plan)
        if unit.kind == "block"
    }


def root_of(plan: WrapPlan) -> set[str]:
    return set(unit_parameters(plan)[-1][1])


def check_every_parameter_is_in_one_unit(model: nn.Module, plan: WrapPlan) -> None:
    names = [name for _, parameters in unit_parameters(plan) for name in parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


class _Net(nn.Module):
    """Parts of 16, 64 and 256 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(4, 4, bias=False)
        self.pair = _Pair(8)
        self.large = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.pair(self.small(x)))


class _Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (64, {"pair.first": 64, "pair.second": 64, "large": 256}),
        (65, {"pair": 128, "large": 256}),
        (128, {"pair": 128, "large": 256}),
        (129, {"large": 256}),
    ],
)
def test_a_module_is_a_unit_when_what_is_left_in_it_reaches_the_size(size: int, expected: dict[str, int]) -> None:
    model = _Net()
    plan = plan_of(model, size)
    assert blocks_of(plan) == expected
    check_every_parameter_is_in_one_unit(model, plan)


def test_inner_units_come_first_and_the_outer_takes_the_rest() -> None:
    model = on_meta(lambda: build_resnet([1, 2, 3, 1]))
    plan = plan_of(model, 3000)
    names = [unit.names[0] for unit in plan.units]
    assert names.index("resnet.encoder.stages.2") > names.index("resnet.encoder.stages.2.layers.0.layer.1.convolution")
    assert blocks_of(plan)["resnet.encoder.stages.2"] >= 3000
    check_every_parameter_is_in_one_unit(model, plan)


def test_every_unit_of_a_resnet_152_is_entered_by_its_own_forward() -> None:
    """Its stages are Sequentials that are looped over: those are never called and so never units."""
    model = build_resnet(RESNET_152)
    plan = plan_of(model, 10_000)
    entered: set[str] = set()
    for unit in plan.units:
        name = unit.names[0]
        unit.modules[0].register_forward_pre_hook(lambda module, args, name=name: entered.add(name))
    with torch.no_grad():
        model(pixel_values=torch.randn(2, 3, 16, 16))
    assert entered == {unit.names[0] for unit in plan.units}
    assert len(blocks_of(plan)) > 36
    assert not any(re.fullmatch(r"resnet\.encoder\.stages\.\d\.layers", name) for name in blocks_of(plan))


def test_units_of_a_plain_network_need_no_list() -> None:
    assert list(blocks_of(plan_of(build_plain(), 4000))) == [f"body.{index}" for index in range(4)]


# -- what must not be a unit -----------------------------------------------------------------------------------------


def test_a_shared_embedding_stays_with_all_its_owners_in_the_root() -> None:
    model = on_meta(text_models()["t5"])
    plan = plan_of(model, 2000)
    assert any(names[0] == "shared.weight" for names in shared_owners(model).values())
    assert "shared.weight" in root_of(plan)
    assert not any(name in ("shared", "encoder", "decoder", "lm_head") for name in blocks_of(plan))
    # The relative position bias belongs to the attention that computes with it, and to no unit of its own.
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    holder = next(unit for unit, parameters in unit_parameters(plan) if bias in parameters)
    assert holder.names[0] == "encoder.block.0.layer.0.SelfAttention"
    check_every_parameter_is_in_one_unit(model, plan)


def test_tied_linear_layers_become_part_of_what_holds_both() -> None:
    model = _Net()
    model.pair.second.weight = model.pair.first.weight
    assert blocks_of(plan_of(model, 64)) == {"pair": 64, "large": 256}


def test_a_module_that_is_held_twice_is_one_unit() -> None:
    model = _Net()
    model.again = model.pair  # type: ignore[assignment]
    assert blocks_of(plan_of(model, 100)) == {"pair": 128, "large": 256}


class _ReadsWeight(_Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.pair(self.small(x)), self.large.weight)


class _CallsParts(_Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.pair.second(self.pair.first(self.small(x))))


class _CallsMethod(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.pair = _PairWithMethod(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.pair.half(self.small(x)))


class _PairWithMethod(_Pair):
    def half(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


class _ReturnsBias(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.pair = _PairThatReturnsItsBias(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, bias = self.pair(self.small(x))
        return self.large(hidden + bias)


class _PairThatReturnsItsBias(_Pair):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return self.second(self.first(x)), self.bias


@pytest.mark.parametrize(
    ("model_class", "expected"),
    [
        (_ReturnsBias, {"large": 256}),
        (_ReadsWeight, {"pair": 128}),
        (_CallsParts, {"large": 256}),
        (_CallsMethod, {"large": 256}),
    ],
)
def test_a_module_that_is_used_past_its_own_forward_is_no_unit(
    model_class: type[nn.Module], expected: dict[str, int]
) -> None:
    assert blocks_of(plan_of(model_class(), 100)) == expected


def test_the_output_of_torch_attention_is_no_unit_since_attention_reads_its_weight() -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 4), nn.Linear(16, 16))
    assert list(blocks_of(plan_of(model, 200))) == ["0", "1"]


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(x.argmax()) % 4](x)


def test_experts_are_gathered_together_since_the_data_chooses_among_them() -> None:
    model = nn.Sequential(_Experts(), nn.Linear(16, 16, bias=False))
    assert blocks_of(plan_of(model, 200)) == {"0": 1024, "1": 256}


def test_norms_in_fp32_are_in_no_unit_by_size() -> None:
    model = build_plain()
    plan = plan_of(model, 4000, norms=True)
    assert plan.units[0].kind == "norms"
    assert len(plan.units[0].modules) == 8
    check_every_parameter_is_in_one_unit(model, plan)


# -- advice ------------------------------------------------------------------------------------------------------------


def follow(error: WrapPolicyError) -> Any:
    text = re.match(r"wrap: (\{.*?\}|\w+)", error.problems[0].fix)
    assert text, error.problems[0].fix
    return yaml.safe_load(text[1])


@pytest.mark.parametrize("build", [lambda: build_resnet(RESNET_152), build_plain, text_models()["t5"], tiny_llama])
def test_a_size_that_nothing_reaches_is_refused_with_one_that_gives_sensible_units(build: Any) -> None:
    model = on_meta(build)
    with pytest.raises(
        WrapPolicyError, match=r"wrap\.min_num_params=10000000: no module of \w+ .* holds so many"
    ) as it:
        plan_of(model, 10_000_000)
    assert "the whole model would be one group" in str(it.value)
    advised = follow(it.value)
    assert advised["policy"] == "size"
    plan = plan_of(model, advised["min_num_params"])
    assert len(blocks_of(plan)) > 1
    total = sum(parameter.numel() for parameter in model.parameters())
    largest = max(parameter.numel() for parameter in model.parameters())
    assert sum(dict(model.named_parameters())[name].numel() for name in root_of(plan)) <= max(
        total / 4, 1.05 * total / 20 + largest
    )


def test_a_size_that_makes_one_large_unit_is_kept_with_a_note_that_holds() -> None:
    model = on_meta(
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=40, num_attention_heads=4
            )
        )
    )
    plan = plan_of(model, 100_000)
    assert list(blocks_of(plan)) == ["model.embed_tokens", "model", "lm_head"]
    assert any("unit model LlamaModel holds" in warning for warning in plan.warnings)
    note = next(note for note in plan.notes if "the largest unit (model) holds" in note)
    advised = int(re.search(r"min_num_params: (\d+)", note)[1])  # type: ignore[index]
    better = plan_of(model, advised)
    assert max(blocks_of(better).values()) < max(blocks_of(plan).values())
    assert not any("unit model LlamaModel" in warning for warning in better.warnings)


def test_recomputing_single_layers_is_refused_and_the_advice_works() -> None:
    model = tiny_llama()
    config = FSDPConfig(wrap={"policy": "size", "min_num_params": 500}, activation_checkpointing="full")
    plan = plan_of(model, 500)
    assert all(isinstance(unit.modules[0], nn.Linear | nn.Embedding) for unit in plan.units[:-1])
    with pytest.raises(WrapPolicyError, match="activation_checkpointing: full has nothing to recompute"):
        refuse_unfit_plan(plan, config)
    refuse_unfit_plan(plan_of(model, 2000), config)
    refuse_unfit_plan(plan, FSDPConfig(wrap={"policy": "size", "min_num_params": 500}))


def test_what_is_recomputed_are_units_of_more_than_one_layer_and_the_inner_of_nested_ones() -> None:
    model = on_meta(lambda: build_resnet(RESNET_152))
    plan = plan_of(model, 10_000)
    names = {id(module): name for name, module in model.named_modules()}
    recomputed = [names[id(module)] for module in plan.blocks]
    assert len(recomputed) > 36
    assert not any(name.endswith("convolution") for name in recomputed)
    assert not any(other.startswith(f"{name}.") for name in recomputed for other in recomputed)


def test_units_are_gathered_in_the_order_of_the_model() -> None:
    ((forward, backward),) = plan_of(_Net(), 64).gather_orders
    assert [type(module).__name__ for module in forward] == ["Linear"] * 3
    assert backward == forward[::-1]
