"""Parameters and optimizer in host memory: the numbers of a run without, and what is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_fsdp import FSDPCallback, FSDPConfig, apply_fsdp, audit_sharding
from hf_fsdp.errors import ShardingError
from hf_fsdp.torch_private import read_unit_state
from tests.distributed.tiny_models import build_model
from tests.distributed.training import QUIET_ARGUMENTS, Run, build_dataset, train, whole

RUNS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "clip-adamw": {"optimizer": "adamw", "learning_rate": 1e-3, "clip": 0.05},
    "accumulation-keep": {"accumulation": 2, "reshard": False, "clip": 0.05},
    "deferred-sync": {"accumulation": 2, "sharding": {"sync_each_batch": False}},
    "lora-checkpointed": {"method": "lora", "checkpointing": "full", "dropout": 0.1},
    "bf16-tied": {
        "precision": {"preset": "bf16-mixed", "keep_norms_fp32": True},
        "tied": True,
        "load_dtype": "bfloat16",
    },
}


def _both(settings: dict[str, Any]) -> Callable[[int, int], Any]:
    def case(rank: int, world_size: int) -> dict[str, Any]:
        kept: list[bool] = []

        def look(trainer: Trainer) -> None:
            trainer.add_callback(_Units(kept))

        return {
            "device": train(Run(**settings), world_size),
            "host": train(Run(**settings, offload="parameters"), world_size, before=look),
            "in_host_memory": kept,
        }

    return case


class _Units(FSDPCallback):
    """Asks torch where every unit keeps its shards."""

    def __init__(self, kept: list[bool]):
        self.kept = kept

    def on_init_end(self, *args: Any, **kwargs: Any) -> None: ...

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        states = [read_unit_state(module) for module in model.modules()]
        self.kept += [state.is_in_host_memory for state in states if state is not None and state.parameters]

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    on_prediction_step = on_pre_optimizer_step = on_step_end = on_epoch_end = _nothing  # type: ignore[assignment]
    on_optimizer_step = on_train_end = _nothing  # type: ignore[assignment]


def _audit_sees_where_parameters_are(rank: int, world_size: int) -> dict[str, Any]:
    model = build_model("llama", tied=False)
    applied = apply_fsdp(model, FSDPConfig(precision="fp32", offload="parameters"))
    audited = audit_sharding(model)
    applied.offload = OffloadPolicy()
    try:
        audit_sharding(model)
    except ShardingError as error:
        return {"error": str(error), "text": str(audited)}
    return {"error": "", "text": str(audited)}


def _pinning_without_an_accelerator(rank: int, world_size: int) -> dict[str, Any]:
    model = build_model("llama", tied=False)
    try:
        apply_fsdp(model, FSDPConfig(precision="fp32", offload={"parameters": True, "pin_memory": True}))
    except ShardingError as error:
        untouched = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        applied = apply_fsdp(
            model, FSDPConfig(precision="fp32", offload={"parameters": True, "pin_memory": "auto"})
        )  # the fix
        return {"error": str(error), "untouched": untouched, "followed": applied.config.offload.parameters}
    return {"error": ""}


def _group_without_a_cpu_backend(rank: int, world_size: int) -> dict[str, Any]:
    """A group that reduces on a GPU only, as `nccl` does: told by its name, since there is no GPU here."""
    import torch.distributed as dist

    from hf_fsdp.config.schema import OffloadConfig
    from hf_fsdp.policies.host import build_offload_policy

    class Mesh:
        device_type = "cuda"

    told = dist.get_backend_config
    results = {}
    try:
        for name in ("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"):
            dist.get_backend_config = lambda name=name: name
            try:
                policy = build_offload_policy(OffloadConfig(parameters=True, optimizer=True), Mesh())  # type: ignore[arg-type]
                results[name] = "pinned" if isinstance(policy, CPUOffloadPolicy) and policy.pin_memory else "not pinned"
            except ShardingError as error:
                results[name] = str(error)
    finally:
        dist.get_backend_config = told
    return results


def _save_and_resume(format: str) -> Callable[[int, int], Any]:
    """Stop after 2 of 4 steps and resume; then save the model and load it again."""

    def case(rank: int, world_size: int) -> dict[str, Any]:
        import torch.distributed as dist

        shared = [tempfile.mkdtemp() if rank == 0 else ""]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0])

        def build(steps: int, output: str) -> Trainer:
            config = FSDPConfig(precision="fp32", offload="parameters", checkpoint=format)
            quiet = {**QUIET_ARGUMENTS, "save_strategy": "steps", "save_steps": 2}
            arguments = TrainingArguments(
                output_dir=str(folder / output),
                **quiet,
                max_steps=steps,
                per_device_train_batch_size=4,
                learning_rate=1e-3,
                lr_scheduler_type="constant",
                **config.trainer_kwargs(),
            )
            return Trainer(
                model=build_model("llama", tied=True),
                args=arguments,
                train_dataset=build_dataset(),
                callbacks=[FSDPCallback()],
            )

        whole_run = build(4, "whole")
        whole_run.train()
        from tests.distributed.harness import forget_accelerate

        forget_accelerate()
        resumed = build(4, "resumed")
        resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
        resumed.save_model(str(folder / "final"))
        dist.barrier()
        loaded = AutoModelForCausalLM.from_pretrained(folder / "final")
        held = {name: whole(parameter) for name, parameter in resumed.model.named_parameters()}
        expected = {name: whole(parameter) for name, parameter in whole_run.model.named_parameters()}
        dist.barrier()
        return {
            "resumed_equal": all(torch.equal(held[name], expected[name]) for name in expected),
            "loaded_equal": all(torch.equal(held[name], value) for name, value in loaded.named_parameters()),
            "num": len(expected),
        }

    return case


CASES: dict[str, Callable[[int, int], Any]] = {name: _both(settings) for name, settings in RUNS.items()}
CASES |= {
    "audit": _audit_sees_where_parameters_are,
    "pinning": _pinning_without_an_accelerator,
    "backend": _group_without_a_cpu_backend,
    "resume_full": _save_and_resume("full"),
    "resume_sharded": _save_and_resume("sharded"),
}
