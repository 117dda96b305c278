"""The search over a lawful model: the fastest that fits comes first, few simulations, every bound and reason true."""

from __future__ import annotations

import dataclasses
import re

import pytest

from hf_fsdp.config.hardware import parse_gpus
from hf_fsdp.config.schema import FSDPConfig, OffloadConfig
from hf_fsdp.errors import PlanError
from hf_fsdp.plan.candidate import Candidate, Plan, PlanRequest
from hf_fsdp.plan.job import Method
from hf_fsdp.plan.search.bounds import estimate_state_bytes
from hf_fsdp.plan.search.evaluation import Evaluation
from hf_fsdp.plan.search.expected_speed import expected_speed
from hf_fsdp.plan.search.ranking import SAME_SPEED, Ranked, rank, worth
from hf_fsdp.plan.search.search import MAX_EXPLORING, MAX_PROVING, search
from hf_fsdp.plan.search.structures import build_job, list_structures
from tests.unit.lawful_steps import GIB, LawfulSimulator, make_request, simulate_lawfully

MACHINES = ("8xA100-80G", "4xA100-40G", "8xRTX4090-24G", "2x8xA100-40G", "8", "1xH200")
# GPUs without NVLink gain from larger micro-batches what recomputing and offload cost.
OTHERS = ("4x8xH100-80G", "4xL40S-48G", "2xRTX4090-24G")


def run(request: PlanRequest, bend_at: int = 0) -> tuple[Plan, LawfulSimulator]:
    simulator = LawfulSimulator(bend_at)
    return search(request, simulate=simulator), simulator


