"""Small models of many families for the unit tests: on meta where only the structure matters, on CPU to run them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

VOCABULARY = 64
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
IMAGE_TOKEN = 3


def enable_own_checkpointing(model: Any) -> None:
    """Switch transformers' own checkpointing on, by the name that the installed version has."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


def own_checkpointing_is_on(model: Any) -> bool:
    """Whether transformers' own checkpointing is on, without the property whose name changed."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def on_meta(build: Callable[[], nn.Module]) -> Any:
    """Build a model without values: structure and shapes only, in milliseconds."""
    with torch.device("meta"):
        return build()


def tiny_llama(num_layers: int = 2, **changes: Any) -> Any:
    """Return a Llama of 32 hidden channels on CPU, seeded."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**TEXT, "num_hidden_layers": num_layers, **changes})
    return transformers.LlamaForCausalLM(config)


def text_models() -> dict[str, Callable[[], nn.Module]]:
    """Builders of the text families that the wrap policy is shown for."""
    t = transformers
    gpt = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
    seq2seq = {"vocab_size": VOCABULARY, "d_model": 32, "d_ff": 48, "num_layers": 3, "num_heads": 4, "d_kv": 8}
    bert = {**{key: TEXT[key] for key in TEXT if key != "num_key_value_heads"}}
    opt = {**bert, "ffn_dim": 48, "word_embed_proj_dim": 32}
    moe = {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}
    jamba = {**TEXT, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    return {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**TEXT)),
        "llama tied": lambda: t.LlamaForCausalLM(t.LlamaConfig(**TEXT, tie_word_embeddings=True)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**TEXT)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**TEXT)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**TEXT, head_dim=8)),
        "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**TEXT, head_dim=8)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt)),
        "opt": lambda: t.OPTForCausalLM(t.OPTConfig(**opt)),
        "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(**TEXT)),
        "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**seq2seq, decoder_start_token_id=0)),
        "bert": lambda: t.BertForSequenceClassification(t.BertConfig(**bert)),
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**moe)),
        "jamba": lambda: t.JambaForCausalLM(t.JambaConfig(**jamba, num_experts=2, use_mamba_kernels=False)),
    }


def vision_language_models() -> dict[str, Callable[[], nn.Module]]:
    """Builders of the image-and-text families; every one has a vision tower and a language model."""
    t = transformers
    llama = t.LlamaConfig(**TEXT)
    idefics = {"text_config": llama, "vision_config": VISION, "image_token_id": IMAGE_TOKEN, "scale_factor": 2}
    qwen_vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    qwen_text = {**TEXT, "rope_parameters": rope}
    mllama_text = {**TEXT, "cross_attention_layers": [1], "rope_scaling": {"rope_type": "default", "rope_theta": 1e4}}
    mllama_vision = {**VISION, "num_global_layers": 2, "attention_heads": 4, "vision_output_dim": 96}
    mllama_vision |= {"intermediate_layers_indices": [0, 1], "image_size": 16, "supported_aspect_ratios": [[1, 1]]}
    return {
        "llava": lambda: t.LlavaForConditionalGeneration(
            t.LlavaConfig(vision_config=t.CLIPVisionConfig(**VISION), text_config=llama, image_token_index=IMAGE_TOKEN)
        ),
        "llava-onevision": lambda: t.LlavaOnevisionForConditionalGeneration(
            t.LlavaOnevisionConfig(
                vision_config=t.SiglipVisionConfig(**VISION),
                text_config=t.Qwen2Config(**TEXT),
                image_token_index=IMAGE_TOKEN,
            )
        ),
        "paligemma": lambda: t.PaliGemmaForConditionalGeneration(
            t.PaliGemmaConfig(
                vision_config=t.SiglipVisionConfig(**VISION),
                text_config=t.GemmaConfig(**TEXT, head_dim=8),
                projection_dim=32,
                image_token_id=IMAGE_TOKEN,
            )
        ),
        "idefics3": lambda: t.Idefics3ForConditionalGeneration(t.Idefics3Config(**idefics)),
        "smolvlm": lambda: t.SmolVLMForConditionalGeneration(t.SmolVLMConfig(**idefics)),
        "qwen2.5-vl": lambda: t.Qwen2_5_VLForConditionalGeneration(
            t.Qwen2_5_VLConfig(text_config=qwen_text, vision_config=qwen_vision, image_token_id=IMAGE_TOKEN)
        ),
        "gemma3": lambda: t.Gemma3ForConditionalGeneration(
            t.Gemma3Config(
                text_config=t.Gemma3TextConfig(**TEXT, head_dim=8),
                vision_config=t.SiglipVisionConfig(**VISION),
                mm_tokens_per_image=4,
                image_token_index=IMAGE_TOKEN,
            )
        ),
        "mllama": lambda: t.MllamaForConditionalGeneration(
            t.MllamaConfig(vision_config=mllama_vision, text_config=mllama_text, image_token_index=IMAGE_TOKEN)
        ),
    }


# -- the auto mappings ------------------------------------------------------------------------------------------------

MAPPINGS = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
_LAYER_COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "depth",
)


def auto_model_classes() -> dict[str, str]:
    """Map the name of every model class in `MAPPINGS` to its model type."""
    found: dict[str, str] = {}
    for mapping in MAPPINGS:
        for model_type, names in getattr(modeling_auto, mapping).items():
            found.setdefault(names if isinstance(names, str) else names[0], model_type)
    return found


def build_default(class_name: str, model_type: str, num_layers: int = 16) -> nn.Module | None:
    """Build a class on meta from its default config, cut to `num_layers` layers; None where that cannot be built."""
    try:
        config = getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[model_type])()
        model_class = getattr(transformers, class_name)
    except Exception:
        return None
    fewer = copy.deepcopy(config)
    for candidate in (_with_fewer_layers(fewer, num_layers), config):
        try:
            return on_meta(functools.partial(model_class, candidate))
        except Exception:
            continue
    return None


def _with_fewer_layers(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    for name in _LAYER_COUNTS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > num_layers:
            _try_set(config, name, num_layers)
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _with_fewer_layers(value, num_layers)
        elif isinstance(value, list) and name in ("layer_types", "mlp_layer_types", "layers_block_type"):
            _try_set(config, name, value[:num_layers])
    return config


def _try_set(config: PretrainedConfig, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # some counts are properties
        return
