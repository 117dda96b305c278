"""`hf-fsdp config`: the launch file of a model, with the reason on each line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_fsdp.cli.output import check_output, errors_without_traceback, write_text
from hf_fsdp.config.presets import MODEL_PRESETS
from hf_fsdp.errors import ConfigError, Problem, nearest_names

if TYPE_CHECKING:
    from hf_fsdp.config.generate import LaunchPlan
    from hf_fsdp.config.hardware import Gpu
    from hf_fsdp.config.presets import ModelFacts
    from hf_fsdp.config.schema import FSDPConfig

METHODS = ("full", "lora", "qlora")


def config_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A preset, a hub id such as meta-llama/Llama-2-7b-hf, or a model folder. "
            f"Presets: {', '.join(preset.alias for preset in MODEL_PRESETS)}.",
        ),
    ],
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus", metavar="N", help="GPUs of one machine: 8, or 8xA100-80G; 2x8 for two machines. Required."
        ),
    ] = None,
    machines: Annotated[int, typer.Option("--machines", metavar="N", help="Machines, each with --gpus GPUs.")] = 1,
    method: Annotated[str, typer.Option("--method", metavar="NAME", help="full, lora or qlora.")] = "full",
    precision: Annotated[
        str, typer.Option("--precision", metavar="NAME", help="auto, fp32, bf16-mixed, bf16-true or fp16-mixed.")
    ] = "auto",
    offload: Annotated[
        str,
        typer.Option("--offload", metavar="WHAT", help="none, parameters, activations, or both by a comma."),
    ] = "none",
    activation_checkpointing: Annotated[
        str,
        typer.Option(
            "--activation-checkpointing",
            "--activation_checkpointing",
            metavar="MODE",
            help="auto, none, full, selective, '{every: 2}', '{fraction: 0.5}'.",
        ),
    ] = "auto",
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Write here; without it, to the terminal.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    """Write a launch file for `accelerate launch --config_file`, with the reason on each line."""
    flags = {
        "--precision": precision,
        "--offload": offload,
        "--activation-checkpointing": activation_checkpointing,
    }
    with errors_without_traceback():
        _config(model, gpus, machines, method, flags, output, force)


def _config(
    model: str, gpus: str | None, machines: int, method: str, flags: dict[str, str], output: str | None, force: bool
) -> None:
    from hf_fsdp.config.generate import write_launch_file

    problems: list[Problem] = []
    options = {"--gpus": gpus, "--machines": str(machines), "--method": method, **flags, "-o": output}
    facts, plan = _read_plan(model, gpus, machines, method, _command_line(model, options), problems)
    config = read_flags(flags, problems)
    if plan is not None:
        config = _fit_precision(config, plan.gpu, flags["--precision"], problems)
    path = check_output(output, force, problems)
    if problems or plan is None or facts is None:
        raise ConfigError(problems)
    text = write_launch_file(config, plan)
    if path is None:
        typer.echo(text, nl=False)
    else:
        write_text(path, text)
        typer.echo(f"wrote {path}")
    loading = _four_bit_loading(config) if method.strip().lower() == "qlora" else ()
    for line in _closing_lines(config, plan, facts, str(path) if path else None, loading):
        typer.echo(line, err=path is None)


def _command_line(model: str, options: dict[str, str | None]) -> str:
    """Return the command that writes the file again, without the options that are at their defaults."""
    defaults = {"--machines": "1", "--method": "full", "--offload": "none"}
    words = ["hf-fsdp", "config", model]
    for flag, text in options.items():
        if text is not None and text != defaults.get(flag, "auto"):
            words += [flag, text]
    return shlex.join(words)


def _read_plan(
    model: str, gpus: str | None, machines: int, method: str, command: str, problems: list[Problem]
) -> tuple[ModelFacts | None, LaunchPlan | None]:
    """Return the model and the machines; what is wrong goes to `problems`."""
    from dataclasses import replace

    from hf_fsdp.config.generate import LaunchPlan
    from hf_fsdp.config.hardware import parse_gpus
    from hf_fsdp.config.presets import find_model

    facts = request = None
    try:
        facts = find_model(model)
    except ConfigError as error:
        problems.extend(error.problems)
    try:
        if gpus is None:
            raise ConfigError("--gpus is missing: how many GPUs has one machine?", fix="--gpus 8, or --gpus 8xA100-80G")
        request = parse_gpus(gpus)
    except ConfigError as error:
        problems.extend(error.problems)
    if machines < 1:
        problems.append(Problem(message=f"--machines {machines} is below 1", fix="--machines 1"))
    elif request is not None and request.num_nodes > 1:
        if machines not in (1, request.num_nodes):
            problems.append(
                Problem(
                    message=f"--gpus {gpus} says {request.num_nodes} machines, --machines says {machines}",
                    fix=f"--machines {request.num_nodes}",
                )
            )
        machines = request.num_nodes
    method = _read_method(method, problems)
    if facts is None or request is None or machines < 1:
        return facts, None
    words = {"full": "full fine-tuning", "lora": "LoRA fine-tuning", "qlora": "QLoRA fine-tuning"}.get(method, method)
    plan = LaunchPlan(
        num_processes=request.count * machines,
        num_machines=machines,
        gpu=request.gpu,
        # The size in the file's comments is that of 16 or 32 bits a weight, which a 4-bit base is not.
        model=replace(facts, num_parameters=None) if method == "qlora" else facts,
        purpose=f"{words} of {facts.name}",
        command=command,
    )
    return facts, plan


def _read_method(text: str, problems: list[Problem]) -> str:
    method = text.strip().lower()
    if method not in METHODS:
        near = nearest_names(method, METHODS)
        problems.append(
            Problem(
                message=f"--method {text} is not a way to fine-tune",
                fix=f"--method {near[0] if near else 'full'}",
                near=", ".join(near or METHODS),
            )
        )
    return method


def read_flags(flags: dict[str, str], problems: list[Problem]) -> FSDPConfig:
    """Return the config that the usable flags state, each read like the section of the same name in YAML."""
    from hf_fsdp.config.schema import FSDPConfig

    sections: dict[str, Any] = {}
    for flag, text in flags.items():
        section = flag[2:].replace("-", "_")
        value = _flag_value(text)
        try:
            FSDPConfig.from_mapping({section: value}, source=f"{flag} {text}")
        except ConfigError as error:
            problems.extend(_as_flag_problem(problem, flag) for problem in error.problems)
            continue
        sections[section] = value
    return FSDPConfig.from_mapping(sections, source="the command line")


def _flag_value(text: str) -> Any:
    """Return a mapping or list typed in YAML's flow style; any other text is taken as it is."""
    if text.lstrip()[:1] not in ("{", "["):
        return text
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _as_flag_problem(problem: Problem, flag: str) -> Problem:
    """Return the problem of a section with its repair as a flag."""
    key, _, value = problem.fix.partition("   #")[0].partition(": ")
    section, _, name = key.partition(".")
    if section != flag[2:].replace("-", "_"):
        return problem
    if name and name not in ("preset", "mode"):  # these two are what one word for the section means
        value = f"{{{name}: {value}}}"
    return Problem(
        message=problem.message, fix=f"{flag} {shlex.quote(value)}", near=problem.near, source=problem.source
    )