def exhaustive(request: PlanRequest) -> list[tuple[float, Candidate]]:
    """Every structure at every micro-batch, each simulated, by what its speed is worth."""
    evaluation = Evaluation(request, LawfulSimulator())
    per_gpu = request.global_batch_size // request.num_gpus
    found = []
    for structure in list_structures(request):
        for rows in range(1, per_gpu + 1):
            if per_gpu % rows == 0:
                job = build_job(request, structure.config, rows, per_gpu // rows)
                candidate = evaluation.candidate(job, simulate_lawfully(job), "simulated")
                if candidate.fits:
                    assert candidate.simulation is not None
                    found.append((worth(expected_speed(request, job, candidate.simulation), job.fsdp), candidate))
    return found


@pytest.mark.parametrize("machine", MACHINES + OTHERS)
@pytest.mark.parametrize(
    ("method", "padded", "length"), [("full", True, 2048), ("full", False, 4096), ("lora", True, 8192)]
)
def test_nothing_that_fits_is_faster_than_the_first_plan(machine: str, method: str, padded: bool, length: int) -> None:
    request = make_request(machine, padded=padded, method=Method(name=method), max_length=length, global_batch_size=128)
    plan, _ = run(request)
    assert plan.best is not None and plan.best.basis == "simulated" and plan.best.simulation is not None
    speed = worth(expected_speed(request, plan.best.job, plan.best.simulation), plan.best.job.fsdp)
    fastest = max(found for found, _ in exhaustive(request))
    assert speed >= fastest * 0.96  # 3 % are not worth a simulation, and 1 % is a tie


def test_offload_comes_first_only_where_it_is_clearly_faster() -> None:
    request = make_request()
    structures = {item.offload: item for item in list_structures(request) if item.key[:2] == ("sharded", "full")}
    simulation = simulate_lawfully(build_job(request, structures["none"].config, 1, 8))
    evaluation = Evaluation(request, LawfulSimulator())

    def ranked(offload: str, speed: float) -> Ranked:
        job = build_job(request, structures[offload].config, 1, 8)
        candidate = evaluation.candidate(job, simulation, "simulated")
        return Ranked(candidate=candidate, structure=structures[offload], division=(1, 8), tokens_per_second=speed)

    plain, one, both = ranked("none", 1000.0), ranked("activations", 1140.0), ranked("both", 1300.0)
    assert rank([one, plain]) == [plain, one] and rank([plain, both]) == [both, plain]
    assert rank([ranked("parameters", 900.0), one])[0] is one, "of two that offload the faster one"


def test_offload_that_gains_too_little_is_left_alone_and_said() -> None:
    plan, simulator = run(make_request("4xL40S-48G", method=Method(name="lora"), max_length=8192))
    assert any("too little to rely on the host: offload of any kind" in note for note in plan.notes), plan.notes
    assert all(job.fsdp.offload == OffloadConfig() for job in simulator.jobs)


@pytest.mark.parametrize(
    ("machine", "method", "padded", "length", "rows"),
    [
        ("16x8xA100-40G", "full", True, 4096, 1024),  # hybrid structures by their bounds took all simulations
        ("16x4xRTX3090-24G", "lora", True, 8192, 1024),  # so did every second block
        ("4x8xRTX4090-24G", "full", False, 8192, 960),  # an all-reduce in each micro-batch was counted once
        ("2x8xRTX4090-24G", "full", True, 512, 480),  # one forward holds no gradients yet
    ],
)
def test_loose_bounds_do_not_take_the_simulations_of_better_ones(
    machine: str, method: str, padded: bool, length: int, rows: int
) -> None:
    request = make_request(
        machine, padded=padded, method=Method(name=method), max_length=length, global_batch_size=rows
    )
    plan, _ = run(request)
    assert plan.best is not None and plan.best.simulation is not None
    speed = worth(expected_speed(request, plan.best.job, plan.best.simulation), plan.best.job.fsdp)
    assert speed >= max(found for found, _ in exhaustive(request)) * 0.96


@pytest.mark.parametrize("machine", MACHINES)
def test_a_search_stays_within_its_simulations_and_calls(machine: str) -> None:
    _, simulator = run(make_request(machine))
    assert len(simulator.jobs) <= MAX_EXPLORING + MAX_PROVING
    assert len(simulator.jobs) == len({job.to_json() for job in simulator.jobs})
    assert len(simulator.calls) <= 7  # together, so that two workers are never idle for long


def test_what_is_recommended_was_simulated_at_its_own_micro_batch() -> None:
    plan, simulator = run(make_request())
    asked = {(job.fsdp, job.batch) for job in simulator.jobs}
    for candidate in plan.fitting[:3]:
        assert candidate.basis == "simulated"
        assert (candidate.job.fsdp, candidate.job.batch) in asked


@pytest.mark.parametrize("machine", MACHINES)
def test_every_candidate_shows_what_a_simulation_of_it_would_show(machine: str) -> None:
    plan, _ = run(make_request(machine, padded=True))
    for candidate in plan.candidates:
        exact = simulate_lawfully(candidate.job)
        if candidate.simulation is None:
            assert candidate.floor_bytes <= exact.peak.num_bytes and candidate.pruned
        elif candidate.job.num_micro_batches > 1 or candidate.basis == "simulated":
            assert candidate.peak_bytes == exact.peak.num_bytes
        else:  # a single forward has no gradients before its backward: the line says more
            assert exact.peak.num_bytes <= candidate.peak_bytes
        assert candidate.global_batch_size == 64


def test_candidates_that_fit_come_first_and_the_others_by_what_they_lack() -> None:
    plan, _ = run(make_request("4xA100-40G"))
    fits = [candidate.fits for candidate in plan.candidates]
    assert fits == sorted(fits, reverse=True) and any(fits) and not all(fits)
    missing = [candidate.missing_bytes for candidate in plan.rejected]
    assert missing == sorted(missing) and missing[0] > 0


def test_a_line_that_a_simulation_refutes_is_bent_and_the_next_candidate_taken() -> None:
    request = make_request("8xA100-80G", global_batch_size=8 * 24, max_length=1024)
    plan, _ = run(request, bend_at=4)
    straight, _ = run(request)
    assert plan.best is not None and straight.best is not None
    assert plan.best.peak_bytes == simulate_lawfully(plan.best.job, bend_at=4).peak.num_bytes
    assert any("off by -" in line for line in plan.verified)
    assert any("which was right to 0.01%" in line for line in straight.verified)


def test_tied_speeds_are_decided_by_room() -> None:
    request = make_request(
        "8xH200",
        global_batch_size=128,
        max_length=8192,
        config=FSDPConfig(activation_checkpointing="full", offload="none"),
    )
    plan, _ = run(request)

    def speed(item: Candidate) -> float:
        assert item.simulation is not None
        return expected_speed(request, item.job, item.simulation)

    fastest = max(speed(item) for item in plan.fitting)
    tied = [item for item in plan.fitting if speed(item) >= (1 - SAME_SPEED) * fastest]
    assert len(tied) > 1 and tied[0] is plan.fitting[0]
    room = [min(item.headroom_bytes, 0.1 * item.usable_bytes) for item in tied]
    assert room == sorted(room, reverse=True)


def test_what_the_config_says_is_not_varied() -> None:
    config = FSDPConfig(
        activation_checkpointing="full", offload="none", sharding={"reshard_after_forward": False}, precision="bf16"
    )
    plan, simulator = run(make_request(config=config))
    assert {job.fsdp.activation_checkpointing.mode for job in simulator.jobs} == {"full"}
    assert {job.fsdp.sharding.reshard_after_forward for job in simulator.jobs} == {False}
    assert not any(job.fsdp.offload.parameters for job in simulator.jobs)
    assert {candidate.job.fsdp.precision.preset for candidate in plan.candidates} == {"bf16-mixed"}


def test_offload_is_explored_where_nothing_else_fits_and_left_alone_where_it_cannot_win() -> None:
    large, _ = run(make_request("8xA100-80G"))
    small, simulator = run(make_request("2xRTX4090-24G"))
    assert not any(candidate.job.fsdp.offload.parameters for candidate in large.candidates)
    assert any("not explored" in note and "offload of any kind" in note for note in large.notes)
    assert small.best is not None and small.best.job.fsdp.offload.parameters
    assert any(item.pruned and "state alone are 50.2 GiB" in item.pruned for item in small.rejected)
    assert all(job.fsdp.offload.parameters for job in simulator.jobs)  # arithmetic was enough for the others


def test_the_host_of_each_machine_is_a_limit_of_offload() -> None:
    need = run(make_request("2xRTX4090-24G"))[0].best
    assert need is not None and need.host_bytes > 90 * GIB  # 16 bytes a parameter, of both processes
    with pytest.raises(PlanError, match="of host memory on each machine|on each GPU"):
        run(make_request("2xRTX4090-24G", host_memory_bytes=64 * GIB))


def test_reasons_state_numbers_that_the_simulations_give() -> None:
    plan, _ = run(make_request())
    best = plan.best
    assert best is not None
    text = " | ".join(best.why)
    larger = dataclasses.replace(best.job, batch=dataclasses.replace(best.job.batch, micro_batch_size=8))
    lacks = simulate_lawfully(dataclasses.replace(larger, num_micro_batches=2))
    reserve = Evaluation(make_request(), LawfulSimulator()).usable_bytes(larger, lacks.peak.num_bytes)
    assert f"micro-batch 8 would lack {(lacks.peak.num_bytes - reserve) / GIB:.1f} GiB on each GPU" in text
    full = FSDPConfig.from_mapping({"activation_checkpointing.mode": "full"})
    less = simulate_lawfully(dataclasses.replace(best.job, fsdp=full)).peak.num_bytes
    saved = f"{(best.peak_bytes - less) / GIB:.1f} GiB less"
    assert re.search(rf"checkpointing none: with checkpointing full the step needs {saved} .*slower", text)


def test_checkpointing_that_is_on_says_what_is_missing_without_it() -> None:
    plan, _ = run(make_request("8xA100-40G", max_length=4096))
    sections = [(item, item.job.fsdp.activation_checkpointing) for item in plan.fitting]
    on = next(
        item
        for item, section in sections
        if section.mode == "full" and not section.selective and item.job.num_micro_batches > 1
    )
    off = dataclasses.replace(on.job, fsdp=FSDPConfig.from_mapping({"activation_checkpointing.mode": "none"}))
    needs = simulate_lawfully(off).peak.num_bytes
    words = f"checkpointing full: without it micro-batch {on.job.batch.micro_batch_size} needs {needs / GIB:.1f} GiB"
    assert any(line.startswith(words) for line in on.why), on.why


def test_a_rejected_candidate_says_the_largest_micro_batch_that_fits() -> None:
    plan, _ = run(make_request("8xA100-40G"))
    item = next(item for item in plan.rejected if any("largest micro-batch that fits is" in line for line in item.why))
    rows = int(re.search(r"largest micro-batch that fits is (\d+)", " ".join(item.why))[1])  # type: ignore[index]
    evaluation = Evaluation(make_request("8xA100-40G"), LawfulSimulator())

    def has_room(size: int) -> bool:
        batch = dataclasses.replace(item.job.batch, micro_batch_size=size)
        job = dataclasses.replace(item.job, batch=batch, num_micro_batches=2)
        return evaluation.has_room(job, simulate_lawfully(job).peak.num_bytes)

    assert has_room(rows) and not has_room(rows + 1)


def follow(request: PlanRequest, advice: str) -> PlanRequest:
    """Do what a piece of advice says."""
    changes: dict[str, object] = {}
    if found := re.search(r"--gpus (\S+)", advice):
        gpus = parse_gpus(found[1])
        changes["gpus"] = gpus
        if gpus.gpu is not None:
            changes["gpu_memory_bytes"] = gpus.gpu.usable_bytes
    if found := re.search(r"--global-batch-size (\d+)", advice):
        changes["global_batch_size"] = int(found[1])
    if found := re.search(r"--method (\w+)", advice):
        changes["method"] = Method(name=found[1])
    if found := re.search(r"--max-length (\d+)", advice):
        changes["max_length"] = int(found[1])
    if found := re.fullmatch(r"(offload|activation_checkpointing): (\w+)", advice):
        said = {key: request.config.get(key) for key in request.config.said if not key.startswith(found[1])}
        changes["config"] = FSDPConfig.from_mapping({**said, found[1]: found[2]})
    assert changes, advice
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"config": FSDPConfig(offload="none")},
        {"config": FSDPConfig(activation_checkpointing="none", offload="none"), "max_length": 8192},
        {
            "config": FSDPConfig(activation_checkpointing="none", offload="none"),
            "method": Method(name="lora"),
            "max_length": 8192,
        },
        {"host_memory_bytes": 16 * GIB},
    ],
)
def test_where_nothing_fits_every_piece_of_advice_does(changes: dict[str, object]) -> None:
    request = make_request("4xRTX4090-24G", global_batch_size=4, **changes)
    with pytest.raises(PlanError, match="fits in no way on 4 x RTX4090-24G: the nearest lacks") as caught:
        run(request)
    advice = caught.value.problems[0].fix.split("; or ")
    assert any(text.startswith("--gpus") for text in advice)
    for text in advice:
        plan, _ = run(follow(request, text))
        assert plan.best is not None, text


