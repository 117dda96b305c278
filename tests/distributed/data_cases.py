"""Packed rows and TRL's losses under sharding: every case runs on one process too, and the two are compared."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from trl import SFTConfig, SFTTrainer

from hf_fsdp import FSDPCallback, FSDPConfig, apply_fsdp
from hf_fsdp.errors import HfFsdpError
from tests.distributed.sft_cases import build_rows, build_tokenizer
from tests.distributed.tiny_models import build_model
from tests.distributed.training import QUIET_ARGUMENTS, GradientRecorder, whole

FP32 = FSDPConfig(precision="fp32")
# An attention that transformers builds no mask for: rows are causal and nothing more.
MASKLESS = "sdpa_without_masks"


def _build_trainer(
    world_size: int,
    folder: str,
    *,
    family: str = "llama",
    attention: str = "sdpa",
    config: FSDPConfig = FP32,
    trainer_arguments: dict[str, Any] | None = None,
    **overrides: Any,
) -> SFTTrainer:
    arguments: dict[str, Any] = {
        "output_dir": folder,
        **QUIET_ARGUMENTS,
        "max_steps": 3,
        "per_device_train_batch_size": 4 // world_size,
        "per_device_eval_batch_size": 32,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_length": 32,
        "bf16": False,
        "gradient_checkpointing": False,
        **overrides,
    }
    model = build_model(family, tied=False)
    model.set_attn_implementation(attention)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL announces what it drops in its next major release
        return SFTTrainer(
            model=model,
            args=SFTConfig(**arguments, **config.trainer_kwargs()),
            train_dataset=build_rows(),
            processing_class=build_tokenizer(),
            callbacks=[FSDPCallback(config), GradientRecorder()],
            **(trainer_arguments or {}),
        )


def _train(world_size: int, evaluates: bool = False, **settings: Any) -> dict[str, Any]:
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if evaluates:
            settings.setdefault("trainer_arguments", {})["eval_dataset"] = build_rows(10)
        trainer = _build_trainer(world_size, folder, **settings)
        trainer.train()
        metrics = trainer.evaluate() if evaluates else {}
        recorder = next(c for c in trainer.callback_handler.callbacks if isinstance(c, GradientRecorder))
        parameters = dict(trainer.model.named_parameters())
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "gradients": recorder.gradients,
        "sharded": all(isinstance(parameter, DTensor) for parameter in parameters.values()),
        "local": sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters.values()),
        "numel": sum(parameter.numel() for parameter in parameters.values()),
        "metrics": {name: float(value) for name, value in metrics.items() if name in ("eval_loss", "eval_mean_logit")},
        "printed": printed.getvalue(),
        "num_rows": len(trainer.train_dataset),
    }


# -- packed rows ------------------------------------------------------------------------------------------------------


def _packed_logits(world_size: int, attention: str, training: bool) -> dict[str, float]:
    """The largest difference between a packed sample's logits and the sample's own, and what no boundary would do."""
    tokenizer = build_tokenizer()
    samples = [tokenizer(text)["input_ids"] for text in build_rows(4)["text"]]
    model = build_model("llama", tied=False)
    model.set_attn_implementation(attention)
    if world_size > 1:
        apply_fsdp(model, FP32)
    model.train(training)
    flat = torch.tensor([sum(samples, [])])
    positions = torch.cat([torch.arange(len(sample)) for sample in samples])[None]
    with torch.set_grad_enabled(training):
        cache = {} if world_size > 1 else {"use_cache": False}  # sharded, the cache is off without a word
        packed = model(input_ids=flat, position_ids=positions, **cache).logits[0]
        joined = model(input_ids=flat, **cache).logits[0]
        alone = [model(input_ids=torch.tensor([sample]), **cache).logits[0] for sample in samples]
    start, worst, leak = 0, 0.0, 0.0
    for index, (sample, logits) in enumerate(zip(samples, alone, strict=True)):
        end = start + len(sample)
        worst = max(worst, (packed[start:end] - logits).abs().max().item())
        if index:
            leak = max(leak, (joined[start:end] - logits).abs().max().item())
        start = end
    return {"worst": worst, "leak": leak}


def packed_logits(rank: int, world_size: int) -> dict[str, Any]:
    return {
        f"{attention}, {'training' if training else 'evaluation'}": _packed_logits(world_size, attention, training)
        for attention in ("sdpa", "eager")
        for training in (True, False)
    }


def packed_training(rank: int, world_size: int) -> dict[str, Any]:
    return _train(world_size, evaluates=True, packing=True)


def packed_training_eager(rank: int, world_size: int) -> dict[str, Any]:
    config = FSDPConfig(precision="fp32", activation_checkpointing="full")
    return _train(world_size, attention="eager", packing=True, config=config)


def packed_evaluation(rank: int, world_size: int) -> dict[str, Any]:
    """The same held-out rows, packed and one by one, without a step between: one loss."""
    losses = {}
    for packs in (True, False):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            trainer = _build_trainer(
                world_size, folder, packing=True, eval_packing=packs, trainer_arguments={"eval_dataset": build_rows(16)}
            )
            losses["packed" if packs else "alone"] = trainer.evaluate()["eval_loss"]
            losses[f"rows {packs}"] = len(trainer.eval_dataset)
    return losses


def _refusal(run: Callable[[], Any]) -> tuple[str, str]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run()
    except HfFsdpError as error:
        return type(error).__name__, str(error)
    return "", ""


def packing_is_refused(rank: int, world_size: int) -> dict[str, Any]:
    """What leaks is refused, and what the advice says then works."""
    AttentionInterface.register(MASKLESS, sdpa_attention_forward)
    one_step = {"packing": True, "max_steps": 1}
    return {
        "maskless": _refusal(lambda: _train(world_size, attention=MASKLESS, **one_step)),
        "maskless evaluation": _refusal(lambda: _evaluate(world_size, attention=MASKLESS, packing=True)),
        "family": _refusal(lambda: _train(world_size, family="opt", **one_step)),
        "family unpacked": _refusal(lambda: _train(world_size, family="opt", max_steps=1)),
        "wrapped": _refusal(lambda: _train(world_size, packing_strategy="wrapped", **one_step)),
        "eval only": _refusal(lambda: _train(world_size, eval_packing=True, max_steps=1)),
        "split": _refusal(lambda: _train(world_size, packing_strategy="bfd_split", **one_step)),
    }


def _evaluate(world_size: int, **settings: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = _build_trainer(world_size, folder, trainer_arguments={"eval_dataset": build_rows(8)}, **settings)
        trainer.evaluate()


# -- losses that read the head ----------------------------------------------------------------------------------------


def dft(rank: int, world_size: int) -> dict[str, Any]:
    return _train(world_size, loss_type="dft")


def label_smoothing(rank: int, world_size: int) -> dict[str, Any]:
    return _train(world_size, label_smoothing_factor=0.1)


def _z_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, reduction="none")
    counted = (targets != -100).float()
    total = (losses + 1e-2 * logits.logsumexp(-1).square() * counted).sum()
    return total / (counted.sum() if num_items_in_batch is None else num_items_in_batch)


def own_loss_function(rank: int, world_size: int) -> dict[str, Any]:
    return _train(world_size, trainer_arguments={"compute_loss_func": _z_loss})


def _mean_logit(prediction: Any) -> dict[str, float]:
    kept = prediction.label_ids != -100
    return {"mean_logit": float(prediction.predictions[kept].mean())}


def metrics_on_logits(rank: int, world_size: int) -> dict[str, Any]:
    """TRL computes the logits by a second forward, which takes the model's own path and not the fused head."""
    return _train(
        world_size,
        evaluates=True,
        per_device_eval_batch_size=5,
        trainer_arguments={"compute_metrics": _mean_logit},
    )


