"""Silent traps: things that once trained a little wrong, or broke at the end, each against the right result."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from datasets import Dataset
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    Trainer,
    TrainerCallback,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

from hf_fsdp import FSDPCallback, FSDPConfig, apply_fsdp
from hf_fsdp.sharding import outcome
from hf_fsdp.torch_private import GROUPS_CAST_EACH_MODULE
from tests.distributed.behaviour_cases import (
    FP32,
    _error,
    _PoisonOnOneRank,
    losses_of,
    make_arguments,
    make_trainer,
    workspace,
)
from tests.distributed.harness import forget_accelerate
from tests.distributed.resume_compare import files_of
from tests.distributed.tiny_models import CONFIGS, build_model, build_t5
from tests.distributed.training import Run, build_dataset, build_run_model, train, whole


def label_smoothing(rank: int, world_size: int) -> dict[str, Any]:
    result = train(Run(arguments={"label_smoothing_factor": 0.1}), world_size)
    return {"losses": result["losses"], "weights": result["weights"]}


def model_that_ignores_num_items(rank: int, world_size: int) -> dict[str, Any]:
    """T5 takes `**kwargs` and does not scale its loss; the same global batch on any number of processes."""

    with tempfile.TemporaryDirectory() as folder:
        arguments = make_arguments(
            folder,
            FP32,
            per_device_train_batch_size=4 // world_size,
            gradient_accumulation_steps=1,
            optim="sgd",
            max_grad_norm=0.0,
        )
        dataset = build_dataset(16, uneven=False)
        trainer = Trainer(
            model=build_t5(dropout=0.0), args=arguments, train_dataset=dataset, callbacks=[FSDPCallback(FP32)]
        )
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        return {"losses": losses_of(trainer), "norms": [float(norm) for norm in norms]}


class _OwnLoss(Trainer):
    """Takes the number of items itself, and needs it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch
        return loss * self.accelerator.num_processes


