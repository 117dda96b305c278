"""Small configurations of any causal language model of transformers, derived from its default one.

The default configuration says which settings a family has; those that say a size get a small one, dropout is switched
off, and token ids are kept inside the small vocabulary. What cannot be derived is in `_SPECIAL`, one line a family.
"""

from __future__ import annotations

import re
from typing import Any

import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

VOCABULARY = 96
HIDDEN = 32
NUM_LAYERS = 4

# Exact names of settings and their small values.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "vocab_size_per_layer_input", "n_words"), VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "lru_width", "attention_hidden_size"), HIDDEN
    ),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "d_inner", "n_inner", "ffn_hidden_size", "dim_ff", "dff"), 64
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), NUM_LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers", "num_blocks"), NUM_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_size", "attention_head_dim", "d_kv", "dim_head"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_length_position"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "intermediate_size_mlp", "ffn_intermediate_size"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "qk_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "n_groups", "num_expert_groups"), 1),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "time_step_rank"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_headdim", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "sliding_window", "attention_window_size", "window_size"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "rotary_dim", "index_head_dim"), 8),
    **dict.fromkeys(("swa_head_dim", "linear_head_dim", "swa_v_head_dim", "swa_qk_nope_head_dim"), 8),
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_heads", "linear_num_heads", "linear_attn_num_heads"), 4),
    **dict.fromkeys(("swa_num_key_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("unpadded_vocab_size",), VOCABULARY),
    **dict.fromkeys(("index_topk",), 16),
    "hidden_size_per_layer_input": 8,
    "image_size": 16,
    "patch_size": 8,
    "num_memory_blocks": 1,
    "num_mem_blocks": 1,
    "first_k_dense_replace": 1,
    "output_router_logits": False,
    "use_cache": False,
    "is_decoder": True,
    "add_cross_attention": False,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
_DROPOUT = re.compile(r"drop|jitter_noise|^layerdrop$")
_SUB_CONFIG = re.compile(r"_config$")

# What cannot be derived, by model type.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_INDEXER = {"indexer_head_dim": 8, "indexer_budget": 16, "indexer_compress_ratio": 4}
_ASSISTANT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_ATTENTION_AND_MIXER = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_experts": 16},
    "blt_local_encoder": {"hidden_size_global": HIDDEN},
    "blt_local_decoder": {"hidden_size_global": HIDDEN},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [2, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, **_INDEXER},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": 64},
    "gemma4_assistant": {"text_config": {**_ASSISTANT, "num_kv_shared_layers": NUM_LAYERS}},
    "gpt_neo": {"attention_types": [[["global", "local"], NUM_LAYERS // 2]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4], "attn_layers": ["local", "lsh"] * 2},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16, "shape_embed_dim": HIDDEN},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": _ATTENTION_AND_MIXER, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"layers_block_type": _ATTENTION_AND_MIXER, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}


def causal_lm_classes() -> dict[str, str]:
    """Map the name of every causal language model class of transformers to its model type."""
    found: dict[str, str] = {}
    for model_type, names in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        found.setdefault(names if isinstance(names, str) else names[0], model_type)
    return dict(sorted(found.items()))


def small_config(class_name: str, model_type: str) -> PretrainedConfig:
    """Return a small configuration for a class: four layers, 32 channels, 96 tokens, no dropout."""
    config_class = getattr(transformers, class_name).config_class  # of a text model inside a composite family
    config_class = config_class or getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[model_type])
    model_type = config_class.model_type
    # The default configuration of an assistant does not pass its own checks.
    default = config_class(**({"text_config": _ASSISTANT} if "assistant" in model_type else {}))
    return config_class(**_small_values(default, model_type))


def build_small(class_name: str, model_type: str) -> nn.Module:
    """Build a small model of a class, on the current device."""
    return getattr(transformers, class_name)(small_config(class_name, model_type))


def _small_values(default: PretrainedConfig, model_type: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in vars(default).items():
        if isinstance(value, PretrainedConfig):
            values[name] = _small_values(value, value.model_type)
        elif name in _TOKENS and isinstance(value, int | None):
            values[name] = _TOKENS[name]
        elif name in _SIZES and value is not None and not isinstance(value, list | tuple | dict):
            values[name] = _SIZES[name]
        elif _DROPOUT.search(name) and isinstance(value, float):
            values[name] = 0.0
    if values.get("kv_lora_rank"):  # latent attention gives every head its own keys
        values |= {name: size for name, size in {"num_key_value_heads": 4, "qk_head_dim": 16}.items() if name in values}
    for name, value in _SPECIAL.get(model_type, {}).items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    return values
