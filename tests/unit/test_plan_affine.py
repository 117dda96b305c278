"""Lines through simulations: exact where the laws are lines, and only there; accumulation counted on."""

from __future__ import annotations

import dataclasses

import pytest

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.search.accumulation import lengthen_step, shorten_step
from hf_fsdp.plan.search.affine import fit_affine, largest_where, relative_error
from hf_fsdp.plan.search.divisions import check_division, list_divisions
from hf_fsdp.plan.search.structures import build_job
from tests.unit.lawful_steps import make_request, simulate_lawfully

REQUEST = make_request()


def job_of(rows: int, forwards: int = 2, **keys: object) -> Job:
    return build_job(REQUEST, FSDPConfig.from_mapping(keys), rows, forwards)


def test_a_line_through_two_sizes_gives_every_category_and_all_traffic_of_a_third() -> None:
    fit = fit_affine([(rows, simulate_lawfully(job_of(rows))) for rows in (4, 1)])
    expected, simulated = fit.simulation_at(32), simulate_lawfully(job_of(32))
    assert expected.peak.num_bytes == simulated.peak.num_bytes
    assert {p.name: dict(p.categories) for p in expected.phases} == {
        p.name: dict(p.categories) for p in simulated.phases
    }
    for item in dataclasses.fields(simulated.work):
        assert getattr(expected.work, item.name) == pytest.approx(getattr(simulated.work, item.name)), item.name


def test_the_largest_phase_may_be_another_one_beyond_the_points() -> None:
    config = FSDPConfig(activation_checkpointing="full")
    short = make_request(max_length=1024)
    points = [(rows, simulate_lawfully(build_job(short, config, rows, 2))) for rows in (1, 2)]
    assert {simulation.peak.name for _, simulation in points} == {"backward: first layer"}
    expected = fit_affine(points).simulation_at(32)
    assert expected.peak.name == "backward: head and loss"
    assert expected.peak.num_bytes == simulate_lawfully(build_job(short, config, 32, 2)).peak.num_bytes
    line_of_peaks = points[0][1].peak.num_bytes + 31 * (points[1][1].peak.num_bytes - points[0][1].peak.num_bytes)
    assert line_of_peaks < 0.99 * expected.peak.num_bytes  # what a line through the peaks alone would have said


def test_a_simulation_off_the_line_bends_it() -> None:
    fit = fit_affine([(rows, simulate_lawfully(job_of(rows), bend_at=4)) for rows in (1, 4)])
    simulated = simulate_lawfully(job_of(8), bend_at=4)
    assert relative_error(fit.simulation_at(8), simulated) < -0.05
    bent = fit.with_point(8, simulated)
    assert bent.peak_bytes_at(8) == simulated.peak.num_bytes
    assert bent.peak_bytes_at(16) == simulate_lawfully(job_of(16), bend_at=4).peak.num_bytes


def test_points_that_are_on_no_line_are_refused() -> None:
    one = simulate_lawfully(job_of(1))
    with pytest.raises(ValueError, match="different numbers"):
        fit_affine([(1, one), (1, one)])
    with pytest.raises(ValueError, match="different numbers"):
        fit_affine([])
    with pytest.raises(ValueError, match="different phases"):
        fit_affine([(1, one), (2, dataclasses.replace(one, phases=one.phases[:2]))])
    with pytest.raises(ValueError, match="says nothing of 2"):
        fit_affine([(1, one)]).simulation_at(2)


def test_the_line_in_one_over_gpus_is_that_of_the_shards() -> None:
    def at(count: int) -> Job:
        return dataclasses.replace(job_of(1), world_size=count)

    fit = fit_affine([(1 / count, simulate_lawfully(at(count))) for count in (2, 32)])
    for count in (4, 8, 64, 512):
        exact = simulate_lawfully(at(count))
        assert fit.peak_bytes_at(1 / count) == pytest.approx(exact.peak.num_bytes, abs=64)
        assert fit.simulation_at(1 / count).work.all_gather_bytes == pytest.approx(exact.work.all_gather_bytes)


@pytest.mark.parametrize("edge", [1, 2, 3, 7, 64, 99, 100])
def test_the_largest_number_is_found_wherever_it_lies(edge: int) -> None:
    assert largest_where(lambda value: value <= edge, largest=100) == edge


def test_there_may_be_no_largest_number() -> None:
    assert largest_where(lambda value: False, largest=100) is None
    assert largest_where(lambda value: True, smallest=2, largest=100) == 100


@pytest.mark.parametrize("keys", [{}, {"sharding.dp_replicate_size": 2}, {"offload": "parameters"}])
def test_two_micro_batches_tell_the_work_of_eight(keys: dict[str, object]) -> None:
    whole = job_of(2, 8, **keys)
    short = shorten_step(whole)
    assert short.num_micro_batches == 2
    told = lengthen_step(simulate_lawfully(short), whole, 2)
    exact = simulate_lawfully(whole)
    for name in ("forward_flops", "all_gather_bytes", "num_reduce_scatters", "host_to_device_bytes", "optimizer_bytes"):
        assert getattr(told.work, name) == pytest.approx(getattr(exact.work, name)), name
    assert told.work.num_tokens == exact.work.num_tokens
    assert told.peak == exact.peak


def test_gradients_that_are_reduced_once_a_step_are_counted_once() -> None:
    whole = job_of(2, 8, **{"sharding.sync_each_batch": False})
    simulated = simulate_lawfully(shorten_step(whole))
    told = lengthen_step(simulated, whole, 2)
    assert told.work.reduce_scatter_bytes == simulated.work.reduce_scatter_bytes
    assert told.work.all_gather_bytes == 4 * simulated.work.all_gather_bytes


def test_a_global_batch_is_divided_or_refused_with_the_nearest_ones() -> None:
    assert list_divisions(96, 8) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert check_division(64, 8) is None
    problem = check_division(60, 8)
    assert problem is not None and "60 cannot be spread over 8 GPUs" in problem.message
    assert problem.fix == "--global-batch-size 56 or --global-batch-size 64; or 6 GPUs"
    for size in (56, 64):
        assert check_division(size, 8) is None
    assert check_division(60, 6) is None
    small = check_division(3, 8)
    assert small is not None and small.fix.startswith("--global-batch-size 8")
