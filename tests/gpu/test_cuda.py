"""What a CPU cannot show: the same sharding on a CUDA device. One device is enough: a world of one still shards.

Run by `scripts/gpu_check.sh`; skipped where there is no device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from hf_fsdp import FSDPCallback, FSDPConfig, apply_fsdp, set_trainable
from hf_fsdp.sharding.audit import audit_sharding
from hf_fsdp.sharding.training_proof import TrainingProof
from hf_fsdp.torch_private import local_shard
from tests.distributed.tiny_models import VOCABULARY, build_model
from tests.distributed.training import build_dataset
from tests.distributed.vlm_models import build_rows, build_vlm, collate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def world_of_one(tmp_path: object) -> Iterator[None]:
    # The backend's own wish: gloo for CPU tensors beside NCCL for CUDA ones.
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-true"])
def test_a_sharded_model_on_cuda_trains_as_the_plain_one(precision: str, world_of_one: None) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    config = FSDPConfig(precision=precision, activation_checkpointing="full")
    ids = torch.randint(3, VOCABULARY, (4, 16), device="cuda", generator=torch.Generator("cuda").manual_seed(0))

    plain = build_model("llama", tied=False).cuda()
    expected = [_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1), ids) for _ in range(3)]

    model = build_model("llama", tied=False)
    apply_fsdp(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = audit_sharding(model, optimizer)
    assert audit.sharded_share == 1.0
    assert all(parameter.device.type == "cuda" for parameter in model.parameters())
    losses = [_step(model, optimizer, ids) for _ in range(3)]
    assert losses == pytest.approx(expected, abs=1e-5 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"offload": "parameters"}, 1e-5),
        ({"offload": {"activations": "saved_tensors"}}, 1e-5),
        ({"offload": "activations", "activation_checkpointing": "full"}, 1e-5),
        ({"activation_checkpointing": "selective"}, 1e-5),
        ({"compile": "blocks"}, 1e-4),
        ({"wrap": {"granularity": "attention_and_mlp"}}, 1e-5),
    ],
    ids=str,
)
def test_a_setting_that_changes_memory_or_speed_changes_no_number(
    settings: dict[str, Any], tolerance: float, world_of_one: None
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    ids = torch.randint(3, VOCABULARY, (4, 16), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    runs = []
    for given in ({}, settings):
        model = build_model("llama", tied=False)
        apply_fsdp(model, FSDPConfig(precision="fp32", **given))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if "parameters" in given.values():
            assert all(local_shard(parameter).device.type == "cpu" for parameter in model.parameters())
            assert all(local_shard(parameter).is_pinned() for parameter in model.parameters())
        runs.append([_step(model, optimizer, ids) for _ in range(3)])
        audit_sharding(model, optimizer)
    assert runs[1] == pytest.approx(runs[0], abs=tolerance)


def test_fp16_with_a_scaler_trains_as_fp32_and_skips_an_overflow(world_of_one: None) -> None:
    model = build_model("llama", tied=False)
    apply_fsdp(model, FSDPConfig(precision="fp16-mixed"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    ids = torch.randint(3, VOCABULARY, (4, 16), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    losses = []
    for step in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(float(loss.item()))
        scaler.scale(loss * float("inf") if step == 1 else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert losses[2] == losses[1] != losses[0]  # the second step was skipped
    assert losses[3] < losses[0]


def test_qlora_on_cuda_trains_its_adapters(world_of_one: None, tmp_path: Any) -> None:
    pytest.importorskip("bitsandbytes")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    build_model("llama", tied=False, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.bfloat16, quantization_config=four_bits, device_map={"": 0}
    )
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    apply_fsdp(model, FSDPConfig(precision="bf16-mixed"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    assert audit_sharding(model, optimizer).sharded_share == 1.0
    ids = torch.randint(3, VOCABULARY, (4, 16), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    losses = []
    for _ in range(3):
        losses.append(_step(model, optimizer, ids))
        model.eval()
        with torch.no_grad():
            model(input_ids=ids)
        model.train()
    assert losses[2] < losses[0]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # its outputs hold views, which nobody writes to
@pytest.mark.parametrize("family", ["llava", "qwen2.5-vl"])
def test_a_vision_language_model_on_cuda_keeps_its_frozen_tower(family: str, world_of_one: None) -> None:
    rows = build_rows(family, [1, 0, 1, 1]).rows
    batch = {name: value.cuda() for name, value in collate(family)(rows).items()}
    runs = []
    for is_sharded in (False, True):
        model = build_vlm(family)
        set_trainable(model, ["language", "projector"])
        if is_sharded:
            apply_fsdp(model, FSDPConfig(precision="fp32", activation_checkpointing="full"))
        else:
            model.cuda()
        proof = TrainingProof(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        losses = []
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward()
            proof.observe_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.item()))
        runs.append(losses)
        assert sum(part.num_frozen_changed for part in proof.compare(model).parts) == 0
    assert runs[1] == pytest.approx(runs[0], abs=1e-4)


def test_weights_copied_behind_training_are_those_of_their_step(tmp_path: Any) -> None:
    found = []
    for is_async in (False, True):
        config = FSDPConfig(checkpoint={"async_save": is_async})
        arguments = TrainingArguments(
            str(tmp_path / str(is_async)),
            max_steps=3,
            save_steps=1,
            per_device_train_batch_size=4,
            report_to=[],
            seed=0,
        )
        trainer = Trainer(
            model=build_model("llama", tied=False),
            args=arguments,
            train_dataset=build_dataset(12),
            callbacks=[FSDPCallback(config)],
        )
        trainer.train()
        files = sorted((tmp_path / str(is_async)).glob("checkpoint-*/*/shard-*.safetensors"))
        found.append([load_file(path) for path in files])
    assert len(found[0]) == len(found[1]) >= 6
    for expected, actual in zip(*found, strict=True):
        assert expected.keys() == actual.keys() and all(expected[name].equal(actual[name]) for name in expected)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())