def trained_head_beside_lora(rank: int, world_size: int) -> dict[str, Any]:
    """`modules_to_save: [lm_head]`: the head that is read is a copy inside PEFT's wrapper."""
    peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"],
                             task_type="CAUSAL_LM")  # fmt: skip
    return _train(world_size, trainer_arguments={"peft_config": peft_config})


class _RawHead(nn.Module):
    """A chunked loss of a person's own, which multiplies by the head's weight itself."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids=input_ids).last_hidden_state[:, :-1]
        weight = self.model.lm_head.weight
        chunks = [
            F.cross_entropy(F.linear(part, weight).flatten(0, 1), targets.flatten(), reduction="sum")
            for part, targets in zip(hidden.split(3, dim=1), input_ids[:, 1:].split(3, dim=1), strict=True)
        ]
        return torch.stack(chunks).sum() / input_ids[:, 1:].numel()


def own_chunked_loss(rank: int, world_size: int) -> dict[str, Any]:
    model = _RawHead(build_model("llama", tied=False))
    ids = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(5))
    if world_size > 1:
        apply_fsdp(model, FP32)
        ids = ids.chunk(world_size)[rank]
    loss = model(ids)
    loss.backward()
    return {
        "losses": [loss.item()],
        "gradients": {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None},
        "sharded": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
    }


def losses_are_refused(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "liger": _refusal(lambda: _train(world_size, use_liger_kernel=True)),
        "without": _refusal(lambda: _train(world_size, use_liger_kernel=False, max_steps=1)),
        "offloading": _refusal(lambda: _train(world_size, activation_offloading=True)),
        "ours": _refusal(
            lambda: _train(world_size, config=FSDPConfig(precision="fp32", offload="activations"), max_steps=1)
        ),
    }


LOSSES = (dft, label_smoothing, own_loss_function, metrics_on_logits, trained_head_beside_lora, own_chunked_loss)
TWINS = [function.__name__ for function in (packed_logits, packed_training, packed_training_eager, *LOSSES)]
CASES = {
    function.__name__: function
    for function in (
        packed_logits,
        packed_training,
        packed_training_eager,
        packed_evaluation,
        packing_is_refused,
        *LOSSES,
        losses_are_refused,
    )
}
