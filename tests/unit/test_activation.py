"""Recomputed activations give the same gradients to the bit, and the cache is off in training only."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hf_fsdp.config.schema import ActivationCheckpointingConfig, FSDPConfig
from hf_fsdp.policies.activation import (
    apply_activations,
    disable_cache_in_training,
    plan_activations,
    select_blocks,
    turn_off_model_checkpointing,
)
from hf_fsdp.policies.blocks import find_blocks
from hf_fsdp.torch_private import is_checkpointed
from tests.unit.small_models import (
    IMAGE_TOKEN,
    VISION,
    enable_own_checkpointing,
    own_checkpointing_is_on,
    tiny_llama,
    vision_language_models,
)

FULL = ActivationCheckpointingConfig(mode="full")
IDS = torch.randint(4, 60, (2, 12), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, **inputs: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model.train()
    model.zero_grad()
    inputs = inputs or {"input_ids": IDS, "labels": IDS}
    model(**inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def checkpoint_all(model: Any, config: ActivationCheckpointingConfig = FULL) -> int:
    plan = plan_activations(
        model, FSDPConfig(activation_checkpointing=config), list(find_blocks(model).blocks.values())
    )
    apply_activations(model, plan)
    return len(plan.checkpointed)


# -- which blocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        (ActivationCheckpointingConfig(mode="none"), []),
        (ActivationCheckpointingConfig(mode="auto"), []),
        (FULL, [0, 1, 2, 3, 4]),
        (ActivationCheckpointingConfig(mode="full", every=2), [0, 2, 4]),
        (ActivationCheckpointingConfig(mode="full", every=3), [0, 3]),
        (ActivationCheckpointingConfig(mode="full", every=9), [0]),
        (ActivationCheckpointingConfig(mode="full", fraction=0.4), [2, 4]),
        (ActivationCheckpointingConfig(mode="full", fraction=0.5), [1, 3, 4]),
        (ActivationCheckpointingConfig(mode="full", fraction=0.01), [4]),
        (ActivationCheckpointingConfig(mode="full", fraction=1.0), [0, 1, 2, 3, 4]),
    ],
)
def test_every_nth_block_or_an_even_share_is_chosen(config: ActivationCheckpointingConfig, chosen: list[int]) -> None:
    names = ["0", "1", "2", "3", "4"]
    assert [names.index(name) for name in select_blocks(config, {"language": names})] == chosen


@pytest.mark.parametrize("fraction", [0.1, 0.25, 1 / 3, 0.5, 0.75, 0.9])
def test_a_share_is_spread_evenly(fraction: float) -> None:
    names = [str(index) for index in range(24)]
    config = ActivationCheckpointingConfig(mode="full", fraction=fraction)
    chosen = [int(name) for name in select_blocks(config, {"language": names})]
    assert len(chosen) == round(24 * fraction)
    gaps = [after - before for before, after in zip([-1, *chosen], chosen, strict=False)]
    assert max(gaps) - min(gaps) <= 1


def test_every_and_fraction_count_within_each_tower() -> None:
    towers = {"vision": ["v0", "v1", "v2"], "language": ["l0", "l1", "l2", "l3"]}
    every = ActivationCheckpointingConfig(mode="full", every=2)
    assert select_blocks(every, towers) == ["v0", "v2", "l0", "l2"]
    half = ActivationCheckpointingConfig(mode="full", fraction=0.5, towers=("language",))
    assert select_blocks(half, towers) == ["l1", "l3"]


def test_only_the_chosen_blocks_are_checkpointed() -> None:
    model = tiny_llama(4)
    assert checkpoint_all(model, ActivationCheckpointingConfig(mode="full", every=2)) == 2
    assert [is_checkpointed(layer) for layer in model.model.layers] == [True, False, True, False]


def test_checkpointing_twice_recomputes_once() -> None:
    model = tiny_llama(2)
    checkpoint_all(model)
    checkpoint_all(model)
    forwards = 0

    def count(module: nn.Module, args: Any) -> None:
        nonlocal forwards
        forwards += 1

    model.model.layers[0].mlp.register_forward_pre_hook(count)
    gradients(model)
    assert forwards == 2  # once forward, once in the recompute


def test_checkpointing_leaves_names_and_module_tree_alone() -> None:
    plain, checkpointed = tiny_llama(2), tiny_llama(2)
    checkpoint_all(checkpointed)
    assert list(plain.state_dict()) == list(checkpointed.state_dict())
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in checkpointed.named_modules()]


# -- exact gradients --------------------------------------------------------------------------------------------------


def test_gradients_under_dropout_are_the_same_to_the_bit() -> None:
    model = tiny_llama(3, attention_dropout=0.3)
    plain = gradients(model)
    assert checkpoint_all(model) == 3
    assert differing(plain, gradients(model)) == []


def test_the_wrapper_that_drops_the_random_state_fails_the_same_comparison() -> None:
    """The control: with it, a test that could not fail would pass."""
    model = tiny_llama(3, attention_dropout=0.3)
    plain = gradients(model)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)
    disable_cache_in_training(model)
    wrapped = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients(model).items()}
    assert "model.layers.0.self_attn.v_proj.weight" in differing(plain, wrapped)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_gradients_under_dropout_are_the_same_to_the_bit() -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(tiny_llama(2), config)
    plain = gradients(model)
    assert checkpoint_all(model) == 2
    assert plain and all("lora_" in name for name in plain)
    assert differing(plain, gradients(model)) == []


def test_a_model_whose_forward_only_hands_the_cache_switch_on_trains_the_same() -> None:
    """LLaVA's forward does not know `use_cache`; a cache filled twice would break the recompute."""
    torch.manual_seed(0)
    model = vision_language_models()["llava"]()
    ids = torch.tensor([[1, *[IMAGE_TOKEN] * 4, 9, 10, 11]])
    pixels = torch.randn(1, 3, VISION["image_size"], VISION["image_size"])
    inputs = {"input_ids": ids, "pixel_values": pixels, "labels": ids}
    plain = gradients(model, **inputs)
    assert checkpoint_all(model) == 7
    assert differing(plain, gradients(model, **inputs)) == []


