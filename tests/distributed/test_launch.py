"""Started the ways people start things: `accelerate launch` with the examples' YAML files, and `torchrun`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp.checkpoint.verify import verify_checkpoint
from tests.distributed.harness import REPOSITORY
from tests.distributed.tiny_models import build_model

# The keys and values of the FSDP2 example files that TRL and Accelerate's documentation give, RAM-efficient loading
# and sharded state dicts included.
TRL_EXAMPLE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
ACCELERATE_EXAMPLE = """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_version: 2
mixed_precision: 'no'
num_processes: 2
"""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_model("llama", tied=True).save_pretrained(folder)
    return folder


def launch(command: list[str], model_folder: Path, output: Path, **environment: str) -> tuple[dict[str, Any], str]:
    """Run the script under `command` and return what it found and what it printed."""
    finished = subprocess.run(
        [*command, "-m", "tests.distributed.launched_script", str(model_folder), str(output)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", **environment},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert finished.returncode == 0, finished.stdout[-1500:] + finished.stderr[-4000:]
    return json.loads((output / "result.json").read_text()), finished.stdout


def accelerate_launch(yaml: str, folder: Path) -> list[str]:
    """`accelerate launch` with the file as it is; only two processes and a free port are said on the command line."""
    file = folder / "launch.yaml"
    file.write_text(yaml)
    options = ["--config_file", str(file), "--num_processes", "2", "--main_process_port", str(free_port())]
    return [sys.executable, "-m", "accelerate.commands.launch", *options]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_trls_example_file_runs_unchanged_with_only_the_callback(model_folder: Path, tmp_path: Path) -> None:
    result, printed = launch(accelerate_launch(TRL_EXAMPLE, tmp_path), model_folder, tmp_path)
    assert result["sharded"] and result["steps"] == 2
    assert result["stored"] == ["torch.float32"]
    assert "bf16-mixed" in printed and "sharded      100.0%" in printed
    assert (tmp_path / "final" / "model.safetensors").is_file(), "save_model wrote nothing under SHARDED_STATE_DICT"
    assert len(list((tmp_path / "checkpoint-2" / "model").glob("shard-*.safetensors"))) == 2
    assert verify_checkpoint(tmp_path / "checkpoint-2") == []


def test_accelerates_example_file_runs_unchanged_with_only_the_callback(model_folder: Path, tmp_path: Path) -> None:
    result, printed = launch(accelerate_launch(ACCELERATE_EXAMPLE, tmp_path), model_folder, tmp_path)
    assert result["sharded"] and result["steps"] == 2
    assert "(dp_shard 2), fp32" in printed


def test_stray_variables_do_not_leak_into_a_torchrun_launch(model_folder: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    with pytest.raises(AssertionError, match="in a run of 2 processes in which FSDP is off") as refused:
        launch(torchrun, model_folder, tmp_path, FSDP_OFFLOAD_PARAMS="true", FSDP_VERSION="1")
    assert "ignored FSDP_OFFLOAD_PARAMS=true, FSDP_VERSION=1" in str(refused.value)


def test_one_process_of_our_launch_file_trains_unsharded(model_folder: Path, tmp_path: Path) -> None:
    from hf_fsdp.config.generate import LaunchPlan, write_launch_file
    from hf_fsdp.config.schema import FSDPConfig

    file = tmp_path / "launch.yaml"
    file.write_text(write_launch_file(FSDPConfig(), LaunchPlan(num_processes=1)))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    result, printed = launch(command, model_folder, tmp_path)
    assert not result["sharded"] and "one process, so the model is trained unsharded" in printed


def test_one_process_under_fsdp_is_refused(model_folder: Path, tmp_path: Path) -> None:
    """Accelerate starts it under torchrun, and would shard it over itself."""
    file = tmp_path / "launch.yaml"
    file.write_text(ACCELERATE_EXAMPLE.replace("num_processes: 2", "num_processes: 1"))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    with pytest.raises(AssertionError, match="one process was launched with FSDP"):
        launch(command, model_folder, tmp_path)


def test_one_process_trains_unsharded_and_says_so(model_folder: Path, tmp_path: Path) -> None:
    result, printed = launch([sys.executable], model_folder, tmp_path)
    assert not result["sharded"]
    assert printed.count("hf-fsdp: one process, so the model is trained unsharded") == 1
