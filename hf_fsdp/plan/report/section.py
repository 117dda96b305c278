"""A piece of what a command prints: a title, a table and lines, broken to the width of a window."""

from __future__ import annotations

import dataclasses
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

COMMAND_INDENT = 8  # lines that begin so far in are commands


@dataclass(frozen=True, kw_only=True)
class Section:
    """Lines, then a table, then more lines; each part may be empty.

    Args:
        title: printed above everything, without a table of its own.
        header: of the table; a title may have several lines.
        rows: of the table, as text.
        right: columns that are aligned to the right.
        lines: below the table.
    """

    title: str = ""
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    right: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()


def fold_section(section: Section, width: int) -> Section:
    """Return a section whose prose is broken to `width`; commands are lines of their own and stay whole."""

    def fold(line: str) -> list[str]:
        indent = " " * (len(line) - len(line.lstrip()))
        if len(indent) >= COMMAND_INDENT:
            return [line]
        return textwrap.wrap(line, width, subsequent_indent=indent + "    ", break_on_hyphens=False) or [line]

    lines = tuple(piece for line in section.lines for piece in fold(line))
    return dataclasses.replace(section, title="\n".join(fold(section.title)), lines=lines)


def break_command(text: str, width: int) -> Iterator[str]:
    """Yield a command, over several lines where it is long, in the way that a shell reads as one."""
    indent = " " * COMMAND_INDENT
    line = indent
    for word in (shlex.quote(word) for word in shlex.split(text)):
        if len(line) + len(word) > width - 2 and line.strip():
            yield f"{line.rstrip()} \\"
            line = indent + "  "
        line += f"{word} "
    yield line.rstrip()


def indent_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Return lines that stand below a title."""
    return tuple(f"  {line}" for line in lines)
