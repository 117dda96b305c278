"""A person's own loop with Accelerate and no Trainer. Started by test_trainer_launch.py."""

from __future__ import annotations

import json
import sys

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from hf_fsdp import build_accelerator

model_folder, output_dir = sys.argv[1:3]
accelerator = build_accelerator(gradient_accumulation_steps=2)
model = AutoModelForCausalLM.from_pretrained(model_folder)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = list(torch.randint(3, 60, (16, 10), generator=torch.Generator().manual_seed(3)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))

losses = []
for ids in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(float(accelerator.gather(loss.detach()).mean()))
accelerator.save_state(f"{output_dir}/state")
accelerator.save_model(model, f"{output_dir}/final")

if accelerator.is_main_process:
    parameters = list(model.parameters())
    result = {
        "sharded": all(isinstance(parameter, DTensor) for parameter in parameters),
        "stored": sorted({str(parameter.dtype) for parameter in parameters}),
        "processes": accelerator.num_processes,
        "losses": losses,
    }
    with open(f"{output_dir}/result.json", "w", encoding="utf-8") as file:
        json.dump(result, file)
accelerator.end_training()
