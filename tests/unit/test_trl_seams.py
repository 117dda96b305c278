"""The seams into TRL, and what of its configs is refused; when a pin fails, upstream has moved."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer
from trl import DPOTrainer, GRPOConfig, GRPOTrainer, KTOTrainer, RLOOConfig
from trl.models import utils as trl_models

from hf_fsdp import FSDPCallback, FSDPConfig, build_accelerator
from hf_fsdp.errors import IntegrationError, ShardingError
from hf_fsdp.integrations import trl as trl_seam

# -- pins -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", [DPOTrainer, KTOTrainer, GRPOTrainer])
def test_reference_models_are_prepared_by_the_function_that_is_replaced(trainer: type[Trainer]) -> None:
    module = inspect.getmodule(trainer)
    assert hasattr(module, "prepare_fsdp"), f"integrations.trl replaces {module}.prepare_fsdp, and it is gone"
    source = inspect.getsource(trainer.__init__)
    assert "prepare_fsdp(self.ref_model, self.accelerator)" in source, "integrations.trl shards no reference any more"
    assert source.index("super().__init__(") < source.index("prepare_fsdp("), (
        "FSDPCallback.on_init_end attaches its backend when super().__init__ ends, before references are prepared"
    )
    assert list(inspect.signature(trl_models.prepare_fsdp).parameters) == ["model", "accelerator"]


@pytest.mark.parametrize("trainer", [DPOTrainer, KTOTrainer])
def test_log_probabilities_ahead_of_training_pass_through_the_seam(trainer: type[Trainer]) -> None:
    assert "_precompute_ref_logps" in vars(trainer), "integrations.trl shards the policy before this method runs"
    assert "self.ref_model or self.model" in inspect.getsource(inspect.unwrap(trainer._precompute_ref_logps))


def test_models_that_are_only_run_are_prepared_in_evaluation_mode() -> None:
    source = inspect.getsource(GRPOTrainer.__init__)
    assert "self.accelerator.prepare_model(\n" in source and "evaluation_mode=True" in source, (
        "integrations.accelerate._prepare_model shards reward models"
    )


def test_a_loss_that_divides_by_the_items_of_all_ranks_still_does() -> None:
    from trl.experimental.gkd import GKDTrainer

    source = inspect.getsource(GKDTrainer.compute_loss)
    assert "num_items_in_batch=num_items_in_batch" in source and "num_processes" not in source, (
        "integrations.trl.items_for_loss corrects this; if TRL does it now, take the name out"
    )
    args = SimpleNamespace(average_tokens_across_devices=True, world_size=4)
    corrected = GKDTrainer.__new__(GKDTrainer)
    corrected.args = args
    assert trl_seam.items_for_loss(corrected, torch.tensor(8)) == 2
    other = DPOTrainer.__new__(DPOTrainer)
    other.args = args
    assert trl_seam.items_for_loss(other, torch.tensor(8)) == 8


# -- what the seams do ------------------------------------------------------------------------------------------------


class _Backend:
    def __init__(self) -> None:
        self.frozen: list[nn.Module] = []

    def shard_frozen(self, model: nn.Module, device_type: str) -> None:
        self.frozen.append(model)


def test_every_module_that_holds_prepare_fsdp_hands_over_while_a_backend_is_attached() -> None:
    trl_seam.install_trl_seams()
    trl_seam.install_trl_seams()  # once is enough, twice changes nothing
    holders = [module for module in list(sys.modules.values()) if "prepare_fsdp" in (getattr(module, "__dict__", {}))]
    functions = {id(vars(module)["prepare_fsdp"]) for module in holders if module.__name__.startswith("trl.")}
    assert len(functions) == 1 and len(holders) >= 4

    backend, model = _Backend(), nn.Linear(2, 2)
    plugin = SimpleNamespace(_hf_fsdp_backend=backend)
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), device=torch.device("cpu"))
    assert trl_models.prepare_fsdp(model, accelerator) is model
    assert backend.frozen == [model]


def test_without_a_backend_trl_does_what_it_always_did() -> None:
    trl_seam.install_trl_seams()
    plugin = SimpleNamespace(fsdp_version=3)
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), device=torch.device("cpu"))
    with pytest.raises(ValueError, match="FSDP version 3 is not supported"):  # TRL's own words
        trl_models.prepare_fsdp(nn.Linear(2, 2), accelerator)


def test_a_teacher_of_another_architecture_is_wrapped_by_its_own_layers() -> None:
    from hf_fsdp.config.schema import WrapConfig
    from hf_fsdp.sharding.frozen import _wrap_for
    from tests.unit.small_models import tiny_llama

    model = tiny_llama(1)
    named = WrapConfig(layer_classes=("LlamaDecoderLayer",))
    assert _wrap_for(model, named) == named
    assert _wrap_for(model, WrapConfig(layer_classes=("Qwen3DecoderLayer",))) == WrapConfig()


# -- refusals, each with its advice followed --------------------------------------------------------------------------


def arguments(config: type, folder: Path, **overrides: Any) -> Any:
    quiet = {"use_cpu": True, "bf16": False, "report_to": [], "gradient_checkpointing": None}
    return config(str(folder), **quiet, **overrides)


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_generation_by_vllm_is_refused_by_one_line(config: type, mode: str, tmp_path: Path) -> None:
    problems = trl_seam.check_trl_arguments(arguments(config, tmp_path, use_vllm=True, vllm_mode=mode))
    assert len(problems) == 1
    assert f"use_vllm=True (vllm_mode='{mode}'): vLLM would have to be given the gathered weights" in str(problems[0])
    assert "fix   use_vllm=False" in str(problems[0])
    assert trl_seam.check_trl_arguments(arguments(config, tmp_path, use_vllm=False)) == []


def test_a_config_that_always_generates_on_a_server_is_refused(tmp_path: Path) -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    (problem,) = trl_seam.check_trl_arguments(arguments(AsyncGRPOConfig, tmp_path))
    assert "AsyncGRPOConfig always generates on a vLLM server" in problem.message
    assert "GRPOTrainer(args=GRPOConfig(use_vllm=False, ...))" in problem.fix
    assert trl_seam.check_trl_arguments(arguments(GRPOConfig, tmp_path, use_vllm=False)) == []


def test_generation_in_which_ranks_run_out_of_step_is_refused(tmp_path: Path) -> None:
    (problem,) = trl_seam.check_trl_arguments(
        arguments(GRPOConfig, tmp_path, use_transformers_continuous_batching=True)
    )
    assert "every rank would generate as many steps as its own prompts need" in problem.message
    assert problem.fix.startswith("use_transformers_continuous_batching=False")
    followed = arguments(GRPOConfig, tmp_path, use_transformers_continuous_batching=False)
    assert trl_seam.check_trl_arguments(followed) == []


def test_a_loss_made_beside_the_models_forward_is_refused(tmp_path: Path) -> None:
    from trl import DistillationConfig
    from trl.experimental.gkd import GKDConfig

    (problem,) = trl_seam.check_trl_arguments(arguments(DistillationConfig, tmp_path))
    assert "multiplies by lm_head.weight beside the model's forward" in problem.message
    assert problem.fix.startswith("GKDTrainer(args=GKDConfig(...))")
    assert trl_seam.check_trl_arguments(arguments(GKDConfig, tmp_path)) == []


# -- loops and notebooks ----------------------------------------------------------------------------------------------


def test_a_process_forked_after_cuda_was_used_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    for build in (FSDPCallback, build_accelerator):
        with pytest.raises(IntegrationError, match="forked from one in which CUDA was in use already") as refused:
            build()
        assert "restart the kernel" in str(refused.value)
    monkeypatch.undo()
    FSDPCallback()


def test_the_sign_of_a_bad_fork_is_where_torch_keeps_it() -> None:
    assert callable(torch.cuda._is_in_bad_fork) and torch.cuda._is_in_bad_fork() is False, (
        "integrations.fork asks torch.cuda._is_in_bad_fork"
    )


def test_a_loop_in_one_process_is_refused_when_sharding_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = FSDPConfig(sharding={"require_sharding": True})
    with pytest.raises(ShardingError, match="require_sharding is true and there is one process"):
        build_accelerator(config)
