"""The built-in list: each config builds the model that its publisher describes, and is found by what people type."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hf_fsdp.plan
from hf_fsdp.config.presets import MODEL_PRESETS
from hf_fsdp.plan.models.known_models import (
    KnownModel,
    catalog_names,
    find_known_model,
    known_models,
    near_known_models,
)
from hf_fsdp.plan.models.model_config import PLANNED_KINDS, model_kind, read_config
from hf_fsdp.plan.models.resolve import resolve_model

FOLDER = Path(hf_fsdp.plan.__file__).parent / "models" / "catalog"
# Keys that repositories of one shape may differ in: none is the size of a weight.
NO_SHAPE = {"max_position_embeddings", "rope_theta", "sliding_window", "torch_dtype"}


@cache
def count_parameters(alias: str) -> int:
    """Parameters of the real model on the meta device, tied ones once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.initialization import no_init_weights

    spec = resolve_model(alias)
    auto: Any = {"causal-lm": AutoModelForCausalLM, "image-text-to-text": AutoModelForImageTextToText}[model_kind(spec)]
    with torch.device("meta"), no_init_weights():
        model = auto.from_config(read_config(spec))
    model.tie_weights()  # without initialization it was left out
    assert type(model).__name__ in spec.config["architectures"]
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "model", [model for model in known_models() if model.num_parameters is not None], ids=lambda model: model.alias
)
def test_a_built_in_config_builds_a_model_of_the_published_size(model: KnownModel) -> None:
    assert count_parameters(model.alias) == model.num_parameters


def test_models_without_a_published_count_are_their_parts() -> None:
    """Language model of the same shape, with more rows in its vocabulary, the same tower, and the projector between."""

    def llava(language: int, width: int) -> int:
        return language + 2 * 64 * width + (1024 * width + width) + (width * width + width)

    clip = count_parameters("llava-1.5-7b") - llava(6_738_415_616, 4096)
    assert count_parameters("llava-1.5-13b") == llava(13_015_864_320, 5120) + clip

    # SmolVLM: SmolLM2-1.7B untied, with 3 more rows, and nine patches a token projected; its tower has 27 x 27 places.
    tower = count_parameters("smolvlm") - (1_711_376_384 + 49152 * 2048 + 2 * 3 * 2048) - 9 * 1152 * 2048
    assert count_parameters("idefics3-8b") == (
        8_030_261_248 + 2 * 3 * 4096 + 4 * 1152 * 4096 + tower - (27**2 - 26**2) * 1152
    )
    more_patches = (448 // 14) ** 2 - (224 // 14) ** 2
    assert count_parameters("paligemma-3b-448") == count_parameters("paligemma-3b") + more_patches * 1152
    unknown = {model.alias for model in known_models() if model.num_parameters is None}
    assert unknown == {"llava-1.5-13b", "idefics3-8b", "paligemma-3b-448"}


def test_every_preset_is_in_the_list_with_the_same_figures() -> None:
    by_alias = {model.alias: model for model in known_models()}
    for preset in MODEL_PRESETS:
        model, config = by_alias[preset.alias], resolve_model(preset.alias).config
        assert (model.hub_id, model.num_parameters) == (preset.hub_id, preset.num_parameters)
        assert (config["num_hidden_layers"], config["hidden_size"]) == (preset.num_layers, preset.hidden_size)
        for name in (preset.hub_id, *preset.same_shape):
            found = find_known_model(name)
            assert found is not None and found.model is model


@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.alias)
def test_repositories_of_one_shape_differ_in_no_shape(model: KnownModel) -> None:
    config = json.loads((FOLDER / f"{model.alias}.json").read_text(encoding="utf-8"))
    for name, changes in model.same_shape.items():
        assert all(key in NO_SHAPE or key.endswith("_token_id") for key in changes), name
        spec = resolve_model(name.upper())
        assert spec.name == name
        assert spec.config == {**config, **changes}
        assert spec.num_parameters == model.num_parameters


def test_the_list_and_its_files_agree() -> None:
    files = {path.stem for path in FOLDER.glob("*.json")} - {"index"}
    assert files == set(catalog_names())
    repositories = [name for model in known_models() for name in (model.hub_id, *model.same_shape)]
    assert len(repositories) == len({name.lower() for name in repositories}), "a repository has two shapes"


@pytest.mark.parametrize(
    ("typed", "hub_id"),
    [
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("Llama-2-7B-Chat", "meta-llama/Llama-2-7b-chat-hf"),
        ("META-LLAMA/llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("qwen2.5-vl-7b", "Qwen/Qwen2.5-VL-7B-Instruct"),
        ("qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("gemma-3-1b", "google/gemma-3-1b-pt"),
        ("gemma-3-1b-it", "google/gemma-3-1b-it"),
        ("gpt2", "openai-community/gpt2"),
        (" smolvlm-instruct ", "HuggingFaceTB/SmolVLM-Instruct"),
    ],
)
def test_a_model_is_found_by_what_people_type(typed: str, hub_id: str) -> None:
    found = find_known_model(typed)
    assert found is not None and found.hub_id == hub_id


@pytest.mark.parametrize("typed", ["llama", "mistral-7b", "7b", "", "qwen3-8b-instruct", "someone/Llama-2-7b-hf"])
def test_a_name_that_could_be_another_model_is_not_guessed(typed: str) -> None:
    assert find_known_model(typed) is None


def test_near_names_have_the_form_that_was_typed() -> None:
    assert near_known_models("llama2-7b")[0] == "llama-2-7b"
    assert near_known_models("mistral-7b")[:2] == ["mistral-7b-v0.1", "mistral-7b-v0.3"]
    assert near_known_models("meta-lama/Llama-2-7b-hf")[0] == "meta-llama/Llama-2-7b-hf"
    assert near_known_models("unsloth/Llama-3.2-1B-Instruct")[0] == "meta-llama/Llama-3.2-1B-Instruct"
    assert near_known_models("zzzzzz") == []


def test_every_built_in_model_is_of_a_kind_that_is_planned() -> None:
    pictures = {model.alias for model in known_models() if model_kind(resolve_model(model.alias)) == PLANNED_KINDS[1]}
    assert all(model_kind(resolve_model(alias)) in PLANNED_KINDS for alias in catalog_names())
    with_tower = {alias for alias in catalog_names() if "vision_config" in resolve_model(alias).config}
    assert pictures == with_tower


def test_experts_and_heads_come_out_whole() -> None:
    for alias in catalog_names():
        text = read_config(resolve_model(alias)).get_text_config()
        heads = text.num_attention_heads
        assert heads % (getattr(text, "num_key_value_heads", None) or heads) == 0
        assert math.gcd(text.hidden_size, 64) == 64


def test_listing_the_names_needs_no_torch_and_no_transformers() -> None:
    code = (
        "import sys; from hf_fsdp.plan.models.known_models import catalog_names;"
        "from hf_fsdp.plan.models.resolve import resolve_model;"
        "assert len(catalog_names()) > 50 and resolve_model('llama-2-7b').num_parameters;"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
