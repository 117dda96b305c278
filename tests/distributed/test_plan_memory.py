"""The simulated peak is the real one: of trainings on two gloo processes, counted tensor by tensor, and by the heap."""

from __future__ import annotations

import pytest

from benchmarks.plan_accuracy_cases import build_job
from hf_fsdp.monitor.memory import FORWARD_BACKWARD, OPTIMIZER
from hf_fsdp.plan.service import Service
from hf_fsdp.plan.simulation import Simulation
from tests.distributed.harness import Outcome, run_cases
from tests.distributed.plan_memory_cases import CASES, HEAP_RUN, NUM_STEPS, RUNS

# Storage for storage it is the same; what differs are scalars and the count of steps in the optimizer's state.
COUNT_BAR = 0.01
# What the issue asks for; the heap also holds what is no tensor.
HEAP_BAR = 0.05
MIB = 1024**2


@pytest.fixture(scope="module")
def measured() -> dict[str, Outcome]:
    return run_cases("tests.distributed.plan_memory_cases", list(CASES), world_size=2, seconds_per_case=120)


@pytest.fixture(scope="module")
def simulated() -> dict[str, Simulation]:
    cases = {**RUNS, HEAP_RUN.name: HEAP_RUN}
    service = Service(num_workers=1)
    try:
        results = service.simulate([build_job(case) for case in cases.values()])
    finally:
        service.close()
    return dict(zip(cases, results, strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_the_simulated_peak_is_that_of_the_tensors_of_the_real_step(
    name: str, measured: dict[str, Outcome], simulated: dict[str, Simulation]
) -> None:
    simulation = simulated[name]
    for rank in measured[name].get():
        real = rank["count"]
        assert simulation.num_parameters == real["num_parameters"]
        assert simulation.peak.num_bytes == pytest.approx(real["steady_peak"], rel=COUNT_BAR)
        state = simulation.state_bytes["parameters"] + simulation.state_bytes["optimizer"]
        assert real["at_rest"][-1] == pytest.approx(state, rel=COUNT_BAR)


@pytest.mark.parametrize("name", RUNS)
def test_steady_steps_are_alike_and_the_first_has_no_optimizer_state_yet(
    name: str, measured: dict[str, Outcome], simulated: dict[str, Simulation]
) -> None:
    for rank in measured[name].get():
        first, *others = rank["count"]["steps"]
        assert len(others) == NUM_STEPS - 1
        assert others[0] == pytest.approx(others[1], abs=1024)
        missing = others[0][FORWARD_BACKWARD] - first[FORWARD_BACKWARD]
        assert missing == pytest.approx(simulated[name].state_bytes["optimizer"], rel=0.05, abs=MIB)
        assert first[OPTIMIZER] >= rank["count"]["at_rest"][0]


def test_the_simulated_peak_is_within_five_percent_of_the_heap(
    measured: dict[str, Outcome], simulated: dict[str, Simulation]
) -> None:
    for rank in measured[HEAP_RUN.name].get():
        assert simulated[HEAP_RUN.name].peak.num_bytes == pytest.approx(rank["heap"]["steady_peak"], rel=HEAP_BAR)
