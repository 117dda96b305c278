"""A step by formulas, for tests of the search: the laws of memory and traffic without their exact constants.

Everything that the search relies on holds: affine in rows and in 1/world size within a phase, another phase may be the
largest, a mask costs only with more than one row, gradients wait during the forward only under accumulation.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_fsdp.config.hardware import parse_gpus
from hf_fsdp.plan.candidate import PlanRequest
from hf_fsdp.plan.job import Job, ModelSpec
from hf_fsdp.plan.simulation import PhasePeak, Simulation, Work

GIB = 1024**3
NUM_LAYERS, HIDDEN, VOCABULARY, LAYER_PARAMETERS = 32, 4096, 32000, 202_383_360
NUM_PARAMETERS = NUM_LAYERS * LAYER_PARAMETERS + 2 * VOCABULARY * HIDDEN
MODEL = ModelSpec(
    name="lawful/7b",
    config={
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
    },
    num_parameters=NUM_PARAMETERS,
)


def make_request(gpus: str = "8xA100-80G", **changes: object) -> PlanRequest:
    """Return a request for the lawful model."""
    parsed = parse_gpus(gpus)
    memory = parsed.gpu.usable_bytes if parsed.gpu is not None else 40 * GIB
    return PlanRequest(**{"model": MODEL, "gpus": parsed, "gpu_memory_bytes": memory, **changes})  # type: ignore[arg-type]


class LawfulSimulator:
    """A simulator that counts what it was asked; `jobs` are in order, `calls` the sizes of the batches.

    Args:
        bend_at: rows from which activations of a layer cost more than the line says; 0: never.
    """

    def __init__(self, bend_at: int = 0):
        self.jobs: list[Job] = []
        self.calls: list[int] = []
        self._bend_at = bend_at

    def __call__(self, jobs: Sequence[Job]) -> list[Simulation]:
        self.jobs += jobs
        self.calls.append(len(jobs))
        return [simulate_lawfully(job, self._bend_at) for job in jobs]


def simulate_lawfully(job: Job, bend_at: int = 0) -> Simulation:
    """Return the step of `job` by formulas."""
    return _Law(job, bend_at).simulation()


class _Law:
    def __init__(self, job: Job, bend_at: int):
        self.job = job
        self.shards = job.world_size // job.fsdp.sharding.dp_replicate_size if job.strategy == "fsdp" else 1
        base = {"full": 4, "lora": 2, "qlora": 0.55}[job.method.name]
        self.trained = NUM_PARAMETERS if job.method.name == "full" else 40_000_000
        adapters = 0 if job.method.name == "full" else 4 * self.trained
        self.states = {
            "parameters": int((NUM_PARAMETERS * base + adapters) / self.shards),
            "gradients": int(4 * self.trained / self.shards),
            "optimizer": int({"sgd": 0}.get(job.optimizer, 8) * self.trained / self.shards),
        }
        self.offloads = job.fsdp.offload.parameters
        self.tokens = job.batch.micro_batch_size * job.batch.num_tokens
        self.extra = max(0, job.batch.micro_batch_size - bend_at) * job.batch.num_tokens if bend_at else 0

    def simulation(self) -> Simulation:
        kept_host = sum(self.states.values()) if self.offloads else 0
        phases = tuple(
            PhasePeak(name=name, num_bytes=sum(parts.values()), categories=parts, host_bytes=kept_host)
            for name, parts in self.phases().items()
        )
        return Simulation(
            phases=phases,
            state_bytes=self.states,
            work=self.work(),
            num_parameters=NUM_PARAMETERS + (0 if self.job.method.name == "full" else self.trained),
            num_trained=self.trained,
            host_bytes=kept_host + self.offloaded_activations(),
            simulated_layers={"language": (6, NUM_LAYERS)},
        )

    def phases(self) -> dict[str, dict[str, int]]:
        adapters = 0 if self.job.method.name == "full" else self.trained
        whole = 0 if self.job.strategy == "ddp" else (NUM_PARAMETERS + adapters) * 2
        unit = 2 * LAYER_PARAMETERS * 2
        kept = not self.job.fsdp.sharding.reshard_after_forward
        held = {} if self.offloads else {name: self.states[name] for name in ("parameters", "optimizer")}
        gradients = 0 if self.offloads else self.states["gradients"]
        waiting = gradients if self.job.num_micro_batches > 1 else 0
        logits = self.tokens * VOCABULARY * 10
        layer = self.one_layer()
        return {
            "forward": {**held, "gradients": waiting, "unsharded": unit, "activations": self.saved() + layer},
            "backward: head and loss": {
                **held,
                "gradients": waiting,
                "unsharded": whole if kept else unit,
                "activations": self.saved(),
                "logits_and_loss": logits,
            },
            "backward: first layer": {
                **held,
                "gradients": gradients,
                "unsharded": unit,
                "activations": 2 * layer,
                "reduce_buffers": LAYER_PARAMETERS * 4,
            },
            "optimizer": {**held, "gradients": gradients, "temporaries": 0},
        }

    def one_layer(self) -> int:
        """What one layer keeps for its backward."""
        mask = self.tokens * self.job.batch.num_tokens // 8 if self.job.batch.padded else 0
        return self.tokens * HIDDEN * 34 + mask + self.extra * HIDDEN * 60

    def saved(self) -> int:
        """What all layers keep on the device until the backward."""
        section = self.job.fsdp.activation_checkpointing
        inputs = self.tokens * HIDDEN * 2 * NUM_LAYERS
        if self.job.fsdp.offload.activations != "none":
            # Blocks that are not computed again keep theirs on the device, and so do the outputs of attention.
            kept = self.one_layer() * NUM_LAYERS // 2 if section.mode == "full" and section.every > 1 else 0
            return inputs // NUM_LAYERS + kept + (inputs if section.mode == "full" and section.selective else 0)
        if section.mode != "full":
            return self.one_layer() * NUM_LAYERS
        if section.every > 1:
            return self.one_layer() * NUM_LAYERS // 2 + inputs // 2
        return inputs * 2 if section.selective else inputs

    def offloaded_activations(self) -> int:
        if self.job.fsdp.offload.activations == "none":
            return 0
        if self.job.fsdp.activation_checkpointing.mode == "full":
            return self.tokens * HIDDEN * 2 * NUM_LAYERS // self.job.fsdp.activation_checkpointing.every
        return self.one_layer() * NUM_LAYERS

    def work(self) -> Work:
        job, forwards = self.job, self.job.num_micro_batches
        forward = 2.0 * NUM_PARAMETERS * self.tokens * forwards
        section = job.fsdp.activation_checkpointing
        share = 0.0 if section.mode != "full" else 0.5 if section.every > 1 else 0.85 if section.selective else 1.0
        gathers = 2 if job.fsdp.sharding.reshard_after_forward else 1
        share_received = (self.shards - 1) / self.shards
        moved = NUM_PARAMETERS * 2 * share_received * gathers * forwards if job.strategy == "fsdp" else 0.0
        reduced = NUM_PARAMETERS * 4 * share_received * forwards if job.strategy == "fsdp" else 0.0
        copies = job.world_size // self.shards
        reductions = forwards if job.fsdp.sharding.sync_each_batch else 1
        offloaded = self.states["parameters"] * gathers * forwards if self.offloads else 0.0
        back = self.offloaded_activations() * forwards
        return Work(
            forward_flops=forward,
            backward_flops=2 * forward if job.method.name == "full" else forward,
            recompute_flops=forward * share,
            all_gather_bytes=moved,
            reduce_scatter_bytes=reduced,
            all_reduce_bytes=4.0 * self.trained / self.shards * reductions if copies > 1 else 0.0,
            num_all_gathers=(NUM_LAYERS + 2) * gathers * forwards if job.strategy == "fsdp" else 0,
            num_reduce_scatters=(NUM_LAYERS + 2) * forwards if job.strategy == "fsdp" else 0,
            num_all_reduces=(NUM_LAYERS + 2) * reductions if copies > 1 else 0,
            host_to_device_bytes=offloaded + back,
            device_to_host_bytes=(self.states["gradients"] * forwards if self.offloads else 0.0) + back,
            optimizer_bytes=sum(self.states.values()) * 2.0,
            num_tokens=self.tokens * forwards,
        )
