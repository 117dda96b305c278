"""Operators answered from memory give what fake tensors give; shards are stepped in what DTensors are stepped in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fsdp.plan.simulator import repeats
from hf_fsdp.plan.simulator.repeats import Repeats
from hf_fsdp.torch_private import fake_values, known_values


def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, tensor.requires_grad


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of operators that were answered from memory."""
    answered: list[str] = []
    original = repeats._again

    def again(kind: str, first: Any, known: Any) -> Any:
        answered.append(kind)
        return original(kind, first, known)

    monkeypatch.setattr(repeats, "_again", again)
    return answered


CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "product": (lambda x: x @ x.t(), "new"),
    "sum over a dimension": (lambda x: x.sum(0), "new"),
    "a copy": (lambda x: x.clone(), "new"),
    "a cast": (lambda x: x.to(torch.bfloat16), "new"),
    "transposed": (lambda x: x.transpose(0, 1), "view"),
    "a slice": (lambda x: x[1:3, ::2], "view"),
    "expanded": (lambda x: x.unsqueeze(0).expand(5, -1, -1), "view"),
    "detached": (lambda x: x.detach(), "view"),
    "written": (lambda x: x.mul_(2), "write"),
    "copied into": (lambda x: x.copy_(torch.empty(4, 6)), "write"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_second_time_is_answered_like_the_first(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, kind = CASES[case]
    answered = count_runs(monkeypatch)
    with fake_values(), Repeats():
        first_input, second_input = torch.empty(4, 6), torch.empty(4, 6)
        first = operator(first_input)
        assert not answered
        second = operator(second_input)
        assert kind in answered
        assert facts(first) == facts(second)
        for made, source in ((first, first_input), (second, second_input)):
            shares = made.untyped_storage()._cdata == source.untyped_storage()._cdata
            assert shares == (kind != "new")
            assert (made is source) == (kind == "write")


def test_what_differs_in_a_word_is_another_question() -> None:
    with fake_values(), Repeats():
        numbers = torch.zeros(3, dtype=torch.int64)
        assert (numbers * 2).dtype is torch.int64
        assert (numbers * 2.0).dtype is torch.float32
        assert (torch.zeros(3, dtype=torch.int64) * True).dtype is torch.int64
        torch.set_default_dtype(torch.float64)
        try:
            assert (numbers * 2.0).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.empty(4, 4).t().contiguous().stride() == (4, 1)
        assert torch.empty(4, 4).t().clone().stride() == (1, 4)


def test_known_values_are_kept() -> None:
    with fake_values(), known_values(100), Repeats():
        for _ in range(2):
            assert (torch.tensor([3, 4]) * 2).tolist() == [6, 8]
            assert torch.tensor([3, 4])[1:].tolist() == [4]


def test_what_shapes_do_not_say_is_asked_again() -> None:
    with fake_values(), Repeats():
        for _ in range(2):
            number = torch.empty(4, dtype=torch.complex64)
            assert number.conj().is_conj() and not number.conj().conj().is_conj()
            assert not number[1:].is_conj() and number.conj()[1:].is_conj() and number.conj().imag.is_neg()
            weight = torch.nn.Parameter(torch.empty(10, 4))
            torch.nn.functional.embedding(torch.zeros(3, dtype=torch.long), weight, sparse=True).sum().backward()
            assert weight.grad is not None and weight.grad.layout is torch.sparse_coo


def test_a_wrong_shape_is_refused_again_and_again() -> None:
    with fake_values(), Repeats():
        for _ in range(3):
            with pytest.raises(RuntimeError):
                torch.empty(2, 3) @ torch.empty(2, 3)


def test_autograd_goes_through() -> None:
    with fake_values(), Repeats():
        for _ in range(2):
            weight = torch.nn.Parameter(torch.empty(8, 4))
            loss = torch.nn.functional.linear(torch.empty(2, 4), weight).relu().sum()
            loss.backward()
            assert weight.grad is not None and weight.grad.shape == weight.shape


def test_memory_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_MAX_KNOWN", 5)
    with fake_values(), Repeats() as mode:
        for size in range(1, 30):
            torch.empty(size) + 1
        assert 1 <= len(mode._known) <= 5


# The device of the planner changes torch for good, so it lives in a process of its own; imports are most of its time.
IN_A_WORKER = """
from hf_fsdp.plan.worker import _prepare
_prepare()
from test_plan_simulate import FULL, LLAMA, MOE
from hf_fsdp import FSDPConfig
from hf_fsdp.plan.job import Batch, Job, Method, ModelSpec
from hf_fsdp.plan.simulator import optimizer, repeats
from hf_fsdp.plan.simulator.simulate import simulate_job
from hf_fsdp.torch_private import local_shard

def job(config, **fields):
    fields = {"fsdp": FSDPConfig(), "world_size": 4, "batch": Batch(num_tokens=96), **fields}
    return Job(model=ModelSpec(name="m", config=config), **fields)

def figures(job):
    found = simulate_job(job)
    phases = [(phase.name, phase.num_bytes, dict(phase.categories), phase.host_bytes) for phase in found.phases]
    return phases, found.work, found.state_bytes

# Shards as plain tensors, against the DTensors themselves.
jobs = [job(LLAMA, optimizer=name) for name in ("adamw_torch_fused", "adamw_torch", "sgd")]
jobs += [job(MOE, world_size=3), job(LLAMA, device="cpu", optimizer="adagrad")]
shards = [figures(each) for each in jobs]
mine = optimizer.local_shard, optimizer._shard, optimizer.ShardOptimizer.state
optimizer.local_shard, optimizer._shard = (lambda tensor: tensor), (lambda parameter: parameter)
optimizer.ShardOptimizer.state = property(lambda self: ((p, local_shard(v)) for p, v in mine[2].fget(self)))
for each, (phases, work, sizes) in zip(jobs, shards):
    whole_phases, whole_work, whole_sizes = figures(each)
    assert sizes == whole_sizes and work == whole_work, each
    for one, other in zip(phases, whole_phases, strict=True):
        assert one[0] == other[0] and abs(one[1] - other[1]) <= 16 * 512, (each.optimizer, one, other)
optimizer.local_shard, optimizer._shard, optimizer.ShardOptimizer.state = mine
print("shards: same")

# Operators from memory, against those that are run.
jobs = [
    job(LLAMA, fsdp=FULL, batch=Batch(num_tokens=96, padded=True)),
    job(LLAMA, world_size=1, optimizer="adamw_torch"),
    job(MOE, method=Method(name="qlora"), fsdp=FSDPConfig(offload={"parameters": True})),
]
first = [figures(each) for each in jobs]
assert [figures(each) for each in jobs] == first
repeats._kind_of = lambda func: ""
assert [figures(each) for each in jobs] == first
print("repeats: same")
"""


@pytest.fixture(scope="module")
def worker_output() -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", IN_A_WORKER], capture_output=True, text=True, timeout=300, env=environment
    )
    return done.stdout + done.stderr[-3000:]


def test_shards_are_stepped_in_what_dtensors_are_stepped_in(worker_output: str) -> None:
    """The same in each phase, but for a handful of scalars while gradients are clipped."""
    assert "shards: same" in worker_output


def test_a_step_holds_and_does_the_same_without_memory(worker_output: str) -> None:
    assert "repeats: same" in worker_output
