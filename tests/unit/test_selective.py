"""Named operators are kept and not computed again, gradients are those without checkpointing; towers are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hf_fsdp import FSDPConfig
from hf_fsdp.errors import ConfigError
from hf_fsdp.policies.activation import ActivationPlan, apply_activations, plan_activations
from hf_fsdp.policies.blocks import find_blocks
from hf_fsdp.policies.operators import KeptOperators, resolve_operators
from hf_fsdp.policies.towers import find_towers
from hf_fsdp.torch_private import checkpoint_block, is_checkpointed
from tests.unit.small_models import IMAGE_TOKEN, VISION, on_meta, text_models, tiny_llama, vision_language_models
from tests.unit.test_activation import IDS, differing, gradients

MATMULS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def apply(model: nn.Module, **sections: Any) -> ActivationPlan:
    plan = plan_activations(model, FSDPConfig(**sections), list(find_blocks(model).blocks.values()))
    apply_activations(model, plan)
    return plan


class OperatorCounts(TorchDispatchMode):
    """Counts what really runs: an output that was kept never reaches this mode again."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def counts_of_backward(model: Any) -> Counter[str]:
    model.train()
    loss = model(input_ids=IDS, labels=IDS).loss
    with OperatorCounts() as mode:
        loss.backward()
    return mode.counts


# -- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selective", "kept", "recomputed"),
    [
        (["matmul"], MATMULS, [ATTENTION]),
        (["attention"], [ATTENTION], ["aten.mm.default"]),
        (["attention", "matmul"], [ATTENTION, *MATMULS], []),
        (["aten.mm"], ["aten.mm.default"], [ATTENTION]),
        (["torch.ops.aten.mm.default"], ["aten.mm.default"], [ATTENTION]),
    ],
)
def test_the_recompute_skips_the_named_operators_and_runs_the_others(
    selective: list[str], kept: list[str], recomputed: list[str]
) -> None:
    plain, full, chosen = tiny_llama(3), tiny_llama(3), tiny_llama(3)
    apply(full, activation_checkpointing="full")
    apply(chosen, activation_checkpointing={"selective": selective})
    without, everything, some = (counts_of_backward(model) for model in (plain, full, chosen))
    for name in kept:
        assert some[name] == without[name], name
    for name in recomputed:
        assert some[name] == everything[name] > without[name], name
    assert everything["aten.mm.default"] > without["aten.mm.default"]
    # What is not named is computed again either way.
    assert some["aten.rsqrt.default"] == everything["aten.rsqrt.default"] > without["aten.rsqrt.default"]


@pytest.mark.parametrize("selective", [["attention"], ["matmul"], ["attention", "matmul"]])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_the_same_to_the_bit(selective: list[str], dropout: float) -> None:
    plain, chosen = tiny_llama(3, attention_dropout=dropout), tiny_llama(3, attention_dropout=dropout)
    plan = apply(chosen, activation_checkpointing={"selective": selective})
    assert len(plan.checkpointed) == 3
    assert differing(gradients(plain), gradients(chosen)) == []


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_gradients_under_dropout_are_the_same_to_the_bit() -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(tiny_llama(2, attention_dropout=0.2), config)
    plain = gradients(model)
    apply(model, activation_checkpointing={"selective": ["matmul"]})
    assert plain and differing(plain, gradients(model)) == []


def test_a_name_that_never_ran_is_reported_and_one_that_ran_is_not() -> None:
    model = tiny_llama(2, attn_implementation="eager")
    plan = apply(model, activation_checkpointing={"selective": ["attention", "matmul"]})
    gradients(model)
    (line,) = plan.findings()
    assert "attention never ran in a checkpointed block" in line and "matmul and softmax" in line
    sdpa = tiny_llama(2)
    plan = apply(sdpa, activation_checkpointing={"selective": ["attention", "matmul"]})
    gradients(sdpa)
    assert plan.findings() == []


