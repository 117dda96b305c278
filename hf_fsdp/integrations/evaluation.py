"""The seams into Trainer's evaluation: a loss that is right, ranks in step, bounded memory, training left as it was.

Trainer averages the means of batches: a short batch weighs as much as a full one, samples that were repeated to even
batches out count twice, and the number depends on batch size and processes. Here `eval_loss` is the mean over all
tokens that count. A loss that is somebody's own is left alone, and so is a Trainer without `FSDPCallback`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Seq2SeqTrainer, Trainer

from hf_fsdp.integrations.accelerate import replace_method
from hf_fsdp.integrations.eval_batches import InStepBatches, unrepeated_samples
from hf_fsdp.integrations.kept_outputs import MemoryWatch
from hf_fsdp.monitor.eval_loss import (
    WeightedMean,
    count_rows,
    count_targets,
    has_class_labels,
    mask_rows,
    perplexity,
    take_rows,
)
from hf_fsdp.monitor.random_state import preserved_random_state
from hf_fsdp.monitor.signals import shield_data_workers
from hf_fsdp.policies.blocks import base_model

MARK = "hf_fsdp_evaluates"
"""An attribute of the callback whose presence lets these seams act on a Trainer."""

_SAID = "_hf_fsdp_said_of_evaluation"
_TRL_SFT = ("trl.trainer.sft_trainer", "SFTTrainer")  # named, not imported: TRL is optional and slow to import
_LANGUAGE_LOSSES = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM")


def install_evaluation_seams() -> None:
    """Put the seams in place; calling it again changes nothing."""
    replace_method(Trainer, "evaluation_loop", _evaluation_loop)


def _evaluation_loop(
    original: Callable[..., Any],
    trainer: Trainer,
    dataloader: Any,
    description: str,
    prediction_loss_only: bool | None = None,
    ignore_keys: list[str] | None = None,
    metric_key_prefix: str = "eval",
) -> Any:
    """Run Trainer's own loop over batches in step, and put the mean over tokens in the place of its loss."""
    if not is_ours(trainer):
        return original(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
    loss_only = trainer.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
    whose = whose_loss(trainer)
    shield_data_workers(dataloader)
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved_random_state())
        if whose is None:
            stack.enter_context(unrepeated_samples(dataloader, keeps_outputs=not loss_only))
            # Told the items of a global batch, some models divide by them and others do not; told nothing, each
            # returns the mean over its own batch.
            stack.enter_context(_shadowed(trainer, "_get_num_items_in_batch", lambda *args, **kwargs: None))
        batches = InStepBatches(
            dataloader,
            rank=trainer.args.process_index,
            world_size=trainer.args.world_size,
            keeps_outputs=not loss_only,
        )
        step = _EvaluationStep(
            trainer=trainer,
            original=trainer.prediction_step,
            batches=batches,
            is_weighted=whose is None,
            memory=None if loss_only else MemoryWatch.of(trainer, description, batches),
            mean=WeightedMean(),
        )
        stack.enter_context(_shadowed(trainer, "prediction_step", step))
        output = original(batches, description, prediction_loss_only, ignore_keys, metric_key_prefix)
    name = f"{metric_key_prefix}_loss"
    if whose is not None:
        if name in output.metrics:
            _say(trainer, f"{name} is what Trainer makes of {whose}: averaged over batches, not tokens")
        return output
    loss = step.mean.over_all_ranks()
    if loss is not None:
        output.metrics[name] = loss
        if _is_language_model_loss(trainer):
            output.metrics[f"{metric_key_prefix}_perplexity"] = perplexity(loss)
        _say(trainer, "eval_loss is the mean over all tokens that count, on all ranks (Trainer averages batch means)")
    elif name in output.metrics:
        output.metrics[name] = float("nan")
        _say(trainer, f"warning: {name} is not a number: no label of the evaluation set counts (all are -100)")
    return output


