"""Estimated speed and reserve: hand-made numbers, directions in which nothing may get slower, published runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_fsdp.config.gpus import GPUS, Gpu, unknown_gpu
from hf_fsdp.config.hardware import parse_gpus
from hf_fsdp.config.schema import FSDPConfig, OffloadConfig, ShardingConfig
from hf_fsdp.errors import PlanError
from hf_fsdp.plan.job import Job, Method, ModelSpec
from hf_fsdp.plan.simulation import PhasePeak, Simulation, Work
from hf_fsdp.plan.speed.cost import estimate_cost
from hf_fsdp.plan.speed.links import Axis, Layout, Span, all_reduce_seconds, bandwidth, gather_seconds
from hf_fsdp.plan.speed.reserve import estimate_job_reserve, estimate_reserve
from hf_fsdp.plan.speed.throughput import SpeedEstimate, estimate_job_speed, estimate_step_time, why_no_speed
from hf_fsdp.units import GIB

MIB = 1024**2
BY_NAME = {gpu.name: gpu for gpu in GPUS}
# An A100 with rates that divide well: 100 TFLOP/s, 1000 GB/s memory, 100 GB/s NVLink, 10 GB/s PCIe, 80 GB/s network.
ROUND = replace(
    BY_NAME["A100-80G"],
    half_tflops=100,
    memory_gb_per_s=1000,
    link_gb_per_s=100,
    host_gb_per_s=10,
    network_gb_per_s=80,
)


def layout(gpu: Gpu = ROUND, nodes: int = 1, replicate: int = 1, per_node: int = 8, **more: Any) -> Layout:
    size = nodes * per_node // replicate
    return Layout(gpu=gpu, gpus_per_node=per_node, num_nodes=nodes, shard_size=size, replicate_size=replicate, **more)


def estimate(work: Work, where: Layout, **more: Any) -> SpeedEstimate:
    speed = estimate_step_time(work, where, **more)
    assert speed is not None
    return speed


def seconds(speed: SpeedEstimate) -> dict[str, tuple[float, float]]:
    return {part.name: (part.low_seconds, part.high_seconds) for part in speed.parts}


def work_of(num_parameters: float, tokens: int, world_size: int, **more: Any) -> Work:
    """Full fine-tuning of a model by the usual arithmetic, one micro-batch, bf16 gathers and fp32 reductions."""
    forward = 2 * num_parameters * tokens
    part = (world_size - 1) / world_size
    facts: dict[str, Any] = {
        "forward_flops": forward,
        "backward_flops": 2 * forward,
        "recompute_flops": 0.0,
        "all_gather_bytes": 2 * 2 * num_parameters * part,
        "reduce_scatter_bytes": 4 * num_parameters * part,
        "num_all_gathers": 68,
        "num_reduce_scatters": 34,
        "optimizer_bytes": 28 * num_parameters / world_size,
        "num_tokens": tokens,
    }
    return Work(**{**facts, **more})


# ---- axes and links -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "replicate", "shard", "copies"),
    [
        (1, 1, Axis(8, 8, False), Axis(1, 1, False)),
        (1, 2, Axis(4, 4, False), Axis(2, 2, False)),
        (2, 1, Axis(16, 8, True), Axis(1, 1, False)),
        (2, 2, Axis(8, 8, False), Axis(2, 1, True)),  # one copy a machine
        (2, 4, Axis(4, 4, False), Axis(4, 2, True)),  # two copies a machine
        (4, 2, Axis(16, 8, True), Axis(2, 1, True)),  # a copy over two machines
        (2, 16, Axis(1, 1, False), Axis(16, 8, True)),  # DDP
        (3, 4, Axis(6, 6, True), Axis(4, 1, True)),  # copies that straddle machines
    ],
)
def test_axes_lie_on_machines_as_the_mesh_lays_them(nodes: int, replicate: int, shard: Axis, copies: Axis) -> None:
    where = layout(nodes=nodes, replicate=replicate)
    assert where.shard_axis == shard
    assert where.replicate_axis == copies


def test_bandwidth_is_the_links_inside_and_the_networks_share_between_machines() -> None:
    assert bandwidth(layout(), layout().shard_axis) == Span(50e9, 80e9)
    flat = layout(nodes=2)  # all eight GPUs of a machine send over its network: 80 GB/s
    assert bandwidth(flat, flat.shard_axis) == Span(40e9, 72e9)
    hybrid = layout(nodes=2, replicate=2)  # eight rings share it: 10 GB/s each
    assert bandwidth(hybrid, hybrid.shard_axis) == Span(50e9, 80e9)
    assert bandwidth(hybrid, hybrid.replicate_axis) == Span(5e9, 9e9)
    fast = layout(nodes=2, network_gb_per_s=10_000)  # a network faster than the links does not help
    assert bandwidth(fast, fast.shard_axis) == Span(50e9, 80e9)


def test_collectives_by_hand() -> None:
    where = layout()
    # 80 GB at 80 or 50 GB/s, and 100 collectives of 7 steps of 1 or 4 microseconds
    gather = gather_seconds(where, where.shard_axis, 80e9, 100)
    assert (gather.low, gather.high) == pytest.approx((1 + 700e-6, 1.6 + 2800e-6), rel=1e-12)
    # a ring all-reduce of 8 moves 14/8 of the buffer in 14 steps
    data_parallel = layout(replicate=8)
    reduce = all_reduce_seconds(data_parallel, data_parallel.replicate_axis, 80e9, 1)
    assert (reduce.low, reduce.high) == pytest.approx((1.75 + 14e-6, 2.8 + 56e-6), rel=1e-12)
    assert gather_seconds(layout(per_node=1), Axis(1, 1, False), 80e9, 100) == Span(0, 0)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"shard_size": 7}, "do not multiply to the 8 processes"),
        ({"shard_size": 0}, "are at least 1"),
        ({"shard_size": 8, "network_gb_per_s": 0}, "is not a rate"),
    ],
)
def test_layouts_that_cannot_be_are_refused(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Layout(gpu=ROUND, gpus_per_node=8, **facts)


# ---- a step by hand -----------------------------------------------------------------------------------

# 10^15 operations, 80 GB gathered, 40 GB scattered, 900 GB of optimizer traffic (chosen for round seconds).
HAND = Work(
    forward_flops=2e14,
    backward_flops=6e14,
    recompute_flops=2e14,
    all_gather_bytes=80e9,
    reduce_scatter_bytes=40e9,
    optimizer_bytes=90e9,
    num_tokens=1000,
)


def test_a_step_by_hand() -> None:
    """Best: 10^15 at 70 % of 100 TFLOP/s, gathers hidden; worst: at 40 %, then 120 GB at 50 GB/s, then the update."""
    speed = estimate(HAND, layout())
    assert seconds(speed) == {
        "arithmetic": pytest.approx((1e15 / 70e12, 25.0)),
        "links inside a machine": pytest.approx((1.5, 2.4)),
        "optimizer step": pytest.approx((0.1, 0.15)),
    }
    assert speed.low_step_seconds == pytest.approx(1e15 / 70e12 + 0.1)
    assert speed.high_step_seconds == pytest.approx(25 + 2.4 + 0.15)
    assert speed.low_tokens_per_second == pytest.approx(8000 / 27.55)
    assert speed.high_tokens_per_second == pytest.approx(8000 / speed.low_step_seconds)
    # MFU leaves the recompute out: 8e14 operations
    assert speed.low_mfu == pytest.approx(8e14 / (27.55 * 100e12))
    assert speed.high_mfu == pytest.approx(8e14 / (speed.low_step_seconds * 100e12))
    assert (speed.low_exposed_share, speed.high_exposed_share) == (0.0, 1.0)
    assert speed.bound_by == "arithmetic"


def test_the_first_gather_and_the_last_reduction_are_not_hidden() -> None:
    speed = estimate(replace(HAND, num_all_gathers=10, num_reduce_scatters=5), layout())
    gather, scatter = 1.0 + 10 * 7e-6, 0.5 + 5 * 7e-6
    assert speed.low_step_seconds == pytest.approx(1e15 / 70e12 + gather / 10 + scatter / 5 + 0.1)
    assert speed.low_exposed_share == pytest.approx((gather / 10 + scatter / 5) / (gather + scatter))


def test_what_arithmetic_cannot_hide_is_exposed() -> None:
    work = replace(HAND, all_gather_bytes=80e9 * 40, num_all_gathers=100)
    speed = estimate(work, layout())
    total = 40 + 0.5 + 700e-6
    assert speed.low_step_seconds == pytest.approx(total + 0.1)
    assert speed.low_exposed_share == pytest.approx((total - 1e15 / 70e12) / total)
    assert speed.bound_by == "links inside a machine"


def test_few_tokens_are_bound_by_reading_weights() -> None:
    """7e9 parameters, 32 tokens: 3 passes of 14 GB at 900 or 600 GB/s, longer than 3 x 2 x 7e9 x 32 operations."""
    work = Work(forward_flops=448e9, backward_flops=896e9, recompute_flops=0, num_tokens=32)
    speed = estimate(work, layout(per_node=1), num_parameters=7_000_000_000)
    assert seconds(speed)["reading weights"] == pytest.approx((42 / 900, 42 / 600))
    assert speed.low_step_seconds == pytest.approx(42 / 900)
    assert speed.high_step_seconds == pytest.approx(42 / 600 + 1344e9 / 40e12)
    assert speed.bound_by == "reading weights"
    # the same tokens in 4 micro-batches read the weights 4 times; in fp32 each weight is 4 bytes
    more = estimate(work, layout(per_node=1), num_parameters=7_000_000_000, num_micro_batches=4)
    assert more.low_step_seconds == pytest.approx(4 * 42 / 900)
    wide = estimate(work, layout(per_node=1), num_parameters=7_000_000_000, precision="fp32")
    assert seconds(wide)["reading weights"] == pytest.approx((84 / 900, 84 / 600))


def test_more_tokens_a_micro_batch_are_used_better() -> None:
    shares = [
        estimate(work_of(7e9, tokens, 1), layout(per_node=1), num_parameters=7 * 10**9).low_mfu
        for tokens in (64, 256, 1024, 4096, 16384)
    ]
    assert shares == sorted(shares)
    assert shares[0] < 0.6 * shares[-1]


def test_small_models_are_bound_by_launching_kernels() -> None:
    work = Work(forward_flops=1e9, backward_flops=2e9, recompute_flops=0, num_tokens=128)
    speed = estimate(work, layout(per_node=1), num_blocks=30, num_micro_batches=2)
    assert (speed.low_step_seconds, speed.high_step_seconds) == pytest.approx((0.06, 0.15))
    assert speed.bound_by == "launching kernels"
    assert any("Python launches" in line for line in speed.assumptions)


def test_hybrid_sharding_keeps_gathers_inside_and_reduces_over_the_network() -> None:
    work = replace(HAND, all_reduce_bytes=18e9, num_all_reduces=10)
    speed = estimate(work, layout(nodes=2, replicate=2))
    assert seconds(speed)["links inside a machine"] == pytest.approx((1.5, 2.4))
    # two copies: 2 x 1/2 of 18 GB over a GPU's 9 or 5 GB/s, 10 x 2 x 1 steps of 4 or 15 microseconds
    assert seconds(speed)["network between machines"] == pytest.approx((2 + 80e-6, 3.6 + 300e-6))
    flat = estimate(HAND, layout(nodes=2))
    assert seconds(flat)["network between machines"] == pytest.approx((120 / 72, 120 / 40))
    assert "links inside a machine" not in seconds(flat)


def test_offload_copies_over_pcie_and_steps_on_the_host() -> None:
    work = replace(HAND, host_to_device_bytes=85e9, device_to_host_bytes=42.5e9)
    speed = estimate(work, layout(), optimizer_on_host=True)
    # 85 GB at 8.5 GB/s with the other way beside it; or 127.5 GB at 4 GB/s
    assert seconds(speed)["copies to and from host memory"] == pytest.approx((10, 127.5 / 4))
    # eight processes of 90 GB share 80 or 20 GB/s of the machine's memory
    assert seconds(speed)["optimizer step on the host"] == pytest.approx((9, 36))
    assert speed.low_step_seconds == pytest.approx(1e15 / 70e12 + 9)
    assert any("OMP_NUM_THREADS" in line for line in speed.assumptions)


# ---- directions ---------------------------------------------------------------------------------------

FASTER = [
    ("half_tflops", 200),
    ("memory_gb_per_s", 2000),
    ("link_gb_per_s", 400),
    ("host_gb_per_s", 60),
    ("network_gb_per_s", 400),
]
ALL_OF_IT = replace(
    work_of(7e9, 4096, 16),
    all_reduce_bytes=7e9,
    num_all_reduces=34,
    host_to_device_bytes=20e9,
    device_to_host_bytes=9e9,
)


@pytest.mark.parametrize("replicate", [1, 2, 4])
@pytest.mark.parametrize(("field", "value"), FASTER)
def test_faster_hardware_is_never_slower(field: str, value: float, replicate: int) -> None:
    more: dict[str, Any] = {"num_parameters": 7 * 10**9, "num_blocks": 32}
    before = estimate(ALL_OF_IT, layout(nodes=2, replicate=replicate), **more)
    after = estimate(ALL_OF_IT, layout(replace(ROUND, **{field: value}), nodes=2, replicate=replicate), **more)
    assert after.low_step_seconds <= before.low_step_seconds
    # A copy that spans machines waits for their network alone.
    assert after.high_step_seconds < before.high_step_seconds or (field, replicate) == ("link_gb_per_s", 1)


@pytest.mark.parametrize(
    "field",
    [
        "forward_flops",
        "backward_flops",
        "recompute_flops",
        "all_gather_bytes",
        "reduce_scatter_bytes",
        "all_reduce_bytes",
        "num_all_gathers",
        "host_to_device_bytes",
        "device_to_host_bytes",
        "optimizer_bytes",
    ],
)
def test_more_work_is_never_faster(field: str) -> None:
    more = replace(ALL_OF_IT, **{field: 2 * getattr(ALL_OF_IT, field) + 1e9 * (field == "recompute_flops")})
    before, after = (estimate(work, layout(nodes=2, replicate=2)) for work in (ALL_OF_IT, more))
    # More gathers of the same bytes are smaller: the first one, which nothing hides, gets shorter.
    assert after.low_step_seconds >= before.low_step_seconds or field == "num_all_gathers"
    assert after.high_step_seconds > before.high_step_seconds


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "fp32", "auto"])
def test_every_known_gpu_has_a_range(gpu: Gpu, precision: str) -> None:
    speed = estimate_step_time(work_of(7e9, 4096, 8), layout(gpu), precision=precision, num_parameters=7 * 10**9)
    if not gpu.has_bf16 and precision in ("bf16-mixed", "auto"):
        assert speed is None
        assert "does not compute in bf16" in str(why_no_speed(gpu, "bf16-mixed"))
        return
    assert speed is not None
    assert 0 < speed.low_mfu < speed.high_mfu < 0.9
    assert speed.low_step_seconds < speed.high_step_seconds
    assert speed.assumptions[-1].endswith("Not measured on a GPU by this project.")


def test_no_work_has_no_speed() -> None:
    nothing = Work(forward_flops=0, backward_flops=0, recompute_flops=0)
    assert estimate_step_time(nothing, layout()) is None


def test_of_an_unknown_gpu_no_speed_is_invented() -> None:
    gpu = unknown_gpu(40 * GIB)
    assert estimate_step_time(HAND, layout(gpu)) is None
    assert why_no_speed(gpu) == (
        "how fast a GPU of 40.0 GiB computes is not known: name it to get a speed, e.g. --gpus 8xA100-80G"
    )
    assert "no GPU was named" in str(why_no_speed(None))
    assert why_no_speed(ROUND) is None
    with pytest.raises(PlanError, match="the links of a GPU of 40.0 GiB are not known"):
        bandwidth(layout(gpu), Axis(8, 8, False))


# ---- runs that others published -----------------------------------------------------------------------

LLAMA_8B, LLAMA_7B = 8.03e9, 6.74e9
INPUT_EMBEDDINGS = {LLAMA_8B: 128256 * 4096, LLAMA_7B: 32000 * 4096}  # looked up, not multiplied


def llama_work(num_parameters: float, tokens: int, sequence: int, world_size: int, recompute: float) -> Work:
    """Causal attention added: 2 x 32 layers x 4096 x sequence / 2 operations, twice, a token's forward."""
    forward = tokens * (2 * (num_parameters - INPUT_EMBEDDINGS[num_parameters]) + 2 * 32 * 4096 * sequence)
    return work_of(
        num_parameters,
        tokens,
        world_size,
        forward_flops=forward,
        backward_flops=2 * forward,
        recompute_flops=recompute * forward,
    )


