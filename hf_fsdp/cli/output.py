"""What every command does alike: errors without a traceback, and files that are not overwritten."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from hf_fsdp.errors import ConfigError, HfFsdpError, Problem

if TYPE_CHECKING:
    from pathlib import Path


@contextmanager
def errors_without_traceback() -> Iterator[None]:
    """Print an error of ours in its own shape and leave with code 2."""
    try:
        yield
    except HfFsdpError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(2) from None


def check_output(output: str | None, force: bool, problems: list[Problem], flag: str = "-o") -> Path | None:
    """Return the file to write, or None without one; a folder and an existing file go to `problems`."""
    if output is None:
        return None
    from pathlib import Path

    path = Path(output)
    if path.is_dir():
        problems.append(
            Problem(
                message=f"{flag} {output} is a folder", fix=f"{flag} {path / 'fsdp.yaml'}", source="the command line"
            )
        )
    elif path.exists() and not force:
        problems.append(
            Problem(
                message=f"{flag} {output} exists and is not overwritten",
                fix=f"--force replaces it; or {flag} with another name",
                source="the command line",
            )
        )
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file and the folders above it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", fix="name a file that this user may write"
        ) from None
