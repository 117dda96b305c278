"""Answers of a model whose parts have several dtypes, in one process: QLoRA with a projector trained in fp32."""

from __future__ import annotations

from typing import Any

import torch

from hf_fsdp.monitor.generate import evaluation_mode, generate_batch
from tests.distributed.vlm_models import build_rows, build_vlm, collate


def test_a_projector_in_fp32_behind_a_tower_in_bf16_answers() -> None:
    model: Any = build_vlm("llava").to(torch.bfloat16)
    model.model.multi_modal_projector.float()
    row = build_rows("llava", [1])[0]
    length = len(row["input_ids"])
    batch = collate("llava")([row])
    prompt = {**batch, **{name: batch[name][:, :length] for name in ("input_ids", "attention_mask")}}
    del prompt["labels"]
    with evaluation_mode(model):
        answers = generate_batch(model, prompt, pad_token_id=0, max_new_tokens=3, synced=False)
    assert len(answers) == 1 and len(answers[0]) <= 3
    assert model.model.multi_modal_projector.linear_1.weight.dtype == torch.float32