def other_losses(rank: int, world_size: int) -> dict[str, Any]:
    """A classification head that ignores the number of items, and a Trainer whose own loss divides by it."""
    found = {}
    rows = build_dataset(16, uneven=False)
    classes = Dataset.from_dict({"input_ids": rows["input_ids"], "labels": [index % 3 for index in range(16)]})
    config = CONFIGS["llama"]()
    config.num_labels = 3
    torch.manual_seed(0)
    head = LlamaForSequenceClassification(config)
    for name, cls, model, dataset in (
        ("head", Trainer, head, classes),
        ("own", _OwnLoss, build_model("llama", tied=False), build_dataset(16)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            sizes = {"per_device_train_batch_size": 4 // world_size, "optim": "sgd", "max_grad_norm": 0.0}
            trainer = cls(
                model=model,
                args=make_arguments(folder, FP32, **sizes),
                train_dataset=dataset,
                callbacks=[FSDPCallback(FP32)],
            )
            trainer.train()
            norms = [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
            found[name] = {"norms": norms, "losses": losses_of(trainer)}
        forget_accelerate()
    return found


def losses_in_float32(rank: int, world_size: int) -> dict[str, Any]:
    """bf16-mixed on models that call the loss function on their own logits."""
    ids = torch.full((2, 6), 5)
    torch.manual_seed(0)
    bert_config = BertConfig(
        vocab_size=67, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, num_labels=3
    )
    found = {}
    for name, build, inputs in (
        ("t5", lambda: build_t5(dropout=0.0), {"input_ids": ids, "labels": ids}),
        (
            "bert",
            lambda: BertForSequenceClassification(bert_config),
            {"input_ids": ids, "labels": torch.tensor([0, 2])},
        ),
    ):
        torch.manual_seed(0)
        plain = build().eval()
        expected = plain(**inputs).loss.item()
        with torch.autocast("cpu", torch.bfloat16):
            autocast = plain(**inputs).loss.item()
        torch.manual_seed(0)
        model = build().eval()
        apply_fsdp(model, FSDPConfig(precision="bf16-mixed"))
        loss = model(**inputs).loss
        found[name] = {
            "loss": loss.item(),
            "expected": expected,
            "autocast": autocast,
            "is_a_bf16_number": loss.item() == loss.bfloat16().item(),
        }
    return found


class _Regression(nn.Module):
    """Reports the labels and inputs that its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.seen = {"x": str(x.dtype), "labels": labels.tolist(), "weights": weights.tolist()}
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, labels)


def labels_keep_their_precision(rank: int, world_size: int) -> dict[str, Any]:
    model = _Regression()
    apply_fsdp(model, FSDPConfig(precision="bf16-mixed", wrap=lambda m: list(m.layers)))
    labels = torch.tensor([[1003.0, 1005.0, 1007.0, 1009.0]])
    model(x=torch.ones(1, 4), labels=labels, weights=torch.tensor([1001.0])).backward()
    return model.seen


class _LooksDuringTheStep(TrainerCallback):
    """Runs the model without gradients at the worst moments: before and right after the optimizer's step."""

    def _look(self, model: Any) -> None:
        with torch.no_grad():
            model(input_ids=torch.full((1, 4), 5))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._look(model)
        model(input_ids=torch.full((1, 4), 6))  # with gradients, and without a backward

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._look(model)
        model.generate(input_ids=torch.full((1, 4), 5), max_new_tokens=2, do_sample=False)


def forwards_around_the_step(rank: int, world_size: int) -> dict[str, Any]:
    curves = []
    for callbacks in ([], [_LooksDuringTheStep()]):
        with workspace() as folder:
            trainer = make_trainer(folder, callbacks=callbacks, max_steps=5)
            trainer.train()
            curves.append(losses_of(trainer))
        forget_accelerate()
    return {"plain": curves[0], "looking": curves[1]}


def checkpoint_format_is_the_configs(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for format in ("full", "sharded"):
        with workspace() as folder:
            # The arguments carry no format at all; only the callback's config says it.
            trainer = make_trainer(
                folder,
                FP32,
                callback=FSDPCallback(FSDPConfig(precision="fp32", checkpoint=format)),
                save_strategy="steps",
                save_steps=3,
            )
            trainer.train()
            dist.barrier()
            found[format] = files_of(f"{folder}/checkpoint-3")
        forget_accelerate()
    return found


def replicas_without_shards(rank: int, world_size: int) -> dict[str, Any]:
    config = FSDPConfig(precision="fp32", sharding={"dp_replicate_size": world_size})
    return {"error": _error(lambda: apply_fsdp(build_model("llama", tied=False), config))}


def two_trainers_built_before_training(rank: int, world_size: int) -> dict[str, Any]:
    with workspace() as folder:
        first = make_trainer(f"{folder}/a", FP32)
        make_trainer(f"{folder}/b", FSDPConfig(precision="bf16-mixed"))
        return {"error": _error(first.train)}


def two_configs_for_one_trainer(rank: int, world_size: int) -> dict[str, Any]:
    with workspace() as folder:
        callback = FSDPCallback(FSDPConfig(precision="bf16-mixed"))
        return {"error": _error(lambda: make_trainer(folder, FP32, callback=callback))}


def stock_trainer_afterwards(rank: int, world_size: int) -> dict[str, Any]:
    """A Trainer without the callback, later in the same process, is Trainer's own DDP again."""
    with workspace() as folder:
        make_trainer(f"{folder}/a").train()
        left = os.environ.get("ACCELERATE_USE_FSDP")
        stock = Trainer(
            model=build_model("llama", tied=False),
            args=make_arguments(f"{folder}/b", None),
            train_dataset=build_dataset(20),
        )
        stock.train()
        return {"left": left, "wrapped": type(stock.model_wrapped).__name__, "losses": losses_of(stock)}


def save_pretrained_on_all_ranks(rank: int, world_size: int) -> dict[str, Any]:
    with workspace() as folder:
        trainer = make_trainer(folder, model=build_run_model(Run(tied=True, load_dtype="bfloat16")))
        trainer.train()
        trainer.model.save_pretrained(f"{folder}/saved")
        live = {name: whole(value) for name, value in trainer.model.state_dict().items()}
        dist.barrier()
        loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/saved")
        equal = all(torch.equal(live[n].bfloat16(), value) for n, value in loaded.state_dict().items())
        return {"dtype": str(loaded.dtype), "equal": equal}


def save_pretrained_on_one_rank(rank: int, world_size: int) -> dict[str, Any]:
    from datetime import timedelta

    model = build_model("llama", tied=False)
    apply_fsdp(model, FP32)
    before, outcome.ENTRY_TIMEOUT = outcome.ENTRY_TIMEOUT, timedelta(seconds=2)
    error = ""
    try:
        with workspace() as folder:
            if rank == 0:
                error = _error(lambda: model.save_pretrained(f"{folder}/saved"))
    finally:
        outcome.ENTRY_TIMEOUT = before
    return {"error": error}


class _PoisonStepThree(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2 and dist.get_rank() == 1:
            model.register_forward_hook(_PoisonOnOneRank._poison)


def nan_between_logged_steps_is_not_saved(rank: int, world_size: int) -> dict[str, Any]:
    with workspace() as folder:
        trainer = make_trainer(
            folder,
            callbacks=[_PoisonStepThree()],
            max_steps=8,
            logging_steps=8,
            save_strategy="steps",
            save_steps=2,
        )
        error = _error(trainer.train)
        dist.barrier()
        return {"error": error, "saved": sorted(p.name for p in Path(folder).glob("checkpoint-*"))}


def nan_is_not_saved_at_the_end_of_an_epoch(rank: int, world_size: int) -> dict[str, Any]:
    with workspace() as folder:
        trainer = make_trainer(
            folder,
            callbacks=[_PoisonStepThree()],
            max_steps=-1,
            num_train_epochs=1,
            logging_steps=50,
            save_strategy="epoch",
        )
        error = _error(trainer.train)
        dist.barrier()
        return {"error": error, "saved": sorted(p.name for p in Path(folder).glob("checkpoint-*"))}


def unfit_models(rank: int, world_size: int) -> dict[str, Any]:
    """Each is refused before anything is changed; what the advice says works."""
    from peft import PromptTuningConfig, get_peft_model

    def opt(layerdrop: float) -> nn.Module:
        return OPTForCausalLM(OPTConfig(**{**CONFIGS["opt"]().to_dict(), "layerdrop": layerdrop}))

    class WithBatchNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    wrap = {"wrap": lambda m: list(m.layers)}
    prompts = get_peft_model(
        build_model("llama", tied=False), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    norm_fixed = WithBatchNorm()
    advised = {"preset": "bf16-mixed", "keep_norms_fp32": True} if GROUPS_CAST_EACH_MODULE else "fp32"
    apply_fsdp(norm_fixed, FSDPConfig(precision=advised, **wrap))
    norm_fixed(torch.randn(4, 4)).sum().backward()
    fixed = opt(0.0).train()
    apply_fsdp(fixed, FP32)
    fixed(input_ids=torch.full((1, 4), 5), labels=torch.full((1, 4), 5)).loss.backward()
    speech = Wav2Vec2Model(
        Wav2Vec2Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            conv_dim=(8, 8),
            conv_stride=(2, 2),
            conv_kernel=(3, 3),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            num_feat_extract_layers=2,
            layerdrop=0.1,
        )
    )
    return {
        "layerdrop_in_config": _error(lambda: apply_fsdp(speech, FP32)),
        "layerdrop": _error(lambda: apply_fsdp(opt(0.1), FP32)),
        "batch_norm": _error(lambda: apply_fsdp(WithBatchNorm(), FSDPConfig(precision="bf16-mixed", **wrap))),
        "prompt": _error(lambda: apply_fsdp(prompts, FP32)),
    }


def mixed_dtypes_in_a_unit(rank: int, world_size: int) -> dict[str, Any]:
    """bf16 weights beside fp32 norms become what the precision says; float64 is refused, and the advice works."""

    def mixed(odd: torch.dtype) -> nn.Module:
        model = build_model("llama", tied=False, dtype=torch.bfloat16)
        for layer in model.model.layers:
            layer.input_layernorm.to(odd)
        return model

    stored = {}
    for precision in ("fp32", "bf16-mixed", "bf16-true"):
        model = mixed(torch.float32)
        apply_fsdp(model, FSDPConfig(precision=precision))
        model(input_ids=torch.full((1, 4), 5), labels=torch.full((1, 4), 5)).loss.backward()
        stored[precision] = sorted({str(parameter.grad.dtype) for parameter in model.parameters()})
    fixed = mixed(torch.float64).float()
    apply_fsdp(fixed, FP32)
    return {"stored": stored, "error": _error(lambda: apply_fsdp(mixed(torch.float64), FP32))}


def unfit_optimizers(rank: int, world_size: int) -> dict[str, Any]:
    errors = {}
    for name in ("adafactor", "adagrad"):
        with workspace() as folder:
            errors[name] = _error(lambda name=name, folder=folder: make_trainer(folder, optim=name))
        forget_accelerate()
    with workspace() as folder:
        make_trainer(folder, optim="adamw_torch_fused").train()
    return errors


def odd_memory_layouts(rank: int, world_size: int) -> dict[str, Any]:
    """A parameter that is a transposed view, and an expanded buffer that differs between ranks."""
    model = build_model("llama", tied=False)
    projection = model.model.layers[0].mlp.up_proj
    projection.weight.data = projection.weight.data.t().contiguous().t()
    model.model.register_buffer("scale", torch.full((1,), float(rank)).expand(4))
    apply_fsdp(model, FP32)
    return {"contiguous": projection.weight.to_local().is_contiguous(), "scale": model.model.scale.tolist()}


def silence(case: Any) -> Any:
    """Keep what Trainer prints out of the worker's output."""

    def run(rank: int, world_size: int) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):
            return case(rank, world_size)

    return run


CASES = {
    case.__name__: silence(case)
    for case in (
        label_smoothing,
        model_that_ignores_num_items,
        other_losses,
        losses_in_float32,
        labels_keep_their_precision,
        forwards_around_the_step,
        checkpoint_format_is_the_configs,
        replicas_without_shards,
        two_trainers_built_before_training,
        two_configs_for_one_trainer,
        stock_trainer_afterwards,
        save_pretrained_on_all_ranks,
        nan_between_logged_steps_is_not_saved,
        nan_is_not_saved_at_the_end_of_an_epoch,
        unfit_models,
        mixed_dtypes_in_a_unit,
        unfit_optimizers,
        odd_memory_layouts,
        save_pretrained_on_one_rank,  # last: its barrier fails, and the group is not to be trusted afterwards
    )
}
TWINS = ["label_smoothing", "model_that_ignores_num_items", "other_losses"]
