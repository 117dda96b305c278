"""What a CPU cannot show: the same sharding on a CUDA device. One device is enough: a world of one still shards.

Run by `scripts/gpu_check.sh`; skipped where there is no device.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from hf_fsdp import FSDPConfig, apply_fsdp
from hf_fsdp.sharding.audit import audit_sharding
from tests.distributed.tiny_models import VOCABULARY, build_model

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


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())
