"""The simulated step: extended depths equal whole ones, states equal arithmetic, work equals hand counts."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hf_fsdp import FSDPConfig
from hf_fsdp.errors import PlanError
from hf_fsdp.plan.job import Batch, Job, Method, ModelSpec
from hf_fsdp.plan.service import Service
from hf_fsdp.plan.simulation import CATEGORIES, Simulation

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 28,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "sliding_window": 64,
}
MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 13,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
}
LATENT = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 13,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FULL = FSDPConfig(activation_checkpointing="full")
PREFETCH = FSDPConfig(sharding={"forward_prefetch": 2, "backward_prefetch": 2})
ROWS = Batch(micro_batch_size=2, num_tokens=256)


def job(config: dict = LLAMA, fsdp: FSDPConfig = FULL, **changes: object) -> Job:
    return Job(**{"model": ModelSpec(name="tiny", config=config), "fsdp": fsdp, "batch": ROWS, **changes})  # type: ignore[arg-type]


JOBS: dict[str, Job] = {
    "checkpointed": job(),
    "plain": job(fsdp=FSDPConfig()),
    "every second": job({**LLAMA, "num_hidden_layers": 16}, FSDPConfig(activation_checkpointing={"every": 2})),
    "selective": job(fsdp=FSDPConfig(activation_checkpointing={"selective": ["attention"]})),
    "three ahead": job({**LLAMA, "num_hidden_layers": 20}, FSDPConfig(sharding={"backward_prefetch": 3})),
    "latent attention": job(LATENT),
    "kept gathered": job(fsdp=FSDPConfig(sharding={"reshard_after_forward": False})),
    "prefetch": job(
        {**LLAMA, "num_hidden_layers": 14}, fsdp=FSDPConfig(sharding={"forward_prefetch": 2, "backward_prefetch": 2})
    ),
    "accumulated": job(num_micro_batches=4),
    "reduced once": job(fsdp=FSDPConfig(sharding={"sync_each_batch": False}), num_micro_batches=4),
    "hybrid": job(fsdp=FSDPConfig(sharding={"dp_replicate_size": 2}), world_size=8),
    "offloaded": job(fsdp=FSDPConfig(offload="parameters", activation_checkpointing="full")),
    "activations offloaded": job(fsdp=FSDPConfig(offload="activations")),
    "fp32": job(fsdp=FSDPConfig(precision="fp32")),
    "bf16-true": job(fsdp=FSDPConfig(precision="bf16-true")),
    # 128 bytes of a norm's gradient in one unit with all others: no multiple of what is allocated at a time.
    "fp16, norms apart": job(fsdp=FSDPConfig(precision="fp16-mixed")),
    "by size": job(fsdp=FSDPConfig(wrap={"policy": "size", "min_num_params": 200_000})),
    "halves": job(fsdp=FSDPConfig(wrap={"granularity": "attention_and_mlp"})),
    "padded": job(batch=dataclasses.replace(ROWS, padded=True)),
    "eager": job(attention="eager"),
    "chunked loss": job(loss="chunked"),
    "foreach": job(optimizer="adamw_torch"),
    "lora": job(method=Method(name="lora", lora_r=4)),
    "gemma": job(GEMMA),
    "experts": job(MOE),
    "three GPUs": job(world_size=3),
    "cpu": job(device="cpu", world_size=2),
    "ddp": job(strategy="ddp"),
    "one GPU": job(world_size=1),
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service() as service:
        yield service


@pytest.fixture(scope="module")
def simulations(service: Service) -> dict[str, tuple[Simulation, Simulation]]:
    """Name -> (extended, exact)."""
    jobs = [version for item in JOBS.values() for version in (item, dataclasses.replace(item, exact=True))]
    results = service.simulate(jobs)
    return dict(zip(JOBS, zip(results[::2], results[1::2], strict=True), strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_a_few_layers_extended_are_the_whole_model(
    name: str, simulations: dict[str, tuple[Simulation, Simulation]]
) -> None:
    extended, exact = simulations[name]
    assert any(few < whole for few, whole in extended.simulated_layers.values()), "nothing was extended"
    assert [phase.name for phase in extended.phases] == [phase.name for phase in exact.phases]
    for ours, theirs in zip(extended.phases, exact.phases, strict=True):
        assert ours.num_bytes == pytest.approx(theirs.num_bytes, rel=2e-3), ours.name
        assert sum(ours.categories.values()) == ours.num_bytes
        assert set(ours.categories) <= set(CATEGORIES)
    assert extended.peak.name == exact.peak.name
    assert extended.num_parameters == exact.num_parameters
    for key, value in exact.work.__dict__.items():
        assert getattr(extended.work, key) == pytest.approx(value, rel=1e-9), key
    assert dict(extended.state_bytes) == dict(exact.state_bytes)
    assert extended.host_bytes == pytest.approx(exact.host_bytes, rel=2e-3)


def count_parameters(config: dict) -> int:
    hidden, heads, groups = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * hidden * groups // heads
    layer += 3 * hidden * config["intermediate_size"] + 2 * hidden
    tables = 1 if config["tie_word_embeddings"] else 2
    return config["num_hidden_layers"] * layer + tables * config["vocab_size"] * hidden + hidden


def test_states_are_what_arithmetic_says(simulations: dict[str, tuple[Simulation, Simulation]]) -> None:
    count = count_parameters(LLAMA)
    for name, itemsize, shards in (("checkpointed", 4, 8), ("bf16-true", 2, 8), ("hybrid", 4, 4), ("fp32", 4, 8)):
        simulation = simulations[name][0]
        assert simulation.num_parameters == count
        assert simulation.state_bytes["parameters"] == count * itemsize / shards, name
        assert simulation.state_bytes["gradients"] == count * itemsize / shards, name
        # AdamW keeps two numbers a weight, and a step count of 4 bytes a tensor.
        tensors = 10 * 9 + 3
        assert simulation.state_bytes["optimizer"] == 2 * count * itemsize / shards + 4 * tensors, name
    assert simulations["offloaded"][0].host_bytes >= 4 * 4 * count / 8
    assert "parameters" not in simulations["offloaded"][0].peak.categories


def test_what_a_setting_costs_is_on_the_device(simulations: dict[str, tuple[Simulation, Simulation]]) -> None:
    count = count_parameters(LLAMA)

    def peak(name: str, category: str) -> int:
        return simulations[name][0].peak.categories.get(category, 0)

    # The whole model in 16 bits stays, but for the root's few norm weights.
    assert peak("kept gathered", "unsharded") == pytest.approx(2 * count, rel=0.15)
    # Whole fp32 gradients wait for the last micro-batch.
    assert peak("reduced once", "gradients") >= 4 * (count - 2 * 4096 * 256)
    assert peak("accumulated", "gradients") < 4 * count / 4
    assert peak("activations offloaded", "activations") < 0.2 * peak("plain", "activations")
    assert simulations["activations offloaded"][0].host_bytes > 0.8 * peak("plain", "activations")
    assert peak("checkpointed", "activations") < 0.4 * peak("plain", "activations")
    assert peak("ddp", "parameters") == 4 * count == peak("ddp", "reduce_buffers")
    assert peak("one GPU", "reduce_buffers") == 0
    foreach = next(phase for phase in simulations["foreach"][0].phases if phase.name == "optimizer")
    assert foreach.categories["temporaries"] == pytest.approx(4 * count / 8, rel=0.05)


def test_the_batches_of_all_micro_batches_are_held(simulations: dict[str, tuple[Simulation, Simulation]]) -> None:
    """As Trainer does, which collects them before the first forward: 2 rows of 256 ids and labels each."""
    for name, count in (("checkpointed", 1), ("accumulated", 4)):
        assert {phase.categories["inputs"] for phase in simulations[name][0].phases} == {count * 2 * 2 * 256 * 8}


def test_operations_are_those_counted_by_hand(simulations: dict[str, tuple[Simulation, Simulation]]) -> None:
    tokens, hidden, layers = 512, 256, 10
    matmuls = count_parameters(LLAMA) - 4096 * 256 - (2 * layers + 1) * hidden  # no lookup, no norms
    attention = layers * 2 * 2 * tokens * 256 * hidden / 2  # causal: half of the scores
    plain = simulations["plain"][0].work
    assert plain.forward_flops == 2 * matmuls * tokens + attention
    # Twice the forward, and flash computes the scores once more.
    assert plain.backward_flops == pytest.approx(4 * matmuls * tokens + 2.5 * attention, rel=1e-9)
    assert plain.recompute_flops == 0
    full = simulations["checkpointed"][0].work
    assert (full.forward_flops, full.backward_flops) == (plain.forward_flops, plain.backward_flops)
    # The recompute ends before the block's last product, whose output nobody needs, and leaves out the head.
    last = layers * hidden * 640
    assert full.recompute_flops == 2 * (matmuls - 4096 * 256 - last) * tokens + attention
    lora = simulations["lora"][0].work
    adapters = simulations["lora"][0].num_trained
    assert lora.forward_flops == plain.forward_flops + 2 * adapters * tokens
    # Frozen weights get no gradient; the first layer's inputs need none either.
    assert lora.backward_flops < 0.6 * plain.backward_flops + 4 * adapters * tokens
    assert simulations["accumulated"][0].work.forward_flops == 4 * plain.forward_flops


def test_traffic_is_what_the_collectives_move(simulations: dict[str, tuple[Simulation, Simulation]]) -> None:
    count = count_parameters(LLAMA)
    others = 7 / 8
    plain = simulations["plain"][0].work
    blocks = (count - 2 * 4096 * 256 - 256) * 2  # gathered in the forward and again in the backward
    edges = 3 * 2 * 4096 * 256 + 256 * 2  # the embedding twice too
    assert plain.all_gather_bytes == pytest.approx((2 * blocks + edges) * others, rel=1e-3)
    assert plain.reduce_scatter_bytes == pytest.approx(4 * count * others, rel=1e-3)  # summed in float32
    kept = simulations["kept gathered"][0].work
    assert kept.all_gather_bytes == pytest.approx(2 * count * others, rel=1e-3)
    assert simulations["hybrid"][0].work.all_reduce_bytes == pytest.approx(4 * count / 4, rel=1e-3)
    assert simulations["reduced once"][0].work.reduce_scatter_bytes == plain.reduce_scatter_bytes
    assert simulations["accumulated"][0].work.reduce_scatter_bytes == 4 * plain.reduce_scatter_bytes
    offloaded = simulations["offloaded"][0].work
    assert offloaded.device_to_host_bytes == pytest.approx(4 * count / 8, rel=0.01)  # gradients
    assert offloaded.host_to_device_bytes > 0


def test_a_7b_model_needs_what_the_whole_simulation_showed(service: Service) -> None:
    from transformers import LlamaConfig

    spec = ModelSpec(name="llama-2-7b", config=LlamaConfig().to_dict())
    simulation = service.simulate([Job(model=spec, fsdp=FULL, batch=Batch(num_tokens=2048))])[0]
    assert simulation.num_parameters == 6_738_415_616
    assert simulation.state_bytes["parameters"] == 4 * 6_738_415_616 / 8
    # 32 layers simulated one by one (2026-11-30, torch 2.13): 14.577 GiB, while the second layer's backward runs.
    assert simulation.peak.num_bytes / 2**30 == pytest.approx(14.577, abs=0.02)
    assert simulation.peak.name == "backward: second layer"


def test_an_optimizer_is_what_torch_runs_on_a_gpu(service: Service) -> None:
    """Its state by name, and temporaries of all parameters where it steps many at once."""
    small = dataclasses.replace(ROWS, num_tokens=8)
    states = {"adamw_torch_fused": 2, "adamw_torch": 2, "adagrad": 1, "rmsprop": 1, "sgd": 0}
    for world_size in (1, 4):
        jobs = [job(world_size=world_size, batch=small, optimizer=name) for name in states]
        for (name, num_states), found in zip(states.items(), service.simulate(jobs), strict=True):
            gradients = found.state_bytes["gradients"]
            assert found.state_bytes["optimizer"] == pytest.approx(num_states * gradients, rel=1e-3), name
            step = next(phase for phase in found.phases if phase.name == "optimizer")
            temporaries = step.categories.get("temporaries", 0)
            assert temporaries < 0.05 * gradients if name == "adamw_torch_fused" else temporaries > 0.9 * gradients, (
                name
            )


def test_4_bit_layers_hold_their_packed_bytes(service: Service) -> None:
    pytest.importorskip("bitsandbytes")
    qlora = job(method=Method(name="qlora", lora_r=8))
    plain, whole = service.simulate([qlora, dataclasses.replace(qlora, exact=True)])
    assert plain.peak.num_bytes == pytest.approx(whole.peak.num_bytes, rel=2e-3)
    linears = 10 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 640)
    rest = (count_parameters(LLAMA) - linears) * 2
    adapters = plain.num_trained * 4
    assert plain.state_bytes["parameters"] == (linears / 2 + rest + adapters) / 8
    assert plain.num_parameters == count_parameters(LLAMA) + plain.num_trained
    # Every product unpacks a whole weight for its time, and does as much work as an unpacked one.
    lora = service.simulate([job(method=Method(name="lora", lora_r=8))])[0]
    for name in ("forward_flops", "backward_flops", "recompute_flops"):
        assert getattr(plain.work, name) == getattr(lora.work, name)


def test_saved_bytes_follow_from_what_is_saved(simulations: dict[str, tuple[Simulation, Simulation]]) -> None:
    count = count_parameters(LLAMA)
    full = simulations["checkpointed"][0]
    assert full.model_bytes == 2 * count  # bf16, as loaded
    assert full.checkpoint_bytes == pytest.approx(12 * count, rel=1e-4)
    lora = simulations["lora"][0]
    assert lora.checkpoint_bytes == pytest.approx(12 * lora.num_trained, rel=0.01)


def test_the_timeline_passes_through_every_phase_and_the_peak(service: Service) -> None:
    simulation = service.simulate([job(timeline=True)])[0]
    totals = [sum(point.categories.values()) for point in simulation.timeline]
    assert max(totals) == simulation.peak.num_bytes
    assert {point.phase for point in simulation.timeline} >= {"clip", "optimizer", "backward: middle layers"}


def test_a_job_survives_json() -> None:
    for item in JOBS.values():
        assert Job.from_json(item.to_json()) == item


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (job(optimizer="adamw_fused"), "optimizer adamw_fused is not one that the planner simulates"),
        (job({**LLAMA, "num_attention_heads": 5}), "builds no language model of tiny's config"),
        (
            job({"model_type": "bert", "architectures": ["BertForMaskedLM"]}),
            "is neither a causal language model nor one with pictures",
        ),
        (job(fsdp=FSDPConfig(wrap={"layer_classes": ["LlamaLayer"]})), "matches no module"),
        (job(fsdp=FSDPConfig(sharding={"dp_replicate_size": 3})), "do not multiply to the 8 processes"),
    ],
)
def test_what_cannot_be_simulated_is_told(service: Service, broken: Job, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        service.simulate([broken])
    assert service.simulate([job()])  # the worker goes on


def test_a_worker_runs_no_code_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "tokenizers", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('run from the folder')")
    monkeypatch.chdir(tmp_path)
    with Service(num_workers=1) as own:
        assert own.simulate([job()])


def test_a_worker_ends_with_the_process_that_asked(tmp_path: Path) -> None:
    script = (
        "import time\nfrom hf_fsdp.plan.service import _Worker\n"
        "worker = _Worker()\nprint(worker._process.pid, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        worker = psutil.Process(int(asking.stdout.readline()))
        asking.kill()
    psutil.wait_procs([worker], timeout=20)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_a_killed_worker_is_an_error_and_the_next_call_gets_another() -> None:
    with Service(1) as service:
        service.simulate([job()])
        os.kill(service._idle[0]._process.pid, signal.SIGKILL)
        service._idle[0]._process.wait()
        with pytest.raises(PlanError, match="ended with code -9"):
            service.simulate([job(num_micro_batches=3)])
        assert service.simulate([job(num_micro_batches=3)])[0].peak.num_bytes > 0


def test_a_recomputed_layer_may_make_a_constant(service: Service) -> None:
    """Gemma 3n asks for a quantile of its activations: a number that becomes a tensor of the device in each forward."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 2}
    config = {"model_type": "gemma3n_text", **sizes, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512}
    config |= {"vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 16, "laurel_rank": 8}
    config |= {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95] * 5}
    assert service.simulate([job(config)])[0].work.recompute_flops > 0


