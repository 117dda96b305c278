"""What `accelerate launch` exports is read; what nobody launched is named for removal."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_fsdp import FSDPConfig
from hf_fsdp.config import Stated, merge
from hf_fsdp.config.environment import (
    PLUGIN_VARIABLES,
    from_accelerate_environment,
    scrubbed_fsdp_environment,
    stray_fsdp_variables,
)
from hf_fsdp.config.precedence import RAM_EFFICIENT_LOADING
from hf_fsdp.errors import ConfigError

LAUNCHED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def launch_environment(path: Path) -> dict[str, str]:
    """Return what Accelerate's launcher would export for a launch file, without starting anything."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    args = launch_command_parser().parse_args(["--config_file", str(path), "--main_process_port", "0", "train.py"])
    args, _, _ = _validate_launch_command(args)
    return prepare_multi_gpu_env(args)


def written(tmp_path: Path, fsdp_config: dict[str, Any], **top: Any) -> Path:
    path = tmp_path / "launch.yaml"
    base = {"distributed_type": "FSDP", "num_processes": 2, "num_machines": 1, "machine_rank": 0}
    path.write_text(yaml.safe_dump({**base, **top, "fsdp_config": fsdp_config}), encoding="utf-8")
    return path


def test_every_variable_that_accelerates_plugin_falls_back_to_is_known() -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    source = inspect.getsource(FullyShardedDataParallelPlugin)
    read = {f"FSDP_{name}" for name in re.findall(r'env_prefix \+ "([A-Z_]+)"', source)}
    read |= set(re.findall(r'"(FSDP_[A-Z_]+)"', source))
    assert "FSDP_OFFLOAD_PARAMS" in read  # the pattern still finds something
    assert read - {"FSDP_CPU_RAM_EFFICIENT_LOADING"} == set(PLUGIN_VARIABLES)


def test_stray_variables_are_found_only_when_nothing_launched_fsdp() -> None:
    stray = {"FSDP_OFFLOAD_PARAMS": "true", "FSDP_VERSION": "1", "HOME": "/", "FSDP_DEBUG_OF_MINE": "1"}
    assert stray_fsdp_variables(stray) == ("FSDP_OFFLOAD_PARAMS", "FSDP_VERSION")
    assert stray_fsdp_variables({**stray, "ACCELERATE_USE_FSDP": "False"}) == ("FSDP_OFFLOAD_PARAMS", "FSDP_VERSION")
    assert stray_fsdp_variables({**stray, "ACCELERATE_USE_FSDP": "true"}) == ()
    assert stray_fsdp_variables({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}) == ()  # TrainingArguments writes it


def test_a_switch_that_accelerate_half_understands_is_stray() -> None:
    assert stray_fsdp_variables({"ACCELERATE_USE_FSDP": "1"}) == ("ACCELERATE_USE_FSDP",)


def test_removing_what_the_scrub_names_leaves_nothing_stray() -> None:
    environ = {"FSDP_OFFLOAD_PARAMS": "true", "ACCELERATE_USE_FSDP": "yes", "HOME": "/"}
    scrub = scrubbed_fsdp_environment(environ)
    assert scrub.names == ("ACCELERATE_USE_FSDP", "FSDP_OFFLOAD_PARAMS")
    assert "FSDP_OFFLOAD_PARAMS=true" in scrub.line
    left = {name: value for name, value in environ.items() if name not in scrub.names}
    assert scrubbed_fsdp_environment(left).names == ()
    assert scrubbed_fsdp_environment(left).line == ""
    assert "unset ACCELERATE_USE_FSDP FSDP_OFFLOAD_PARAMS" in scrub.line


