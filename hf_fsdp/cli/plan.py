"""`hf-fsdp plan`: what fits on which GPUs, and how fast, by simulating the step; nothing is downloaded but a config."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_fsdp.cli.plan_flags import Problems, check_together, flag_of
from hf_fsdp.cli.plan_request import read_hardware, read_request, words_of
from hf_fsdp.cli.plan_show import check_outputs, show_comparison, show_max_batch, show_plan, show_smallest
from hf_fsdp.cli.plan_sizes import read_count, read_memory, read_price
from hf_fsdp.cli.terminal import errors_for_scripts, say

if TYPE_CHECKING:
    from hf_fsdp.plan.candidate import Plan

# What is done with a plan, not what is asked.
_NOT_ASKED = ("model", "as_json", "html", "write", "force", "pick", "why", "top", "list_models")


def plan_command(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name of the built-in list such as llama-2-7b, a hub id, a model folder, a config.json, or a run "
            "config of configs/train/ (.yaml), which is planned as it stands. --list-models prints the list.",
        ),
    ] = "",
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", metavar="GPUS", help="8xA100-80G, 2x8xH100 for two machines, or 8 with --gpu-memory."),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Memory of a GPU without a preset: 40GiB.")
    ] = None,
    method: Annotated[str, typer.Option("--method", metavar="NAME", help="full, lora or qlora.")] = "full",
    max_length: Annotated[
        int, typer.Option("--max-length", metavar="N", help="Tokens a row, pictures counted.")
    ] = 2048,
    global_batch_size: Annotated[
        int, typer.Option("--global-batch-size", metavar="N", help="Rows of one step over all GPUs.")
    ] = 64,
    packing: Annotated[bool, typer.Option("--packing", help="Rows are filled with several samples.")] = False,
    padded: Annotated[
        bool, typer.Option("--padded/--no-padded", help="Rows of a micro-batch differ in length, so there is a mask.")
    ] = True,
    num_images: Annotated[
        int | None,
        typer.Option("--num-images", metavar="N", help="Pictures a row; 1 for models that take some, else 0."),
    ] = None,
    image_size: Annotated[
        str | None,
        typer.Option(
            "--image-size", metavar="HxW", help="Of each picture, in pixels: 448x672; for models that keep its size."
        ),
    ] = None,
    lora_r: Annotated[int, typer.Option("--lora-r", metavar="N", help="Rank of adapters.")] = 16,
    lora_dropout: Annotated[float, typer.Option("--lora-dropout", metavar="P", help="Above 0 keeps more.")] = 0.0,
    lora_parts: Annotated[
        str, typer.Option("--lora-parts", metavar="PARTS", help="language, vision, projector, by commas.")
    ] = "",
    trainable: Annotated[
        str, typer.Option("--trainable", metavar="PARTS", help="Parts trained under --method full, or all.")
    ] = "",
    optim: Annotated[
        str, typer.Option("--optim", metavar="NAME", help="As in TrainingArguments.")
    ] = "adamw_torch_fused",
    loss: Annotated[
        str,
        typer.Option(
            "--loss", metavar="KIND", help="chunked: TRL's SFTTrainer and our recipes; logits: plain Trainer."
        ),
    ] = "chunked",
    attention: Annotated[
        str, typer.Option("--attention", metavar="NAME", help="sdpa, flash_attention_2 or eager.")
    ] = "sdpa",
    precision: Annotated[
        str | None, typer.Option("--precision", metavar="NAME", help="Fix it: fp32, bf16-mixed, bf16-true, fp16-mixed.")
    ] = None,
    offload: Annotated[
        str | None, typer.Option("--offload", metavar="WHAT", help="Fix it: none, parameters, activations.")
    ] = None,
    activation_checkpointing: Annotated[
        str | None,
        typer.Option(
            "--activation-checkpointing", metavar="MODE", help="Fix it: none, full, '{selective: [attention]}'."
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="A YAML with an fsdp: section; what it says is fixed."),
    ] = None,
    price: Annotated[
        str | None, typer.Option("--price", metavar="X", help="Per GPU and hour, in any currency; needs --tokens.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            metavar="N",
            help="Tokens of the whole training: 2e9, 300M, 1.5B. As the model sees them: padding counts.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", metavar="SIZE", help="Of one machine: 1TiB; a limit for offload.")
    ] = None,
    max_batch: Annotated[
        bool, typer.Option("--max-batch", help="The largest micro-batch, and the longest rows of --micro-batch-size.")
    ] = False,
    micro_batch_size: Annotated[
        int, typer.Option("--micro-batch-size", metavar="N", help="Rows whose length --max-batch stretches.")
    ] = 1,
    min_gpus: Annotated[bool, typer.Option("--min-gpus", help="The fewest and smallest GPUs that do it.")] = False,
    compare: Annotated[
        str | None, typer.Option("--compare", metavar="NAMES", help="A table, e.g. ddp,fsdp,fsdp-offload.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Simulate every layer of the best, and of a run config.")
    ] = False,
    why: Annotated[bool, typer.Option("--why", help="Explain the choice by numbers.")] = False,
    top: Annotated[int, typer.Option("--top", metavar="N", help="How many candidates are shown.")] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON; schema in docs/plan.schema.json.")
    ] = False,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write one page with charts.")] = None,
    write: Annotated[
        str | None, typer.Option("--write", metavar="DIR", help="Write launch file, FSDP config and run config.")
    ] = None,
    pick: Annotated[int, typer.Option("--pick", metavar="N", help="Which of the ranked plans --write writes.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace files.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", metavar="NAME", help="Of a model on the hub.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model to read its config.")
    ] = False,
    list_models: Annotated[bool, typer.Option("--list-models", help="Print the built-in list and leave.")] = False,
) -> None:
    """Say what fits and how fast it is: the real step, simulated without weights, and a search over settings."""
    options: dict[str, Any] = {name: value for name, value in locals().items() if name != "context"}
    typed = frozenset(name for name in options if _is_typed(context, name))
    with errors_for_scripts(as_json=as_json):
        _plan(options, typed)


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _plan(options: dict[str, Any], typed: frozenset[str]) -> None:
    from hf_fsdp.plan.models.known_models import catalog_names
    from hf_fsdp.plan.search.recipe_run import is_run_config

    if options["list_models"]:
        for name in catalog_names():
            say(name)
        return
    if is_run_config(options["model"]):
        show_plan(_plan_run_config(options, typed), options, is_run=True)
        return
    problems = Problems()
    problems.found += check_outputs(options)
    request = problems.attempt(lambda: read_request(options, typed))
    problems.refuse()
    assert request is not None
    if options["max_batch"]:
        show_max_batch(request, options)
    elif options["min_gpus"]:
        show_smallest(request, options)
    elif options["compare"]:
        show_comparison(request, words_of(options["compare"].lower()), options)
    else:
        from hf_fsdp.plan.search.search import search

        show_plan(search(request, command=_command_line(options, typed)), options)


def _plan_run_config(options: dict[str, Any], typed: frozenset[str]) -> Plan:
    """Return the plan of one run config: no search, its own settings."""
    from hf_fsdp.plan.search.check import check_price
    from hf_fsdp.plan.search.recipe_plan import plan_recipe_run
    from hf_fsdp.plan.search.recipe_run import read_recipe_run

    problems = Problems()
    problems.found += check_together(options, typed, is_run=True)
    problems.found += check_outputs({**options, "write": None})
    hardware = problems.attempt(lambda: read_hardware(options))
    processes = 1 if hardware is None else hardware[0].num_gpus
    trusted = options["trust_remote_code"]
    problems.attempt(lambda: read_recipe_run(options["model"], processes, trust_remote_code=trusted))
    price = problems.attempt(lambda: read_price(options["price"]))
    problems.found += check_price(price)
    tokens = problems.attempt(lambda: read_count(options["tokens"], "--tokens"))
    host = problems.attempt(lambda: read_memory(options["host_memory"], "--host-memory"))
    problems.refuse()
    assert hardware is not None
    plan = plan_recipe_run(
        options["model"],
        *hardware,
        exact=options["exact"],
        timeline=bool(options["html"]),
        trust_remote_code=trusted,
        command=_command_line(options, typed),
    )
    request = dataclasses.replace(
        plan.request, training_tokens=tokens, price_per_gpu_hour=price, host_memory_bytes=host
    )
    candidates = tuple(dataclasses.replace(item, host_limit_bytes=host) for item in plan.candidates)
    return dataclasses.replace(plan, request=request, candidates=candidates)


def _command_line(options: dict[str, Any], typed: frozenset[str]) -> str:
    """Return the command that asks the same again: what was typed, in the order of --help."""
    words = ["hf-fsdp", "plan", options["model"]]
    for name, value in options.items():
        if name not in typed or name in _NOT_ASKED:
            continue
        if isinstance(value, bool):
            words.append(flag_of(name) if value else f"--no-{flag_of(name)[2:]}")
        else:
            words += [flag_of(name), str(value)]
    return shlex.join(words)
