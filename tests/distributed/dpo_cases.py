"""DPO under `FSDPCallback`: with a reference model, without one, and with log-probabilities ahead of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset, load_dataset
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from trl import DPOConfig, DPOTrainer

from hf_fsdp import FSDPCallback, FSDPConfig
from tests.distributed.sft_cases import build_tokenizer
from tests.distributed.tiny_models import build_model
from tests.distributed.trainer_kinds_cases import (
    FP32,
    held,
    lora,
    move_weights,
    observe,
    on_rank_0,
    preference_rows,
    quiet_folder,
    reward_full,
    run_arguments,
)
from tests.distributed.training import GradientRecorder, whole


def _dpo(
    world_size: int,
    *,
    peft: bool,
    reference: str = "none",
    config: FSDPConfig = FP32,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> dict[str, Any]:
    """DPO whose policy differs from its reference, so that the first loss is not log 2 whatever the reference does."""
    recorder = GradientRecorder()
    with quiet_folder() as (folder, printed):
        rows = Dataset.from_list(preference_rows())
        if overrides.get("precompute_ref_log_probs"):  # TRL shares them between ranks by the cache file of a dataset
            on_rank_0(lambda: rows.to_json(f"{folder}/rows.json"))
            rows = load_dataset("json", data_files=f"{folder}/rows.json", split="train", cache_dir=f"{folder}/cache")
        model: Any = build_model("llama", tied=False, dtype=dtype)
        if reference == "from_path":
            saved = model
            on_rank_0(lambda: saved.save_pretrained(f"{folder}/model"))
            model = f"{folder}/model"
            overrides["model_init_kwargs"] = {"dtype": "float32"}
        else:
            move_weights(model)
        ref_model = build_model("llama", tied=False, dtype=dtype) if reference == "given" else None
        callback = FSDPCallback(config)
        trainer = DPOTrainer(
            model=model,
            ref_model=ref_model,
            args=DPOConfig(**run_arguments(folder, world_size, **overrides), max_length=24, **config.trainer_kwargs()),
            train_dataset=rows,
            processing_class=build_tokenizer(),
            callbacks=[callback, recorder],
            peft_config=lora("CAUSAL_LM") if peft else None,
        )
        if peft:
            _fill_lora(trainer.model)
        sharded_before_training = held(trainer.model)["sharded"]
        trainer.train()
        frozen = trainer.ref_model
        result = observe(trainer, recorder, printed)
        result["sharded_before_training"] = sharded_before_training
        result["rewards"] = [entry["rewards/margins"] for entry in trainer.state.log_history if "loss" in entry]
        if frozen is not None:
            result["reference"] = {
                **held(frozen),
                "is_frozen": not any(parameter.requires_grad for parameter in frozen.parameters()),
                "is_training": frozen.training,
                "dtypes": sorted({str(parameter.dtype) for parameter in frozen.parameters()}),
                "audits": [audit.model_class for audit in callback.frozen_audits],
                "weights": {name: whole(parameter).clone() for name, parameter in frozen.named_parameters()},
            }
        return result


def _fill_lora(model: nn.Module) -> None:
    """B starts at zero, where A has no gradient, and the policy would equal its reference."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                value = torch.randn(parameter.shape) * 0.1
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.copy_(value)


def dpo_lora(rank: int, world_size: int) -> dict[str, Any]:
    return _dpo(world_size, peft=True)


def dpo_full(rank: int, world_size: int) -> dict[str, Any]:
    return _dpo(world_size, peft=False, reference="given")


def dpo_synced_reference(rank: int, world_size: int) -> dict[str, Any]:
    sync: dict[str, Any] = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    return _dpo(world_size, peft=False, reference="given", **sync)


def dpo_lora_precomputed(rank: int, world_size: int) -> dict[str, Any]:
    return _dpo(world_size, peft=True, precompute_ref_log_probs=True)


def dpo_full_precomputed(rank: int, world_size: int) -> dict[str, Any]:
    """TRL loads the reference itself, runs it over the rows, and lets it go before training."""
    return _dpo(world_size, peft=False, reference="from_path", precompute_ref_log_probs=True, num_train_epochs=2)


def dpo_in_bf16(rank: int, world_size: int) -> dict[str, Any]:
    """A bf16 reference stays bf16 between steps, while the policy is stored in fp32 for its optimizer."""
    config = FSDPConfig(precision="bf16-mixed", activation_checkpointing="full")
    return _dpo(world_size, peft=False, reference="given", config=config, bf16=True, dtype=torch.bfloat16)


def reward_then_dpo(rank: int, world_size: int) -> dict[str, Any]:
    """Two kinds of Trainer in one process under different configs: the second gives what it gives alone."""
    reward = reward_full(rank, world_size)
    # Of the policy's config, the reference must leave out what only a backward needs.
    offload = {"parameters": True, "activations": "block_inputs"}
    config = FSDPConfig(precision="fp32", activation_checkpointing="full", offload=offload)
    return {"first": reward["losses"], **_dpo(world_size, peft=False, reference="given", config=config)}


CASES: dict[str, Callable[[int, int], Any]] = {
    function.__name__: function
    for function in (
        dpo_lora,
        dpo_full,
        dpo_synced_reference,
        dpo_lora_precomputed,
        dpo_full_precomputed,
        dpo_in_bf16,
        reward_then_dpo,
    )
}
