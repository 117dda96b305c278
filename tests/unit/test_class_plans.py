"""Every causal language model class of transformers that builds small gets units, whole and by half blocks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from torch import nn

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.errors import WrapPolicyError
from hf_fsdp.policies.precision import resolve_precision
from hf_fsdp.policies.wrap import build_wrap_plan
from hf_fsdp.policies.wrap_plan import WrapPlan, unit_parameters
from tests.small_configs import NUM_LAYERS, build_small, causal_lm_classes
from tests.unit.small_models import on_meta

# Blocks that are one piece: a mixer beside a norm. XLM's lists hold attentions and feed-forwards, which are the blocks.
# RWKV's model rescales weights inside both halves of its blocks.
FUSED = {
    "FalconMambaForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "NemotronHForCausalLM",
    "RwkvForCausalLM",
    "XLMWithLMHeadModel",
}
# What needs a package that is not installed here.
FEW_UNBUILDABLE = 5


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return dict(_build_all())


def _build_all() -> Iterator[tuple[str, nn.Module]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for class_name, model_type in causal_lm_classes().items():
            try:
                yield class_name, on_meta(lambda name=class_name, kind=model_type: build_small(name, kind))
            except Exception:  # a package that is not installed; the benchmark's table names the reason
                continue


def plan_of(model: nn.Module, granularity: str) -> WrapPlan:
    config = FSDPConfig(wrap={"granularity": granularity}, precision="fp32")
    return build_wrap_plan(model, config.wrap, resolve_precision(config.precision))


def test_almost_every_class_builds(models: dict[str, nn.Module]) -> None:
    assert len(models) >= len(causal_lm_classes()) - FEW_UNBUILDABLE


def test_every_class_gets_a_unit_for_each_block(models: dict[str, nn.Module]) -> None:
    odd = {}
    for name, model in models.items():
        plan = plan_of(model, "layer")
        held = [parameter for _, parameters in unit_parameters(plan) for parameter in parameters]
        if sorted(held) != sorted(parameter for parameter, _ in model.named_parameters()):
            odd[name] = "parameters in no unit or in two"
        if len(plan.blocks) < NUM_LAYERS:
            odd[name] = f"{len(plan.blocks)} blocks"
    assert odd == {}


def test_every_class_is_split_into_attention_and_mlp_but_for_fused_blocks(models: dict[str, nn.Module]) -> None:
    refused, odd = set(), {}
    for name, model in models.items():
        try:
            plan = plan_of(model, "attention_and_mlp")
        except WrapPolicyError:
            refused.add(name)
            continue
        held = [parameter for _, parameters in unit_parameters(plan) for parameter in parameters]
        if sorted(held) != sorted(parameter for parameter, _ in model.named_parameters()):
            odd[name] = "parameters in no unit or in two"
        if plan.blocks != plan_of(model, "layer").blocks:
            odd[name] = "other blocks are recomputed than those of whole layers"
    assert refused == FUSED
    assert odd == {}
