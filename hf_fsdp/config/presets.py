"""Known models, and what can be read about a model without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_fsdp.errors import ConfigError, nearest_names


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """One model family member. `num_parameters` counts tied weights once.

    Args:
        alias: the short name on the command line.
        hub_id: the repository that the figures are of.
        layer_class: class of the repeated block in transformers.
        num_layers: number of those blocks.
        hidden_size: width of the residual stream.
        num_parameters: parameters of the causal language model.
        same_shape: other repositories with the same architecture and sizes.
    """

    alias: str
    hub_id: str
    layer_class: str
    num_layers: int
    hidden_size: int
    num_parameters: int
    same_shape: tuple[str, ...] = ()


MODEL_PRESETS: tuple[ModelPreset, ...] = (
    ModelPreset(
        alias="llama-2-7b",
        hub_id="meta-llama/Llama-2-7b-hf",
        layer_class="LlamaDecoderLayer",
        num_layers=32,
        hidden_size=4096,
        num_parameters=6_738_415_616,
        same_shape=("meta-llama/Llama-2-7b-chat-hf",),
    ),
    ModelPreset(
        alias="llama-2-13b",
        hub_id="meta-llama/Llama-2-13b-hf",
        layer_class="LlamaDecoderLayer",
        num_layers=40,
        hidden_size=5120,
        num_parameters=13_015_864_320,
        same_shape=("meta-llama/Llama-2-13b-chat-hf",),
    ),
    ModelPreset(
        alias="llama-2-70b",
        hub_id="meta-llama/Llama-2-70b-hf",
        layer_class="LlamaDecoderLayer",
        num_layers=80,
        hidden_size=8192,
        num_parameters=68_976_648_192,
        same_shape=("meta-llama/Llama-2-70b-chat-hf",),
    ),
    ModelPreset(
        alias="llama-3.1-8b",
        hub_id="meta-llama/Llama-3.1-8B",
        layer_class="LlamaDecoderLayer",
        num_layers=32,
        hidden_size=4096,
        num_parameters=8_030_261_248,
        same_shape=(
            "meta-llama/Llama-3.1-8B-Instruct",
            "meta-llama/Meta-Llama-3.1-8B",
            "meta-llama/Meta-Llama-3.1-8B-Instruct",
        ),
    ),
    ModelPreset(
        alias="llama-3.1-70b",
        hub_id="meta-llama/Llama-3.1-70B",
        layer_class="LlamaDecoderLayer",
        num_layers=80,
        hidden_size=8192,
        num_parameters=70_553_706_496,
        same_shape=("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Meta-Llama-3.1-70B"),
    ),
    ModelPreset(
        alias="llama-3.2-1b",
        hub_id="meta-llama/Llama-3.2-1B",
        layer_class="LlamaDecoderLayer",
        num_layers=16,
        hidden_size=2048,
        num_parameters=1_235_814_400,
        same_shape=("meta-llama/Llama-3.2-1B-Instruct",),
    ),
    ModelPreset(
        alias="llama-3.2-3b",
        hub_id="meta-llama/Llama-3.2-3B",
        layer_class="LlamaDecoderLayer",
        num_layers=28,
        hidden_size=3072,
        num_parameters=3_212_749_824,
        same_shape=("meta-llama/Llama-3.2-3B-Instruct",),
    ),
    ModelPreset(
        alias="mistral-7b-v0.3",
        hub_id="mistralai/Mistral-7B-v0.3",
        layer_class="MistralDecoderLayer",
        num_layers=32,
        hidden_size=4096,
        num_parameters=7_248_023_552,
        same_shape=("mistralai/Mistral-7B-Instruct-v0.3",),
    ),
    ModelPreset(
        alias="qwen2.5-7b",
        hub_id="Qwen/Qwen2.5-7B",
        layer_class="Qwen2DecoderLayer",
        num_layers=28,
        hidden_size=3584,
        num_parameters=7_615_616_512,
        same_shape=("Qwen/Qwen2.5-7B-Instruct",),
    ),
    ModelPreset(
        alias="qwen3-8b",
        hub_id="Qwen/Qwen3-8B",
        layer_class="Qwen3DecoderLayer",
        num_layers=36,
        hidden_size=4096,
        num_parameters=8_190_735_360,
        same_shape=("Qwen/Qwen3-8B-Base",),
    ),
    ModelPreset(
        alias="gemma-3-1b",
        hub_id="google/gemma-3-1b-pt",
        layer_class="Gemma3DecoderLayer",
        num_layers=26,
        hidden_size=1152,
        num_parameters=999_885_952,
        same_shape=("google/gemma-3-1b-it",),
    ),
    ModelPreset(
        alias="phi-3-mini",
        hub_id="microsoft/Phi-3-mini-4k-instruct",
        layer_class="Phi3DecoderLayer",
        num_layers=32,
        hidden_size=3072,
        num_parameters=3_821_079_552,
    ),
    ModelPreset(
        alias="smollm2-135m",
        hub_id="HuggingFaceTB/SmolLM2-135M",
        layer_class="LlamaDecoderLayer",
        num_layers=30,
        hidden_size=576,
        num_parameters=134_515_008,
        same_shape=("HuggingFaceTB/SmolLM2-135M-Instruct",),
    ),
)

# `model_type` of a config.json -> class of the repeated block. Only text models whose blocks are all of one
# class; anything else is found from the model itself when it trains.
BLOCK_CLASSES: dict[str, str] = {
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "mixtral": "MixtralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "gemma": "GemmaDecoderLayer",
    "gemma2": "Gemma2DecoderLayer",
    "gemma3_text": "Gemma3DecoderLayer",
    "phi3": "Phi3DecoderLayer",
    "gpt2": "GPT2Block",
    "gpt_neox": "GPTNeoXLayer",
    "opt": "OPTDecoderLayer",
}


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What is known about a model before it is loaded; None where nothing is.

    Args:
        name: as the person gave it, or the hub id of an alias.
        layer_class: class of the repeated block.
        num_layers: number of blocks.
        num_parameters: parameters of the whole model.
        note: one line for the person about what is not known, if anything.
    """

    name: str
    layer_class: str | None = None
    num_layers: int | None = None
    num_parameters: int | None = None
    note: str | None = None


