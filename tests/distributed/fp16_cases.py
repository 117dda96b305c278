"""fp16 with loss scaling: what the scale must not change, and what an overflow on one rank does on all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import GradScalerKwargs
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_fsdp import FSDPCallback, FSDPConfig, apply_fsdp
from hf_fsdp.errors import NumericsError
from tests.distributed.tiny_models import VOCABULARY, build_model
from tests.distributed.training import QUIET_ARGUMENTS, Run, build_dataset, train, whole

# The first scale of torch's scaler; scaled gradients of the tiny model stay in range under it.
FIRST_SCALE = 65536.0


class _Overflow(TrainerCallback):
    """Makes the loss of one rank infinite in one step, and notes weights, scale and learning rate around every step."""

    def __init__(self, rank: int, bad_steps: tuple[int, ...]):
        self.rank, self.bad_steps, self.step = rank, bad_steps, 0
        self.weights: list[torch.Tensor] = []
        self.scales: list[float] = []
        self.rates: list[float] = []
        self.trainer: Any = None

    def spoil(self, module: Any, inputs: Any, output: Any) -> Any:
        if self.rank == 1 and self.step in self.bad_steps:
            output["loss"] = output["loss"] * float("inf")
        return output

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.step = state.global_step + 1
        if not self.weights:
            model.register_forward_hook(self.spoil)
            self._note(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._note(model)
        self.scales.append(self.trainer.accelerator.scaler.get_scale())
        self.rates.append(self.trainer.optimizer.param_groups[0]["lr"])

    def _note(self, model: Any) -> None:
        self.weights.append(torch.cat([whole(parameter).flatten() for parameter in model.parameters()]))


def _overflowing(optimizer: str, offload: str = "none") -> Callable[[int, int], Any]:
    def case(rank: int, world_size: int) -> dict[str, Any]:
        import contextlib
        import io

        watch = _Overflow(rank, bad_steps=(1, 3))
        config = FSDPConfig(precision="fp16-mixed", offload=offload)
        printed = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
            arguments = TrainingArguments(
                output_dir=folder,
                **QUIET_ARGUMENTS,
                per_device_train_batch_size=4,
                max_steps=5,
                optim=optimizer,
                learning_rate=1e-2,
                lr_scheduler_type="linear",
                **config.trainer_kwargs(),
            )
            watch.trainer = Trainer(
                model=build_model("llama", tied=False),
                args=arguments,
                train_dataset=build_dataset(),
                callbacks=[FSDPCallback(), watch],
            )
            watch.trainer.train()
        model = watch.trainer.model
        return {
            "moved": [not torch.equal(a, b) for a, b in zip(watch.weights, watch.weights[1:], strict=False)],
            "finite": bool(torch.isfinite(watch.weights[-1]).all()),
            "weights": watch.weights[-1],
            "scales": watch.scales,
            "rates": watch.rates,
            "printed": printed.getvalue(),
            "sharded": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
            "fp16": model.model.layers[0]._get_fsdp_state()._mp_policy.param_dtype is torch.float16,
        }

    return case


def _without_way_out(rank: int, world_size: int) -> dict[str, Any]:
    """Every step overflows: once the scale is one, training on would only skip for ever."""
    watch = _Overflow(rank, bad_steps=tuple(range(1, 20)))
    config = FSDPConfig(precision="fp16-mixed")
    with tempfile.TemporaryDirectory() as folder:
        arguments = {**QUIET_ARGUMENTS, "per_device_train_batch_size": 4, "max_steps": 19, **config.trainer_kwargs()}
        watch.trainer = Trainer(
            model=build_model("llama", tied=False),
            args=TrainingArguments(output_dir=folder, **arguments),
            train_dataset=build_dataset(),
            callbacks=[FSDPCallback(), watch],
        )
        watch.trainer.accelerator.scaler_handler = GradScalerKwargs(init_scale=4.0)
        try:
            watch.trainer.train()
        except NumericsError as error:
            return {"error": str(error), "scales": watch.scales}
    return {"error": "", "scales": watch.scales}


def _own_loop(rank: int, world_size: int) -> dict[str, Any]:
    """`apply_fsdp` with a scaler of one's own, as the docs show it."""
    model = build_model("llama", tied=False)
    apply_fsdp(model, FSDPConfig(precision="fp16-mixed"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False)
    scaler = torch.amp.GradScaler("cpu")
    ids = torch.randint(3, VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(rank))
    weights = []
    for step in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss * float("inf") if step == 1 and rank == 1 else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weights.append(torch.cat([whole(parameter).flatten() for parameter in model.parameters()]))
    return {
        "moved": [not torch.equal(a, b) for a, b in zip(weights, weights[1:], strict=False)],
        "scale": scaler.get_scale(),
        "finite": bool(torch.isfinite(weights[-1]).all()),
    }


def _scaler_of_other_precision_goes(rank: int, world_size: int) -> dict[str, Any]:
    """A scaler that Accelerate made is taken away where the config says another precision."""
    from hf_fsdp.integrations.loss_scaling import set_scaler

    class Holder:
        scaler: Any = torch.amp.GradScaler("cpu")
        scaler_handler = None

        class device:
            type = "cpu"

    holder = Holder()
    set_scaler(holder, FSDPConfig(precision="fp32"))  # type: ignore[arg-type]
    gone = holder.scaler is None
    set_scaler(holder, FSDPConfig(precision="fp16-mixed"), ())  # type: ignore[arg-type]
    return {"gone": gone, "back": holder.scaler is not None and holder.scaler.is_enabled()}


def _plain(precision: str, clip: float) -> Callable[[int, int], Any]:
    return lambda rank, world_size: train(Run(precision=precision, clip=clip, micro_batch=12), world_size)


def _typed_in_training_arguments(rank: int, world_size: int) -> dict[str, Any]:
    """`TrainingArguments(fp16=True)` on a model whose weights are fp16: stored in fp32, saved as they were loaded."""
    config = FSDPConfig()
    with tempfile.TemporaryDirectory() as folder:
        arguments = {**QUIET_ARGUMENTS, "per_device_train_batch_size": 4, "max_steps": 2, **config.trainer_kwargs()}
        trainer = Trainer(
            model=build_model("llama", tied=False, dtype=torch.float16),
            args=TrainingArguments(output_dir=folder, fp16=True, **arguments),
            train_dataset=build_dataset(),
            callbacks=[FSDPCallback()],
        )
        trainer.train()
        stored = {str(parameter.dtype) for parameter in trainer.model.parameters()}
        saved = {str(value.dtype) for value in trainer.accelerator.get_state_dict(trainer.model).values()}
        return {
            "stored": sorted(stored),
            "saved": sorted(saved) if rank == 0 else ["torch.float16"],
            "scale": trainer.accelerator.scaler.get_scale(),
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        }


def _loop_on_nan(rank: int, world_size: int) -> dict[str, Any]:
    """A plain loop on a model that holds a NaN: it must not skip for ever without a word."""
    from hf_fsdp import build_accelerator

    accelerator = build_accelerator(FSDPConfig(precision="fp16-mixed"), cpu=True)
    model = build_model("llama", tied=False)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    ids = torch.randint(3, VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(rank))
    steps = 0
    try:
        for _ in range(40):
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    except NumericsError as error:
        return {"error": str(error), "steps": steps}
    return {"error": "", "steps": steps}


CASES = {
    "loop_on_nan": _loop_on_nan,
    "fp32": _plain("fp32", 0.0),
    "fp16": _plain("fp16-mixed", 0.0),
    "fp32_clip": _plain("fp32", 0.05),
    "fp16_clip": _plain("fp16-mixed", 0.05),
    "overflow_adamw": _overflowing("adamw_torch"),
    "overflow_fused": _overflowing("adamw_torch_fused"),
    "overflow_offloaded": _overflowing("adamw_torch_fused", "parameters"),
    "no_way_out": _without_way_out,
    "own_loop": _own_loop,
    "typed": _typed_in_training_arguments,
    "scaler_goes": _scaler_of_other_precision_goes,
}
