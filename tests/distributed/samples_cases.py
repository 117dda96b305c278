"""Samples and evaluation of language models through `SamplesCallback` and TRL's `SFTTrainer`."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from trl import SFTConfig, SFTTrainer

from hf_fsdp import FSDPCallback, FSDPConfig, SamplesCallback
from hf_fsdp.monitor.generate import generate_greedily
from hf_fsdp.monitor.samples import Prompt
from tests.distributed import evaluation_cases
from tests.distributed.evaluation_cases import make_trainer, mean_by_hand, reset
from tests.distributed.sft_cases import WORDS, build_rows, build_tokenizer
from tests.distributed.tiny_models import CONFIGS, build_model, build_t5
from tests.distributed.training import QUIET_ARGUMENTS, build_dataset, whole

CHATML = (
    "{% for message in messages %}{{ '<bos>' + message['role'] + ' ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<eos>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>assistant ' }}{% endif %}"
)
PROMPTS = [Prompt(tokens=tuple(range(5, 5 + length))) for length in (3, 9, 1, 6, 4)]


def answers(rank: int, world_size: int) -> dict[str, Any]:
    """Of prompts that ranks cannot share evenly, one that is alone, answers that end early, adapters, T5."""
    found = {}
    for kind in ("llama", "tied", "lora", "t5"):
        model = _model(kind)
        reference = _greedy_by_hand(copy.deepcopy(model).eval(), PROMPTS)
        # Answers end at different steps on each rank; a model that repeats itself goes on to the last.
        end = model.generation_config.eos_token_id = reference[0][2] if kind in ("llama", "lora") else 66
        reference = [answer[: answer.index(end)] if end in answer else answer for answer in reference]
        with make_trainer(world_size, model) as trainer:
            trainer.evaluate(build_dataset(2))
            settings = {"pad_token_id": 0, "max_new_tokens": 7}
            found[kind] = {
                "all": generate_greedily(trainer.model, PROMPTS, batch_size=2, **settings),
                "one": generate_greedily(trainer.model, PROMPTS[:1], batch_size=8, **settings),
                "expected": reference,
                "sharded": all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()),
                "training": trainer.model.training,
            }
        reset()
    return found


def _model(kind: str) -> Any:
    if kind == "t5":
        return build_t5(dropout=0.2)
    model = build_model("llama", tied=kind == "tied", dropout=0.2)
    if kind != "lora":
        return model
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, LoraConfig(**{**config.to_dict(), "task_type": "CAUSAL_LM"}))


def _greedy_by_hand(model: Any, prompts: list[Prompt]) -> list[list[int]]:
    """The likeliest token again and again, without padding, batches or a cache."""
    answers = []
    for prompt in prompts:
        ids, decoded = torch.tensor([prompt.tokens]), torch.tensor([[0]])
        for _ in range(7):
            with torch.no_grad():
                if model.config.is_encoder_decoder:
                    token = model(input_ids=ids, decoder_input_ids=decoded).logits[:, -1:].argmax(-1)
                    decoded = torch.cat([decoded, token], 1)
                else:
                    ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        answers.append((decoded[0, 1:] if model.config.is_encoder_decoder else ids[0, len(prompt.tokens) :]).tolist())
    return answers


def build_chat_tokenizer() -> Any:
    """Words, and a template that marks what the assistant says."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["user", "assistant"])
    tokenizer.chat_template = CHATML
    return tokenizer


def build_conversations(num_rows: int) -> Dataset:
    """Questions and answers of different lengths."""

    def words(start: int, count: int) -> str:
        return " ".join(WORDS[(start + index) % len(WORDS)] for index in range(count))

    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": words(row, 2 + row % 3)},
                    {"role": "assistant", "content": words(3 * row, 1 + row % 4)},
                ]
            }
            for row in range(num_rows)
        ]
    )


def _sft(folder: str, world_size: int, model: Any, callbacks: list[Any], **options: Any) -> SFTTrainer:
    config = FSDPConfig(precision="fp32", activation_checkpointing="full")
    arguments: dict[str, Any] = {
        **QUIET_ARGUMENTS,
        "max_steps": 4,
        "bf16": False,
        "per_device_train_batch_size": 4 // world_size,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "max_length": 32,
        **options.pop("arguments", {}),
    }
    return SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=folder, **arguments, **config.trainer_kwargs()),
        callbacks=[FSDPCallback(config), *callbacks],
        **options,
    )


