"""The tower, projector and language model of every family that is fine-tuned, and what is frozen and trained."""

from __future__ import annotations

import copy
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
from hf_fsdp.policies.frozen_statistics import hold_frozen_statistics
from hf_fsdp.policies.model_parts import describe_parts, find_parts, set_trainable
from hf_fsdp.policies.other_tools import OTHER_NAMES, answer_other_tools
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
        (["audio"], "trainable=audio: LlavaForConditionalGeneration has no audio tower", "trainable: [language"),
        ([], "trains nothing", "trainable: [language, projector, vision]"),
        (["all", "vision"], "names all and more", "trainable: all"),
        (["freeze_vision_tower"], "another tool's name: it freezes the vision", "trainable: [language]"),
        (["freeze_merger"], "another tool's name: it freezes the projector", "trainable: [language, vision]"),
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


@pytest.mark.parametrize("parts", ["all", "language", "language,projector", "[language, vision]", "vision projector"])
def test_parts_may_be_one_string(parts: str) -> None:
    model = on_meta(FAMILIES["llava"])
    found = set_trainable(model, parts)
    wanted = set(found.names) if parts == "all" else set(re.findall(r"\w+", parts))
    trained = {found.part_of(name) for name, p in model.named_parameters() if p.requires_grad}
    assert trained == wanted


@pytest.mark.parametrize("part", ["vision", "projector", "audio"])
def test_a_text_model_has_no_tower_to_train_and_says_so(part: str) -> None:
    model = tiny_llama()
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM has no {part}.*a model of text alone") as caught:
        set_trainable(model, ["language", part])
    assert caught.value.problems[0].fix.startswith("trainable: all")
    set_trainable(model, "all")  # the advice


# -- where the parts lie ----------------------------------------------------------------------------------------------

WHERE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    **{
        family: {
            "language": ("model.language_model", "lm_head"),
            "projector": ("model.multi_modal_projector",),
            "vision": ("model.vision_tower",),
        }
        for family in ("llava", "paligemma", "gemma3", "internvl")
    },
    **{
        family: {
            "language": ("model.language_model", "lm_head"),
            "projector": ("model.multi_modal_projector", "model.image_newline"),
            "vision": ("model.vision_tower",),
        }
        for family in ("llava-next", "llava-onevision")
    },
    **{
        family: {
            "language": ("model.text_model", "lm_head"),
            "projector": ("model.connector",),
            "vision": ("model.vision_model",),
        }
        for family in ("idefics3", "smolvlm")
    },
    "mllama": {
        "language": ("model.language_model", "lm_head"),
        "projector": ("model.multi_modal_projector",),
        "vision": ("model.vision_model",),
    },
    **{
        family: {
            "language": ("model.language_model", "lm_head"),
            "projector": ("model.visual.merger",),
            "vision": ("model.visual.patch_embed", "model.visual.blocks"),
        }
        for family in ("qwen2-vl", "qwen2.5-vl")
    },
    "qwen3-vl": {
        "language": ("model.language_model", "lm_head"),
        "projector": ("model.visual.merger", "model.visual.deepstack_merger_list"),
        "vision": ("model.visual.patch_embed", "model.visual.pos_embed", "model.visual.blocks"),
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_of_families_is_read_off_the_model(family: str) -> None:
    model = on_meta(FAMILIES[family])
    rows = describe_parts(model)
    found = {row.part: set(row.paths) for row in rows}
    assert found == {part: set(paths) for part, paths in WHERE[family].items()}
    assert sum(row.num_parameters for row in rows) == sum(parameter.numel() for parameter in model.parameters())
    named = dict(model.named_parameters())
    for row in rows:
        assert row.num_parameters == sum(named[name].numel() for name in find_parts(model).names[row.part])


def test_a_text_model_is_one_row() -> None:
    rows = describe_parts(tiny_llama())
    assert [(row.part, row.paths) for row in rows] == [("language", ("model", "lm_head"))]


# -- other tools ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "tool", "line"),
    [
        ({"freeze_vision_tower": True}, "LLaMA-Factory", "trainable: [language]"),
        ({"freeze_vision_tower": "false"}, "LLaMA-Factory", "trainable: [language, vision]"),
        (
            {"freeze_vision_tower": False, "freeze_multi_modal_projector": False, "freeze_language_model": True},
            "LLaMA-Factory",
            "trainable: [projector, vision]",
        ),
        ({"train_mm_proj_only": True}, "LLaMA-Factory", "trainable: [projector]"),
        (
            {"freeze_vit": False, "freeze_aligner": True, "freeze_llm": False},
            "ms-swift",
            "trainable: [language, vision]",
        ),
        ({"freeze_llm": "True", "freeze_aligner": "False"}, "ms-swift", "trainable: [projector]"),
        ({"tune_mm_mlp_adapter": True}, "LLaVA", "trainable: [projector]"),
        ({"tune_mm_mlp_adapter": True, "freeze_backbone": True}, "LLaVA", "trainable: [projector]"),
        ({"tune_mm_mlp_adapter": False}, "LLaVA", "trainable: [language, projector]"),
        ({"freeze_mm_mlp_adapter": True}, "LLaVA", "trainable: [language]"),
        ({"freeze_backbone": True}, "LLaVA", "trainable: [projector]"),
        ({"freeze_backbone": True, "freeze_mlp": False}, "InternVL", "trainable: [language, projector]"),
        ({"unfreeze_mm_vision_tower": True}, "LLaVA", "trainable: [language, projector, vision]"),
        (
            {"tune_mm_llm": True, "tune_mm_mlp": True, "tune_mm_vision": False},
            "Qwen-VL",
            "trainable: [language, projector]",
        ),
        ({"freeze_vision_tower": True, "freeze_merger": False}, "Qwen-VL-Series", "trainable: [language, projector]"),
        ({"finetune_vision_layers": False}, "Unsloth", "lora_parts: [language]"),
        ({"mm_tunable_parts": "mm_vision_tower,mm_mlp_adapter"}, "LLaVA-NeXT", "trainable: [projector, vision]"),
        ({"unfrozen_parameters": [r"model\.language_model\.", "lm_head"]}, "by pattern", "trainable: [language]"),
        ({"unfrozen_parameters": [r"multi_modal_projector"]}, "by pattern", "trainable: [projector]"),
        ({"mm_projector_lr": 2e-5}, "LLaVA", "part_learning_rate: {projector: 2.0e-05}"),
        ({"vit_lr": 1e-6}, "ms-swift", "part_learning_rate: {vision: 1.0e-06}"),
    ],
)
def test_other_tools_keys_are_answered_by_the_line_that_means_the_same(
    values: dict[str, Any], tool: str, line: str
) -> None:
    model = on_meta(FAMILIES["llava"])
    problems = answer_other_tools(
        {**values, "learning_rate": 1e-5}, part_names=find_parts(model).names, source="my.yaml"
    )
    assert len(problems) == len(values)  # an unknown key that no program is known for is somebody else's to refuse
    for problem in problems:
        assert tool in problem.message and problem.fix == line and problem.source == "my.yaml"
    if line.startswith("trainable"):
        asked = line.removeprefix("trainable: ")
        found = set_trainable(model, asked)
        trained = {found.part_of(name) for name, p in model.named_parameters() if p.requires_grad}
        assert trained == set(re.findall(r"\w+", asked))


