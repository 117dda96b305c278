"""Rewards, classes and sequences under `FSDPCallback`, and what the cases of all kinds of Trainer share."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from trl import RewardConfig, RewardTrainer

from hf_fsdp import FSDPCallback, FSDPConfig
from hf_fsdp.sharding.mesh import agree_all
from tests.distributed.sft_cases import WORDS, build_tokenizer
from tests.distributed.tiny_models import CONFIGS, VOCABULARY, build_t5
from tests.distributed.training import QUIET_ARGUMENTS, GradientRecorder, whole

FP32 = FSDPConfig(precision="fp32")
NUM_STEPS = 3


def run_arguments(folder: str, world_size: int, **overrides: Any) -> dict[str, Any]:
    """The arguments of a short run whose global batch is 4 on any number of processes."""
    return {
        "output_dir": folder,
        **QUIET_ARGUMENTS,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 4 // world_size,
        "per_device_eval_batch_size": 4 // world_size,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "bf16": False,
        "max_grad_norm": 0.5,
        **overrides,
    }


def lora(task_type: str, **overrides: Any) -> LoraConfig:
    return LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type=task_type, lora_dropout=0.0, **overrides
    )


def words(generator: torch.Generator, low: int, high: int) -> str:
    length = int(torch.randint(low, high, (1,), generator=generator))
    return " ".join(WORDS[pick] for pick in torch.randint(0, len(WORDS), (length,), generator=generator).tolist())


def preference_rows(num_rows: int = 12) -> list[dict[str, str]]:
    """Pairs of uneven lengths."""
    generator = torch.Generator().manual_seed(7)
    return [
        {
            "prompt": words(generator, 2, 6),
            "chosen": " " + words(generator, 2, 9),
            "rejected": " " + words(generator, 2, 9),
        }
        for _ in range(num_rows)
    ]


def observe(trainer: Trainer, recorder: GradientRecorder, printed: io.StringIO) -> dict[str, Any]:
    """What parity is shown by, and how the trained model is held."""
    parameters = dict(trainer.model.named_parameters())
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [float(entry["grad_norm"]) for entry in history if "grad_norm" in entry],
        "eval_losses": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "gradients": recorder.gradients,
        "weights": {name: whole(parameter).clone() for name, parameter in parameters.items()},
        **held(trainer.model),
        "printed": printed.getvalue(),
    }


def held(model: nn.Module) -> dict[str, Any]:
    """Whether every parameter is a DTensor, how many values this rank holds, and how many units there are."""
    parameters = list(model.parameters())
    return {
        "sharded": all(isinstance(parameter, DTensor) for parameter in parameters),
        "num_local": sum(_local(parameter).numel() for parameter in parameters),
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "num_units": sum(isinstance(module, FSDPModule) for module in model.modules()),
    }


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@contextmanager
def quiet_folder() -> Iterator[tuple[str, io.StringIO]]:
    """One folder for all ranks, as a shared file system gives, and what is printed meanwhile."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as own, contextlib.redirect_stdout(printed):
        yield agree_all(own)[0], printed
        agree_all("done")  # rank 0 removes it


def move_weights(model: nn.Module) -> None:
    """Change every weight a little, so that a model differs from its reference."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def on_rank_0(write: Callable[[], Any]) -> None:
    if int(os.environ.get("RANK", 0)) == 0:
        write()
    agree_all("written")


# -- rewards and classes ----------------------------------------------------------------------------------------------


def classifier(rank: int, num_labels: int) -> nn.Module:
    """A Llama whose head every rank initialises for itself; rank 0's is the one of the single process."""
    config = CONFIGS["llama"]()
    config.num_labels = num_labels
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config)
    torch.manual_seed(100 + rank)
    nn.init.normal_(model.score.weight, std=0.02)
    return model


def _reward(rank: int, world_size: int, *, peft: bool) -> dict[str, Any]:
    recorder = GradientRecorder()
    with quiet_folder() as (folder, printed):
        trainer = RewardTrainer(
            model=classifier(rank, num_labels=1),
            args=RewardConfig(
                **run_arguments(folder, world_size, eval_strategy="steps", eval_steps=2),
                max_length=24,
                center_rewards_coefficient=0.01,
                **FP32.trainer_kwargs(),
            ),
            train_dataset=Dataset.from_list(preference_rows()),
            eval_dataset=Dataset.from_list(preference_rows(5)),
            processing_class=build_tokenizer(),
            callbacks=[FSDPCallback(FP32), recorder],
            peft_config=lora("SEQ_CLS", modules_to_save=["score"]) if peft else None,
        )
        trainer.train()
        return observe(trainer, recorder, printed)


