"""Tables, progress and errors on a terminal, with text that may come from a hostile file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import typer

from hf_fsdp.errors import ConfigError, HfFsdpError

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 240


def printable(text: str) -> str:
    """Return `text` without what a terminal would obey: escape sequences, and marks that turn the writing direction."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape", "surrogatepass").decode("ascii")
        for char in text
    )


@contextmanager
def errors_for_scripts(*, as_json: bool = False) -> Iterator[None]:
    """Print an error of ours without a traceback and leave with 1, or with 2 when the command itself was wrong.

    Args:
        as_json: say it on stdout too, as JSON: ``{"error": ...}``.
    """

    def tell(text: str) -> None:
        typer.echo(printable(text), err=True)
        if as_json:
            with suppress(OSError):  # it may be stdout that cannot be written; the line above is said
                print_json({"error": text})

    try:
        yield
    except HfFsdpError as error:
        tell(f"{type(error).__name__}: {error}")
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        tell(f"{type(error).__name__}: {where}{error.strerror or error}")
        raise typer.Exit(1) from None


def print_json(value: Any) -> None:
    """Print `value` as JSON that holds ASCII only."""
    typer.echo(json.dumps(value, indent=2))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print a table as wide as it needs to be; columns in `right` are aligned to the right."""
    from rich.table import Table
    from rich.text import Text

    if sys.stdout is None:  # closed by whoever started this
        return
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    for index, title in enumerate(header):
        table.add_column(title, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    _console().print(table)


def say(text: str) -> None:
    """Print a line of which parts were read from files."""
    typer.echo(printable(text))


def _console() -> Console:
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    return Console(width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


class Advance(Protocol):
    """Tells a progress bar how many bytes were done, and, when it is known, how many there are."""

    def __call__(self, done: int, total: int) -> None: ...


@contextmanager
def progress_bar(label: str, *, quiet: bool = False) -> Iterator[Advance]:
    """Yield a function for a bar of bytes on stderr; nothing is drawn where nobody looks."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(printable(label), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
