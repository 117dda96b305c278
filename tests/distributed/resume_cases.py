"""Resuming on the same number of processes: every kind of model and of run, each against itself without a break."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate.utils import GradScalerKwargs
from datasets import Dataset
from torch import nn
from torch.utils.data import WeightedRandomSampler
from transformers import (
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from trl import DPOConfig, DPOTrainer

from tests.distributed.image_models import build_images, build_plain
from tests.distributed.qlora_models import build_qlora
from tests.distributed.resume_compare import cut_in_two, held
from tests.distributed.resume_models import experts, image_rows, llama, llava, lora, partly_frozen
from tests.distributed.resuming import Kind, Life, Outcome
from tests.distributed.sft_cases import build_tokenizer
from tests.distributed.tiny_models import VOCABULARY, build_model, build_t5
from tests.distributed.trainer_kinds_cases import move_weights, preference_rows
from tests.distributed.training import build_dataset


class GroupsTrainer(Trainer):
    """Builds an optimizer of three groups, of which no two have the same settings."""

    def create_optimizer(self, model: Any = None) -> Any:
        parameters = list(self.model.named_parameters())
        embedding = [p for name, p in parameters if "embed" in name]
        norms = [p for name, p in parameters if "norm" in name]
        rest = [p for name, p in parameters if "embed" not in name and "norm" not in name]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": embedding, "lr": 1e-3},
                {"params": norms, "weight_decay": 0.0, "betas": (0.8, 0.99)},
                {"params": rest, "eps": 1e-6},
            ],
            lr=1e-2,
        )
        return self.optimizer


def small_first_scale(trainer: Trainer) -> None:
    """Let the loss scale grow every second step, so that scale and growth tracker are both on their way at a cut."""
    trainer.accelerator.scaler_handler = GradScalerKwargs(init_scale=1024.0, growth_interval=2)


def scaler_states(unbroken: Life, again: Life) -> Outcome:
    states = [life.trainer.accelerator.scaler.state_dict() for life in (unbroken, again)]
    return {"scalers": [(state["scale"], state["_growth_tracker"]) for state in states]}


def without_state(unbroken: Life, again: Life) -> Outcome:
    """The parameters whose optimizer state the checkpoint does not have, as its own list of them says."""
    folder = next(Path(again.trainer.args.output_dir).glob("checkpoint-2"))
    return {"without_state": json.loads((folder / "optimizer" / "groups.json").read_text())["without_state"]}


def evaluating(**changes: Any) -> dict[str, Any]:
    return {"eval_strategy": "steps", "eval_steps": 1, **changes}


def evaluated(model: nn.Module) -> dict[str, Any]:
    return {"eval_dataset": build_dataset(8)}


def patient(model: nn.Module) -> dict[str, Any]:
    """Stop after two evaluations that are not a hundred better than the best: after the third one."""
    return {**evaluated(model), "callbacks": [EarlyStoppingCallback(2, 100.0)]}


def stopped(unbroken: Life, again: Life) -> Outcome:
    return {"stopped_at": [life.trainer.state.global_step for life in (unbroken, again)]}


def masking_collator(rows: list[Any]) -> dict[str, Any]:
    """Leave a random part of the labels out, as masked language modelling does."""
    batch = default_data_collator(rows)
    batch["labels"] = batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.2, -100)
    return batch


class AugmentedRows(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Rows in which one token is another one whenever they are read, drawn from Python's and NumPy's generators."""

    def __init__(self, num_rows: int):
        self._rows = build_dataset(num_rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self._rows[index]
        row["input_ids"][random.randrange(len(row["input_ids"]))] = int(numpy.random.randint(3, VOCABULARY))
        return row


class Stream(torch.utils.data.IterableDataset[dict[str, list[int]]]):
    """Eight batches in another order each time; it has no length."""

    def __init__(self) -> None:
        self._rows, self._epoch = AugmentedRows(32), 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        order = torch.randperm(len(self._rows), generator=torch.Generator().manual_seed(self._epoch))
        return (self._rows[index] for index in order.tolist())


class WeightedTrainer(Trainer):
    """Draws samples with replacement, from torch's global generator."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return WeightedRandomSampler([1.0] * 12 + [4.0] * 4, 16)


def rows_of_any_length() -> Dataset:
    rows = [[3 + index % 40] * (4 + index * 7 % 9) for index in range(32)]
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])


def padding_collator(rows: list[Any]) -> dict[str, Any]:
    def padded(name: str, value: int) -> torch.Tensor:
        tensors = [torch.tensor(row[name]) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}


def second_epoch(unbroken: Life, again: Life) -> Outcome:
    """How many different samples the second epoch of eight steps had."""
    return {"num_samples": len({sample for step in range(9, 17) for sample in unbroken.samples[step]})}


def policy() -> nn.Module:
    model = build_model("llama", tied=False)
    move_weights(model)
    return model


def pairs() -> Dataset:
    return Dataset.from_list(preference_rows(16))


def reference(model: nn.Module) -> dict[str, Any]:
    return {"ref_model": build_model("llama", tied=False), "processing_class": build_tokenizer()}


def reference_is_sharded(unbroken: Life, again: Life) -> Outcome:
    return {"reference": held(again.trainer.ref_model)}


def settings(**changes: Any) -> dict[str, Any]:
    return {"precision": "fp32", **changes}


FULL_CHECKPOINTING = settings(activation_checkpointing="full")
FP16 = {"precision": "fp16-mixed"}
RESTARTS = {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}
# Nothing is ever a million times better, so every evaluation lowers the learning rate.
PLATEAU = evaluating(
    lr_scheduler_type="reduce_lr_on_plateau",
    lr_scheduler_kwargs={"patience": 0, "threshold": 1e6},
    metric_for_best_model="loss",
)
EARLY = evaluating(
    metric_for_best_model="loss", load_best_model_at_end=True, restore_callback_states_from_checkpoint=True
)
DPO = {"bf16": False, "max_length": 24, "gradient_checkpointing": False}
# Five steps an epoch, cut in the middle of the second one and between two logs; twice the samples by accumulation.
LONG: dict[str, Any] = {
    "dataset": lambda: build_dataset(40),
    "arguments": {"gradient_accumulation_steps": 2, "logging_steps": 3, "dataloader_num_workers": 1},
    "num_steps": 10,
    "save_step": 7,
}
EPOCHS = Kind(
    trainer=lambda model: {"data_collator": masking_collator},
    model=llama(dropout=0.1),
    dataset=lambda: build_dataset(12),
    arguments={"max_steps": None, "num_train_epochs": 3, "save_strategy": "epoch", "logging_steps": 2},
    num_steps=9,
    save_step=3,
)
# Cut after the first step of the second epoch: the batch after it was built before it.
MASKED = Kind(
    trainer=lambda model: {"data_collator": masking_collator, **evaluated(model)},
    model=llama(dropout=0.1),
    dataset=lambda: AugmentedRows(16),
    arguments=evaluating(),
    num_steps=8,
    save_step=5,
)
# Dropout draws other numbers on each rank here, whose batches have different lengths.
GROUPED = Kind(
    trainer=lambda model: {"data_collator": padding_collator},
    model=llama(dropout=0.1),
    dataset=rows_of_any_length,
    arguments={"train_sampling_strategy": "group_by_length"},
    num_steps=16,
    save_step=10,
)
UNSEEDED = {"accelerator_config": {"use_seedable_sampler": False}}
KINDS: dict[str, Any] = {
    "fp32": cut_in_two(Kind(model=llama(dropout=0.1), **LONG), saves=False),
    "bf16": cut_in_two(Kind(model=llama(dropout=0.1), config={"precision": "bf16-mixed"}, **LONG)),
    "epoch": cut_in_two(EPOCHS),
    "masked": cut_in_two(MASKED),
    "masked_accumulated": cut_in_two(
        replace(MASKED, dataset=lambda: AugmentedRows(40), arguments={"gradient_accumulation_steps": 2}, save_step=7)
    ),
    "grouped": cut_in_two(GROUPED, after=second_epoch),
    "weighted": cut_in_two(replace(MASKED, trainer_class=(WeightedTrainer, TrainingArguments))),
    "unseeded": cut_in_two(replace(MASKED, arguments=UNSEEDED)),
    "stream": cut_in_two(replace(MASKED, dataset=Stream, num_steps=14, save_step=11)),
    "lora": cut_in_two(Kind(model=lora(), arguments=RESTARTS, num_steps=6, save_step=4)),
    "lora_checkpointing": cut_in_two(Kind(model=lora(), config=FULL_CHECKPOINTING)),
    "adapters": cut_in_two(Kind(model=lora(adapters=("default", "other"), modules_to_save=["lm_head"])), newest=True),
    "dora": cut_in_two(Kind(model=lora(use_dora=True, dropout=0.0))),
    "tied": cut_in_two(Kind(model=llama(tied=True), trainer=evaluated, arguments=PLATEAU)),
    "tied_full": cut_in_two(Kind(model=llama(tied=True), config=settings(checkpoint="full")), newest=True),
    "halves_async": cut_in_two(
        Kind(
            model=llama(),
            config=settings(wrap={"granularity": "attention_and_mlp"}, checkpoint={"async_save": True}),
        )
    ),
    "frozen_groups": cut_in_two(
        Kind(
            model=partly_frozen,
            config=settings(wrap={"policy": "size", "min_num_params": 3000}),
            trainer_class=(GroupsTrainer, TrainingArguments),
        )
    ),
    "offload_momentum": cut_in_two(
        Kind(
            model=llama(),
            config=settings(offload="parameters"),
            arguments={"optim": "sgd", "optim_args": "momentum=0.9"},
        )
    ),
    "fp16": cut_in_two(
        Kind(model=llama(), config=FP16, prepare=small_first_scale, num_steps=5, save_step=3), after=scaler_states
    ),
    "qlora": cut_in_two(
        Kind(model=lambda: build_qlora(torch.bfloat16, double=True, dropout=0.1), config={"precision": "bf16-mixed"})
    ),
    "llava": cut_in_two(Kind(model=llava, dataset=image_rows), after=without_state),
    "batch_norm": cut_in_two(
        Kind(
            model=build_plain,
            dataset=build_images,
            trainer=lambda model: {"eval_dataset": build_images(8)},
            arguments=evaluating(eval_steps=4, remove_unused_columns=False),
        )
    ),  # fmt: skip
    "t5_no_state": cut_in_two(
        Kind(
            model=lambda: build_t5(0.1),
            arguments={"optim": "sgd"},
            trainer_class=(Seq2SeqTrainer, Seq2SeqTrainingArguments),
        )
    ),
    "experts": cut_in_two(Kind(model=experts, num_steps=5), after=without_state),
    "early_stopping": cut_in_two(Kind(model=llama(), trainer=patient, arguments=EARLY, num_steps=8), after=stopped),
    "dpo": cut_in_two(
        Kind(model=policy, dataset=pairs, trainer=reference, arguments=DPO, trainer_class=(DPOTrainer, DPOConfig)),
        after=reference_is_sharded,
    ),
}


CASES: dict[str, Callable[[int, int], Any]] = KINDS