def reward_full(rank: int, world_size: int) -> dict[str, Any]:
    return _reward(rank, world_size, peft=False)


def reward_lora(rank: int, world_size: int) -> dict[str, Any]:
    return _reward(rank, world_size, peft=True)


def _classify(model: nn.Module, rows: Dataset, world_size: int, *, run_first: bool = False) -> dict[str, Any]:
    recorder, callback = GradientRecorder(), FSDPCallback(FP32)
    with quiet_folder() as (folder, printed):
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**run_arguments(folder, world_size), **FP32.trainer_kwargs()),
            train_dataset=rows,
            callbacks=[callback, recorder],
        )
        if run_first:  # as a Trainer does that evaluates before it trains
            trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
        trainer.train()
        result = observe(trainer, recorder, printed)
        result["taken"] = callback.audit.tensors_taken_from_rank_0 if callback.audit else []
        trainer.save_model(folder)
        if trainer.is_world_process_zero():
            with safe_open(next(Path(folder).glob("*.safetensors")), "pt") as file:
                result["saved"] = {name: file.get_tensor(name) for name in file.keys()}
        return result


def _token_rows(labels: Callable[[int], Any]) -> Dataset:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (12, 8), generator=generator)
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": [labels(index) for index in range(12)]})


def sequence_classes(rank: int, world_size: int) -> dict[str, Any]:
    return _classify(classifier(rank, num_labels=3), _token_rows(lambda index: index % 3), world_size)


def sequence_classes_lora(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(1)
    model = get_peft_model(classifier(rank, num_labels=3), lora("SEQ_CLS", modules_to_save=["score"]))
    return _classify(model, _token_rows(lambda index: index % 3), world_size)


def token_classes(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForTokenClassification(BertConfig(vocab_size=VOCABULARY, num_labels=5, **sizes, **dropout))
    torch.manual_seed(100 + rank)
    nn.init.normal_(model.classifier.weight, std=0.02)
    return _classify(
        model, _token_rows(lambda index: [(index + place) % 5 for place in range(8)]), world_size, run_first=True
    )


# -- sequences to sequences -------------------------------------------------------------------------------------------


def seq2seq(rank: int, world_size: int) -> dict[str, Any]:
    """T5 that generates in an evaluation between training steps: 5 rows for 2 processes, some of one token only."""
    recorder = GradientRecorder()
    generator = torch.Generator().manual_seed(4)
    rows = [
        {
            "input_ids": torch.randint(3, VOCABULARY, (3 + index % 5,), generator=generator).tolist(),
            "labels": torch.randint(3, VOCABULARY, (4,), generator=generator).tolist(),
        }
        for index in range(12)
    ]
    seen: list[list[list[int]]] = []

    def keep(output: Any) -> dict[str, float]:
        seen.append(output.predictions.tolist())
        return {"rows": len(output.predictions)}

    with quiet_folder() as (folder, printed):
        model = build_t5(dropout=0.0)
        trainer = Seq2SeqTrainer(
            model=model,
            args=Seq2SeqTrainingArguments(
                **run_arguments(folder, world_size, eval_strategy="steps", eval_steps=1),
                predict_with_generate=True,
                generation_config=GenerationConfig(
                    max_length=9, decoder_start_token_id=0, pad_token_id=0, eos_token_id=0
                ),
                **FP32.trainer_kwargs(),
            ),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:5]),
            data_collator=DataCollatorForSeq2Seq(build_tokenizer(), model=model),
            processing_class=build_tokenizer(),
            compute_metrics=keep,
            callbacks=[FSDPCallback(FP32), recorder],
        )
        trainer.train()
        return {**observe(trainer, recorder, printed), "predictions": seen}


CASES: dict[str, Callable[[int, int], Any]] = {
    function.__name__: function
    for function in (reward_full, reward_lora, sequence_classes, sequence_classes_lora, token_classes, seq2seq)
}