def _fit_precision(config: FSDPConfig, gpu: Gpu | None, text: str, problems: list[Problem]) -> FSDPConfig:
    """Return `config` with ``auto`` settled for a GPU without bf16; a stated bf16 is refused for it."""
    from dataclasses import replace

    preset = config.precision.preset
    if gpu is None or gpu.has_bf16 or preset in ("fp32", "fp16-mixed"):
        return config
    if preset == "auto":
        return replace(config, precision=replace(config.precision, preset="fp16-mixed"))
    problems.append(
        Problem(
            message=f"--precision {text}: {gpu.name} does not compute in bf16",
            fix="--precision fp16-mixed   # or fp32",
        )
    )
    return config


def _four_bit_loading(config: FSDPConfig) -> tuple[str, ...]:
    """Return the lines that load a 4-bit base so that it can be sharded: stored in the dtype that is computed in."""
    dtype = {"fp32": "torch.float32", "fp16-mixed": "torch.float16"}.get(config.precision.preset, "torch.bfloat16")
    load = f"AutoModelForCausalLM.from_pretrained(..., dtype={dtype}, quantization_config=BitsAndBytesConfig("
    return (
        f"model = {load}",
        "    load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True,",
        f"    bnb_4bit_compute_dtype={dtype}, bnb_4bit_quant_storage={dtype}))",
        "model = get_peft_model(model, LoraConfig(target_modules='all-linear', task_type='CAUSAL_LM'))",
    )


def _closing_lines(
    config: FSDPConfig, plan: LaunchPlan, facts: ModelFacts, path: str | None, loading: Sequence[str] = ()
) -> Iterator[str]:
    """Yield what a person does next, as commands that can be copied."""
    from hf_fsdp.config.generate import settings_outside_launch_file

    if facts.note:
        yield f"note  {facts.note}"
    if plan.num_processes == 1:
        yield "note  one GPU: there is nothing to shard over, the model runs whole"
    arguments = _python_arguments(settings_outside_launch_file(config))
    callback = f"FSDPCallback(FSDPConfig({arguments}))" if arguments else "FSDPCallback()"
    names = "FSDPCallback, FSDPConfig" if arguments else "FSDPCallback"
    yield "next  in your script:"
    yield f"        from hf_fsdp import {names}"
    yield from (f"        {line}" for line in loading)
    yield f"        trainer = Trainer(..., callbacks=[{callback}])"
    file = shlex.quote(path or "FILE")
    if plan.num_machines == 1:
        yield "      then run:"
        yield f"        accelerate launch --config_file {file} train.py"
        return
    yield f"      then run, on each machine with its own rank 0 to {plan.num_machines - 1}:"
    yield (
        f"        accelerate launch --config_file {file} --machine_rank RANK "
        "--main_process_ip ADDRESS_OF_MACHINE_0 train.py"
    )


def _python_arguments(settings: list[tuple[str, str]]) -> str:
    """Return dotted keys with YAML values as keyword arguments for FSDPConfig, for a line of code."""
    import yaml

    sections: dict[str, dict[str, Any]] = {}
    for key, text in settings:
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = yaml.safe_load(text)
    return ", ".join(f"{section}={_short_form(fields)!r}" for section, fields in sections.items())


def _short_form(fields: dict[str, Any]) -> Any:
    """Return the one word that says a section, where there is one."""
    only = next(iter(fields)) if len(fields) == 1 else None
    return fields[only] if only in ("preset", "mode") else fields