# -- cache ------------------------------------------------------------------------------------------------------------


def test_the_cache_is_off_in_training_and_on_without_gradients() -> None:
    model = tiny_llama(2)
    checkpoint_all(model)
    model.train()
    assert model(input_ids=IDS).past_key_values is None
    assert model(input_ids=IDS, use_cache=True).past_key_values is None
    with torch.no_grad():
        assert model(input_ids=IDS).past_key_values is not None
    assert model.eval()(input_ids=IDS).past_key_values is not None


def test_generation_and_the_config_are_as_before() -> None:
    model, plain = tiny_llama(2), tiny_llama(2)
    before = copy.deepcopy(model.config.to_dict())
    checkpoint_all(model)
    model.train()
    gradients(model)
    generated = model.generate(IDS[:, :4], max_new_tokens=6, do_sample=False)
    assert torch.equal(generated, plain.eval().generate(IDS[:, :4], max_new_tokens=6, do_sample=False))
    assert model.config.to_dict() == before
    assert model.config.use_cache and model.generation_config.use_cache


def test_the_cache_switch_is_hooked_once_on_the_outermost_module_that_knows_it() -> None:
    model = tiny_llama(2)
    disable_cache_in_training(model)
    disable_cache_in_training(model)
    hooked = [name for name, module in model.named_modules() if module._forward_pre_hooks]
    assert hooked == [""] and len(model._forward_pre_hooks) == 1

    llava = vision_language_models()["llava"]()
    disable_cache_in_training(llava)
    assert [name for name, module in llava.named_modules() if module._forward_pre_hooks] == ["model.language_model"]


def test_a_model_without_a_cache_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    disable_cache_in_training(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_hook_survives_a_copy_of_the_model() -> None:
    model = tiny_llama(1)
    disable_cache_in_training(model)
    assert copy.deepcopy(model).train()(input_ids=IDS).past_key_values is None


# -- transformers' own switch -----------------------------------------------------------------------------------------


def test_transformers_own_checkpointing_is_turned_off_and_reported() -> None:
    model = tiny_llama(2)
    assert not turn_off_model_checkpointing(model)
    enable_own_checkpointing(model)
    assert own_checkpointing_is_on(model)
    assert turn_off_model_checkpointing(model)
    assert not own_checkpointing_is_on(model)


def test_applying_ours_replaces_theirs() -> None:
    model, plain = tiny_llama(2, attention_dropout=0.3), tiny_llama(2, attention_dropout=0.3)
    enable_own_checkpointing(model)
    checkpoint_all(model)
    assert not own_checkpointing_is_on(model)
    assert differing(gradients(plain), gradients(model)) == []


def test_theirs_is_off_too_when_ours_is_not_asked_for() -> None:
    """`activation_checkpointing: none` means none, whatever the model was loaded with."""
    model = tiny_llama(2)
    enable_own_checkpointing(model)
    assert checkpoint_all(model, ActivationCheckpointingConfig(mode="none")) == 0
    assert not own_checkpointing_is_on(model)