def chat_training(rank: int, world_size: int) -> dict[str, Any]:
    """Conversations, dropout, W&B: samples at every evaluation, and training as without them."""
    runs = []
    for with_samples in (False, True):
        model = build_model("llama", tied=False, dropout=0.3)
        callbacks = [SamplesCallback(num_samples=3, max_new_tokens=4)] if with_samples else []
        printed = io.StringIO()
        with TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
            os.environ["WANDB_DIR"] = folder
            trainer = _sft(
                folder,
                world_size,
                model,
                callbacks,
                processing_class=build_chat_tokenizer(),
                train_dataset=build_conversations(16),
                eval_dataset=build_conversations(7),
                arguments={
                    "assistant_only_loss": True,
                    "eval_strategy": "steps" if with_samples else "no",
                    "eval_steps": 2,
                    "eval_on_start": with_samples,
                    "report_to": ["wandb"] if with_samples else [],
                },
            )
            trainer.train()
            runs.append({name: whole(value).clone() for name, value in trainer.model.named_parameters()})
            if with_samples:
                loss = trainer.evaluate()["eval_loss"]
                found = _read(Path(folder), rank, trainer)
                by_hand = _unsharded(model, runs[-1])
                found |= {"loss": loss, "expected": mean_by_hand(by_hand, trainer.eval_dataset)}
        reset()
    equal = all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    return {**found, "is_equal": equal, "printed": printed.getvalue()}


def _read(folder: Path, rank: int, trainer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"training": trainer.model.training}
    if rank:
        return {**found, "files": sorted(path.name for path in folder.glob("samples*"))}
    import wandb

    wandb.finish()
    tables = sorted(folder.glob("wandb/offline-run-*/files/media/table/samples_*.table.json"))
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return {**found, "lines": lines, "tables": [json.loads(table.read_text()) for table in tables]}


def _unsharded(model: Any, weights: dict[str, torch.Tensor]) -> Any:
    copy_of_model = build_model("llama", tied=False)
    copy_of_model.load_state_dict(weights)
    return copy_of_model.eval()


def packed_evaluation(rank: int, world_size: int) -> dict[str, Any]:
    """Packs in one flat row, which nothing can be taken out of: their number divides by nothing."""
    rows = build_rows(11)
    tokenizer = build_tokenizer()
    model = build_model("llama", tied=False)
    by_hand = copy.deepcopy(model).eval()
    found = {}
    for packing in (False, True):
        with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            trainer = _sft(
                folder,
                world_size,
                copy.deepcopy(model),
                [],
                processing_class=tokenizer,
                train_dataset=rows,
                eval_dataset=rows,
                arguments={"packing": packing, "eval_packing": packing, "max_length": 32},
            )
            found["packed" if packing else "padded"] = trainer.evaluate()["eval_loss"]
            found["num_packs"] = len(trainer.eval_dataset)
            if not packing:
                data = trainer.eval_dataset.map(lambda row: {"labels": row["input_ids"]})
                found["expected"] = mean_by_hand(by_hand, data)
        reset()
    return found


def given_prompts(rank: int, world_size: int) -> dict[str, Any]:
    """Texts and conversations, in a plain Trainer, once a step however many evaluation sets there are."""
    config = CONFIGS["llama"]()
    prompts = ["the quick brown", [{"role": "user", "content": "fox jumps"}]]
    printed = io.StringIO()
    model = build_model("llama", tied=False)
    rows = {"a": build_dataset(3), "b": build_dataset(2)}
    with contextlib.redirect_stdout(printed):
        with make_trainer(
            world_size,
            model,
            callbacks=[SamplesCallback(prompts=prompts, max_new_tokens=5)],
            processing_class=build_chat_tokenizer(),
            eval_dataset=rows,
        ) as trainer:
            trainer.evaluate()
            path = Path(trainer.args.output_dir, "samples.jsonl")
            lines = path.read_text().splitlines() if path.exists() else []
    return {"lines": [json.loads(line) for line in lines], "printed": printed.getvalue(), "vocab": config.vocab_size}


SAMPLES = {function.__name__: function for function in (answers, given_prompts, packed_evaluation, chat_training)}
CASES = {**evaluation_cases.CASES, **SAMPLES}  # one spawn runs both files
