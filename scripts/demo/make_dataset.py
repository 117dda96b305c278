"""Write the demo's data: functions of Python's standard library, each with the first line of its own docstring.

Real code that every machine has, so nothing is downloaded. The split is by module: what the held-out file asks about
comes from modules of which the training file has seen nothing.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROMPT = "Write a one-line docstring for this Python function.\n```python\n{code}\n```"
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo"}
# Short functions keep a step on two CPU cores at a few seconds; shorter docstrings than this say nothing.
MAX_CODE_CHARS = 260
DOCSTRING_CHARS = (20, 100)
HELD_OUT_SHARE = 0.15
MAX_ROWS_A_MODULE = 60  # else one large module (tkinter) would be half of its side

Row = dict[str, Any]


def source_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield ``(top-level module name, file)`` for the library's own sources under `root`, in a fixed order."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not SKIPPED_FOLDERS.intersection(parts):
            yield parts[0].removesuffix(".py"), path


def function_pairs(source: str) -> Iterator[tuple[str, str]]:
    """Yield ``(code without its docstring, first line of the docstring)`` for the short functions in `source`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        line = " ".join(docstring.split("\n\n")[0].split())
        if not DOCSTRING_CHARS[0] <= len(line) <= DOCSTRING_CHARS[1]:
            continue
        node.body = node.body[1:]
        code = ast.unparse(node)
        if len(code) <= MAX_CODE_CHARS:
            yield code, line


def is_held_out(module: str) -> bool:
    """Tell whether `module` belongs to the held-out part; by a hash of its name, so it never changes sides."""
    digest = hashlib.sha256(module.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < HELD_OUT_SHARE


def collect_rows(root: Path) -> tuple[list[Row], list[Row]]:
    """Return the training and the held-out rows that the sources under `root` give, without repetitions."""
    train: list[Row] = []
    held_out: list[Row] = []
    seen: set[str] = set()
    num_rows: Counter[str] = Counter()
    for module, path in source_files(root):
        try:
            pairs = list(function_pairs(path.read_text(encoding="utf-8")))
        except (SyntaxError, UnicodeDecodeError):
            continue  # a few library files are broken on purpose, for the library's own tests
        for code, line in pairs:
            # A function copied between modules would otherwise stand on both sides of the split.
            if code in seen or line in seen or num_rows[module] == MAX_ROWS_A_MODULE:
                continue
            num_rows[module] += 1
            seen.update((code, line))
            messages = [
                {"role": "user", "content": PROMPT.format(code=code)},
                {"role": "assistant", "content": line},
            ]
            (held_out if is_held_out(module) else train).append({"messages": messages, "module": module})
    return train, held_out


def write_jsonl(rows: list[Row], path: Path) -> None:
    """Write `rows` to `path`, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_dataset(folder: Path, num_train: int, num_held_out: int, root: Path | None = None) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``held_out.jsonl`` to `folder` and return the two paths.

    Args:
        folder: where to write; made if needed.
        num_train, num_held_out: rows to keep, drawn with a fixed seed.
        root: the library's sources; this Python's own by default.
    """
    train, held_out = collect_rows(root or Path(sysconfig.get_paths()["stdlib"]))
    chooser = random.Random(0)
    paths = folder / "train.jsonl", folder / "held_out.jsonl"
    for rows, num_rows, path in ((train, num_train, paths[0]), (held_out, num_held_out, paths[1])):
        chooser.shuffle(rows)
        write_jsonl(rows[:num_rows], path)
    return paths


def main() -> None:
    """Write the dataset and say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-train", type=int, default=320)
    parser.add_argument("--num-held-out", type=int, default=32)
    arguments = parser.parse_args()
    for path in make_dataset(arguments.folder, arguments.num_train, arguments.num_held_out):
        print(f"{path}: {sum(1 for _ in path.open(encoding='utf-8'))} rows")


if __name__ == "__main__":
    main()
