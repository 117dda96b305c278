"""A tiny Llama with its base in 4 bits and LoRA on it, the same in every process."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from tests.distributed.tiny_models import VOCABULARY


@functools.cache
def saved_base() -> str:
    """The folder of the whole weights; sizes that bitsandbytes' rewriting for avx512 can handle."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    # Each process writes its own, while save_pretrained leaves writing to the first.
    config.to_json_file(f"{folder}/config.json")
    weights = {name: tensor.contiguous() for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
    return folder


def load_base(dtype: torch.dtype, *, double: bool = False, **changes: Any) -> Any:
    """Load the base in 4 bits, stored and computed in `dtype`."""
    config = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": dtype,
        "bnb_4bit_use_double_quant": double,
        **changes,
    }
    return AutoModelForCausalLM.from_pretrained(
        saved_base(), dtype=dtype, quantization_config=BitsAndBytesConfig(**config)
    )


def add_lora(model: Any, *, dropout: float = 0.0, **changes: Any) -> Any:
    """Put LoRA on every linear layer, with a B that is not zero, so that A has a gradient too."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    model = get_peft_model(model, LoraConfig(lora_dropout=dropout, init_lora_weights="gaussian", **settings))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def build_qlora(dtype: torch.dtype, *, double: bool = False, dropout: float = 0.0, **changes: Any) -> Any:
    """The model that is trained; adapters are in float32, as PEFT makes them."""
    return add_lora(load_base(dtype, double=double), dropout=dropout, **changes)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, for comparisons that NaN cannot spoil."""
    return tensor.detach().contiguous().view(torch.uint8).clone()


def packed_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The packed weights of `model` by name."""
    from hf_fsdp.policies.packed_weights import packed_names

    names = packed_names(model)
    return {name: parameter for name, parameter in model.named_parameters() if name in names}