@pytest.mark.parametrize(
    ("gpus", "model", "rows", "sequence", "recompute", "published"),
    [
        # torchtitan benchmarks/llama3_h100_202412: 8 x H100, 2 rows of 8192, selective checkpointing; compiled
        ("8xH100-80G", LLAMA_8B, 2, 8192, 0.5, 5762),
        ("8xH100-80G", LLAMA_8B, 2, 8192, 0.5, 6667),
        # the same on 128
        ("16x8xH100-80G", LLAMA_8B, 2, 8192, 0.5, 5605),
        # accelerate examples/torch_native_parallelism: 8 x H100, sequence 8192, bf16
        ("8xH100-80G", LLAMA_8B, 1, 8192, 0.0, 8000),
        # fms-fsdp README: 96 x H100 and 128 x A100, compiled, nothing recomputed
        ("12x8xH100-80G", LLAMA_7B, 2, 4096, 0.0, 9600),
        ("16x8xA100-80G", LLAMA_7B, 2, 4096, 0.0, 4550),
        # PyTorch blog, Maximizing training: 128 x A100, eager
        ("16x8xA100-80G", LLAMA_7B, 2, 4096, 0.0, 3700),
        # fms-acceleration a100_80gb_liger.csv: Trainer, 4 x A100, 4 and 16 rows of 4096, recomputed but for the head
        ("4xA100-80G", LLAMA_8B, 4, 4096, 0.93, 3199),
        ("4xA100-80G", LLAMA_8B, 16, 4096, 0.93, 3423),
        # torchtune README: one RTX 4090, 2 rows of 2048, blocks recomputed
        ("1xRTX4090", LLAMA_8B, 2, 2048, 0.93, 1650),
    ],
)
def test_published_tokens_per_second_are_inside_the_range(
    gpus: str, model: float, rows: int, sequence: int, recompute: float, published: float
) -> None:
    """The ranges are chosen from such runs, so this shows only that the sum of all parts leaves them inside."""
    request = parse_gpus(gpus)
    assert request.gpu is not None
    where = layout(request.gpu, nodes=request.num_nodes, per_node=request.count)
    work = llama_work(model, rows * sequence, sequence, request.num_gpus, recompute)
    if request.num_gpus == 1:  # torchtune stores bf16 and steps in 8 bits
        work = replace(work, optimizer_bytes=8 * model)
    speed = estimate(work, where, num_parameters=int(model), num_blocks=32)
    low, high = (rate / request.num_gpus for rate in (speed.low_tokens_per_second, speed.high_tokens_per_second))
    assert low < published < high, (low, published, high)
    assert high < 3 * low  # a range that says something