@dataclass
class _EvaluationStep:
    """Stands in for `Trainer.prediction_step` during one evaluation."""

    trainer: Trainer
    original: Callable[..., Any]
    batches: InStepBatches
    is_weighted: bool
    memory: MemoryWatch | None
    mean: WeightedMean

    def __call__(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the step; add its loss, weighted by the targets that are no repetition."""
        if not self.is_weighted or not isinstance(inputs, Mapping):
            result = self.original(model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **kwargs)
        elif has_class_labels(inputs):
            inputs = self._without_repetitions(inputs)
            result = self.original(model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **kwargs)
            self._add(result[0], inputs)
        else:
            result = self._step_by_rows(model, inputs, prediction_loss_only, ignore_keys, kwargs)
        if self.memory is not None and result[1] is not None:
            self.memory.add(result[1])
        return result

    def _without_repetitions(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        num_rows = count_rows(inputs)
        num_real = self.batches.num_real_rows(num_rows)
        return inputs if num_real == num_rows else mask_rows(inputs, num_real)

    def _step_by_rows(
        self, model: nn.Module, inputs: Mapping[str, Any], loss_only: bool, ignore_keys: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Labels that nothing can be masked in: repeated rows leave the batch, at least one stays for the forward."""
        num_rows = count_rows(inputs)
        num_real = self.batches.num_real_rows(num_rows)
        kept = take_rows(inputs, max(num_real, 1)) if num_real < num_rows else inputs
        if not loss_only:
            result = self.original(model, inputs, loss_only, ignore_keys=ignore_keys, **kwargs)
            if not self.batches.has_repetitions(num_rows):  # the same on all ranks, so all take the second forward
                self._add(result[0], inputs)
                return result
            self._add(self.original(model, kept, True, ignore_keys=ignore_keys, **kwargs)[0], kept, num_real)
            return result
        result = self.original(model, kept, loss_only, ignore_keys=ignore_keys, **kwargs)
        self._add(result[0], kept, num_real)
        return result

    def _add(self, loss: Any, inputs: Mapping[str, Any], num_real: int | None = None) -> None:
        count = count_targets(inputs, is_shifted=_is_shifted(self.trainer))
        if isinstance(loss, torch.Tensor) and count is not None:
            self.mean.add(loss, count * 0 if self.batches.is_replay or num_real == 0 else count)


def is_ours(trainer: Trainer) -> bool:
    """Return whether the Trainer has the callback."""
    return any(hasattr(callback, MARK) for callback in trainer.callback_handler.callbacks)


def whose_loss(trainer: Trainer) -> str | None:
    """Return who computes the loss in a way that says nothing about its mean; None for losses that are known."""
    if trainer.compute_loss_func is not None:
        return "compute_loss_func"
    if trainer.args.n_gpu > 1:
        return "nn.DataParallel"
    cls = type(trainer)
    for name, known in (
        ("compute_loss", (Trainer.compute_loss,)),
        ("prediction_step", (Trainer.prediction_step, Seq2SeqTrainer.prediction_step)),
    ):
        method = getattr(cls, name)
        is_trls = (method.__module__, method.__qualname__) == (_TRL_SFT[0], f"{_TRL_SFT[1]}.{name}")
        if method not in known and not is_trls:
            return f"{method.__qualname__}()"
    return None


def _is_shifted(trainer: Trainer) -> bool:
    return bool(trainer._loss_shifts_labels) or _is_trls_sft(trainer)


def _is_trls_sft(trainer: Trainer) -> bool:
    return any((cls.__module__, cls.__name__) == _TRL_SFT for cls in type(trainer).__mro__)


def _is_language_model_loss(trainer: Trainer) -> bool:
    """Whether exp(loss) is a perplexity: a plain cross-entropy over a vocabulary."""
    if trainer.label_smoother is not None or getattr(trainer.args, "loss_type", "nll") != "nll":
        return False
    return _is_shifted(trainer) or getattr(base_model(trainer.model), "loss_type", None) in _LANGUAGE_LOSSES


def _say(trainer: Trainer, line: str) -> None:
    said = trainer.__dict__.setdefault(_SAID, set())
    if line not in said and trainer.is_world_process_zero():
        print(f"hf-fsdp: {line}", flush=True)
    said.add(line)


@contextlib.contextmanager
def _shadowed(trainer: Trainer, name: str, value: Any) -> Iterator[None]:
    """Let `value` answer for a method of this one Trainer, whatever class defines it."""
    missing = object()
    before = vars(trainer).get(name, missing)
    setattr(trainer, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(trainer, name)
        else:
            setattr(trainer, name, before)