def test_a_stray_variable_would_really_change_accelerates_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for the scrub: when this fails, upstream no longer reads the environment and the scrub can go."""
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    from accelerate.utils import FullyShardedDataParallelPlugin

    assert FullyShardedDataParallelPlugin(fsdp_version=2).activation_checkpointing is True
    monkeypatch.delenv(scrubbed_fsdp_environment(os.environ).names[0])
    assert FullyShardedDataParallelPlugin(fsdp_version=2).activation_checkpointing is False


def test_nothing_is_stated_without_a_launcher() -> None:
    assert from_accelerate_environment({}) == {}
    assert from_accelerate_environment({"FSDP_RESHARD_AFTER_FORWARD": "false"}) == {}


def test_a_launch_file_reaches_the_config(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "A, B",
            "fsdp_activation_checkpointing": True,
            "fsdp_cpu_ram_efficient_loading": True,
        },
        mixed_precision="bf16",
    )
    stated = from_accelerate_environment(launch_environment(path))
    assert all(not item.typed for item in stated.values())
    assert stated["sharding.reshard_after_forward"] == Stated(
        False, "Accelerate's launch file (FSDP_RESHARD_AFTER_FORWARD=false)", False
    )
    assert stated[RAM_EFFICIENT_LOADING].value is True
    config = merge(FSDPConfig(), {}, stated).config
    assert config.sharding.reshard_after_forward is False
    assert config.checkpoint.format == "sharded"
    assert config.wrap.layer_classes == ("A", "B")
    assert config.activation_checkpointing.mode == "full"
    assert config.precision.preset == "bf16-mixed"


def test_trls_own_fsdp2_file_is_read_as_it_is() -> None:
    trl = pytest.importorskip("trl")
    path = Path(trl.__file__).parent / "accelerate_configs" / "fsdp2.yaml"
    config = merge(FSDPConfig(), {}, from_accelerate_environment(launch_environment(path))).config
    assert config.precision.preset == "bf16-mixed"
    assert config.checkpoint.format == "full"
    assert config.activation_checkpointing.mode == "auto"  # the launcher's "false" is no wish of anybody


def test_our_own_launch_file_is_read_back_without_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    asked = FSDPConfig(wrap=["A"], precision="fp32", sharding={"reshard_after_forward": False}, checkpoint="sharded")
    path.write_text(asked.to_accelerate(num_processes=4), encoding="utf-8")
    assert merge(FSDPConfig(), {}, from_accelerate_environment(launch_environment(path))).config == asked


def test_an_fsdp1_file_is_refused_and_its_fix_works(tmp_path: Path) -> None:
    path = written(tmp_path, {"fsdp_sharding_strategy": "FULL_SHARD"})
    with pytest.raises(ConfigError, match="asks for FSDP version 1; this release runs FSDP2") as caught:
        from_accelerate_environment(launch_environment(path))
    fix = yaml.safe_load(caught.value.problems[0].fix)
    assert from_accelerate_environment(launch_environment(written(tmp_path, fix)))


@pytest.mark.parametrize(
    ("variables", "message", "repaired"),
    [
        ({"FSDP_OFFLOAD_PARAMS": "perhaps"}, "neither true nor false", {"FSDP_OFFLOAD_PARAMS": "false"}),
        ({"FSDP_STATE_DICT_TYPE": "LOCAL_STATE_DICT"}, "does not exist under FSDP2", None),
        ({"FSDP_TRANSFORMER_CLS_TO_WRAP": "['A', 'B']"}, "not the name of a class", None),
        ({"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, "has no effect under FSDP2", None),
        ({"FSDP_SHARDING_STRATEGY": "4"}, "HYBRID_SHARD is FSDP1's", None),
        (
            {"FSDP_IGNORED_MODULES": "lm_head"},
            "fsdp_ignored_modules arrives in a later",
            {"FSDP_IGNORED_MODULES": "None"},
        ),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "'fp8' arrives in a later", {"ACCELERATE_MIXED_PRECISION": "bf16"}),
        (
            {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"},
            "parallelism_config_tp_size: 2 arrives in a later release",
            {"PARALLELISM_CONFIG_TP_SIZE": "1"},
        ),
    ],
)
def test_what_the_file_asks_for_and_we_cannot_do_is_refused(
    variables: dict[str, str], message: str, repaired: dict[str, str] | None
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        from_accelerate_environment({**LAUNCHED, **variables})
    (problem,) = caught.value.problems
    assert str(problem.source).startswith("Accelerate's launch file (")
    if repaired is not None:
        from_accelerate_environment({**LAUNCHED, **variables, **repaired})


def test_offload_size_and_fp16_of_a_launch_file_reach_the_config() -> None:
    environ = {
        **LAUNCHED,
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "5000",
        "ACCELERATE_MIXED_PRECISION": "fp16",
    }
    config = merge(FSDPConfig(), {}, from_accelerate_environment(environ)).config
    assert config.offload.parameters and config.offload.optimizer
    assert config.offload.activations == "block_inputs"
    assert (config.wrap.policy, config.wrap.min_num_params) == ("size", 5000)
    assert config.precision.preset == "fp16-mixed"


def test_the_size_that_the_launcher_exports_beside_every_policy_says_nothing() -> None:
    environ = {**LAUNCHED, "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "100000000"}
    assert merge(FSDPConfig(), {}, from_accelerate_environment(environ)).config.wrap.policy == "transformer_layers"


def test_hybrid_sharding_of_a_parallelism_config_is_read() -> None:
    environ = {
        **LAUNCHED,
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
        "PARALLELISM_CONFIG_TP_SIZE": "1",
    }
    config = merge(FSDPConfig(), {}, from_accelerate_environment(environ)).config
    assert (config.sharding.dp_replicate_size, config.sharding.dp_shard_size) == (2, 4)


def test_all_problems_of_a_launch_come_at_once() -> None:
    environ = {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "maybe", "ACCELERATE_MIXED_PRECISION": "fp8"}
    with pytest.raises(ConfigError, match="^3 problems"):
        from_accelerate_environment(environ)