# ---- jobs, cost ---------------------------------------------------------------------------------------


def job_of(**more: Any) -> Job:
    return Job(model=ModelSpec(name="m", config={}), **more)


def simulation_of(work: Work, layers: int = 32) -> Simulation:
    peak = PhasePeak(name="forward", num_bytes=1, categories={"parameters": 1})
    return Simulation(
        phases=(peak,),
        state_bytes={},
        work=work,
        num_parameters=7 * 10**9,
        num_trained=7 * 10**9,
        simulated_layers={"language": (4, layers)},
    )


def test_a_job_is_laid_out_by_its_own_config() -> None:
    request = parse_gpus("2x8xA100-80G")
    simulation = simulation_of(ALL_OF_IT)
    flat = estimate_job_speed(job_of(world_size=16), simulation, request)
    hybrid_config = FSDPConfig(sharding=ShardingConfig(dp_replicate_size=2))
    hybrid = estimate_job_speed(job_of(world_size=16, fsdp=hybrid_config), simulation, request)
    ddp = estimate_job_speed(job_of(world_size=16, strategy="ddp"), simulation, request)
    assert flat and hybrid and ddp
    common: dict[str, Any] = {"num_parameters": 7 * 10**9, "num_blocks": 32}
    gpu = BY_NAME["A100-80G"]
    assert flat == estimate(ALL_OF_IT, layout(gpu, nodes=2), **common)
    assert hybrid == estimate(ALL_OF_IT, layout(gpu, nodes=2, replicate=2), **common)
    assert ddp == estimate(ALL_OF_IT, layout(gpu, nodes=2, replicate=16), **common)
    slow = estimate_job_speed(job_of(world_size=16), simulation, request, network_gb_per_s=3)
    assert slow and slow.high_tokens_per_second < flat.high_tokens_per_second
    assert any("3 GB/s each way (as given)" in line for line in slow.assumptions)


