"""Evaluation cases that run on any number of processes; `expected` is computed by hand on an unsharded copy."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_fsdp import FSDPCallback, FSDPConfig
from hf_fsdp.errors import HfFsdpError
from hf_fsdp.monitor import eval_memory
from tests.distributed.tiny_models import CONFIGS, build_model, build_t5
from tests.distributed.training import QUIET_ARGUMENTS, SEQUENCE_TOKENS, build_dataset, whole

SIZES = [(13, 2), (13, 5), (12, 2), (7, 3), (2, 2), (1, 4)]  # rows, batch of a process
ARGMAX = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}


@contextlib.contextmanager
def make_trainer(world_size: int, model: torch.nn.Module, cls: type = Trainer, **options: Any) -> Iterator[Trainer]:
    """A Trainer under `FSDPCallback` in a folder of its own; `arguments` go to TrainingArguments."""
    config = FSDPConfig(precision="fp32")
    arguments = {**QUIET_ARGUMENTS, "learning_rate": 0.05, "lr_scheduler_type": "constant", "optim": "sgd"}
    arguments |= {"per_device_train_batch_size": 12 // world_size, "max_steps": 3, **options.pop("arguments", {})}
    with tempfile.TemporaryDirectory() as folder:
        yield cls(
            model=model,
            args=TrainingArguments(output_dir=folder, **arguments, **config.trainer_kwargs()),
            callbacks=[FSDPCallback(config), *options.pop("callbacks", [])],
            **{"train_dataset": build_dataset(24), "eval_dataset": build_dataset(13), **options},
        )


def mean_by_hand(model: torch.nn.Module, rows: Dataset) -> float:
    """The mean loss over all labels that count, row by row."""
    total, count = 0.0, 0
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits.double()
        targets = labels[0, 1:]
        total += float(F.cross_entropy(logits[0, :-1], targets, ignore_index=-100, reduction="sum"))
        count += int(targets.ne(-100).sum())
    return total / count


def sizes(rank: int, world_size: int) -> dict[str, Any]:
    """Datasets that divide by nothing, fewer samples than ranks, and every batch size."""
    model = build_model("llama", tied=False)
    by_hand = copy.deepcopy(model).eval()
    found = {}
    with make_trainer(world_size, model) as trainer:
        for num_rows, batch in SIZES:
            trainer.args.per_device_eval_batch_size = batch
            rows = build_dataset(num_rows)
            metrics = trainer.evaluate(rows)
            expected = mean_by_hand(by_hand, rows)
            found[f"{num_rows}-{batch}"] = (metrics["eval_loss"], metrics["eval_perplexity"], expected)
        return {"found": found, "is_sharded": all_sharded(trainer.model), "num_local": share_of(trainer.model)}


def all_sharded(model: torch.nn.Module) -> bool:
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def share_of(model: torch.nn.Module) -> float:
    local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    return local / sum(parameter.numel() for parameter in model.parameters())


class Stream(IterableDataset):
    """A stream that does not know its length."""

    def __init__(self, rows: Dataset):
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def streams(rank: int, world_size: int) -> dict[str, Any]:
    """Dispatched by rank 0, sharded by Accelerate, sharded by datasets: 1, 4 and 13 samples."""
    model = build_model("llama", tied=False)
    by_hand = copy.deepcopy(model).eval()
    found = {}
    for kind, dispatch in (("dispatched", None), ("sharded", False), ("split", False)):
        arguments = {"accelerator_config": {"dispatch_batches": dispatch}, "per_device_eval_batch_size": 2}
        with make_trainer(world_size, copy.deepcopy(model), arguments=arguments) as trainer:
            for num_rows in (13, 4, 1):
                rows = build_dataset(num_rows)
                stream = rows.to_iterable_dataset(num_shards=min(4, num_rows)) if kind == "split" else Stream(rows)
                loss = trainer.evaluate(stream)["eval_loss"]
                found[f"{kind}-{num_rows}"] = (loss, mean_by_hand(by_hand, rows))
        reset()
    return found


def reset() -> None:
    """Let the next Trainer of a case build its own Accelerator."""
    from tests.distributed.harness import forget_accelerate

    forget_accelerate()


def collate_unequal(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest of the batch."""
    longest = max(len(example["input_ids"]) for example in examples)

    def pad(name: str, value: int) -> torch.Tensor:
        return torch.tensor([example[name] + [value] * (longest - len(example[name])) for example in examples])

    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100)}


