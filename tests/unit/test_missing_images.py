"""Where a model takes in pictures, what a rank without them gives its tower, and what of it reaches the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t
from torch import nn
from transformers.generation import GenerationMixin

from hf_fsdp.sharding.missing_images import GENERATE_ENCODES, _WithoutWeight, install_missing_images
from hf_fsdp.sharding.modalities import find_fusion
from hf_fsdp.sharding.stand_in_inputs import count_values, outline, stand_in, tensors_in
from tests.distributed.two_tower_model import TwoTowers
from tests.distributed.vlm_models import MORE_FAMILIES, PARITY_FAMILIES, build_rows, build_vlm, collate
from tests.unit.small_models import on_meta, text_models, vision_language_models
from tests.unit.test_model_parts import FAMILIES

EVERY_FAMILY = (*PARITY_FAMILIES, *MORE_FAMILIES)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_every_family_says_where_pictures_come_in(family: str) -> None:
    model: Any = on_meta(FAMILIES[family])
    fusion = find_fusion(model)
    assert fusion is not None and fusion.module is model.model
    assert fusion.language_model is model.model.get_decoder()
    image = fusion.modalities[0]
    assert (image.name, image.method, image.reason) == ("pixel_values", "get_image_features", "")
    videos = [m.method for m in fusion.modalities if m.name == "pixel_values_videos"]
    assert videos == (["get_video_features"] if family.startswith(("qwen", "llava-onevision")) else [])


def test_adapters_hide_nothing() -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(FAMILIES["llava"](), LoraConfig(r=2, target_modules=r".*q_proj"))
    fusion = find_fusion(model)
    assert fusion is not None and fusion.modalities[0].method == "get_image_features"


@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_a_text_model_has_nothing_to_agree_on(name: str) -> None:
    assert find_fusion(on_meta(text_models()[name])) is None


def test_towers_come_in_the_order_of_the_forward_and_not_of_its_signature() -> None:
    fusion = find_fusion(TwoTowers())
    assert fusion is not None
    assert [m.method for m in fusion.modalities] == ["get_audio_features", "get_image_features"]


def test_a_model_without_a_tower_of_its_own_says_why() -> None:
    fusion = find_fusion(on_meta(vision_language_models()["mllama"]))
    assert fusion is not None and fusion.modalities[0].method is None
    assert "no method of its own for pixel_values" in fusion.modalities[0].reason


def test_a_model_that_needs_its_picture_has_nothing_to_agree_on() -> None:
    """BLIP-2's forward has no default for pixels: a batch without fails in a single process too."""
    config = t.Blip2Config()
    model = on_meta(lambda: t.Blip2ForConditionalGeneration(config))
    assert find_fusion(model) is None


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_stand_in_passes_the_tower_and_its_shapes_are_those_of_the_picture(family: str) -> None:
    model = build_vlm(family).eval()
    batch = collate(family)(build_rows(family, [1, 0]).rows)
    fusion = find_fusion(model)
    assert fusion is not None
    image = fusion.modalities[0]
    arguments = {n: batch[n] for n in (image.name, *image.companions) if n in batch}
    made = stand_in(outline(arguments), torch.device("cpu"))
    assert {n: (v.shape, v.dtype) for n, v in made.items()} == {n: (v.shape, v.dtype) for n, v in arguments.items()}
    for name in set(made) - {"pixel_values"}:
        assert torch.equal(made[name], arguments[name])
    with torch.no_grad():
        features = tensors_in(model.model.get_image_features(**made)["pooler_output"])
    assert features and all(feature.isfinite().all() and feature.numel() for feature in features)


def test_an_outline_keeps_whole_numbers_and_no_pixels() -> None:
    value = {
        "a": [torch.rand(2, 3)],
        "grid": torch.tensor([[1, 4, 4]]),
        "mask": torch.zeros(2, dtype=torch.bool),
        "n": 3,
    }
    made = stand_in(outline(value), torch.device("cpu"))
    assert made["n"] == 3 and torch.equal(made["grid"], value["grid"]) and made["mask"].all()
    assert made["a"][0].shape == (2, 3) and made["a"][0].min() == -1 and made["a"][0].max() == 1
    assert count_values(value["a"]) == 6 and count_values(None) == 0 and count_values(torch.empty(0, 3)) == 0
    with pytest.raises(TypeError, match="object"):
        outline(object())


def test_an_empty_tensor_of_whole_numbers_keeps_its_shape() -> None:
    empty = torch.zeros(0, 3, dtype=torch.long)
    assert stand_in(outline(empty), torch.device("cpu")).shape == (0, 3)


def test_what_has_no_weight_changes_no_bit_and_gives_gradients_of_zero_even_where_it_is_not_finite() -> None:
    embeds = torch.randn(2, 3, requires_grad=True)
    features = torch.tensor([1.0, float("inf"), float("nan")], requires_grad=True)
    passed = _WithoutWeight.apply(embeds, features)
    assert torch.equal(passed, embeds)
    passed.square().sum().backward()
    assert embeds.grad is not None and torch.equal(embeds.grad, 2 * embeds.detach())
    assert features.grad is not None and torch.equal(features.grad, torch.zeros(3))


def test_embeddings_without_gradients_get_a_graph_so_that_backward_passes_the_tower() -> None:
    embeds = torch.randn(2, 3)
    features = torch.ones(4, requires_grad=True)
    _WithoutWeight.apply(embeds, features).sum().backward()
    assert features.grad is not None and not features.grad.any()


def test_one_process_gets_no_hooks() -> None:
    model = FAMILIES["llava"]()
    install_missing_images(model, "cpu")
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_generate_still_encodes_where_the_hook_waits_for_it() -> None:
    assert callable(getattr(GenerationMixin, GENERATE_ENCODES))
    assert isinstance(FAMILIES["llava"](), GenerationMixin) and isinstance(FAMILIES["llava"](), nn.Module)
