"""Generated answers of sharded vision-language models: alone, in training, and as predictions of a whole dataset."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import torch
import wandb
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch.distributed.tensor import DTensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from hf_fsdp import FSDPCallback, FSDPConfig, MetricsCallback
from hf_fsdp.data.images.collator import ImageTextCollator
from hf_fsdp.errors import DataError
from hf_fsdp.integrations.answers import AnswersCallback
from hf_fsdp.monitor import predict
from hf_fsdp.monitor.answer_rounds import generate_answers
from hf_fsdp.monitor.answers import exact_match
from hf_fsdp.monitor.predict import predict_answers
from hf_fsdp.sharding.mesh import agree_all
from tests.distributed.answer_rows import TinyCollator, build_answering_model, build_row, build_rows, enlarge_weights
from tests.distributed.harness import forget_accelerate
from tests.distributed.training import QUIET_ARGUMENTS, whole
from tests.unit import image_processors
from tests.unit.small_models import TEXT, VISION

NUM_ROWS = (0, 1, 5, 7)
MODELS = ("llava", "qwen2.5-vl", "lora", "lora-without-task")
NEW_TOKENS = 6


def checksum(answer: str, references: Sequence[str]) -> float:
    """A metric of one's own that another answer changes, on a model that is never right."""
    return zlib.crc32(answer.encode()) % 1000 / 1000


@contextlib.contextmanager
def _trainer(world_size: int, model: Any, family: str, *callbacks: Any, **arguments: Any) -> Iterator[Trainer]:
    config = FSDPConfig(precision="fp32")
    rows = build_rows(12, all_with_images=True)
    with TemporaryDirectory() as own, contextlib.redirect_stdout(io.StringIO()):
        folder = agree_all(own)[0]
        options = {**QUIET_ARGUMENTS, "output_dir": folder, "learning_rate": 0.05, "optim": "sgd", "max_steps": 4}
        options |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_grad_norm": 1.0}
        options |= {"remove_unused_columns": False, "lr_scheduler_type": "constant", **arguments}
        yield Trainer(
            model=model,
            args=TrainingArguments(**options, **config.trainer_kwargs()),
            train_dataset=rows,
            eval_dataset=rows[:5],
            data_collator=TinyCollator(family),
            callbacks=[FSDPCallback(config), *callbacks],
        )
        agree_all(None)  # rank 0's folder is there as long as anybody looks into it
    forget_accelerate()


def _model(kind: str, dropout: float = 0.0) -> tuple[Any, str]:
    family = kind if not kind.startswith("lora") else "llava"
    model = build_answering_model(family, dropout=dropout)
    if kind == family:
        return model, family
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    if kind == "lora":
        config.task_type = "CAUSAL_LM"
    return get_peft_model(model, config), family


def answers(rank: int, world_size: int) -> dict[str, Any]:
    """Numbers of rows that divide by nothing, some without pictures, against one unsharded model, row by row."""
    found = {}
    for kind in MODELS:
        model, family = _model(kind)
        rows, collator = build_rows(max(NUM_ROWS)), TinyCollator(family)
        by_hand = [_greedy(copy.deepcopy(model).eval(), row, collator) for row in rows]
        # Ends in the middle of some answers, so that ranks are done at different steps.
        end = model.generation_config.eos_token_id = by_hand[0][2]
        expected = [_text(collator, answer[: answer.index(end)] if end in answer else answer) for answer in by_hand]
        with _trainer(world_size, model, family) as trainer:
            trainer.evaluate()
            trainer.model.train()
            frozen = next(
                module for name, module in trainer.model.named_modules() if "vision" in name or "visual" in name
            )
            frozen.eval()
            before = _random_state()
            found[kind] = {
                "answers": {
                    str(number): generate_answers(
                        trainer.model, rows[:number], collator, max_new_tokens=NEW_TOKENS, batch_size=batch
                    )
                    for number, batch in zip(NUM_ROWS, (1, 2, 1, 3), strict=True)
                },
                "expected": expected,
                "sharded": all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()),
                "modes": [trainer.model.training, frozen.training],
                "random": before == _random_state(),
                "most": max(collator.num_encoded[len(rows) :]),
            }
    return found


def _greedy(model: Any, row: Mapping[str, Any], collator: TinyCollator) -> list[int]:
    """The likeliest token again and again: without padding, batches, a cache or `generate`."""
    batch = collator.encode_prompts([row])
    tokens: list[int] = []
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            token = int(model(**batch).logits[0, -1].argmax())
        tokens.append(token)
        batch["input_ids"] = torch.cat([batch["input_ids"], torch.tensor([[token]])], dim=1)
        for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
            if name in batch:
                batch[name] = torch.cat([batch[name], torch.full((1, 1), value, dtype=batch[name].dtype)], dim=1)
    return tokens


