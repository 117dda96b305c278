"""A tiny Llama through Trainer with `MemoryPlanCallback`: what it predicted and measured on each process."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

from hf_fsdp import FSDPCallback, FSDPConfig, MemoryPlanCallback, MetricsCallback
from hf_fsdp.torch_private import local_shard
from tests.distributed.training import QUIET_ARGUMENTS

NUM_STEPS = 4
NUM_TOKENS = 192


def _build_llama() -> LlamaForCausalLM:
    """Wide enough that its tensors, and not the small change, make the peak: 11M parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def _rows(num_rows: int) -> Dataset:
    ids = torch.randint(3, 8000, (num_rows, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})


def _train(folder: str, callback: Any, **arguments: Any) -> Trainer:
    config = FSDPConfig(precision="bf16-mixed", activation_checkpointing="full")
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=NUM_STEPS,
        **{**QUIET_ARGUMENTS, **config.trainer_kwargs(), **arguments},
    )
    trainer = Trainer(
        model=_build_llama(),
        args=args,
        train_dataset=_rows(2 * 2 * 2 * NUM_STEPS),
        data_collator=default_data_collator,
        callbacks=[FSDPCallback(config), callback, MetricsCallback()],
    )
    trainer.train()
    return trainer


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: local_shard(parameter.detach()).clone() for name, parameter in trainer.model.named_parameters()}


def side_by_side(rank: int, world_size: int) -> dict[str, Any]:
    """Train twice in one folder, the second time with nothing left to simulate, and once without the callback."""
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as shared:
        folder = f"{shared}/{rank}"  # process 0 writes; nothing of this run is exchanged by files
        for _ in range(2):
            printed = io.StringIO()
            callback = MemoryPlanCallback()
            with contextlib.redirect_stdout(printed):
                trainer = _train(folder, callback)
            file = Path(folder) / "memory.json"
            lines = [line for line in printed.getvalue().splitlines() if "memory: " in line]
            result: dict[str, Any] = {
                "lines": lines,
                "has_file": file.is_file(),
                "followed": callback.record is not None,
            }
            if rank == 0:
                document = json.loads(file.read_text())
                assert document["failure"] is None, document["failure"]
                metrics = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
                result |= {
                    "predicted": document["predicted"]["peak_bytes"],
                    "measured": document["measured"]["peak_bytes"],
                    "steps": [document["measured"]["first_step"], document["measured"]["last_step"]],
                    "by_phase": document["measured"]["by_phase"],
                    "doubts": document["doubts"],
                    "rows": document["job"]["batch"]["micro_batch_size"],
                    "num_micro_batches": document["job"]["num_micro_batches"],
                    "metrics": [line for line in metrics if "memory_predicted_bytes" in line],
                    "num_logged": len(metrics),
                }
            results.append(result)
        followed = _weights(trainer)
        plain = _weights(_train(f"{shared}/plain-{rank}", MetricsCallback()))
    same = all(torch.equal(tensor, plain[name]) for name, tensor in followed.items())
    return {"runs": results, "same_weights": same}


CASES: dict[str, Callable[[int, int], Any]] = {"side_by_side": side_by_side}