# -- random numbers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def noisy_attention() -> Iterator[Any]:
    """An operator as CUDA's fused attention is: with dropout it draws from the generator itself."""
    library = torch.library.Library("hf_fsdp_test", "DEF")  # noqa: TOR901
    library.define("attention(Tensor x, float dropout_p=0.0) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
    library.impl("attention", lambda x, dropout_p=0.0: F.dropout(x.sin(), dropout_p, True), "CPU")
    operator = torch.ops.hf_fsdp_test.attention
    yield operator
    library._destroy()


class Noisy(nn.Module):
    """An operator that draws, and a dropout behind it whose mask depends on how much was drawn."""

    def __init__(self, operator: Any, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.operator, self.dropout = operator, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The operator has no derivative here; what counts is what it draws.
        drawn = self.operator(x.detach(), self.dropout)
        return F.dropout(self.linear(x).square() + drawn, 0.5, True).square()


def noisy_gradient(block: Noisy) -> torch.Tensor:
    torch.manual_seed(3)
    block.zero_grad()
    block(torch.ones(4, 16)).sum().backward()
    assert block.linear.weight.grad is not None
    return block.linear.weight.grad.clone()


def test_attention_that_draws_dropout_is_computed_again_and_that_is_said(noisy_attention: Any) -> None:
    block = Noisy(noisy_attention, 0.5)
    plain = noisy_gradient(block)
    kept = KeptOperators({noisy_attention.default: ("attention",)})
    checkpoint_block(block, kept.contexts)
    assert torch.equal(noisy_gradient(block), plain)
    (line,) = kept.findings()
    assert "attention draws random numbers (dropout)" in line


def test_attention_without_dropout_is_kept(noisy_attention: Any) -> None:
    block = Noisy(noisy_attention, 0.0)
    plain = noisy_gradient(block)
    kept = KeptOperators({noisy_attention.default: ("attention",)})
    checkpoint_block(block, kept.contexts)
    assert torch.equal(noisy_gradient(block), plain)
    assert kept.findings() == []


def test_keeping_it_all_the_same_would_give_wrong_gradients(noisy_attention: Any) -> None:
    """The control: the rule is there for a reason."""
    block = Noisy(noisy_attention, 0.5)
    plain = noisy_gradient(block)
    checkpoint_block(block, lambda: create_selective_checkpoint_contexts([noisy_attention.default]))
    assert not torch.equal(noisy_gradient(block), plain)


# -- names ------------------------------------------------------------------------------------------------------------


def test_groups_cover_every_variant_of_this_torch() -> None:
    kept, problems = resolve_operators(["attention", "matmul"])
    assert problems == []
    names = {operator.name().removeprefix("aten::") for operator in kept.operators}
    for name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
        assert f"_scaled_dot_product_{name}" in names
    assert {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm"} <= names
    assert not any("backward" in name or name.endswith(("out", "_")) for name in names)


@pytest.mark.parametrize(
    ("name", "message", "near"),
    [
        ("atention", "atention is not an operator", "attention"),
        ("aten.addmn", "aten.addmn is not an operator", "aten.addmm"),
        ("softmax", "softmax is not an operator", "aten._softmax"),
        ("aten.linear", "aten.linear cannot be kept: it runs as other operators", None),
        ("aten.add_", "aten.add_ cannot be kept: it writes into its inputs", None),
        ("aten.view", "aten.view cannot be kept: it returns a view", None),
        ("aten.bernoulli", "aten.bernoulli cannot be kept: it draws random numbers", None),
    ],
)
def test_a_name_that_cannot_be_kept_is_an_error_with_its_reason(name: str, message: str, near: str | None) -> None:
    model = tiny_llama(1)
    with pytest.raises(ConfigError, match="selective") as caught:
        apply(model, activation_checkpointing={"selective": ["matmul", name]})
    (problem,) = caught.value.problems
    assert message in problem.message
    assert near is None or near in (problem.near or "")
    assert not is_checkpointed(model.model.layers[0]), "refused before anything is changed"
    # The advice works.
    fixed = problem.fix.partition("selective: [")[2].partition("]")[0]
    apply(model, activation_checkpointing={"selective": [fixed]})
    assert is_checkpointed(model.model.layers[0])


# -- towers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(vision_language_models()))
def test_every_image_and_text_model_has_a_language_and_a_vision_tower(family: str) -> None:
    model = on_meta(vision_language_models()[family])
    towers = find_towers(model, find_blocks(model).blocks)
    assert set(towers) == {"language", "vision"}
    assert not any("vision" in name or "visual" in name for name in towers["language"])


@pytest.mark.parametrize("family", list(text_models()))
def test_a_text_model_is_one_language_tower(family: str) -> None:
    model = on_meta(text_models()[family])
    assert list(find_towers(model, find_blocks(model).blocks)) == ["language"]


def llava_inputs() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[1, *[IMAGE_TOKEN] * 4, 9, 10, 11]])
    pixels = torch.randn(1, 3, VISION["image_size"], VISION["image_size"], generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "pixel_values": pixels, "labels": ids}


@pytest.mark.parametrize(
    ("section", "chosen"),
    [
        ({"towers": ["language"]}, {"language": [0, 1, 2, 3], "vision": []}),
        ({"towers": ["vision"]}, {"language": [], "vision": [0, 1, 2]}),
        ({"towers": ["language"], "fraction": 0.5}, {"language": [1, 3], "vision": []}),
        ({"towers": ["language", "vision"], "every": 2}, {"language": [0, 2], "vision": [0, 2]}),
    ],
)
def test_only_the_named_towers_are_checkpointed(section: dict[str, Any], chosen: dict[str, list[int]]) -> None:
    torch.manual_seed(0)
    model: Any = vision_language_models()["llava"]()
    plain = gradients(model, **llava_inputs())
    plan = apply(model, activation_checkpointing=section)
    layers = {"language": model.model.language_model.layers, "vision": model.model.vision_tower.encoder.layers}
    found = {tower: [i for i, layer in enumerate(layers[tower]) if is_checkpointed(layer)] for tower in layers}
    assert found == chosen
    for tower, indices in chosen.items():
        assert f"{len(indices)} of {len(layers[tower])} {tower}" in plan.describe()
    assert differing(plain, gradients(model, **llava_inputs())) == []


def test_a_tower_that_the_model_has_not_is_refused_with_those_it_has() -> None:
    model = tiny_llama(2)
    with pytest.raises(ConfigError, match="towers names vision, and LlamaForCausalLM has none") as caught:
        apply(model, activation_checkpointing={"towers": ["vision"]})
    (problem,) = caught.value.problems
    assert problem.near == "language (2 blocks)" and "towers: [language]" in problem.fix
    assert len(apply(model, activation_checkpointing={"towers": ["language"]}).checkpointed) == 2