def grouped_by_length(rank: int, world_size: int) -> dict[str, Any]:
    rows = build_dataset(13).map(lambda row, index: {k: v[: 12 - index % 4] for k, v in row.items()}, with_indices=True)
    model = build_model("llama", tied=False)
    expected = mean_by_hand(copy.deepcopy(model).eval(), rows)
    arguments = {"train_sampling_strategy": "group_by_length", "per_device_eval_batch_size": 3}
    with make_trainer(world_size, model, arguments=arguments, data_collator=collate_unequal) as trainer:
        trainer.processing_class = _Names()
        return {"loss": trainer.evaluate(rows)["eval_loss"], "expected": expected}


class _Names:
    model_input_names = ("input_ids",)


class EvalLosses(TrainerCallback):
    """Keeps what every evaluation said."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.metrics.append(dict(metrics))


def several_datasets(rank: int, world_size: int) -> dict[str, Any]:
    """Each has its own loss, and the best model and early stopping go by the one that is named."""
    model = build_model("llama", tied=False)
    by_hand = copy.deepcopy(model)
    keeper = EvalLosses()
    arguments = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "no",
        "eval_on_start": True,
        "metric_for_best_model": "eval_b_loss",
        "greater_is_better": True,  # the loss falls, so training stops by patience
        "max_steps": 8,
        "learning_rate": 0.2,
    }
    rows = {"a": build_dataset(5), "b": build_dataset(7).select(range(2, 7))}
    with make_trainer(
        world_size,
        model,
        eval_dataset=rows,
        arguments=arguments,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2), keeper],
    ) as trainer:
        trainer.train()
        final = trainer.evaluate()
        by_hand.load_state_dict({name: whole(value) for name, value in trainer.model.state_dict().items()})
        return {
            "final": {name: final[f"eval_{name}_loss"] for name in rows},
            "expected": {name: mean_by_hand(by_hand.eval(), part) for name, part in rows.items()},
            "best": trainer.state.best_metric,
            "seen": [metrics["eval_b_loss"] for metrics in keeper.metrics if "eval_b_loss" in metrics],
            "steps": trainer.state.global_step,
        }


def other_heads(rank: int, world_size: int) -> dict[str, Any]:
    """Losses over rows, over elements, of an encoder-decoder and smoothed; with and without gathered outputs."""
    rows = build_dataset(7, uneven=False).remove_columns("labels")
    found: dict[str, Any] = {}
    for kind in ("classes", "regression", "t5", "smoothed"):
        labels, model = _head(kind, rows)
        if labels is None:
            data = build_dataset(7)
        else:
            data = rows.add_column("labels", labels)
        expected = _mean_of_rows(copy.deepcopy(model).eval(), data, kind)
        for metrics in ({}, {"compute_metrics": lambda prediction: {"rows": len(prediction.label_ids)}}):
            arguments = {
                "per_device_eval_batch_size": 3,
                "label_smoothing_factor": 0.1 if kind == "smoothed" else 0.0,
            }
            with make_trainer(world_size, copy.deepcopy(model), arguments=arguments, **metrics) as trainer:
                said = trainer.evaluate(data)
            reset()
            found[f"{kind}-{'outputs' if metrics else 'loss'}"] = {
                "loss": said["eval_loss"],
                "expected": expected,
                "has_perplexity": "eval_perplexity" in said,
                "rows": said.get("eval_rows"),
            }
    return found


def _head(kind: str, rows: Dataset) -> tuple[list[Any] | None, torch.nn.Module]:
    if kind == "t5":
        return None, build_t5(dropout=0.0)
    if kind == "smoothed":
        return None, build_model("llama", tied=False)
    config = CONFIGS["llama"]()
    config.num_labels = 3 if kind == "classes" else 1
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    values = [index % 3 for index in range(len(rows))]
    return (values if kind == "classes" else [float(value) for value in values]), model


def _mean_of_rows(model: torch.nn.Module, data: Dataset, kind: str) -> float:
    """Row by row with the model's own loss, weighted by what counts in a row."""
    total, count = 0.0, 0
    for row in data:
        batch = {name: torch.tensor([value]) for name, value in row.items()}
        with torch.no_grad():
            output = model(**batch)
        labels = batch["labels"][..., 1:] if kind == "smoothed" else batch["labels"]
        weight = int(labels.ne(-100).sum())
        loss = float(output.loss)
        if kind == "smoothed":
            log_probs = -F.log_softmax(output.logits[:, :-1].double(), -1)[labels.ne(-100)]
            loss = 0.9 * loss + 0.1 * float(log_probs.mean())
        total, count = total + loss * weight, count + weight
    return total / count