def test_advice_names_what_the_config_forbids() -> None:
    no_offload = make_request("4xRTX4090-24G", global_batch_size=4, config=FSDPConfig(offload="none"))
    with pytest.raises(PlanError, match="offload: parameters") as caught:
        run(no_offload)
    for text in (
        "--gpus 8xRTX4090-24G --global-batch-size 8",
        "--gpus 4xA100-40G",
        "--method lora",
        "--method qlora",
    ):
        assert text in caught.value.problems[0].fix
    config = FSDPConfig(activation_checkpointing="none", offload="none")
    lora = make_request(
        "4xRTX4090-24G", global_batch_size=4, config=config, method=Method(name="lora"), max_length=8192
    )
    with pytest.raises(PlanError, match="activation_checkpointing: full"):
        run(lora)


def test_one_gpu_that_is_too_small_is_told_of_more_and_of_larger_ones() -> None:
    request = make_request("1xRTX4090-24G", global_batch_size=8)
    with pytest.raises(PlanError, match="fits in no way on 1 x RTX4090-24G") as caught:
        run(request)
    advice = caught.value.problems[0].fix.split("; or ")
    assert "--gpus 8xRTX4090-24G" in advice
    for text in advice:
        assert run(follow(request, text))[0].best is not None, text


def test_problems_of_a_request_are_all_told_at_once() -> None:
    request = make_request(
        "8xV100-32G",
        global_batch_size=60,
        packing=True,
        padded=True,
        max_length=10_000,
        method=Method(name="qlra", lora_r=0),
        config=FSDPConfig(sharding={"dp_replicate_size": 3}),
        loss="logit",
    )
    simulator = LawfulSimulator()
    with pytest.raises(PlanError, match="8 problems") as caught:
        search(request, simulate=simulator)
    text = str(caught.value)
    for part in (
        "--method qlra is not known",
        "--loss logit is not known",
        "8192 positions",
        "--global-batch-size 60 cannot be spread over 8 GPUs",
        "--lora-r 0",
        "V100-32G does not compute in bfloat16",
        "dp_replicate_size=3 does not divide 8",
        "--packing fills every row and --padded",
    ):
        assert part in text
    assert not simulator.jobs


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": FSDPConfig(offload="parameters"), "machine": "1xH200"}, "nothing is offloaded"),
        ({"method": Method(name="qlora", load_dtype="float32")}, "packs weights in 4 bits"),
        ({"method": Method(name="lora", trainable=("language",))}, "parts of a full fine-tuning"),
        ({"method": Method(lora_parts=("language",))}, "there are none"),
        ({"method": Method(load_dtype="bfloat16"), "config": FSDPConfig(precision="fp32")}, "rounded once"),
        ({"price_per_gpu_hour": -1.0}, "no price"),
        ({"price_per_gpu_hour": float("nan")}, "no price"),
        ({"optimizer": "adamw_8bit"}, "--optim adamw_8bit is not known"),
        ({"num_images": -1}, "below 0"),
        ({"image_size": (448, 448)}, "without pictures"),
        ({"image_size": (0, 448), "num_images": 1}, "has no pixels"),
        ({"num_images": 1}, "takes no pictures"),
        ({"num_images": 1, "packing": True}, "rows with pictures are not packed"),
        ({"training_tokens": 0}, "--tokens 0 is less than one"),
    ],
)
def test_options_that_contradict_each_other_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        run(make_request(str(changes.pop("machine", "8xA100-80G")), **changes))


