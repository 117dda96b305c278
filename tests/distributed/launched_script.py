"""A person's own script: it knows nothing of the launcher and adds only the callback. Started by test_launch.py."""

from __future__ import annotations

import json
import sys

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_fsdp import FSDPCallback
from tests.distributed.training import build_dataset

model_folder, output_dir = sys.argv[1:3]
trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained(model_folder),
    args=TrainingArguments(
        output_dir,
        max_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        logging_steps=1,
        save_steps=2,
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=build_dataset(8),
    callbacks=[FSDPCallback()],
)
trainer.train()
trainer.save_model(f"{output_dir}/final")
if trainer.is_world_process_zero():
    parameters = list(trainer.model.parameters())
    result = {
        "sharded": all(isinstance(parameter, DTensor) for parameter in parameters),
        "stored": sorted({str(parameter.dtype) for parameter in parameters}),
        "steps": trainer.state.global_step,
        "loss": trainer.state.log_history[0]["loss"],
        "threads": torch.get_num_threads(),
    }
    with open(f"{output_dir}/result.json", "w", encoding="utf-8") as file:
        json.dump(result, file)
