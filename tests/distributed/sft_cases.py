"""TRL's SFTTrainer under `FSDPCallback`: its fused head, its defaults, LoRA, packing."""

from __future__ import annotations

import contextlib
import io
import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from hf_fsdp import FSDPCallback, FSDPConfig
from tests.distributed.tiny_models import build_model
from tests.distributed.training import QUIET_ARGUMENTS, GradientRecorder, whole

WORDS = "the quick brown fox jumps over a lazy dog while nine small birds watch from one old tree".split()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer small enough for the tiny models' vocabulary."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        [" ".join(WORDS)], trainers.WordLevelTrainer(special_tokens=["<pad>", "<bos>", "<eos>", "<unk>"])
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def build_rows(num_rows: int = 24) -> Dataset:
    """Texts of 4 to 14 words, so that batches are padded and packs hold several."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for _ in range(num_rows):
        length = int(torch.randint(4, 15, (1,), generator=generator))
        picks = torch.randint(0, len(WORDS), (length,), generator=generator).tolist()
        rows.append(" ".join(WORDS[pick] for pick in picks))
    return Dataset.from_dict({"text": rows})


def _train(
    world_size: int, config: FSDPConfig, *, lora: float | None = None, tied: bool = False, **overrides: Any
) -> dict[str, Any]:
    recorder = GradientRecorder()
    printed = io.StringIO()
    peft_config = None
    if lora is not None:
        peft_config = LoraConfig(r=4, lora_dropout=lora, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        arguments: dict[str, Any] = {
            "output_dir": folder,
            **QUIET_ARGUMENTS,
            "max_steps": 3,
            "per_device_train_batch_size": 4 // world_size,
            "learning_rate": 1e-2,
            "max_length": 32,
            "lr_scheduler_type": "constant",
            **overrides,
        }
        torch.manual_seed(0)
        trainer = SFTTrainer(
            model=build_model("llama", tied=tied),
            args=SFTConfig(**arguments, **config.trainer_kwargs()),
            train_dataset=build_rows(),
            processing_class=build_tokenizer(),
            callbacks=[FSDPCallback(config), recorder],
            peft_config=peft_config,
        )
        trainer.train()
        audit = next(c for c in trainer.callback_handler.callbacks if isinstance(c, FSDPCallback)).audit
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "gradients": recorder.gradients,
        "weights": {name: whole(parameter).clone() for name, parameter in trainer.model.named_parameters()},
        "sharded": all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()),
        "printed": printed.getvalue(),
        "kinds": [unit.kind for unit in audit.units] if audit else [],
        "checkpointed": audit.num_checkpointed_blocks if audit else 0,
        "num_rows": len(trainer.train_dataset),
    }


def full(rank: int, world_size: int) -> dict[str, Any]:
    return _train(world_size, FSDPConfig(precision="fp32"), bf16=False, gradient_checkpointing=False)


def lora(rank: int, world_size: int) -> dict[str, Any]:
    return _train(world_size, FSDPConfig(precision="fp32"), lora=0.0, bf16=False)


def lora_dropout(rank: int, world_size: int) -> dict[str, Any]:
    plain = _train(world_size, FSDPConfig(precision="fp32", activation_checkpointing="none"), lora=0.2)
    checkpointed = _train(world_size, FSDPConfig(precision="fp32", activation_checkpointing="full"), lora=0.2)
    return {
        "equal": all(torch.equal(plain["weights"][n], checkpointed["weights"][n]) for n in plain["weights"]),
        "gradients_equal": all(
            torch.equal(plain["gradients"][n], checkpointed["gradients"][n]) for n in plain["gradients"]
        ),
        "checkpointed": [plain["checkpointed"], checkpointed["checkpointed"]],
    }


def defaults(rank: int, world_size: int) -> dict[str, Any]:
    """TRL's own defaults (bf16, gradient checkpointing) and an empty FSDPConfig: followed, with a line each."""
    return _train(world_size, FSDPConfig(), tied=True)


def packed_equals_padded(rank: int, world_size: int) -> dict[str, Any]:
    """The same rows, packed into one sequence and padded in a batch: the summed loss of the answer tokens agrees."""
    from hf_fsdp import apply_fsdp

    tokenizer = build_tokenizer()
    rows = [tokenizer(text)["input_ids"] for text in build_rows(3)["text"]]
    model = build_model("llama", tied=False)
    apply_fsdp(model, FSDPConfig(precision="fp32", activation_checkpointing="full"))
    model.train()
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    padded = model(input_ids=ids, attention_mask=mask).logits
    flat = torch.tensor([[token for row in rows for token in row]])
    positions = torch.tensor([[index for row in rows for index in range(len(row))]])
    packed = model(input_ids=flat, position_ids=positions).logits
    leaky = model(input_ids=flat, position_ids=torch.arange(flat.shape[1])[None]).logits
    losses: dict[str, list[float]] = {"padded": [], "packed": [], "leaky": []}
    start = 0
    for index, row in enumerate(rows):
        targets = torch.tensor(row[1:])
        for name, logits in (("padded", padded[index]), ("packed", packed[0, start:]), ("leaky", leaky[0, start:])):
            losses[name].append(torch.nn.functional.cross_entropy(logits[: len(row) - 1], targets).item())
        start += len(row)
    return losses


def packing_through_trl(rank: int, world_size: int) -> dict[str, Any]:
    """TRL's packing through the whole stack: all rows in one step, packed and padded, give one loss."""
    config = FSDPConfig(precision="fp32", activation_checkpointing="full")
    common = {"bf16": False, "max_steps": 1, "max_length": 64, "learning_rate": 0.0}
    padded = _train(world_size, config, per_device_train_batch_size=24 // world_size, **common)
    packed = _train(world_size, config, packing=True, per_device_train_batch_size=4 // world_size, **common)
    return {
        "padded": padded["losses"],
        "packed": packed["losses"],
        "num_rows": [padded["num_rows"], packed["num_rows"]],
        "sharded": packed["sharded"],
    }


CASES = {
    function.__name__: function
    for function in (full, lora, lora_dropout, defaults, packed_equals_padded, packing_through_trl)
}
TWINS = ["full", "lora"]
