"""Where exactly is a data file broken? Read again, line by line, only after the fast reader has given up."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path

from hf_fsdp.errors import DataError

# Enough to tell what kind of file it is, whatever its size.
_NUM_BYTES_CHECKED = 1 << 24


def check_json_start(path: Path) -> None:
    """Refuse what the JSON reader takes and should not: text of another encoding, one object that wraps the list.

    Raises:
        DataError: with the command that converts or unwraps it.
    """
    with path.open("rb") as raw:
        _refuse_binary(path, raw.read(_NUM_BYTES_CHECKED), whole=path.stat().st_size <= _NUM_BYTES_CHECKED)
    with path.open(encoding="utf-8", errors="replace") as stream:
        head = stream.read(1 << 20)
    if not head.lstrip().startswith("{"):
        return
    first = head.strip().split("\n", 1)
    try:
        row = json.loads(first[0] if len(first) > 1 and first[0].rstrip().endswith("}") else head)
    except ValueError:
        return  # a longer file of rows: the reader itself says what is wrong
    lists = [key for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    nested = [key for key in lists if not {"role", "from"} & set(row[key][0])]
    if len(row) == 1 and nested:
        raise DataError(
            f"dataset_name={str(path)!r} is one object whose {nested[0]!r} holds the rows",
            fix=f'write the rows themselves, one a line: python -c "import json; [print(json.dumps(r)) for r in '
            f"json.load(open('{path}'))['{nested[0]}']]\" > {path.with_suffix('.jsonl').name}",
        )


def explain_unreadable(path: Path, error: Exception) -> None:
    """Raise for what in a JSON or Parquet file its reader stumbled over; return when nothing is found.

    Raises:
        DataError: with the line or row.
    """
    if path.suffix.lower() == ".parquet":
        if path.read_bytes()[:4] != b"PAR1":
            raise DataError(f"dataset_name={str(path)!r} is not a Parquet file", fix="write it again") from error
        return
    _refuse_binary(path, path.read_bytes(), whole=True)
    text = path.read_text(encoding="utf-8", errors="replace")
    if text.lstrip().startswith("["):
        try:
            rows = list(enumerate(json.loads(text), start=1))
        except ValueError as found:
            line = getattr(found, "lineno", 0)
            raise DataError(
                f"dataset_name={str(path)!r} is not valid JSON at line {line}: {found}", fix=f"repair line {line}"
            ) from error
        _find_stray_row(path, iter(rows), "row", error)
        return
    _find_stray_row(path, _read_lines(path, text, error), "line", error)


def _refuse_binary(path: Path, content: bytes, *, whole: bool) -> None:
    """Raise for what is no UTF-8 text, where no single line is to blame; return when it is text.

    Args:
        path: the file.
        content: its first bytes.
        whole: whether they are all of it; otherwise the last character may be cut.
    """
    copy = path.with_suffix(".repaired" + path.suffix)
    fix = f"write the examples as text, one JSON object a line, or as Parquet: {path.with_suffix('.parquet').name}"
    if content[:4] == b"PAR1":
        fix = f"it is a Parquet file: mv {path} {path.with_suffix('.parquet')}"
    elif content[:2] == b"\x1f\x8b":
        fix = f"it is compressed: gunzip -c {path} > {copy}"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content, final=whole)
    except UnicodeDecodeError as found:
        line = content.count(b"\n", 0, found.start) + 1
        if content[:1] in (b"{", b"[") and b"\0" not in content:
            fix = f"save it as UTF-8, e.g. from Windows: iconv -f CP1252 -t UTF-8 {path} > {copy}"
        raise DataError(f"dataset_name={str(path)!r} is not UTF-8 text (line {line})", fix=fix) from found
    if b"\0" in content:
        raise DataError(f"dataset_name={str(path)!r} is a binary file, not JSON", fix=fix)


def _read_lines(path: Path, text: str, error: Exception) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as found:
            shown = line if len(line) <= 60 else line[:57] + "..."
            raise DataError(
                f"dataset_name={str(path)!r}: line {number} is not valid JSON ({found}): {shown}",
                fix=f"repair line {number}, or train on a copy without it: "
                f"sed '{number}d' {path} > {path.with_suffix('.repaired' + path.suffix)}",
            ) from error


def _find_stray_row(path: Path, rows: Iterator[tuple[int, object]], unit: str, error: Exception) -> None:
    """Raise for the first row that is no object; return when there is none."""
    for number, row in rows:
        if not isinstance(row, dict):
            raise DataError(
                f"dataset_name={str(path)!r}: {unit} {number} is a {type(row).__name__}, not an object with columns",
                fix=f'write {unit} {number} as {{"messages": [...]}} or {{"prompt": "...", "completion": "..."}}',
            ) from error