def test_switches_say_where_adapters_go_in_a_run_that_trains_adapters() -> None:
    (problem,) = answer_other_tools({"freeze_vit": False}, lora=True)
    assert problem.fix == "lora_parts: [language, vision]"


def test_names_with_two_meanings_and_patterns_of_half_a_part_are_said() -> None:
    (problem,) = answer_other_tools({"freeze_backbone": True})
    assert "in InternVL's script it means the vision" in problem.message
    names = find_parts(on_meta(FAMILIES["llava"])).names
    (problem,) = answer_other_tools({"unfrozen_parameters": [r".*layers\.[23]\."]}, part_names=names)
    assert "parameters of the language" in problem.message and "whole parts" in problem.message
    (problem,) = answer_other_tools({"freeze_vision_tower": True, "freeze_language_model": True})[:1]
    assert "freeze everything" in problem.fix
    assert answer_other_tools({"learning_rate": 1}) == []


# -- batch norms of a frozen part -------------------------------------------------------------------------------------


class TowerWithBatchNorm(nn.Module):
    """A tower with running statistics beside a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.language_model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.language_model(self.vision_tower(inputs))


def test_a_frozen_batch_norm_keeps_its_statistics_in_training() -> None:
    torch.manual_seed(0)
    model = TowerWithBatchNorm()
    set_trainable(model, ["language"])
    assert hold_frozen_statistics(model) == ["vision_tower.1"]
    model = copy.deepcopy(model)  # as PEFT copies what it trains beside adapters
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _ in range(2):
        model.train()
        model(torch.randn(8, 4)).sum().backward()
    changed = {name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}
    assert changed and all(name.startswith("language_model") for name in changed)
    set_trainable(model, "all")
    assert hold_frozen_statistics(model) == []
    model.train()
    model(torch.randn(8, 4))
    assert not torch.equal(model.vision_tower[1].running_mean, before["vision_tower.1.running_mean"])


def test_the_parts_of_a_loaded_model_are_frozen_and_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    FAMILIES["llava"]().save_pretrained(tmp_path)
    model = load_sharded(t.LlavaForConditionalGeneration, tmp_path)
    found = set_trainable(model, ["projector"])
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == list(found.names["projector"])
