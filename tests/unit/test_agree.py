"""The checksum by which ranks compare tensors, and agreement where there is one process."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_fsdp.sharding import mesh
from hf_fsdp.sharding.agree import AgreementReport, checksum, prove_agreement
from hf_fsdp.sharding.mesh import agree_all

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_tensors_have_equal_checksums_in_every_dtype(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1, 0, 1, 1])
    one, other = values.to(dtype), values.to(dtype).clone()
    assert checksum(one) == checksum(other)
    other[2] = 0
    assert checksum(one) != checksum(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.ones(1000, dtype=dtype)
    before = checksum(tensor)
    tensor.view(torch.uint8)[1234] ^= 1
    assert checksum(tensor) != before


def test_order_shape_and_dtype_count() -> None:
    tensor = torch.arange(6.0)
    assert (
        len({checksum(tensor), checksum(tensor.flip(0)), checksum(tensor.view(2, 3)), checksum(tensor.view(3, 2))}) == 4
    )
    assert checksum(torch.zeros(4, dtype=torch.int32)) != checksum(torch.zeros(4, dtype=torch.float32))


def test_layout_in_memory_does_not_count() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous())
    assert checksum(tensor[:, ::2]) == checksum(tensor[:, ::2].clone())
    assert checksum(nn.Parameter(tensor)) == checksum(tensor)


def test_not_a_number_equals_itself_and_signed_zeros_differ() -> None:
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_empty_tensors_and_scalars_are_fine() -> None:
    assert checksum(torch.empty(0, 4)) == checksum(torch.empty(0, 4)) != checksum(torch.empty(4, 0))
    assert checksum(torch.tensor(3.0)) != checksum(torch.tensor([3.0]))


def test_a_tensor_without_values_is_marked() -> None:
    assert checksum(torch.empty(3, device="meta")) == "meta"


def test_one_process_agrees_with_itself_without_a_process_group() -> None:
    assert agree_all({"a": 1}) == [{"a": 1}]
    prove_agreement(AgreementReport(checksum="abc"))


def test_a_process_that_agreed_pauses_at_its_exit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's threads drop their last tensors then; without it a process now and then aborts after a good training."""
    registered: list[tuple[object, ...]] = []
    monkeypatch.setattr(mesh.atexit, "register", lambda *call: registered.append(call))
    mesh._pause_at_exit.cache_clear()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    monkeypatch.setattr(dist, "new_group", lambda backend: dist.group.WORLD)
    monkeypatch.setattr(mesh, "is_simulated", lambda: False)  # the fake group stands in for a real one here
    try:
        mesh.agreement_group()
        mesh.agreement_group()
        assert registered == [(time.sleep, mesh.EXIT_PAUSE_SECONDS)]
    finally:
        dist.destroy_process_group()
        mesh._agreement_groups.clear()
        mesh._pause_at_exit.cache_clear()