def find_model(model: str) -> ModelFacts:
    """Return what is known about a preset alias, a hub id or a local model folder; nothing is downloaded.

    Raises:
        ConfigError: a folder that is no model, or a name that is neither an alias nor a possible hub id.
    """
    folder = Path(model).expanduser()
    preset = _find_preset(model)
    if model and folder.is_dir() and (preset is None or (folder / "config.json").is_file()):
        return _read_folder(model, folder)
    if preset is not None:
        return _facts_of(preset, model)
    aliases = [item.alias for item in MODEL_PRESETS]
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model):
        near = nearest_names(model, [item.hub_id for item in MODEL_PRESETS], limit=1)
        hint = f" (if you meant {near[0]}, use that)" if near and _is_near_miss(model, near[0]) else ""
        return ModelFacts(
            name=model, note=f"{model} is not a preset: its wrap classes are found from the model at run time{hint}"
        )
    near = nearest_names(model, aliases)
    is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*", model) is not None
    if is_name and not near:
        return ModelFacts(
            name=model, note=f"{model} is not a preset: its wrap classes are found from the model at run time"
        )
    raise ConfigError(
        f"MODEL {model!r} is neither a preset, a hub id (owner/name) nor a folder that exists",
        fix=f"use {near[0]}" if near else f"a preset such as {aliases[0]}, or a folder with a config.json",
        near=", ".join(near) or ", ".join(aliases),
    )


def _is_near_miss(model: str, hub_id: str) -> bool:
    import difflib

    return difflib.SequenceMatcher(None, model.lower(), hub_id.lower()).ratio() > 0.93


def _find_preset(model: str) -> ModelPreset | None:
    wanted = model.lower()
    for preset in MODEL_PRESETS:
        if wanted in (preset.alias, *(name.lower() for name in (preset.hub_id, *preset.same_shape))):
            return preset
    return None


def _facts_of(preset: ModelPreset, model: str) -> ModelFacts:
    name = preset.hub_id if model.lower() == preset.alias else model
    return ModelFacts(
        name=name,
        layer_class=preset.layer_class,
        num_layers=preset.num_layers,
        num_parameters=preset.num_parameters,
    )


def _read_folder(model: str, folder: Path) -> ModelFacts:
    """Read the config.json of a local model; only the keys that say which block it repeats."""
    path = folder / "config.json"
    if not path.is_file():
        adapter = _read_json(folder / "adapter_config.json") if (folder / "adapter_config.json").is_file() else {}
        base = adapter.get("base_model_name_or_path")
        raise ConfigError(
            f"MODEL {model} is a folder without a config.json" + (", an adapter" if adapter else ""),
            fix=f"name its base model: {base}" if base else "name a folder that save_pretrained wrote, or a hub id",
            source=str(folder),
        )
    config = _read_json(path)
    model_type = str(config.get("model_type", ""))
    num_layers = config.get("num_hidden_layers", config.get("n_layer"))
    layer_class = BLOCK_CLASSES.get(model_type)
    note = None
    if layer_class is None:
        kind = f"model_type {model_type}" if model_type else "a config without model_type"
        note = f"{model} is of {kind}: its wrap classes are found from the model at run time"
    return ModelFacts(
        name=model,
        layer_class=layer_class,
        num_layers=num_layers if isinstance(num_layers, int) and layer_class else None,
        note=note,
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"{path} cannot be read as JSON: {str(error).splitlines()[0]}",
            fix="restore the file, e.g. by saving the model again with save_pretrained",
            source=f"{path}:{line}" if line else str(path),
        ) from None
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{path} holds no JSON object", fix="name a folder that save_pretrained wrote", source=str(path)
        )
    return data
