"""Known models: every figure counted from the published sizes, every name found in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp.config.presets import BLOCK_CLASSES, MODEL_PRESETS, ModelPreset, find_model
from hf_fsdp.errors import ConfigError

# From each repository's config.json: class of its config, then the sizes that decide the parameter count.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2-7b": ("LlamaConfig", {"intermediate_size": 11008, "heads": 32, "kv": 32, "vocab_size": 32000}),
    "llama-2-13b": ("LlamaConfig", {"intermediate_size": 13824, "heads": 40, "kv": 40, "vocab_size": 32000}),
    "llama-2-70b": ("LlamaConfig", {"intermediate_size": 28672, "heads": 64, "kv": 8, "vocab_size": 32000}),
    "llama-3.1-8b": ("LlamaConfig", {"intermediate_size": 14336, "heads": 32, "kv": 8, "vocab_size": 128256}),
    "llama-3.1-70b": ("LlamaConfig", {"intermediate_size": 28672, "heads": 64, "kv": 8, "vocab_size": 128256}),
    "llama-3.2-1b": (
        "LlamaConfig",
        {"intermediate_size": 8192, "heads": 32, "kv": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    ),
    "llama-3.2-3b": (
        "LlamaConfig",
        {"intermediate_size": 8192, "heads": 24, "kv": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    ),
    "mistral-7b-v0.3": ("MistralConfig", {"intermediate_size": 14336, "heads": 32, "kv": 8, "vocab_size": 32768}),
    "qwen2.5-7b": ("Qwen2Config", {"intermediate_size": 18944, "heads": 28, "kv": 4, "vocab_size": 152064}),
    "qwen3-8b": (
        "Qwen3Config",
        {"intermediate_size": 12288, "heads": 32, "kv": 8, "head_dim": 128, "vocab_size": 151936},
    ),
    "gemma-3-1b": (
        "Gemma3TextConfig",
        {"intermediate_size": 6912, "heads": 4, "kv": 1, "head_dim": 256, "vocab_size": 262144},
    ),
    "phi-3-mini": ("Phi3Config", {"intermediate_size": 8192, "heads": 32, "kv": 32, "vocab_size": 32064}),
    "smollm2-135m": (
        "LlamaConfig",
        {"intermediate_size": 1536, "heads": 9, "kv": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    ),
}


def build_on_meta(preset: ModelPreset) -> Any:
    import torch
    import transformers

    name, sizes = SIZES[preset.alias]
    sizes = dict(sizes)
    config = getattr(transformers, name)(
        hidden_size=preset.hidden_size,
        num_hidden_layers=preset.num_layers,
        num_attention_heads=sizes.pop("heads"),
        num_key_value_heads=sizes.pop("kv"),
        **sizes,
    )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("preset", MODEL_PRESETS, ids=lambda preset: preset.alias)
def test_the_parameter_count_and_block_class_are_those_of_the_real_architecture(preset: ModelPreset) -> None:
    model = build_on_meta(preset)
    assert sum(parameter.numel() for parameter in model.parameters()) == preset.num_parameters
    blocks = [module for module in model.modules() if type(module).__name__ == preset.layer_class]
    assert len(blocks) == preset.num_layers
    assert BLOCK_CLASSES[model.config.model_type] == preset.layer_class


def test_the_block_class_of_every_known_model_type_exists_in_transformers() -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for model_type, class_name in BLOCK_CLASSES.items():
        package = CONFIG_MAPPING[model_type].__module__.rpartition(".")[0].rpartition(".")[2]
        module = getattr(getattr(transformers.models, package), f"modeling_{package}")
        assert hasattr(module, class_name), f"{model_type}: {class_name}"


@pytest.mark.parametrize(
    "name", ["llama-2-7b", "LLAMA-2-7B", "meta-llama/Llama-2-7b-hf", "meta-llama/llama-2-7b-chat-hf"]
)
def test_a_preset_is_found_by_alias_and_by_hub_id(name: str) -> None:
    facts = find_model(name)
    assert facts.layer_class == "LlamaDecoderLayer"
    assert facts.num_layers == 32
    assert facts.note is None
    assert "/" in facts.name


def test_an_unknown_hub_id_works_and_says_what_is_not_known() -> None:
    for name in ("my-org/My_model.v2", "gpt2"):
        facts = find_model(name)
        assert facts.layer_class is None
        assert facts.note == f"{name} is not a preset: its wrap classes are found from the model at run time"
    assert "if you meant meta-llama/Llama-2-7b-hf" in str(find_model("meta-lama/Llama-2-7b-hf").note)


@pytest.mark.parametrize("name", ["lama-2-7b", "llama-2-7", "./nowhere", "a/b/c", "", "two words"])
def test_a_name_that_can_be_no_model_is_refused_with_what_is_near(name: str) -> None:
    with pytest.raises(ConfigError, match="is neither a preset, a hub id") as caught:
        find_model(name)
    assert caught.value.problems[0].near
    if name.startswith(("lama", "llama")):
        assert find_model(caught.value.problems[0].fix.removeprefix("use ")).layer_class == "LlamaDecoderLayer"


def test_a_local_folder_is_read_from_its_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 2}))
    facts = find_model(str(tmp_path))
    assert (facts.layer_class, facts.num_layers, facts.note) == ("Qwen3DecoderLayer", 2, None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    facts = find_model(str(tmp_path))
    assert facts.layer_class is None
    assert "model_type llava" in str(facts.note)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is a folder without a config.json$"),
        ({"adapter_config.json": '{"base_model_name_or_path": "org/base"}'}, "without a config.json, an adapter"),
        ({"config.json": "{broken"}, "cannot be read as JSON"),
        ({"config.json": "[]"}, "holds no JSON object"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        find_model(str(tmp_path))
    import re

    assert re.search(message, caught.value.problems[0].message)
    if "adapter_config.json" in files:
        assert caught.value.problems[0].fix == "name its base model: org/base"