def own_losses(rank: int, world_size: int) -> dict[str, Any]:
    """Somebody's own loss says nothing about its mean: Trainer's value stays."""

    def half(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return outputs.logits.float().pow(2).mean() * 0 + 0.5

    class OwnLoss(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(*args, **{**kwargs, "return_outputs": True})
            loss = loss * 0 + 0.25
            return (loss, outputs) if kwargs.get("return_outputs") else loss

    found = {}
    arguments = {"average_tokens_across_devices": False}
    for name, options in (("func", {"compute_loss_func": half}), ("method", {"cls": OwnLoss})):
        with make_trainer(world_size, build_model("llama", tied=False), arguments=arguments, **options) as trainer:
            metrics = trainer.evaluate()
            found[name] = {"loss": metrics["eval_loss"], "has_perplexity": "eval_perplexity" in metrics}
        reset()
    return found


def nothing_counts(rank: int, world_size: int) -> dict[str, Any]:
    """Batches without a target weigh nothing; where no label counts there is no loss, and training goes on."""
    rows = build_dataset(5)
    silent = rows.map(lambda row: {"labels": [-100] * SEQUENCE_TOKENS})
    half = Dataset.from_list([*silent, *rows])
    model = build_model("llama", tied=False)
    expected = mean_by_hand(copy.deepcopy(model).eval(), rows)
    with make_trainer(world_size, model, arguments={"per_device_eval_batch_size": 1}) as trainer:
        return {
            "half": trainer.evaluate(half)["eval_loss"],
            "expected": expected,
            "none": trainer.evaluate(silent)["eval_loss"],
        }


def _trained(world_size: int, evaluates: bool, **options: Any) -> dict[str, Any]:
    arguments = {"max_steps": 4, "per_device_eval_batch_size": 2}
    if evaluates:
        arguments |= {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    model = build_model("llama", tied=False, dropout=0.3)
    with make_trainer(world_size, model, arguments=arguments, **options) as trainer:
        if evaluates:
            trainer.evaluate()
            trainer.predict(build_dataset(5))
        trainer.train()
        first = {name: whole(value).clone() for name, value in trainer.model.named_parameters()}
        if evaluates:
            trainer.evaluate()
            trainer.predict(build_dataset(3))
        trainer.train()  # and once more after it
        second = {name: whole(value).clone() for name, value in trainer.model.named_parameters()}
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return {"losses": losses, "first": first, "second": second}


def training_is_unchanged(rank: int, world_size: int) -> dict[str, Any]:
    """With dropout on: to the bit, with and without evaluations before, between and after."""
    plain = _trained(world_size, evaluates=False)
    reset()
    evaluated = _trained(world_size, evaluates=True)
    return {
        "losses": (plain["losses"], evaluated["losses"]),
        "is_equal": all(
            torch.equal(plain[part][name], evaluated[part][name])
            for part in ("first", "second")
            for name in plain[part]
        ),
        "has_trained": not torch.equal(plain["first"]["lm_head.weight"], plain["second"]["lm_head.weight"]),
    }


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except HfFsdpError as error:
        return str(error)
    return ""


def logits_that_do_not_fit(rank: int, world_size: int) -> dict[str, Any]:
    """Refused before training and by `evaluate()` and `predict()`; each piece of advice works."""
    kept_function, eval_memory.free_bytes = eval_memory.free_bytes, lambda on_device: 60_000
    during = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    sized = {"compute_metrics": lambda prediction: {"shape": str(prediction.predictions.shape)}}
    seen: list[int] = []

    def by_batch(prediction: Any, compute_result: bool) -> dict[str, float]:
        seen.append(len(prediction.label_ids))
        return {"rows": sum(seen)} if compute_result else {}

    found: dict[str, Any] = {}
    try:
        for name, arguments, options in (
            ("refused", {}, sized),
            ("argmax", {}, {**sized, **ARGMAX}),
            ("by_batch", {"batch_eval_metrics": True}, {"compute_metrics": by_batch}),
        ):
            model = build_model("llama", tied=False)
            with make_trainer(world_size, model, arguments={**during, **arguments}, **options) as trainer:
                found[name] = {
                    "train": _error_of(trainer.train),
                    "steps": trainer.state.global_step,
                    "evaluate": _error_of(trainer.evaluate),
                    "log": [entry for entry in trainer.state.log_history if "eval_loss" in entry][-1:],
                }
                if name != "by_batch":
                    found[name]["predict"] = _error_of(lambda trainer=trainer: trainer.predict(build_dataset(13)))
                    found[name]["stream"] = _error_of(
                        lambda trainer=trainer: trainer.evaluate(Stream(build_dataset(13)))
                    )
            reset()
        labels, model = _head("classes", build_dataset(13))
        data = build_dataset(13).remove_columns("labels").add_column("labels", labels)
        with make_trainer(world_size, model, arguments=during, eval_dataset=data, train_dataset=data, **sized) as heads:
            found["classes"] = {"train": _error_of(heads.train), "steps": heads.state.global_step}
    finally:
        eval_memory.free_bytes = kept_function
    return found


def uneven_outputs(rank: int, world_size: int) -> dict[str, Any]:
    """Outputs are gathered row by row: a stream that is sharded unevenly is refused, and both pieces of advice work."""
    data = build_dataset(5)
    sized = {"compute_metrics": lambda prediction: {"rows": len(prediction.label_ids)}, **ARGMAX}
    found = {}
    for name, config, arguments in (
        ("refused", {"dispatch_batches": False}, {}),
        ("dispatched", {"dispatch_batches": True, "even_batches": True}, {}),
        ("loss_only", {"dispatch_batches": False}, {"prediction_loss_only": True}),
    ):
        arguments = {"accelerator_config": config, "per_device_eval_batch_size": 2, **arguments}
        with make_trainer(world_size, build_model("llama", tied=False), arguments=arguments, **sized) as trainer:
            metrics: dict[str, float] = {}
            error = _error_of(lambda trainer=trainer, metrics=metrics: metrics.update(trainer.evaluate(Stream(data))))
            found[name] = {"error": error, "rows": metrics.get("eval_rows"), "loss": metrics.get("eval_loss")}
        reset()
    return found


ANYWHERE = {
    function.__name__: function
    for function in (sizes, streams, grouped_by_length, several_datasets, other_heads, own_losses, nothing_counts)
}
SHARDED_ONLY = {
    function.__name__: function for function in (training_is_unchanged, logits_that_do_not_fit, uneven_outputs)
}
CASES = {**ANYWHERE, **SHARDED_ONLY}
