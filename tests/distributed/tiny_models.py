"""Tiny random models of the families that parity is shown for; seeded, so every process builds the same one."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 67
_COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA_LIKE = {
    **_COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

CONFIGS = {
    "llama": lambda: LlamaConfig(**_LLAMA_LIKE),
    "mistral": lambda: MistralConfig(**_LLAMA_LIKE, sliding_window=16),
    "qwen3": lambda: Qwen3Config(**_LLAMA_LIKE, head_dim=8),
    "gemma3": lambda: Gemma3TextConfig(
        **_LLAMA_LIKE,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 1 + ["full_attention"],
    ),
    "phi3": lambda: Phi3Config(**_LLAMA_LIKE),
    "gpt2": lambda: GPT2Config(
        **_COMMON, n_embd=32, n_layer=3, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "opt": lambda: OPTConfig(
        **_COMMON,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        dropout=0.0,
    ),
}


def build_t5(dropout: float) -> PreTrainedModel:
    """An encoder-decoder whose loss is its own, seeded."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_ff=48,
        d_kv=8,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=dropout,
    )
    return T5ForConditionalGeneration(config)


def build_model(
    family: str, *, tied: bool, dropout: float = 0.0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build the model of `family` with seed 0; `dropout` is attention dropout where the family has it."""
    config = CONFIGS[family]()
    config.tie_word_embeddings = tied
    for name in ("attention_dropout", "attn_pdrop"):
        if hasattr(config, name):
            setattr(config, name, dropout)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)
