"""The launch file for `accelerate launch --config_file`: Accelerate's keys only, and on each line why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_fsdp.config.hardware import Gpu
from hf_fsdp.config.presets import ModelFacts
from hf_fsdp.config.validate import check_config
from hf_fsdp.config.values import yaml_value
from hf_fsdp.errors import ConfigError, Problem
from hf_fsdp.units import format_bytes

if TYPE_CHECKING:
    from hf_fsdp.config.schema import FSDPConfig

# Fields that have a key in Accelerate's file, or a value there that is the same for every config of this release.
_IN_LAUNCH_FILE = frozenset(
    {
        "wrap.policy",
        "wrap.layer_classes",
        "wrap.min_num_params",
        "precision.preset",
        "offload.parameters",
        "offload.optimizer",
        "sharding.reshard_after_forward",
        "checkpoint.format",
    }
)
_COMMENT_COLUMN = 46


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Where and for what a launch file is written.

    Args:
        num_processes: GPUs over all machines, one process each.
        num_machines: machines in the run.
        machine_rank: number of this machine, from 0.
        main_process_ip: address of machine 0, if known.
        main_process_port: port on machine 0.
        gpu: the GPU model, if it was named.
        model: what is known about the model, if one was named.
        purpose: words for the title line, e.g. ``full fine-tuning of meta-llama/Llama-2-7b-hf``.
        command: the command that wrote the file, for the title.
        callback: the call that the script adds, for the title.
        config_files: files beside this one that say what Accelerate has no key for; without them the script has to.
        cpu_ram_efficient_loading: process 0 alone reads the weights.
    """

    num_processes: int = 8
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int = 29500
    gpu: Gpu | None = None
    model: ModelFacts | None = None
    purpose: str | None = None
    command: str | None = None
    callback: str = "FSDPCallback()"
    config_files: tuple[str, ...] = ()
    cpu_ram_efficient_loading: bool = False


@dataclass(frozen=True)
class _Line:
    """One key of the file and the reason for its value."""

    key: str
    value: str
    why: str
    indent: int = 0

    def __str__(self) -> str:
        text = f"{' ' * self.indent}{self.key}:{' ' + self.value if self.value else ''}"
        return f"{text:<{_COMMENT_COLUMN}}  # {self.why}"


def write_launch_file(config: FSDPConfig, plan: LaunchPlan) -> str:
    """Return the YAML text of a launch file.

    Args:
        config: what is decided about sharding; what Accelerate has no key for is named in the title.
        plan: machines, GPUs and model.

    Raises:
        ConfigError: the numbers of `plan` do not fit together or do not fit ``config.sharding``.
    """
    problems = [*_check_plan(plan), *(check_config(config, plan.num_processes) if plan.num_processes > 0 else [])]
    if problems:
        raise ConfigError(problems)
    body = _machine_lines(config, plan)
    if plan.num_processes > 1:
        body += [_Line("fsdp_config", "", "read by Accelerate's FSDP plugin"), *_fsdp_lines(config, plan)]
    return "\n".join([*_title_lines(config, plan), *(str(line) for line in body)]) + "\n"


def launch_precision(config: FSDPConfig) -> str:
    """Return the preset that the file stands for; ``auto`` is ``bf16-mixed`` when nothing below says otherwise."""
    preset = config.precision.preset
    return "bf16-mixed" if preset == "auto" else preset


def settings_outside_launch_file(config: FSDPConfig) -> list[tuple[str, str]]:
    """Return (dotted key, value as YAML) of what differs from the defaults and has no key in Accelerate's file."""
    from hf_fsdp.config.parse import DOTTED_KEYS
    from hf_fsdp.config.schema import FSDPConfig

    defaults = FSDPConfig()
    outside = [
        (key, yaml_value(config.get(key)) if key != "wrap.callable" else "a Python function")
        for key in DOTTED_KEYS
        if key not in _IN_LAUNCH_FILE and config.get(key) != defaults.get(key)
    ]
    if config.precision.preset == "bf16-true":  # mixed_precision has no word for it
        outside.insert(0, ("precision.preset", "bf16-true"))
    return outside