def test_a_jobs_offload_precision_and_method_are_heard() -> None:
    request, simulation = parse_gpus("8xA100-80G"), simulation_of(work_of(7e9, 4096, 8))
    offload = estimate_job_speed(job_of(fsdp=FSDPConfig(offload=OffloadConfig(parameters=True))), simulation, request)
    assert offload and "optimizer step on the host" in seconds(offload)
    wide = estimate_job_speed(job_of(fsdp=FSDPConfig(precision="fp32")), simulation, request)
    assert wide and wide.bound_by == "arithmetic" and "19.5 TFLOP/s in fp32" in wide.assumptions[0]
    packed = estimate_job_speed(job_of(method=Method(name="qlora")), simulation, request)
    assert packed and "Unpacking 4-bit weights" in packed.assumptions[-1]
    assert estimate_job_speed(job_of(), simulation, parse_gpus("8")) is None
    with pytest.raises(PlanError, match="do not multiply to the 4 processes"):
        estimate_job_speed(job_of(), simulation, parse_gpus("4xA100-80G"))


def test_hours_and_cost_by_hand() -> None:
    speed = replace(estimate(HAND, layout()), low_tokens_per_second=10_000.0, high_tokens_per_second=20_000.0)
    cost = estimate_cost(speed, num_gpus=8, num_tokens=3 * 24_000_000, price_per_gpu_hour=2.5)
    assert (cost.low_hours, cost.high_hours) == pytest.approx((1.0, 2.0))
    assert (cost.low_cost, cost.high_cost) == pytest.approx((20.0, 40.0))
    assert (cost.low_days, cost.high_days) == pytest.approx((1 / 24, 1 / 12))
    assert estimate_cost(speed, num_gpus=8, num_tokens=1e9).low_cost is None


