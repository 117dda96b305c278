"""The memory meter: what it counts to the byte, from when on, and that training is the same under it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hf_fsdp.errors import HfFsdpError
from hf_fsdp.monitor.heap import HeapCount
from hf_fsdp.monitor.memory import BETWEEN, FORWARD_BACKWARD, OPTIMIZER, MemoryMeter
from hf_fsdp.monitor.storage_count import StorageCount, training_tensors
from hf_fsdp.torch_private import checkpoint_block

KIB = 1024
MIB = 1024**2


def build_mlp(num_layers: int = 4, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers)))


def num_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def train(model: nn.Module, meter: MemoryMeter | None = None, num_steps: int = 2, rows: int = 8) -> list[torch.Tensor]:
    """Steps as Trainer takes them; returns losses and the last gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))
    if meter is not None:
        meter.start(model, [optimizer])
    kept = []
    for _ in range(num_steps):
        if meter is not None:
            meter.begin_step()
        loss = model(batch).square().mean()
        loss.backward()
        kept.append(loss.detach())
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        if meter is not None:
            meter.begin_optimizer()
        optimizer.step()
        optimizer.zero_grad()
        if meter is not None:
            meter.end_step()
    if meter is not None:
        meter.stop()
    return [*kept, *gradients]


# -- what is counted --------------------------------------------------------------------------------------------------


def test_a_storage_is_counted_once_until_its_last_view_is_gone() -> None:
    with StorageCount() as count:
        whole = torch.empty(256)
        view = whole[:10].view(2, 5)
        alias = whole.detach()
        assert count.current == KIB
        del whole, alias
        assert count.current == KIB
        del view
        assert count.current == 0
        assert count.peak == KIB


def test_storages_that_are_emptied_and_refilled_in_place_are_followed() -> None:
    before = torch.zeros(256)
    emptied_before = torch.zeros(512)
    original = torch.UntypedStorage.resize_
    emptied_before.untyped_storage().resize_(0)
    with StorageCount() as count:
        count.count([before], "parameters")
        storage = before.untyped_storage()
        storage.resize_(0)
        assert count.current == 0
        storage.resize_(2 * KIB)
        assert count.current == 2 * KIB
        emptied_before.untyped_storage().resize_(2 * KIB)  # FSDP's gathered weights, between two steps
        assert count.current == 4 * KIB
    assert torch.UntypedStorage.resize_ is original, "the patch of resize_ outlives the count"


def test_what_a_tensor_keeps_for_its_backward_is_counted() -> None:
    leaf = torch.ones(256, requires_grad=True)
    with StorageCount() as count:
        loss = leaf.exp().sum()  # exp keeps its result
        assert count.current == KIB + 4
        loss.backward()
        del loss
        assert count.current == KIB  # the gradient
    assert {item.in_backward for item in count.storages()} == {True}


def test_a_row_of_a_data_set_does_not_count_the_data_set() -> None:
    data = torch.randn(1000, 64)
    with StorageCount() as count:
        batch = torch.stack([data[0], data[1]])
        assert count.current == num_bytes([batch])


