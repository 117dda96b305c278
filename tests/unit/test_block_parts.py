"""`granularity: attention_and_mlp`: the halves of a block are units, blocks that have none stay whole and say so."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import transformers
import yaml
from torch import nn

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.errors import WrapPolicyError
from hf_fsdp.policies.precision import resolve_precision
from hf_fsdp.policies.wrap import build_wrap_plan
from hf_fsdp.policies.wrap_plan import WrapPlan, is_chosen_by_data, unit_parameters
from tests.small_configs import NUM_LAYERS, build_small
from tests.unit.small_models import TEXT, VOCABULARY, on_meta, text_models, tiny_llama, vision_language_models


def plan_of(model: nn.Module, *, norms: bool = False, granularity: str = "attention_and_mlp") -> WrapPlan:
    config = FSDPConfig(wrap={"granularity": granularity}, precision={"preset": "bf16-mixed", "keep_norms_fp32": norms})
    return build_wrap_plan(model, config.wrap, resolve_precision(config.precision))


def classes_of(plan: WrapPlan) -> dict[str, int]:
    return dict(Counter(type(unit.modules[0]).__name__ for unit in plan.units if unit.kind == "block"))


PARTS = {
    "llama": {"LlamaAttention": 4, "LlamaMLP": 4, "LlamaDecoderLayer": 4},
    "gpt2": {"GPT2Attention": 4, "GPT2MLP": 4, "GPT2Block": 4},
    # Its feed-forward is two linear layers of the block itself, which stay in the block's unit.
    "opt": {"OPTAttention": 4, "OPTDecoderLayer": 4},
    "bert": {"BertAttention": 4, "BertIntermediate": 4, "BertOutput": 4, "BertLayer": 4},
    "mixtral": {"MixtralAttention": 4, "MixtralSparseMoeBlock": 4, "MixtralDecoderLayer": 4},
    "t5": {"T5LayerSelfAttention": 6, "T5LayerCrossAttention": 3, "T5LayerFF": 6, "T5Block": 6},
    "phi3": {"Phi3Attention": 4, "Phi3MLP": 4, "Phi3DecoderLayer": 4},
    "jamba": {
        "JambaMambaMixer": 2,
        "JambaAttention": 2,
        "JambaSparseMoeBlock": 2,
        "JambaMLP": 2,
        "JambaMambaDecoderLayer": 2,
        "JambaAttentionDecoderLayer": 2,
    },
}


@pytest.mark.parametrize("family", PARTS)
def test_attention_and_mlp_of_every_block_are_units(family: str) -> None:
    model = on_meta(text_models()[family])
    plan = plan_of(model)
    assert classes_of(plan) == PARTS[family]
    names = [name for _, parameters in unit_parameters(plan) for name in parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_norms_stay_in_the_unit_of_their_block() -> None:
    held = {unit.names[0]: set(parameters) for unit, parameters in unit_parameters(plan_of(tiny_llama(2)))}
    assert held["model.layers.1"] == {
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
    }


def test_whole_blocks_are_what_is_recomputed() -> None:
    model = tiny_llama(3)
    assert plan_of(model).blocks == list(model.model.layers)


def test_units_are_gathered_in_the_order_in_which_they_run() -> None:
    model = tiny_llama(2)
    names = {id(module): name.removeprefix("model.layers.") for name, module in model.named_modules()}
    ((forward, backward),) = plan_of(model).gather_orders
    assert [names[id(m)] for m in forward] == ["0", "0.self_attn", "0.mlp", "1", "1.self_attn", "1.mlp"]
    assert [names[id(m)] for m in backward] == ["1", "1.mlp", "1.self_attn", "0", "0.mlp", "0.self_attn"]


def test_each_tower_is_gathered_in_an_order_of_its_own() -> None:
    plan = plan_of(on_meta(vision_language_models()["llava"]))
    assert sorted(len(forward) for forward, _ in plan.gather_orders) == [3 * 3, 4 * 3]


def test_norms_in_fp32_leave_the_parts_and_the_block() -> None:
    plan = plan_of(tiny_llama(2), norms=True)
    held = {unit.names[0]: set(parameters) for unit, parameters in unit_parameters(plan)}
    assert held["model.layers.0"] == set()
    assert all("norm" not in name for name in held["model.layers.0.mlp"])


# -- blocks without parts ----------------------------------------------------------------------------------------------


def mamba() -> nn.Module:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, state_size=8)
    return transformers.MambaForCausalLM(config)


def test_a_model_of_fused_blocks_is_refused_with_advice_that_works() -> None:
    model = on_meta(mamba)
    with pytest.raises(WrapPolicyError, match=r"no block of MambaForCausalLM has .*: MambaBlock \(norm, mixer\)") as it:
        plan_of(model)
    advice = re.match(r"wrap: (\w+)", it.value.problems[0].fix)
    assert advice
    wrap: Any = yaml.safe_load(advice[1])
    config = FSDPConfig(wrap=wrap)
    plan = build_wrap_plan(model, config.wrap, resolve_precision(config.precision))
    assert classes_of(plan) == {"MambaBlock": 3}


def test_blocks_without_parts_beside_others_stay_whole_with_a_note() -> None:
    config = transformers.BambaConfig(
        **TEXT, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8
    )
    model = on_meta(lambda: transformers.BambaForCausalLM(config))
    model.model.layers[3] = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64))  # type: ignore[index,operator]
    plan = plan_of(model)
    assert any(name.endswith("feed_forward") for unit in plan.units for name in unit.names)
    assert any("model.layers.3) stay whole units" in note for note in plan.notes)


def test_blocks_that_share_their_attention_stay_whole() -> None:
    model = tiny_llama(3)
    layers = model.model.layers
    for name in ("q_proj", "k_proj"):
        getattr(layers[2].self_attn, name).weight = getattr(layers[0].self_attn, name).weight
    plan = plan_of(model)
    inner = [unit.names[0] for unit in plan.units if unit.names[0].endswith("self_attn")]
    assert inner == ["model.layers.1.self_attn"]
    assert ("model.layers.0", "model.layers.2") in [unit.names for unit in plan.units]


def test_an_attention_that_hands_out_its_bias_stays_in_its_block() -> None:
    """The caller adds the bias after the attention's own forward, when it is a shard again."""
    plan = plan_of(on_meta(lambda: build_small("GPTNeoXJapaneseForCausalLM", "gpt_neox_japanese")))
    attention = [unit.names[0] for unit in plan.units if unit.names[0].endswith(".attention")]
    assert [int(name.split(".")[2]) for name in attention] == list(range(NUM_LAYERS - 1))


@pytest.mark.parametrize("granularity", ["layer", "attention_and_mlp"])
def test_reversible_blocks_are_gathered_by_their_parts(granularity: str) -> None:
    """Backward calls the parts and not the block, whose own forward hooks would gather it."""
    plan = plan_of(on_meta(lambda: build_small("ReformerModelWithLMHead", "reformer")), granularity=granularity)
    assert not any(type(module).__name__ == "ReformerLayer" for unit in plan.units for module in unit.modules)
    assert {type(block).__name__ for block in plan.blocks} == {"ReformerAttention", "ChunkReformerFeedForward"}
    assert any("reversible blocks" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", True),
        ("model.layers.0.block_sparse_moe.gate.weight", True),
        ("model.layers.0.mlp.up_proj.weight", False),
        ("model.smoed.weight", False),
    ],
)
def test_experts_are_told_by_their_names(name: str, expected: bool) -> None:
    assert is_chosen_by_data(["model.norm.weight", name]) is expected