def _check_plan(plan: LaunchPlan) -> list[Problem]:
    problems = []
    for name in ("num_processes", "num_machines"):
        value = getattr(plan, name)
        if value < 1:
            problems.append(Problem(message=f"{name}={value} is below 1", fix=f"{name}=1"))
    if problems:
        return problems
    if plan.num_processes % plan.num_machines:
        fitting = plan.num_machines * max(1, plan.num_processes // plan.num_machines)
        problems.append(
            Problem(
                message=f"num_processes={plan.num_processes} cannot be spread evenly over "
                f"num_machines={plan.num_machines}; num_processes counts the GPUs of all machines",
                fix=f"num_processes={fitting}",
            )
        )
    if not 0 <= plan.machine_rank < plan.num_machines:
        problems.append(
            Problem(
                message=f"machine_rank={plan.machine_rank} is not a machine of {plan.num_machines}, counted from 0",
                fix=f"machine_rank={min(max(plan.machine_rank, 0), plan.num_machines - 1)}",
            )
        )
    return problems


def _title_lines(config: FSDPConfig, plan: LaunchPlan) -> list[str]:
    lines = [f"# Launch file of Accelerate{' for ' + plan.purpose if plan.purpose else ''}."]
    if plan.command:
        lines.append(f"# Written by: {plan.command}")
    own = "A script of your own" if plan.config_files else "The script"
    does = "shards the model" if plan.num_processes > 1 else "leaves one process unsharded"
    lines.append(f"# {own} adds callbacks=[{plan.callback}] to its Trainer; FSDPCallback {does}.")
    outside = settings_outside_launch_file(config)
    if outside:
        where = "say it in the script's FSDPConfig"
        if plan.config_files:
            where = f"it is in {' and '.join(plan.config_files)} beside it"
        lines.append(f"# Not in this file, because Accelerate has no key for it; {where}:")
        lines += [f"#   {key}: {value}" for key, value in outside]
    if plan.num_processes > 1:  # one process is started without torchrun's agent
        lines += _grace_lines(config)
    return lines


def _grace_lines(config: FSDPConfig) -> list[str]:
    """What the launcher has to be told so that a run that is asked to stop has the time to save; no key for it."""
    grace = config.checkpoint.grace_seconds
    if grace == "auto":
        return [
            "# Asked to stop (SIGTERM), all ranks save and leave; after 30 s the launcher kills. For longer saves:",
            "#   export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300",
        ]
    return [
        "# Asked to stop (SIGTERM), all ranks save and leave. The launcher kills after 30 s unless it is told before:",
        f"#   export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={math.ceil(float(grace))}",
    ]


def _machine_lines(config: FSDPConfig, plan: LaunchPlan) -> list[_Line]:
    per_machine = plan.num_processes // plan.num_machines
    gpu = f" {plan.gpu.name}" if plan.gpu else ""
    lines = [
        _Line("compute_environment", "LOCAL_MACHINE", "your own machines, not SageMaker"),
        _distributed_line(plan),
        _precision_line(config, plan),
        _Line(
            "num_processes",
            str(plan.num_processes),
            f"one process a GPU: {per_machine}{gpu} on {_count(plan.num_machines, 'machine')}",
        ),
        _Line("num_machines", str(plan.num_machines), _machines_why(plan)),
        _Line("machine_rank", str(plan.machine_rank), _rank_why(plan)),
    ]
    if plan.num_machines > 1:
        if plan.main_process_ip:
            lines.append(_Line("main_process_ip", plan.main_process_ip, "machine 0, where the processes meet"))
        lines.append(_Line("main_process_port", str(plan.main_process_port), "must be reachable on machine 0"))
        lines.append(_Line("same_network", "true", "the machines reach each other by address"))
    lines.append(_Line("main_training_function", "main", "only read for TPUs; Accelerate's own files carry it"))
    return lines


def _distributed_line(plan: LaunchPlan) -> _Line:
    if plan.num_processes > 1:
        return _Line("distributed_type", "FSDP", "split parameters, gradients and optimizer state over the GPUs")
    # Told FSDP, Accelerate starts one process under torchrun too and shards it by itself, in its own precision.
    return _Line("distributed_type", "'NO'", "one process has nothing to split: Trainer trains it unsharded")


def _machines_why(plan: LaunchPlan) -> str:
    return "all GPUs are in one machine" if plan.num_machines == 1 else "run the launch command once on each of them"


def _rank_why(plan: LaunchPlan) -> str:
    if plan.num_machines == 1:
        return "the only machine"
    return "this machine; on the others --machine_rank, which wins over this line"


def _precision_line(config: FSDPConfig, plan: LaunchPlan) -> _Line:
    preset = launch_precision(config)
    if preset == "bf16-true":
        return _Line("mixed_precision", "'no'", "bf16-true stores bf16 and casts nothing; say it in FSDPConfig")
    if preset == "fp32":
        why = "fp32 everywhere"
        if plan.gpu is not None and not plan.gpu.has_bf16:
            why += f": {plan.gpu.name} does not compute in bf16"
        return _Line("mixed_precision", "'no'", why)
    if preset == "fp16-mixed":
        why = "fp16 compute, fp32 weights and sums, scaled loss"
        if plan.gpu is not None and not plan.gpu.has_bf16:
            why += f": {plan.gpu.name} does not compute in bf16"
        return _Line("mixed_precision", "fp16", why)
    if config.precision.reduce_dtype == "bfloat16":
        return _Line("mixed_precision", "bf16", "bf16 compute, fp32 weights, gradients summed in bf16")
    if plan.num_processes == 1:
        return _Line("mixed_precision", "bf16", "bf16 compute under autocast, fp32 weights")
    return _Line(
        "mixed_precision",
        "bf16",
        "bf16 compute; FSDPCallback sums gradients in fp32, Accelerate in bf16",
    )


def _fsdp_lines(config: FSDPConfig, plan: LaunchPlan) -> list[_Line]:
    lines = [
        _Line("fsdp_version", "2", "fully_shard on each block; left out, Accelerate takes FSDP1"),
        _reshard_line(config, plan),
        *_wrap_lines(config),
    ]
    classes = _wrap_classes(config, plan)
    if classes:
        lines.append(_Line("fsdp_transformer_layer_cls_to_wrap", ",".join(classes), _classes_why(config, plan)))
    full = config.checkpoint.format == "full"
    lines.append(
        _Line(
            "fsdp_state_dict_type",
            "FULL_STATE_DICT" if full else "SHARDED_STATE_DICT",
            "whole weights, gathered to process 0" if full else "each process writes the part it holds",
        )
    )
    lines.append(
        _Line(
            "fsdp_cpu_ram_efficient_loading",
            yaml_value(plan.cpu_ram_efficient_loading),
            "process 0 alone reads the weights; the others get its values"
            if plan.cpu_ram_efficient_loading
            else "each process reads the weights; left out it is true: all but one start empty",
        )
    )
    lines.append(
        _Line(
            "fsdp_activation_checkpointing",
            "false",
            "its recompute draws dropout anew: wrong gradients; see FSDPConfig",
        )
    )
    offloads = config.offload.parameters
    lines.append(
        _Line(
            "fsdp_offload_params",
            yaml_value(offloads),
            "shards, gradients and the optimizer are in host memory" if offloads else "parameters stay on the GPU",
        )
    )
    return [_Line(line.key, line.value, line.why, indent=2) for line in lines]


def _wrap_lines(config: FSDPConfig) -> list[_Line]:
    if config.wrap.policy != "size":
        return [_Line("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "one unit a block: gathered alone")]
    return [
        _Line("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP", "units by size, for a model that is no transformer"),
        _Line("fsdp_min_num_params", str(config.wrap.min_num_params), "parameters from which on a module is a unit"),
    ]


def _reshard_line(config: FSDPConfig, plan: LaunchPlan) -> _Line:
    reshard = config.sharding.reshard_after_forward
    size = ""
    if plan.model is not None and plan.model.num_parameters:
        compute_bytes = 4 if launch_precision(config) == "fp32" else 2
        size = f", {format_bytes(plan.model.num_parameters * compute_bytes)} a GPU"
    if reshard:
        why = f"free a block after its forward; false keeps the whole model{size}"
    else:
        why = f"keep the whole model until the backward{size}: less traffic"
    return _Line("fsdp_reshard_after_forward", yaml_value(reshard), why)


def _wrap_classes(config: FSDPConfig, plan: LaunchPlan) -> tuple[str, ...]:
    if config.wrap.layer_classes:
        return config.wrap.layer_classes
    if config.wrap.callable is None and plan.model is not None and plan.model.layer_class:
        return (plan.model.layer_class,)
    return ()


def _classes_why(config: FSDPConfig, plan: LaunchPlan) -> str:
    if config.wrap.layer_classes:
        return "named in wrap.layer_classes"
    times = f"{plan.model.num_layers} times" if plan.model and plan.model.num_layers else "over and over"
    return f"the block that the model repeats {times}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"each of {count} {noun}s"