def _text(collator: TinyCollator, tokens: list[int]) -> str:
    return str(collator.processor.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def _random_state() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()]


def training(rank: int, world_size: int) -> dict[str, Any]:
    """Scores are part of the evaluation, decide the best model, and change nothing of the training."""
    found: dict[str, Any] = {}
    weights = []
    asked = build_rows(7)
    for mode in ("without", "evaluations", "steps"):
        model, family = _model("llava", dropout=0.3)
        callbacks: list[Any] = [MetricsCallback()]
        arguments: dict[str, Any] = {}
        if mode != "without":
            callbacks.append(
                AnswersCallback(
                    asked,
                    TinyCollator(family),
                    metrics=(checksum, "exact_match", "anls"),
                    num_rows=5,
                    max_new_tokens=NEW_TOKENS,
                    batch_size=2,
                    every=2 if mode == "steps" else None,
                    grid=0,
                )
            )
        if mode == "evaluations":
            arguments |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
            arguments |= {"metric_for_best_model": "checksum", "load_best_model_at_end": True, "eval_on_start": True}
            arguments |= {"report_to": ["wandb"]}
        with _trainer(world_size, model, family, *callbacks, **arguments) as trainer:
            os.environ["WANDB_DIR"] = trainer.args.output_dir
            last: dict[str, torch.Tensor] = {}
            trainer.add_callback(_LastWeights(last))
            trainer.train()
            weights.append(last)
            if mode != "without":
                history = [entry for entry in trainer.state.log_history if "eval_checksum" in entry]
                found[mode] = {
                    "history": [
                        (entry["step"], entry["eval_checksum"], entry["eval_exact_match"]) for entry in history
                    ],
                    "losses": [entry["step"] for entry in trainer.state.log_history if "loss" in entry],
                    "lines": _lines(trainer, "answers.jsonl") if rank == 0 else [],
                    "metrics": _lines(trainer, "metrics.jsonl") if rank == 0 else [],
                    "best": [trainer.state.best_metric, trainer.state.best_global_step],
                }
            if mode == "evaluations":
                again = trainer.evaluate()
                by_hand = generate_answers(trainer.model, asked[:5], TinyCollator(family), max_new_tokens=NEW_TOKENS)
                found[mode] |= {
                    "again": again["eval_checksum"],
                    "by_hand": sum(checksum(answer, []) for answer in by_hand) / 5,
                    "num_lines": len(_lines(trainer, "answers.jsonl")) if rank == 0 else 25,
                    "runtime": again["eval_runtime"],
                }
                if rank == 0:
                    found[mode]["wandb"] = {
                        key: value for key, value in dict(wandb.run.summary).items() if "checksum" in key
                    }
                    wandb.finish()
    equal = [all(torch.equal(weights[0][name], other[name]) for name in other) for other in weights[1:]]
    return {**found, "equal": equal, "num_weights": len(weights[0])}


class _LastWeights(MetricsCallback):
    def __init__(self, into: dict[str, torch.Tensor]):
        super().__init__()
        self._into = into

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None: ...

    def on_log(self, *args: Any, **kwargs: Any) -> None: ...

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._into.update({name: whole(value).clone() for name, value in model.named_parameters()})


def _lines(trainer: Trainer, name: str) -> list[Any]:
    path = Path(trainer.args.output_dir, name)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def several_sets(rank: int, world_size: int) -> dict[str, Any]:
    """Two evaluation sets are one evaluation: asked once, under the name that best models go by."""
    model, family = _model("llava")
    collator = TinyCollator(family)
    callback = AnswersCallback(build_rows(3), collator, metrics=("exact_match",), max_new_tokens=2, grid=0)
    with _trainer(world_size, model, family, callback) as trainer:
        rows = build_rows(4, all_with_images=True)
        first = trainer.evaluate({"a": rows, "b": rows[:2]})
        num_first = sum(collator.num_encoded)
        second = trainer.evaluate({"a": rows, "b": rows[:2]})
        other = trainer.evaluate(rows, metric_key_prefix="test")
    named = [sorted(name for name in metrics if "exact_match" in name) for metrics in (first, second, other)]
    return {"named": named, "asked": [num_first, sum(collator.num_encoded)]}


