"""The tower, projector and language model of every family that is fine-tuned, and what is frozen and trained."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn

from hf_fsdp import load_sharded
from hf_fsdp.errors import ConfigError
from hf_fsdp.policies.model_parts import OTHER_NAMES, find_parts, set_trainable
from tests.unit.small_models import IMAGE_TOKEN, TEXT, VISION, on_meta, text_models, tiny_llama, vision_language_models

ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
QWEN_VISION = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}


def more_families() -> dict[str, Callable[[], nn.Module]]:
    llama = t.LlamaConfig(**TEXT)
    clip = t.CLIPVisionConfig(**VISION)
    qwen3_text = {**TEXT, "head_dim": 8, "rope_parameters": ROPE}
    return {
        "llava-next": lambda: t.LlavaNextForConditionalGeneration(
            t.LlavaNextConfig(vision_config=clip, text_config=llama, image_token_index=IMAGE_TOKEN)
        ),
        "qwen2-vl": lambda: t.Qwen2VLForConditionalGeneration(
            t.Qwen2VLConfig(
                text_config={**TEXT, "rope_parameters": ROPE},
                vision_config={"depth": 3, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2},
                image_token_id=IMAGE_TOKEN,
            )
        ),
        "qwen3-vl": lambda: t.Qwen3VLForConditionalGeneration(
            t.Qwen3VLConfig(
                text_config=qwen3_text,
                vision_config={**QWEN_VISION, "deepstack_visual_indexes": [0, 1]},
                image_token_id=IMAGE_TOKEN,
            )
        ),
        "internvl": lambda: t.InternVLForConditionalGeneration(
            t.InternVLConfig(
                text_config=t.Qwen2Config(**TEXT),
                vision_config={**VISION, "image_size": [16, 16], "patch_size": [8, 8]},
                image_token_id=IMAGE_TOKEN,
            )
        ),
    }


FAMILIES = {**vision_language_models(), **more_families()}
# Where each family keeps its parts, as its own code has it.
PLACES: Mapping[str, Mapping[str, str]] = {
    "llava": {"vision": r"model\.vision_tower\.", "projector": r"model\.multi_modal_projector\."},
    "llava-next": {
        "vision": r"model\.vision_tower\.",
        "projector": r"model\.(multi_modal_projector\.|image_newline)",
    },
    "llava-onevision": {
        "vision": r"model\.vision_tower\.",
        "projector": r"model\.(multi_modal_projector\.|image_newline)",
    },
    "paligemma": {"vision": r"model\.vision_tower\.", "projector": r"model\.multi_modal_projector\."},
    "gemma3": {"vision": r"model\.vision_tower\.", "projector": r"model\.multi_modal_projector\."},
    "mllama": {"vision": r"model\.vision_model\.", "projector": r"model\.multi_modal_projector\."},
    "internvl": {"vision": r"model\.vision_tower\.", "projector": r"model\.multi_modal_projector\."},
    "idefics3": {"vision": r"model\.vision_model\.", "projector": r"model\.connector\."},
    "smolvlm": {"vision": r"model\.vision_model\.", "projector": r"model\.connector\."},
    "qwen2-vl": {"vision": r"model\.visual\.(patch_embed|blocks)\.", "projector": r"model\.visual\.merger\."},
    "qwen2.5-vl": {"vision": r"model\.visual\.(patch_embed|blocks)\.", "projector": r"model\.visual\.merger\."},
    "qwen3-vl": {
        "vision": r"model\.visual\.(patch_embed|pos_embed|blocks)\.",
        "projector": r"model\.visual\.(merger|deepstack_merger_list)\.",
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_in_the_part_where_the_family_keeps_it(family: str) -> None:
    model = on_meta(FAMILIES[family])
    found = find_parts(model)
    assert set(found.names) == {"language", "projector", "vision"}
    assert sorted(name for names in found.names.values() for name in names) == sorted(
        name for name, _ in model.named_parameters()
    )
    for part, place in PLACES[family].items():
        expected = [name for name, _ in model.named_parameters() if re.match(place, name)]
        assert expected and list(found.names[part]) == expected
    assert found.part_of(found.names["vision"][0]) == "vision"


@pytest.mark.parametrize("family", text_models())
def test_a_text_model_is_its_language_part(family: str) -> None:
    model = on_meta(text_models()[family])
    assert dict(find_parts(model).names) == {"language": tuple(name for name, _ in model.named_parameters())}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", [["language"], ["projector"], ["language", "projector"], ["vision"], ["all"]])
def test_the_named_parts_are_trained_and_nothing_else(family: str, parts: list[str]) -> None:
    model = on_meta(FAMILIES[family])
    found = set_trainable(model, parts)
    wanted = set(found.names) if parts == ["all"] else set(parts)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for part in wanted for name in found.names[part]}
    set_trainable(model, ["all"])
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_adapters_belong_to_the_part_that_they_are_on() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model: Any = get_peft_model(
        FAMILIES["qwen2.5-vl"](), LoraConfig(r=2, target_modules=r".*(visual\.blocks\.0\.attn\.qkv|q_proj)")
    )
    found = find_parts(model)
    assert set(found.names) == {"language", "projector", "vision"}
    assert {found.part_of(name) for name, _ in model.named_parameters() if "lora_" in name} == {"language", "vision"}
    assert all("q_proj" in name for name in found.names["language"] if "lora_" in name)


@pytest.mark.parametrize(
    ("parts", "message", "fix"),
    [
        (["visoin"], "trainable=visoin is no part of LlavaForConditionalGeneration", "trainable: [language, projector"),
        (["audio"], "trainable=audio is no part of", "trainable: [language"),
        ([], "trains nothing", "trainable: [language, projector, vision]"),
        (["all", "vision"], "names all and more", "trainable: all"),
        (["freeze_vision_tower"], "another tool's name: it freezes the vision", "trainable: [language, projector]"),
    ],
)
def test_a_part_that_is_none_is_an_error_whose_advice_works(parts: list[str], message: str, fix: str) -> None:
    model = on_meta(FAMILIES["llava"])
    before = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(ConfigError) as caught:
        set_trainable(model, parts)
    (problem,) = caught.value.problems
    assert message in problem.message and problem.fix.startswith(fix)
    assert [parameter.requires_grad for parameter in model.parameters()] == before


def test_names_of_other_tools_answer_for_parts_that_exist() -> None:
    assert set(OTHER_NAMES.values()) == {"vision", "projector", "language"}
    with pytest.raises(ConfigError, match="freeze_llm is another tool's name"):
        set_trainable(tiny_llama(), ["freeze_llm"])


def test_the_parts_of_a_loaded_model_are_frozen_and_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    FAMILIES["llava"]().save_pretrained(tmp_path)
    model = load_sharded(t.LlavaForConditionalGeneration, tmp_path)
    found = set_trainable(model, ["projector"])
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == list(found.names["projector"])
