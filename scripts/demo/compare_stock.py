"""Measure on this machine what Accelerate alone does where hf-fsdp does something else.

    torchrun --standalone --nproc_per_node 2 compare_stock.py --model FOLDER --data FILE --output FILE

Two measurements, both on the demo's own model and rows:

- how much of the model is sharded after a training step with nothing but ``TrainingArguments(fsdp=True)`` on CPU;
- how far the gradients are off when activation checkpointing meets dropout, both ways really sharded by FSDP2 over the
  two processes: Accelerate's way and ours, each against the same sharded step without checkpointing. The random stream
  starts equal, so the right answer is zero.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.utils import logging

from hf_fsdp import FSDPConfig, apply_fsdp

LORA_DROPOUT = 0.05
SEED = 0


def read_rows(data: Path, num_rows: int) -> list[list[dict[str, str]]]:
    """Return the `messages` of the first `num_rows` rows of the JSONL file `data`."""
    with data.open(encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line, _ in zip(lines, range(num_rows), strict=False)]


def build_model(folder: Path, lora_dropout: float | None = None) -> Any:
    """Return the demo's model in fp32, with fresh LoRA weights where a dropout is given; the same at every call."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if lora_dropout is None:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(SEED)
    lora = LoraConfig(r=8, lora_dropout=lora_dropout, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def tokenize(folder: Path, messages: list[dict[str, str]]) -> torch.Tensor:
    """Return the token ids of one conversation, shape (1, length)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]


def measure_stock_sharded_share(folder: Path, data: Path) -> dict[str, Any]:
    """Train one step with ``TrainingArguments(fsdp=True)`` alone; return how many parameter elements are sharded."""
    examples = [tokenize(folder, messages)[0] for messages in read_rows(data, 2)]
    rows = [{"input_ids": ids, "labels": ids} for ids in examples]
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            scratch,
            fsdp=True,
            use_cpu=True,
            per_device_train_batch_size=1,
            max_steps=1,
            optim="sgd",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            logging_strategy="no",
        )
        trainer = Trainer(model=build_model(folder), args=arguments, train_dataset=rows)
        trainer.train()
    parameters = list(trainer.model_wrapped.parameters())
    return {
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "num_sharded": sum(parameter.numel() for parameter in parameters if isinstance(parameter, DTensor)),
        "wrapped_as": type(trainer.model_wrapped).__name__,
        "distributed_type": str(trainer.accelerator.distributed_type.value),
    }


def gradients(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Return all gradients of one training step on `input_ids`, as one vector; the random stream starts at SEED."""
    model.train()
    torch.manual_seed(SEED)
    model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
    return torch.cat([_whole(p.grad).flatten() for p in model.parameters() if p.grad is not None])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def checkpoint_as_stock(model: nn.Module) -> None:
    """Apply activation checkpointing to every decoder layer with Accelerate's own function."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        activation_checkpointing=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    fsdp2_apply_ac(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model)


def shard_as_stock(model: nn.Module, checkpointing: bool) -> None:
    """Shard every decoder layer with plain FSDP2, after Accelerate's own activation checkpointing when asked for."""
    layers = [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"]
    if checkpointing:
        checkpoint_as_stock(model)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)


def shard_as_ours(model: nn.Module, checkpointing: bool) -> None:
    """Shard and checkpoint the way `FSDPCallback` does."""
    config = FSDPConfig(precision="fp32", activation_checkpointing="full" if checkpointing else "none")
    apply_fsdp(model, config, device_type="cpu")


def measure_gradient_errors(folder: Path, data: Path) -> dict[str, float]:
    """Return ``|g - g0| / |g0|`` for both ways, `g0` being the same sharded step's gradients without checkpointing."""
    input_ids = tokenize(folder, read_rows(data, 1)[0])
    errors = {}
    for name, shard in (("stock", shard_as_stock), ("ours", shard_as_ours)):
        vectors = []
        for checkpointing in (False, True):
            model = build_model(folder, LORA_DROPOUT)
            shard(model, checkpointing)
            vectors.append(gradients(model, input_ids))
        errors[name] = ((vectors[1] - vectors[0]).norm() / vectors[0].norm()).item()
    return errors


def main() -> None:
    """Run both measurements and write them, from the first process, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSONL rows with `messages`")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    share = measure_stock_sharded_share(arguments.model, arguments.data)
    errors = measure_gradient_errors(arguments.model, arguments.data)
    if dist.get_rank() == 0:
        result = {"stock_sharding": share, "lora_dropout": LORA_DROPOUT, "gradient_error": errors}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