def predictions(rank: int, world_size: int) -> dict[str, Any]:
    """A whole file, one that is broken off and gone on with, lines of other rows, a picture that cannot be read."""
    model, family = _model("llava")
    rows, collator = build_rows(13), TinyCollator(family)
    found: dict[str, Any] = {}
    with _trainer(world_size, model, family) as trainer, mock.patch.object(predict, "_ROUNDS_AT_ONCE", 1):
        trainer.evaluate()
        folder = Path(trainer.args.output_dir)
        settings = {"max_new_tokens": NEW_TOKENS, "batch_size": 2, "metrics": (checksum, exact_match)}
        found["means"] = predict_answers(trainer.model, rows, collator, folder / "a.jsonl", **settings)
        found["lines"] = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
        found["expected"] = generate_answers(trainer.model, rows, collator, max_new_tokens=NEW_TOKENS, batch_size=4)
        found["files"] = sorted(path.name for path in folder.glob("a*"))
        found["stored"] = len(list((folder / "a_images").iterdir()))

        broken = [*rows]
        broken[9] = {**broken[9], "images": [{"path": None, "bytes": b"broken"}]}
        found["refused"] = _error(
            lambda: predict_answers(trainer.model, broken, collator, folder / "b.jsonl", **settings)
        )
        found["is_named"] = (folder / "b.jsonl").exists()
        agree_all(None)  # nobody writes while another still looks
        if rank == 0:
            with (folder / "b.jsonl.partial").open("a") as stream:
                stream.write('{"index": 8, "id"')  # killed in the middle of a line
        agree_all(None)
        collator.num_encoded.clear()
        settings["resume"] = True
        other = [*rows[:2], build_row(40, 1), *rows[3:]]
        found["other"] = _error(lambda: predict_answers(trainer.model, other, collator, folder / "b.jsonl", **settings))
        found["resumed"] = predict_answers(trainer.model, rows, collator, folder / "b.jsonl", **settings)
        found["num_asked"] = sum(agree_all(sum(collator.num_encoded)))
        found["equal"] = (folder / "a.jsonl").read_text() == (folder / "b.jsonl").read_text().replace("b_im", "a_im")
        collator.num_encoded.clear()
        found["once_more"] = predict_answers(trainer.model, rows, collator, folder / "b.jsonl", **settings)
        found["asked_once_more"] = sum(collator.num_encoded)
    return found


def pictures(rank: int, world_size: int) -> dict[str, Any]:
    """Real pictures through transformers' processor and our collator: scores of known answers, files, a grid, W&B."""
    processor = image_processors.llava()
    collator = ImageTextCollator(processor)
    model = _llava_of(processor)
    rows = [_colored_row(index) for index in range(7)]
    expected = [_generate_alone(_llava_of(processor), row, collator) for row in rows]
    # The first answer becomes the reference of all: right for it and for whoever answers the same.
    asked = [{**row, "answers": [expected[0], "a"]} for row in rows]
    right = [answer == expected[0] for answer in expected]
    callback = AnswersCallback(asked, collator, metrics=("exact_match", "vqa_accuracy"), max_new_tokens=4, batch_size=2)
    with _trainer(world_size, model, "llava", callback, report_to=["wandb"]) as trainer:
        trainer.data_collator, trainer.eval_dataset = collator, rows
        folder = trainer.args.output_dir
        if rank == 0:
            run = wandb.init(dir=folder)  # Trainer's own callback does it when a training begins
        metrics = trainer.evaluate()
        found: dict[str, Any] = {
            "answers": generate_answers(trainer.model, rows, collator, max_new_tokens=4, batch_size=2),
            "expected": expected,
            "scores": [metrics["eval_exact_match"], metrics["eval_vqa_accuracy"]],
            "right": right,
        }
        agree_all(None)
        if rank == 0:
            wandb.finish()
            found["lines"] = _lines(trainer, "answers.jsonl")
            found["files"] = sorted(str(path.relative_to(folder)) for path in Path(folder).glob("answers*/*"))
            found["logged"] = [path.name for path in Path(run.dir).glob("media/images/*")]
    return found


def _colored_row(index: int) -> dict[str, Any]:
    row = build_row(index, int(index != 3))
    shade = np.full((12 + index, 20, 3), (40 * index, 255 - 30 * index, 90), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(shade).save(buffer, "PNG")
    return {**row, "images": [{"path": None, "bytes": buffer.getvalue()} for _ in row["images"]]}


def _llava_of(processor: Any) -> Any:
    tokenizer = processor.tokenizer
    vision = CLIPVisionConfig(**{**VISION, "image_size": 32})
    text = LlamaConfig(**{**TEXT, "vocab_size": len(tokenizer), "max_position_embeddings": 256})
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="full",
    )
    return enlarge_weights(LlavaForConditionalGeneration(config)).eval()


def _generate_alone(model: Any, row: Mapping[str, Any], collator: ImageTextCollator) -> str:
    """What transformers' own `generate` says, one row at a time."""
    batch = collator.encode_prompts([row])
    tokens = model.generate(**batch, max_new_tokens=4, do_sample=False, pad_token_id=collator.pad_id)
    text = collator.processor.tokenizer.decode(tokens[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(text).strip()


def _error(do: Any) -> str:
    try:
        do()
    except DataError as error:
        return str(error)
    return ""


CASES = {function.__name__: function for function in (answers, training, several_sets, predictions, pictures)}
