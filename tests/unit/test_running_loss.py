"""The mean loss that `train()` reports for a run that was resumed between two logs."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Trainer, TrainingArguments

from hf_fsdp import FSDPCallback
from tests.distributed.tiny_models import build_model
from tests.distributed.training import QUIET_ARGUMENTS, build_dataset


def build_trainer(folder: Path, logging_steps: int) -> Trainer:
    arguments = {**QUIET_ARGUMENTS, "logging_steps": logging_steps, "save_steps": 2, "max_steps": 6}
    return Trainer(
        model=build_model("llama", tied=False),
        args=TrainingArguments(str(folder), **{**arguments, "save_strategy": "steps"}),
        train_dataset=build_dataset(24),
        callbacks=[FSDPCallback()],
    )


@pytest.mark.parametrize("logging_steps", [1, 3, 4, 10])
def test_it_is_that_of_the_steps_taken_since(tmp_path: Path, logging_steps: int) -> None:
    whole = build_trainer(tmp_path / "whole", 1)
    whole.train()
    losses = [log["loss"] for log in whole.state.log_history if "loss" in log]
    build_trainer(tmp_path / "run", logging_steps).train()
    resumed = build_trainer(tmp_path / "run", logging_steps)
    found = resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert found.training_loss == pytest.approx(sum(losses[4:]) / 2, rel=1e-3)
