"""The demo's comparison on a tiny model: stock checkpointing changes gradients, ours does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def world_of_one(tmp_path: Path) -> Iterator[None]:
    """A process group of one: the comparison really shards, over the processes that there are."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def tiny_inputs(tmp_path: Path) -> tuple[Path, Path]:
    """Return a folder with a tiny random Llama and its tokenizer, and a file with one row."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<unk>", "what", "is", "two", "and", "four"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=template)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    fast.save_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "what is two and two"}, {"role": "assistant", "content": "four"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    return tmp_path / "model", tmp_path / "rows.jsonl"


def test_gradient_error_is_large_with_stock_checkpointing_and_zero_with_ours(tiny_inputs, monkeypatch):
    import compare_stock

    monkeypatch.setattr(compare_stock, "LORA_DROPOUT", 0.3)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")  # Accelerate's plugin changes it for good
    errors = compare_stock.measure_gradient_errors(*tiny_inputs)
    assert errors["stock"] > 0.01
    assert errors["ours"] == 0.0


def test_without_dropout_both_ways_are_right(tiny_inputs, monkeypatch):
    import compare_stock

    monkeypatch.setattr(compare_stock, "LORA_DROPOUT", 0.0)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    errors = compare_stock.measure_gradient_errors(*tiny_inputs)
    assert errors["stock"] <= 1e-6
    assert errors["ours"] <= 1e-6
