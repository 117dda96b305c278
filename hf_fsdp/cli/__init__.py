"""The `hf-fsdp` command: parses, calls, prints; one file a command.

Nothing heavy is imported here, so that `hf-fsdp --help` answers at once; each command imports what it needs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from hf_fsdp import __version__
from hf_fsdp.cli.checkpoint import checkpoint_app
from hf_fsdp.cli.config import config_command
from hf_fsdp.cli.migrate import migrate_command
from hf_fsdp.cli.plan import plan_command
from hf_fsdp.cli.recipes import recipes_app

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


app.command("config")(config_command)
app.command("migrate")(migrate_command)
app.command("plan")(plan_command)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(recipes_app, name="recipes")
