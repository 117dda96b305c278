"""The check on a GPU runs end to end without one: real tensors on the CPU, seven processes by name, the same script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan_gpu, plan_gpu_cases
from benchmarks.plan_gpu_cases import CASES, GpuCase, choose_job
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.simulation import PhasePeak, Simulation, Work

GIB = 2**30


def test_real_steps_are_measured_close_to_their_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_gpu_cases, "TINY_SHAPES", ((2, 64),))
    monkeypatch.setattr(plan_gpu_cases, "TINY", {**plan_gpu_cases.TINY, "num_hidden_layers": 3})
    names = ["LoRA, checkpointing", "full, checkpointing, offload"]
    arguments = ["--device", "cpu", "-o", str(tmp_path)]
    status = plan_gpu.main([*arguments, *(word for name in names for word in ("--case", name))])
    document = json.loads((tmp_path / "plan_gpu.json").read_text())
    rows = document["cases"]
    assert [row["case"] for row in rows] == names
    for row in rows:
        assert "failure" not in row, row
        assert abs(row["error"]) <= 0.05, row
        assert row["kind"] == "count" and row["tokens_per_second"] > 0
    # Embeddings and head alone: 4 bytes a number over 8 processes, with gradients and the optimizer's two states.
    assert rows[1]["measured_bytes"] > 2 * 4096 * 256 * 4 * 4 / 8
    assert status == 0
    table = (tmp_path / "plan_gpu.md").read_text()
    assert table in capsys.readouterr().out
    assert f"| {names[0]} | tiny-llama, 2 x 64 |" in table


def test_without_a_cuda_device_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if plan_gpu.torch.cuda.is_available():
        pytest.skip("there is one")
    assert plan_gpu.main(["-o", str(tmp_path)]) == 2
    assert "--device cpu" in capsys.readouterr().err


# -- sizes ------------------------------------------------------------------------------------------------------------


def stand_in(jobs: list[Job]) -> list[Simulation]:
    """Llama-like needs by arithmetic: 16 bytes a parameter over 8 processes, and 3 MiB a token."""
    found = []
    for job in jobs:
        size = {"llama-2-7b": 6.7e9, "llama-3.2-3b": 3.2e9, "llama-3.2-1b": 1.2e9}[short(job)]
        tokens = job.batch.micro_batch_size * job.batch.num_tokens
        per_token = 0.3 if job.fsdp.activation_checkpointing.mode == "full" else 3.0
        num_bytes = int(size * 16 / 8 + tokens * per_token * 2**20 * size / 6.7e9)
        peak = PhasePeak(name="forward", num_bytes=num_bytes, categories={"activations": num_bytes})
        work = Work(forward_flops=1.0, backward_flops=2.0, recompute_flops=0.0)
        simulation = Simulation(phases=(peak,), state_bytes={}, work=work, num_parameters=1, num_trained=1)
        found.append(simulation)
    return found


def short(job: Job) -> str:
    name = job.model.name.lower()
    return next(size for size in ("llama-2-7b", "llama-3.2-3b", "llama-3.2-1b") if size in name)


@pytest.mark.parametrize("room_gib", [15, 22, 45, 79, 139])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_largest_batch_that_fits_is_chosen(room_gib: int, case: GpuCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_fsdp.plan.service.simulate", stand_in)
    chosen: Any = choose_job(case, "cuda", [], room_gib * GIB, 64 * GIB)
    job, simulation = chosen
    assert simulation.peak.num_bytes <= room_gib * GIB
    shape = (job.batch.micro_batch_size, job.batch.num_tokens)
    place = plan_gpu_cases.SHAPES.index(shape)
    if place:
        larger = plan_gpu_cases.build_job(case, job.model, plan_gpu_cases.SHAPES[place - 1], "cuda")
        assert stand_in([larger])[0].peak.num_bytes > room_gib * GIB
    if room_gib >= 22:
        assert short(job) == "llama-2-7b"


def test_a_card_on_which_nothing_fits_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_fsdp.plan.service.simulate", stand_in)
    said = choose_job(CASES[0], "cuda", [], GIB, 64 * GIB)
    assert isinstance(said, str) and "llama-3.2-1b" in said.lower() and "of 1.0 GiB" in said
