"""Trainer's own checkpoints, written by its stock code, and this package's resume from them."""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_fsdp import FSDPCallback, FSDPConfig
from hf_fsdp.errors import HfFsdpError
from hf_fsdp.sharding.mesh import agree_all, rank
from tests.distributed.harness import forget_accelerate
from tests.distributed.resuming import shared_folder
from tests.distributed.training import QUIET_ARGUMENTS, Run, build_dataset, build_run_model

NUM_STEPS, SAVE_STEP = 4, 2
_UP_TO_THE_SAVE = {"max_steps": SAVE_STEP, "save_strategy": "steps", "save_steps": SAVE_STEP}


class _Losses(TrainerCallback):
    def __init__(self) -> None:
        self.by_step: dict[int, tuple[float, float]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.by_step[state.global_step] = (logs["loss"], logs["grad_norm"])


def _build(folder: str, method: str, checkpoint: Any, **arguments: Any) -> tuple[Trainer, _Losses]:
    forget_accelerate()
    config, losses = FSDPConfig(precision="fp32", checkpoint=checkpoint), _Losses()
    trainer = Trainer(
        model=build_run_model(Run(method=method)),
        args=TrainingArguments(
            output_dir=folder,
            **{**QUIET_ARGUMENTS, "max_steps": NUM_STEPS, **arguments},
            per_device_train_batch_size=2,
            learning_rate=0.01,
            lr_scheduler_type="constant",
            **config.trainer_kwargs(),
        ),
        train_dataset=build_dataset(32),
        callbacks=[FSDPCallback(config), losses],
    )
    return trainer, losses


@contextlib.contextmanager
def _stock_saving() -> Iterator[None]:
    ours = Trainer._save_checkpoint
    Trainer._save_checkpoint = inspect.unwrap(ours)
    try:
        yield
    finally:
        Trainer._save_checkpoint = ours


def _resumed(method: str, format: str) -> Callable[[int, int], dict[str, Any]]:
    def case(rank_: int, world_size: int) -> dict[str, Any]:
        with shared_folder() as folder:
            trainer, unbroken = _build(folder, method, format)
            trainer.train()
            trainer, _ = _build(
                folder, method, format, max_steps=SAVE_STEP, save_strategy="steps", save_steps=SAVE_STEP
            )
            with _stock_saving():
                trainer.train()
            trainer, resumed = _build(folder, method, "sharded")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                trainer.train(resume_from_checkpoint=True)
            checkpoint = Path(folder, f"checkpoint-{SAVE_STEP}")
            return {
                "stock": not (checkpoint / "manifest.json").exists() and any(checkpoint.glob("rng_state_*.pth")),
                "unbroken": {step: value for step, value in unbroken.by_step.items() if step > SAVE_STEP},
                "resumed": resumed.by_step,
                "printed": printed.getvalue(),
            }

    return case


def without_an_optimizer(rank_: int, world_size: int) -> dict[str, Any]:
    """The optimizer's file is gone: an error with a way out, which works."""
    with shared_folder() as folder:
        trainer, _ = _build(folder, "full", "full", **_UP_TO_THE_SAVE)
        with _stock_saving():
            trainer.train()
        if rank() == 0:
            Path(folder, f"checkpoint-{SAVE_STEP}", "optimizer.bin").unlink()
        agree_all(None)
        trainer, _ = _build(folder, "full", "full")
        error = ""
        try:
            trainer.train(resume_from_checkpoint=True)
        except HfFsdpError as caught:
            error = str(caught)
        trainer, resumed = _build(folder, "full", {"optimizer": "fresh"})
        trainer.train(resume_from_checkpoint=True)
        return {"error": error, "resumed": sorted(resumed.by_step)}


CASES = {
    "full_full": _resumed("full", "full"),
    "sharded_lora": _resumed("lora", "sharded"),
    "without_an_optimizer": without_an_optimizer,
}
