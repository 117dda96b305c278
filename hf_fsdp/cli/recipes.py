"""`hf-fsdp recipes list` and `hf-fsdp recipes copy`: the recipes of an installed package, as files to work with."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from hf_fsdp.cli.output import errors_without_traceback, write_text
from hf_fsdp.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pathlib import Path

    from hf_fsdp.cli.recipe_files import Recipe

recipes_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List the recipes, or copy one to work with."
)


@recipes_app.command("list")
def list_command() -> None:
    """Print every recipe: its name, model, method, GPUs, and one line about it."""
    from hf_fsdp.cli.recipe_files import find_recipes

    with errors_without_traceback():
        recipes = find_recipes()
        rows = [("NAME", "MODEL", "METHOD", "GPUS", "")]
        rows += [(r.name, r.model, r.method, str(r.num_gpus), r.summary) for r in recipes]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        for row in rows:
            cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
            typer.echo("  ".join([*cells, row[4]]).rstrip())
        typer.echo(f"copy one with: hf-fsdp recipes copy {recipes[0].name}")


@recipes_app.command("copy")
def copy_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `hf-fsdp recipes list`.")],
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FOLDER", help="Copy into this folder; without it, NAME.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there and differ.")] = False,
) -> None:
    """Copy a recipe's script, run config and launch file into a folder, and print the command that starts it."""
    from pathlib import Path

    from hf_fsdp.cli.recipe_files import find_recipe

    with errors_without_traceback():
        recipe = find_recipe(name)
        folder = Path(output if output is not None else recipe.name)
        texts = _check_folder(recipe, folder, force)
        for file, text in texts.items():
            write_text(folder / file, text)
            typer.echo(f"wrote {folder / file}")
        for file in recipe.files:
            if file not in texts:
                typer.echo(f"kept  {folder / file}, which is the same")
        typer.echo(f"next  pip install 'hf-fsdp[{recipe.extras}]'")
        typer.echo(f"      cd {shlex.quote(str(folder))}")
        typer.echo(f"      {recipe.command}")
        typer.echo(f"      on other than {recipe.num_gpus} GPUs: accelerate launch --num_processes N --config_file ...")


def _check_folder(recipe: Recipe, folder: Path, force: bool) -> dict[str, str]:
    """Return the files to write and their text, without those that are there already and are the same."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"-o {folder} is a file", fix="-o with the name of a folder")
    problems, texts = [], {}
    for file in recipe.files:
        text, target = (recipe.root / file).read_text(encoding="utf-8"), folder / file
        if target.is_file() and target.read_bytes() == text.encode("utf-8"):
            continue
        if target.exists() and not (force and target.is_file()):
            fix = f"-o with another folder; or --force, which replaces {target}"
            problems.append(Problem(message=f"{target} exists and is not overwritten", fix=fix))
        texts[file] = text
    if problems:
        raise ConfigError(problems)
    return texts