def test_a_job_that_takes_too_long_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_fsdp.plan.service._DEFAULT_SECONDS", 1.0)
    with Service(1) as service, pytest.raises(PlanError, match="was not simulated within 1 seconds") as raised:
        service.simulate([job()])
    assert "memory" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "attention", "is_eager"),
    [
        ({**GEMMA, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "sdpa", True),
        ({**GEMMA, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "flash_attention_2", False),
        ({**GEMMA}, "sdpa", False),
        ({"model_type": "bloom", "n_layer": 2, "hidden_size": 64, "n_head": 4, "vocab_size": 512}, "sdpa", True),
        ({"model_type": "falcon", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512}, "sdpa", True),
        (
            {"model_type": "gpt_neo", "num_layers": 2, "hidden_size": 64, "attention_types": [[["global"], 2]]},
            "flash_attention_2",
            True,
        ),
    ],
)
def test_a_model_without_a_kernel_is_eager_as_in_training(
    config: dict, attention: str, is_eager: bool, service: Service
) -> None:
    config = {**config, "num_hidden_layers": 2} | ({"num_attention_heads": 4} if "n_head" not in config else {})
    config |= {"num_heads": 4} if config["model_type"] == "gpt_neo" else {}
    found, eager = service.simulate([job(config, attention=attention), job(config, attention="eager")])
    assert (found.peak.num_bytes == eager.peak.num_bytes) == is_eager
    assert any("simulated as eager" in note for note in found.notes) == is_eager and not eager.notes


def test_compiled_blocks_are_simulated_as_if_they_were_not(service: Service) -> None:
    plain = FSDPConfig(activation_checkpointing="full")
    compiled = dataclasses.replace(plain, compile={"blocks": True})  # type: ignore[arg-type]
    found, expected = service.simulate([job(fsdp=compiled), job(fsdp=plain)])
    assert found.phases == expected.phases
    assert found.notes == ("compiled blocks were simulated as if they were not compiled",) and not expected.notes


def test_the_same_job_is_simulated_once(service: Service) -> None:
    first, second = service.simulate([job(), job()])
    assert first is second
    assert math.isclose(service.simulate([job()])[0].cpu_seconds, first.cpu_seconds)


@pytest.mark.parametrize(
    ("model_type", "changes", "period"),
    [("smollm3", {"no_rope_layer_interval": 4}, 4), ("llama", {}, 1), ("gemma3_text", {}, 6)],
)
def test_the_period_is_that_of_all_that_layers_keep(model_type: str, changes: dict, period: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hf_fsdp.plan.simulator.depth import find_depths

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 24, "num_attention_heads": 2}
    config = AutoConfig.for_model(model_type, **sizes, num_key_value_heads=1, vocab_size=64, pad_token_id=0, **changes)
    with torch.device("meta"):
        (tower,) = find_depths(AutoModelForCausalLM.from_config(config))
    assert (tower.prefix, tower.period, tower.num_layers) == (0, period, 24)


@pytest.mark.parametrize("wrong", ["gradients", "optimizer"])
def test_states_that_contradict_arithmetic_are_no_figure(wrong: str) -> None:
    from hf_fsdp.plan.simulation import PhasePeak
    from hf_fsdp.plan.simulator.simulate import _check_states

    totals = {"stepped_bytes": 40_000.0, "num_stepped": 2.0}
    held = {"gradients": 40_448, "optimizer": 81_024}
    _check_states(job(), totals, [PhasePeak(name="clip", num_bytes=sum(held.values()), categories=held)])
    held[wrong] //= 2
    with pytest.raises(PlanError, match=f"bytes of {wrong} were simulated, and arithmetic says"):
        _check_states(job(), totals, [PhasePeak(name="clip", num_bytes=sum(held.values()), categories=held)])
