"""The largest batch, the longest rows, the smallest hardware, strategies compared: right, and one more is too many."""

from __future__ import annotations

import dataclasses

import pytest

from hf_fsdp.config.gpus import GPUS
from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.errors import PlanError
from hf_fsdp.plan.candidate import PlanRequest
from hf_fsdp.plan.job import Job, Method
from hf_fsdp.plan.search.batch_size import LENGTH_STEP, find_longest_rows, find_max_batch
from hf_fsdp.plan.search.compare import STRATEGIES, compare
from hf_fsdp.plan.search.evaluation import Evaluation
from hf_fsdp.plan.search.placement import place_gpus
from hf_fsdp.plan.search.search import search
from hf_fsdp.plan.search.smallest import find_smallest
from tests.unit.lawful_steps import GIB, LawfulSimulator, make_request, simulate_lawfully


def has_room(request: PlanRequest, job: Job, bend_at: int = 0) -> bool:
    peak = simulate_lawfully(job, bend_at).peak.num_bytes
    return Evaluation(request, LawfulSimulator()).has_room(job, peak)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("bend_at", [0, 6])
@pytest.mark.parametrize("machine", ["8xA100-80G", "8xRTX4090-24G", "64xT4-16G"])
def test_the_largest_micro_batch_fits_and_one_row_more_does_not(machine: str, bend_at: int, padded: bool) -> None:
    config = FSDPConfig(precision="fp16" if "T4" in machine else "bf16")
    request = make_request(machine, padded=padded, config=config)
    simulator = LawfulSimulator(bend_at)
    found = find_max_batch(request, simulate=simulator)
    assert found.above is not None and found.candidate.fits and not found.above.fits
    assert found.above.job.batch.micro_batch_size == found.micro_batch_size + 1
    assert has_room(request, found.candidate.job, bend_at) and not has_room(request, found.above.job, bend_at)
    assert found.candidate.basis == found.above.basis == "simulated" and len(simulator.jobs) <= 8


@pytest.mark.parametrize("rows", [1, 4, 16, 48])
@pytest.mark.parametrize("padded", [False, True])
def test_the_longest_rows_fit_and_the_next_length_does_not(rows: int, padded: bool) -> None:
    request = make_request("8xA100-40G", padded=padded)
    simulator = LawfulSimulator()
    found = find_longest_rows(request, rows, simulate=simulator)
    assert found.num_tokens % LENGTH_STEP == 0 and has_room(request, found.candidate.job)
    assert len(simulator.jobs) <= 10
    if found.above is None:
        assert found.num_tokens == 8192  # all positions
    else:
        assert found.above.job.batch.num_tokens == found.num_tokens + LENGTH_STEP
        assert not has_room(request, found.above.job)


def test_where_not_even_one_row_fits_the_bytes_are_told() -> None:
    request = make_request("2xRTX4090-24G")
    for find in (find_max_batch, find_longest_rows):
        with pytest.raises(PlanError, match=r"1 row of \d+ tokens .* need .* GiB on each of 2 x RTX4090-24G"):
            find(request, simulate=LawfulSimulator())
    assert search(request, simulate=LawfulSimulator()).best is not None  # as the advice says: it searches offload too


def test_a_micro_batch_without_rows_is_refused() -> None:
    with pytest.raises(PlanError, match="--micro-batch-size 0 is no number of rows"):
        find_longest_rows(make_request(), 0, simulate=LawfulSimulator())


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_smallest_hardware_does_it_and_the_next_smaller_does_not(method: str) -> None:
    request = make_request(method=Method(name=method), max_length=4096)
    simulator = LawfulSimulator()
    plan = find_smallest(request, simulate=simulator)
    assert len(simulator.jobs) <= 24
    plain = [row for row in plan.rows if row.offload == "none"]
    assert [row.total_gib for row in plain] == sorted(row.total_gib for row in plain)
    for row in plan.rows:
        assert row.candidate.fits and has_room(row.request, row.candidate.job)
        if row.fewer is not None:
            assert row.fewer.job.world_size < row.num_gpus and not row.fewer.fits
    if method == "full":
        assert any(row.fewer is not None for row in plain) and any(row.offload != "none" for row in plan.rows)


def test_the_whole_plan_of_each_smallest_hardware_finds_something() -> None:
    for row in find_smallest(make_request(), simulate=LawfulSimulator()).rows:
        config = row.candidate.job.fsdp if row.offload != "none" else row.request.config
        request = dataclasses.replace(row.request, config=config)
        assert search(request, simulate=LawfulSimulator()).best is not None, row.request.gpu_name


def test_gpus_without_bfloat16_are_planned_in_fp16_or_left_out() -> None:
    auto = find_smallest(make_request(), simulate=LawfulSimulator())
    half = [row for row in auto.rows if row.request.gpus.gpu is not None and not row.request.gpus.gpu.has_bf16]
    assert half and {row.candidate.job.fsdp.precision.preset for row in half} == {"fp16-mixed"}
    said = find_smallest(make_request(config=FSDPConfig(precision="bf16")), simulate=LawfulSimulator())
    assert all(row.request.gpus.gpu is not None and row.request.gpus.gpu.has_bf16 for row in said.rows)
    assert "V100-16G" in said.notes[0]


def test_a_count_divides_the_global_batch() -> None:
    plan = find_smallest(make_request(global_batch_size=12), simulate=LawfulSimulator())
    assert {row.num_gpus for row in plan.rows} <= {1, 2, 4}


def test_more_gpus_than_a_machine_has_are_several_machines() -> None:
    t4 = next(gpu for gpu in GPUS if gpu.name == "T4-16G")
    assert (place_gpus(16, t4).num_nodes, place_gpus(16, t4).count) == (4, 4)
    assert (place_gpus(2, t4).num_nodes, place_gpus(2, t4).count) == (1, 2)
    assert (place_gpus(12, None).num_nodes, place_gpus(12, None).count) == (2, 6)


def test_strategies_are_compared_at_what_each_can_hold() -> None:
    request = make_request("8xA100-40G")
    simulator = LawfulSimulator()
    rows = {row.name: row for row in compare(request, list(STRATEGIES), simulate=simulator).rows}
    assert list(rows) == list(STRATEGIES)
    assert rows["ddp"].largest_micro_batch == 0 and not rows["ddp"].candidate.fits
    assert rows["ddp"].candidate.job.strategy == "ddp"
    for row in rows.values():
        if not row.largest_micro_batch:
            continue
        batch = dataclasses.replace(row.candidate.job.batch, micro_batch_size=row.largest_micro_batch)
        most = dataclasses.replace(row.candidate.job, batch=batch, num_micro_batches=2)
        more = dataclasses.replace(most, batch=dataclasses.replace(batch, micro_batch_size=row.largest_micro_batch + 1))
        assert has_room(request, most) and not has_room(request, more)
        assert row.candidate.fits and row.candidate.basis == "simulated"
    assert rows["fsdp-offload"].largest_micro_batch > rows["fsdp"].largest_micro_batch
    assert rows["fsdp-offload"].candidate.host_bytes > 90 * GIB and not rows["fsdp"].candidate.host_bytes


def test_strategies_that_are_not_known_or_named_twice_are_refused_together() -> None:
    with pytest.raises(PlanError, match="2 problems") as caught:
        compare(make_request(), ["fdsp", "ddp", "ddp"], simulate=LawfulSimulator())
    assert "--compare fdsp: no such strategy" in str(caught.value) and "--compare fdsp,ddp" in str(caught.value)
    with pytest.raises(PlanError, match="on one GPU"):
        compare(make_request("1xH200", global_batch_size=8), simulate=LawfulSimulator())
