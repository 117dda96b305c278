"""What the end of a training says when its weights are not those of its last step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_fsdp import FSDPCallback, FSDPConfig
from tests.unit.small_models import VOCABULARY, tiny_llama


def train(folder: Path, steps: int, resume: str | None = None) -> Trainer:
    """Train on random tokens; the best is the largest loss, which is the earliest."""
    torch.manual_seed(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(8, VOCABULARY, (8, 8))]
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    trainer = Trainer(
        model=tiny_llama(),
        args=TrainingArguments(**arguments),
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[FSDPCallback(FSDPConfig(precision="fp32"))],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_a_resumed_run_that_loads_weights_from_before_it_does_not_say_that_nothing_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 2)
    assert "trained tensors moved" in capsys.readouterr().out
    trainer = train(tmp_path, 4, str(tmp_path / "checkpoint-2"))
    said = capsys.readouterr().out
    assert trainer.state.best_global_step == 2
    assert "the best weights are those of step 2, from before this training's 2 steps" in said
    assert "did not move" not in said and "0 of" not in said
