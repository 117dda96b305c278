"""A tiny tokenizer, a tiny model and tiny data for recipe and data tests; made on the spot, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "Write a one-line docstring for this Python function.",
    "def add(a, b): return a + b",
    "Return the sum of the two numbers, and nothing else.",
    "What is the colour of the sky? It is blue, as a rule.",
    "Be brief. Hello! Hi there, how are you today?",
    "system user assistant [INST] [/INST] <<SYS>> <</SYS>> Cutting Knowledge Date: December 2023 Today Date: 26 Jul",
]
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")
# Written here from the published format, not from our training twins, so that a test can compare the two.
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_tokenizer(
    special: tuple[str, ...], *, bos: str | None, eos: str, pad: str | None = None, template: str | None = None
) -> Any:
    """Return a byte-level BPE tokenizer, as SmolLM2's and Llama 3's are."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)
    fast.chat_template = template
    return fast


def smollm2_tokenizer(template: str | None = SMOLLM2_TEMPLATE) -> Any:
    """Return a tokenizer in the manner of SmolLM2: ChatML, pad equal to eos."""
    return byte_level_tokenizer(
        CHATML_TOKENS, bos="<|im_start|>", eos="<|im_end|>", pad="<|im_end|>", template=template
    )


def llama3_tokenizer(template: str | None = None) -> Any:
    """Return a tokenizer in the manner of base Llama 3: its eos is not the token that ends a turn."""
    return byte_level_tokenizer(LLAMA3_TOKENS, bos="<|begin_of_text|>", eos="<|end_of_text|>", template=template)


def llama2_tokenizer(template: str | None = None) -> Any:
    """Return a tokenizer in the manner of Llama 2: spaces become part of the next token, bytes as fallback."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator((word for line in CORPUS for word in line.split()), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


def mistral_v3_tokenizer(template: str | None = None) -> Any:
    """Return a tokenizer in the manner of Mistral v0.3: Llama 2's, with [INST] and [/INST] as one token each."""
    tokenizer = llama2_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[INST]", "[/INST]"]})
    return tokenizer


def save_tiny_llama(folder: Path, tokenizer: Any) -> str:
    """Write a 2-layer random Llama with its tokenizer; return the folder as text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def conversations(count: int) -> list[dict[str, Any]]:
    """Return `count` short conversations."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} and {i}?"},
                {"role": "assistant", "content": f"It is {2 * i}."},
            ]
        }
        for i in range(count)
    ]


def completions(count: int) -> list[dict[str, Any]]:
    """Return `count` short prompt/completion pairs."""
    return [{"prompt": f"What is {i} and {i}?", "completion": f" It is {2 * i}."} for i in range(count)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows as JSON lines; return the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
