"""What transformers makes of a config.json: its config object, and the kind of model that is built from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from hf_fsdp.plan.job import ModelSpec

# Kind -> table of transformers that lists its model classes. Looked at in this order where a class is in several.
_TABLES = {
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
}
_AUTO_CLASSES = {"AutoModelForImageTextToText": "image-text-to-text", "AutoModelForCausalLM": "causal-lm"}
# Heads that a fine-tuning may put on a language model; they say nothing about the kind of model below.
_OTHER_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")

# The kinds that the planner can simulate a step of.
PLANNED_KINDS = ("causal-lm", "image-text-to-text")


def uses_own_code(config: Mapping[str, Any]) -> bool:
    """Return whether the model's class comes with the model and not with the installed transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return config.get("model_type") not in CONFIG_MAPPING


def read_config(spec: ModelSpec) -> Any:
    """Return the config object (a `PreTrainedConfig`) that transformers makes of `spec`, as `from_pretrained` would.

    Args:
        spec: of `resolve_model`. Code that comes with the model runs only if `spec.trust_remote_code`.

    Raises:
        ValueError, TypeError, KeyError: values that the config class refuses; `resolve_model` reports them in words.

    Example::

        read_config(resolve_model("llama-2-7b")).num_hidden_layers
        # 32
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    data = copy.deepcopy(dict(spec.config))
    model_type = data["model_type"]
    if uses_own_code(data):
        if not spec.trust_remote_code:
            raise ValueError(f"model_type {model_type!r} is not one of transformers")
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        own: Any = get_class_from_dynamic_module(data["auto_map"]["AutoConfig"], spec.name)
        return own.from_dict(data)
    if model_type == "mistral" and "layer_types" in data:  # as AutoConfig does: alternating attention is ministral's
        model_type = data["model_type"] = "ministral"
    return CONFIG_MAPPING[model_type].from_dict(data)


def model_kind(spec: ModelSpec) -> str:
    """Return which kind of model is built from `spec`, without building it.

    Args:
        spec: of `resolve_model`.

    Returns:
        ``causal-lm`` (`AutoModelForCausalLM`) or ``image-text-to-text`` (`AutoModelForImageTextToText`), which the
        planner simulates; ``seq2seq``, ``speech``, ``masked-lm`` or ``other``, which it does not.

    Example::

        model_kind(resolve_model("gemma-3-4b"))
        # 'image-text-to-text'
    """
    return kind_of(spec.config)


def kind_of(config: Mapping[str, Any]) -> str:
    """Return `model_kind` of the contents of a config.json."""
    from transformers.models.auto import modeling_auto

    model_type = config.get("model_type")
    if uses_own_code(config):
        own = config.get("auto_map") or {}
        return next((kind for name, kind in _AUTO_CLASSES.items() if name in own), "other")
    tables = {kind: getattr(modeling_auto, name).get(model_type) for kind, name in _TABLES.items()}
    classes = {kind: (names,) if isinstance(names, str) else tuple(names or ()) for kind, names in tables.items()}
    named = config.get("architectures")
    stated = [name for name in named if isinstance(name, str)] if isinstance(named, list | tuple) else []
    stated = [name for name in stated if not name.endswith(_OTHER_HEADS)]
    # BERT is in the table of causal models too, and a Gemma 3 in that of both: the checkpoint knows which it is.
    for kind, names in classes.items():
        if set(stated) & set(names):
            return kind
    possible = [kind for kind, names in classes.items() if names]
    if stated and "masked-lm" in possible:
        return "masked-lm"
    return possible[0] if possible else "other"