# ---- reserve ------------------------------------------------------------------------------------------


def sizes(reserve: Any) -> dict[str, float]:
    return {part.name: part.num_bytes / MIB for part in reserve.parts}


def test_a_reserve_by_hand() -> None:
    reserve = estimate_reserve(BY_NAME["A100-80G"], world_size=8, allocated_bytes=40 * GIB)
    assert sizes(reserve) == {
        "CUDA context": 500,
        "NCCL buffers": 24 * 2 * 12,
        "cuBLAS workspaces": 24.25,
        "fragmentation": 2048,
    }
    assert reserve.total_bytes == int((500 + 576 + 24.25 + 2048) * MIB)
    assert all(part.reason for part in reserve.parts)


def test_hybrid_sharding_and_more_machines_need_more_buffers_and_one_process_none() -> None:
    gpu = BY_NAME["H100-80G"]
    one, eight = (estimate_job_reserve(gpu, job_of(world_size=size), allocated_bytes=0) for size in (1, 8))
    assert "NCCL buffers" not in sizes(one)
    hybrid = FSDPConfig(sharding=ShardingConfig(dp_replicate_size=2))
    two = estimate_job_reserve(gpu, job_of(world_size=16, fsdp=hybrid), num_nodes=2, allocated_bytes=0)
    assert sizes(eight)["NCCL buffers"] == 32 * 2 * 12
    assert sizes(two)["NCCL buffers"] == 3 * 32 * 3 * 12
    assert sizes(estimate_reserve(BY_NAME["L4-24G"], world_size=8, allocated_bytes=0))["NCCL buffers"] == 4 * 2 * 12


def test_without_a_peak_the_reserve_is_that_of_the_largest_that_fits() -> None:
    gpu = BY_NAME["A100-40G"]
    reserve = estimate_reserve(gpu, world_size=8)
    largest = gpu.usable_bytes - reserve.total_bytes
    exact = estimate_reserve(gpu, world_size=8, allocated_bytes=largest)
    assert abs(gpu.usable_bytes - exact.total_bytes - largest) < 8
    more = estimate_reserve(gpu, world_size=8, allocated_bytes=largest + MIB)
    assert gpu.usable_bytes < more.total_bytes + largest + MIB


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_an_unknown_gpu_keeps_as_much_as_any_known_one(gpu: Gpu) -> None:
    unknown = estimate_reserve(unknown_gpu(gpu.usable_bytes), world_size=8, allocated_bytes=0)
    assert estimate_reserve(gpu, world_size=8, allocated_bytes=0).total_bytes <= unknown.total_bytes