def test_a_gpu_of_which_only_the_memory_is_known_is_planned_without_a_speed() -> None:
    plan, _ = run(make_request("8"))
    assert plan.best is not None and plan.best.speed is None and plan.best.fits


@pytest.mark.parametrize("name", ["full", "lora", "qlora"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "fp32"])
def test_the_bound_on_state_is_one(name: str, precision: str) -> None:
    request = make_request(method=Method(name=name), config=FSDPConfig(precision=precision))
    bound = estimate_state_bytes(request, 8)
    state = simulate_lawfully(build_job(request, request.config, 1, 2)).state_bytes
    if precision == "bf16-mixed":
        assert bound is not None and bound <= sum(state.values())
        assert name == "qlora" or bound > 0.8 * sum(state.values())
    full = estimate_state_bytes(make_request(config=FSDPConfig(precision=precision)), 8)
    assert bound is not None and full is not None and bound <= full


def test_every_second_layer_is_a_choice_like_the_others() -> None:
    plan, simulator = run(make_request("4xA100-40G", max_length=4096))
    assert any(job.fsdp.activation_checkpointing.every == 2 for job in simulator.jobs)
    assert any(item.job.fsdp.activation_checkpointing.every == 2 for item in plan.fitting)
    config = FSDPConfig(activation_checkpointing={"every": 2})
    said, _ = run(make_request("4xA100-40G", config=config))
    assert {candidate.job.fsdp.activation_checkpointing.every for candidate in said.candidates} == {2}


def test_host_memory_that_nobody_gave_is_said_to_be_unchecked() -> None:
    plan, _ = run(make_request("2xRTX4090-24G"))
    assert plan.best is not None
    assert any("was not given and so not checked" in line for line in plan.best.why)
    given, _ = run(make_request("2xRTX4090-24G", host_memory_bytes=512 * GIB))
    assert given.best is not None and not any("not checked" in line for line in given.best.why)
