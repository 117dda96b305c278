"""The `hf-fsdp` command: parses, calls, prints.

Nothing heavy is imported here, so that `hf-fsdp --help` answers at once; each command imports what it needs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_fsdp import __version__
from hf_fsdp.config.presets import MODEL_PRESETS
from hf_fsdp.errors import ConfigError, HfFsdpError, Problem, nearest_names

if TYPE_CHECKING:
    from pathlib import Path

    from hf_fsdp.config.generate import LaunchPlan
    from hf_fsdp.config.presets import Gpu, ModelFacts
    from hf_fsdp.config.schema import FSDPConfig

METHODS = ("full", "lora", "qlora")

app = typer.Typer(
    name="hf-fsdp",
    help="Fully sharded training you can trust inside the Hugging Face Trainer.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; the entry point of the `hf-fsdp` script."""
    app(prog_name="hf-fsdp")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"hf-fsdp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Fully sharded training you can trust inside the Hugging Face Trainer."""


@contextmanager
def _errors_without_traceback() -> Iterator[None]:
    """Print an error of ours in its own shape and leave with code 2."""
    try:
        yield
    except HfFsdpError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(2) from None


@app.command("config")
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
        str | None, typer.Option("--gpus", metavar="N", help="GPUs of one machine: 8, or 8xA100-80G. Required.")
    ] = None,
    machines: Annotated[int, typer.Option("--machines", metavar="N", help="Machines, each with --gpus GPUs.")] = 1,
    method: Annotated[str, typer.Option("--method", metavar="NAME", help="full or lora.")] = "full",
    precision: Annotated[
        str, typer.Option("--precision", metavar="NAME", help="auto, fp32, bf16-mixed or bf16-true.")
    ] = "auto",
    offload: Annotated[str, typer.Option("--offload", metavar="WHAT", help="none.")] = "none",
    activation_checkpointing: Annotated[
        str,
        typer.Option(
            "--activation-checkpointing",
            "--activation_checkpointing",
            metavar="MODE",
            help="auto, none, full, or '{every: 2}'.",
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
    with _errors_without_traceback():
        _config(model, gpus, machines, method, flags, output, force)


def _config(
    model: str, gpus: str | None, machines: int, method: str, flags: dict[str, str], output: str | None, force: bool
) -> None:
    from hf_fsdp.config.generate import write_launch_file

    problems: list[Problem] = []
    options = {"--gpus": gpus, "--machines": str(machines), "--method": method, **flags, "-o": output}
    facts, plan = _read_plan(model, gpus, machines, method, _command_line(model, options), problems)
    config = _read_flags(flags, problems)
    if plan is not None:
        config = _fit_precision(config, plan.gpu, flags["--precision"], problems)
    path = _check_output(output, force, problems)
    if problems or plan is None or facts is None:
        raise ConfigError(problems)
    text = write_launch_file(config, plan)
    if path is None:
        typer.echo(text, nl=False)
    else:
        _write(path, text)
        typer.echo(f"wrote {path}")
    for line in _closing_lines(config, plan, facts, str(path) if path else None):
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
    from hf_fsdp.config.generate import LaunchPlan
    from hf_fsdp.config.presets import find_model, parse_gpus

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
    method = _read_method(method, problems)
    if facts is None or request is None or machines < 1:
        return facts, None
    words = {"full": "full fine-tuning", "lora": "LoRA fine-tuning"}.get(method, method)
    plan = LaunchPlan(
        num_processes=request.count * machines,
        num_machines=machines,
        gpu=request.gpu,
        model=facts,
        purpose=f"{words} of {facts.name}",
        command=command,
    )
    return facts, plan


def _read_method(text: str, problems: list[Problem]) -> str:
    method = text.strip().lower()
    if method == "qlora":
        problems.append(
            Problem(
                message="--method qlora arrives in a later release and is refused rather than ignored",
                fix="--method lora",
            )
        )
    elif method not in METHODS:
        near = nearest_names(method, METHODS[:2])
        problems.append(
            Problem(
                message=f"--method {text} is not a way to fine-tune",
                fix=f"--method {near[0] if near else 'full'}",
                near=", ".join(near or METHODS[:2]),
            )
        )
    return method


def _read_flags(flags: dict[str, str], problems: list[Problem]) -> FSDPConfig:
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
    if gpu is None or gpu.has_bf16 or preset == "fp32":
        return config
    if preset == "auto":
        return replace(config, precision=replace(config.precision, preset="fp32"))
    problems.append(
        Problem(
            message=f"--precision {text}: {gpu.name} does not compute in bf16",
            fix="--precision fp32   # fp16 with loss scaling arrives in a later release",
        )
    )
    return config


def _check_output(output: str | None, force: bool, problems: list[Problem]) -> Path | None:
    if output is None:
        return None
    from pathlib import Path

    path = Path(output)
    if path.is_dir():
        problems.append(
            Problem(message=f"-o {output} is a folder", fix=f"-o {path / 'fsdp.yaml'}", source="the command line")
        )
    elif path.exists() and not force:
        problems.append(
            Problem(
                message=f"-o {output} exists and is not overwritten",
                fix="--force replaces it; or -o with another name",
                source="the command line",
            )
        )
    return path


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"-o {path} cannot be written: {error.strerror}", fix="-o with a file that this user may write"
        ) from None


def _closing_lines(config: FSDPConfig, plan: LaunchPlan, facts: ModelFacts, path: str | None) -> Iterator[str]:
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