def test_tensors_freed_in_other_threads_are_taken_off() -> None:
    with StorageCount() as count:
        held = [torch.empty(256)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert count.current == 0


def test_other_devices_are_not_counted() -> None:
    with StorageCount("cuda") as count:
        torch.empty(256)
        torch.empty(256, device="meta")
    assert (count.current, count.peak) == (0, 0)


def test_the_storages_at_the_peak_are_those_that_were_alive() -> None:
    with StorageCount(keep_storages=True) as count:
        first = torch.zeros(4, 64)
        second = first.bfloat16()
        del first, second
        torch.ones(8)
    assert [(item.num_bytes, item.made_by, item.shape) for item in count.at_peak] == [
        (KIB, "aten::zeros", (4, 64)),
        (KIB // 2, "aten::_to_copy", (4, 64)),
    ]


# -- a training -------------------------------------------------------------------------------------------------------


def test_phases_of_a_step_are_what_arithmetic_says() -> None:
    model = build_mlp()
    meter = MemoryMeter()
    train(model, meter)
    weights = num_bytes(model.parameters())
    assert meter.kind == "count"
    first, second = meter.steps
    batch_and_norms = 8 * 64 * 4 + weights  # `train` keeps a copy of the gradients
    # weights, gradients and the two states of Adam; each parameter has a step count of 4 bytes
    for step in (first, second):
        excess = step.by_phase[OPTIMIZER] - 4 * weights - batch_and_norms
        assert abs(excess) < 4 * KIB
    assert second.at_rest_bytes == pytest.approx(4 * weights, abs=4 * KIB)
    assert meter.steady_peak_bytes == second.peak_bytes
    assert second.by_phase[FORWARD_BACKWARD] > first.by_phase[FORWARD_BACKWARD] + weights, "Adam's state is missing"
    assert meter.peak_bytes == max(meter.by_phase.values())
    assert set(meter.by_phase) == {BETWEEN, FORWARD_BACKWARD, OPTIMIZER}


def test_a_meter_that_starts_late_counts_what_is_there() -> None:
    model = build_mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    meter = MemoryMeter()
    meter.start(model, [optimizer])
    weights = num_bytes(model.parameters())
    assert meter.current_bytes == 4 * weights + 4 * len(list(model.parameters()))  # gradients, two states, step counts
    optimizer.zero_grad()
    assert meter.current_bytes == 3 * weights + 4 * len(list(model.parameters()))
    meter.stop()


def test_recomputed_activations_are_seen_and_take_less() -> None:
    rows, width, inner, num_layers = 512, 64, 1024, 8
    peaks = {}
    for name in ("none", "full"):
        blocks = [nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(num_layers)]
        for block in blocks if name == "full" else ():
            checkpoint_block(block)
        with StorageCount(keep_storages=True) as count:
            nn.Sequential(*blocks)(torch.randn(rows, width)).sum().backward()
        peaks[name] = count.peak
        recomputed = [item for item in count.at_peak if item.in_backward and item.made_by == "aten::addmm"]
        assert bool(recomputed) == (name == "full")
    kept = 2 * rows * inner * 4  # of a block: the inner values before and after GELU
    assert peaks["none"] - peaks["full"] == pytest.approx((num_layers - 1) * kept, rel=0.2)


@pytest.mark.parametrize("kind", ["count", "heap"])
def test_training_is_the_same_to_the_bit_under_a_meter(kind: str) -> None:
    if kind == "heap" and not sys.platform.startswith("linux"):
        pytest.skip("mallinfo2 is glibc's")
    plain = train(build_mlp())
    measured = train(build_mlp(), MemoryMeter(kind))
    assert all(torch.equal(one, other) for one, other in zip(plain, measured, strict=True))


@pytest.fixture
def fake_mesh() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def test_of_a_sharded_model_the_local_parts_are_counted(fake_mesh: Any) -> None:
    model = build_mlp()
    weights = num_bytes(model.parameters())
    for layer in model:
        fully_shard(layer, mesh=fake_mesh)
    fully_shard(model, mesh=fake_mesh)
    count = StorageCount()
    for kind, tensor in training_tensors(model):
        count.count([tensor], kind)
    assert count.current == weights // 2
    meter = MemoryMeter()
    optimizer = torch.optim.AdamW(model.parameters())
    meter.start(model, [optimizer])
    for _ in range(2):
        meter.begin_step()
        model(torch.randn(4, 64)).sum().backward()
        meter.begin_optimizer()
        # The states' shapes are asked of DTensor, by whole tensors without values, which take no memory.
        optimizer.step()
        optimizer.zero_grad()
        meter.end_step()
    meter.stop()
    assert meter.steps[-1].at_rest_bytes == pytest.approx(3 * weights / 2, rel=0.02)
    largest_gather = weights // 4  # one layer of four
    for step in meter.steps:
        assert step.by_phase[OPTIMIZER] < 4 * weights / 2 + largest_gather
        assert step.by_phase[FORWARD_BACKWARD] > weights / 2 + largest_gather


# -- the heap ---------------------------------------------------------------------------------------------------------

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallinfo2 is glibc's")


@linux_only
def test_the_heap_grows_by_what_a_tensor_takes_and_the_peak_stays() -> None:
    heap = HeapCount()
    small, maps = heap.in_use()
    counted = HeapCount(small + maps)
    with counted:
        held = torch.ones(32 * MIB // 4)
        assert counted.current == pytest.approx(32 * MIB, abs=MIB)
        del held
        torch.ones(1)
    assert counted.current == pytest.approx(0, abs=MIB)
    assert counted.peak == pytest.approx(32 * MIB, abs=MIB)


@linux_only
def test_heap_and_count_agree_on_a_training() -> None:
    peaks = {}
    for kind in ("heap", "count"):
        model = build_mlp(num_layers=16)
        base = sum(HeapCount().in_use()) - num_bytes(model.parameters())
        meter = MemoryMeter(kind, baseline_bytes=base)
        train(model, meter, rows=4096)
        peaks[kind] = meter.steady_peak_bytes
    assert peaks["heap"] == pytest.approx(peaks["count"], rel=0.05)


# -- what a person can do wrong ---------------------------------------------------------------------------------------


def test_an_unknown_kind_is_refused_with_the_near_one() -> None:
    with pytest.raises(HfFsdpError, match=r"MemoryMeter\(kind='counts'\) is none of") as error:
        MemoryMeter("counts")
    assert "MemoryMeter(kind='count')" in error.value.problems[0].fix
    MemoryMeter("count")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused_and_auto_counts() -> None:
    with pytest.raises(HfFsdpError, match="there is no CUDA device"):
        MemoryMeter("cuda")
    meter = MemoryMeter("auto")
    train(build_mlp(), meter)
    assert meter.kind == "count"
    assert meter.peak_bytes > 0


def test_stopping_within_another_mode_is_refused_and_works_after_it() -> None:
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    original = torch.UntypedStorage.resize_
    meter = MemoryMeter()
    meter.start(build_mlp())
    with Other():
        with pytest.raises(HfFsdpError, match="within another dispatch mode"):
            meter.stop()
    meter.stop()
    meter.stop()
    assert torch.UntypedStorage.resize_ is original
