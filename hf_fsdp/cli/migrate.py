"""`hf-fsdp migrate`: an old config of FSDP1 or FSDP2 as a config of ours."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from hf_fsdp.cli.output import check_output, errors_without_traceback, write_text
from hf_fsdp.errors import ConfigError, Problem

if TYPE_CHECKING:
    from hf_fsdp.config.migrate import Migration


NEW = "NEW"  # stands for the file that a person saves
LAUNCH_NAMES = ("launch.yaml", "launch_fsdp2.yaml", "accelerate_fsdp2.yaml")


def migrate_command(
    old: Annotated[
        str,
        typer.Argument(
            metavar="OLD",
            help="Accelerate's launch file, TrainingArguments as YAML or JSON, a config of Axolotl or LLaMA-Factory, "
            "or a Python file with the calls in it; which of them is found from its content.",
        ),
    ],
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="NEW", help="Write here; without it, to the terminal.")
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option("--launch", metavar="FILE", help="From Accelerate's file: write the new launch file here too."),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option("--replicas", metavar="N", help="Hybrid sharding: how many copies, where OLD does not say."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace NEW and FILE if they exist.")] = False,
) -> None:
    """Turn an old FSDP config into one for hf-fsdp; lists what has no equivalent, and why."""
    with errors_without_traceback():
        _migrate(old, output, launch, replicas, force)


def _migrate(old: str, output: str | None, launch: str | None, replicas: int | None, force: bool) -> None:
    from hf_fsdp.config.migrate import migrate

    problems: list[Problem] = []
    path, launch_path = check_output(output, force, problems), check_output(launch, force, problems, "--launch")
    if path is not None and path == launch_path:
        message = f"-o and --launch both name {path}: the config and the launch file are two files"
        problems.append(Problem(message=message, fix=f"--launch {path.with_name('launch.yaml')}"))
    if problems:
        raise ConfigError(problems)
    migration = migrate(old, replicas, _command_line(old, output, launch, replicas))
    launch_text = _launch_text(migration, old, output) if launch_path is not None else None
    if path is None:
        typer.echo(migration.text, nl=False)
    else:
        write_text(path, migration.text)
        typer.echo(f"wrote {path}, from {migration.kind}")
    if launch_path is not None and launch_text is not None:
        write_text(launch_path, launch_text)
        typer.echo(f"wrote {launch_path}, its launch file", err=path is None)
    for line in _closing_lines(migration, old, output, launch, replicas):
        typer.echo(line, err=path is None)


def _command_line(old: str, output: str | None, launch: str | None, replicas: int | None) -> str:
    options = {"--replicas": replicas, "-o": output, "--launch": launch}
    words = ["hf-fsdp", "migrate", old]
    for flag, value in options.items():
        if value is not None:
            words += [flag, str(value)]
    return shlex.join(words)


def _launch_text(migration: Migration, old: str, output: str | None) -> str:
    from hf_fsdp.config.generate import LaunchPlan, write_launch_file

    machines = migration.machines
    if machines is None or machines.num_processes is None:
        missing = "is not Accelerate's" if machines is None else "has no num_processes"
        raise ConfigError(
            f"--launch: {old} {missing}, so the machines are not known",
            fix="leave --launch out and run: hf-fsdp config MODEL --gpus 8 -o FILE",
            source="the command line",
        )
    plan = LaunchPlan(
        num_processes=machines.num_processes,
        num_machines=machines.num_machines or 1,
        machine_rank=machines.machine_rank,
        main_process_ip=machines.main_process_ip,
        main_process_port=machines.main_process_port,
        callback=f"FSDPCallback(FSDPConfig.from_yaml({output or NEW!r}))",
        cpu_ram_efficient_loading=migration.cpu_ram_efficient_loading,
    )
    return write_launch_file(migration.config, plan)


def _closing_lines(
    migration: Migration, old: str, output: str | None, launch: str | None, replicas: int | None
) -> Iterator[str]:
    """Yield what was left behind and what a person does next."""
    from hf_fsdp.config.migrate import axolotl, llama_factory
    from hf_fsdp.config.migrate.write import write_left

    if output is not None:  # on the terminal, the text itself ends with them
        yield from write_left(list(migration.left))
    yield "next  in your script:"
    yield "        from hf_fsdp import FSDPCallback, FSDPConfig"
    yield f"        config = FSDPConfig.from_yaml({output or NEW!r})"
    yield "        args = TrainingArguments(..., **config.trainer_kwargs())"
    yield "        trainer = Trainer(..., args=args, callbacks=[FSDPCallback(config)])"
    if launch is not None:
        yield "      then run:"
        yield f"        accelerate launch --config_file {shlex.quote(launch)} train.py"
    elif migration.machines is not None and migration.machines.num_processes is not None:
        yield f"      and a launch file for FSDP2: {_launch_command(old, output, replicas)}"
    if migration.kind.startswith((axolotl.KIND, llama_factory.KIND)):
        yield "      or put the section into a run config of the recipe: hf-fsdp recipes copy llama2_7b_lora"


def _launch_command(old: str, output: str | None, replicas: int | None) -> str:
    """Return a command that writes the launch file alone: NEW is not written again, as it may have been edited."""
    from pathlib import Path

    taken = {Path(name) for name in (old, output) if name is not None}
    launch = next((name for name in LAUNCH_NAMES if Path(name) not in taken and not Path(name).exists()), "FILE")
    return _command_line(old, None, launch, replicas)
