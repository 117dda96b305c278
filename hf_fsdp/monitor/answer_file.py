"""Answers as JSON lines, with references to the pictures they are about."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from hf_fsdp.monitor.answer_rows import Row, prompt_text, references_of, row_id
from hf_fsdp.monitor.metrics import MetricsFile

_MAGIC = ((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpg"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"II*\0", "tif"))


class ImageStore:
    """Where pictures that are no files yet are written, each one once.

    Args:
        folder: made when the first picture is written.

    A picture that is a file is named by its path, as the data has it. One that comes as bytes is written into the
    folder under the hash of its bytes, so that ten evaluations of one dataset leave one copy.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._written: set[str] = set()

    def reference(self, image: Any) -> str:
        """Return how a line names this picture: a path of the data, or one relative to the folder's parent."""
        path, data = (image.get("path"), image.get("bytes")) if isinstance(image, Mapping) else (image, None)
        if not data:
            return str(path)
        name = f"{xxhash.xxh3_128(data).hexdigest()}.{_extension(data)}"
        target = self.folder / name
        if name not in self._written and not (target.is_file() and target.stat().st_size == len(data)):
            self.folder.mkdir(parents=True, exist_ok=True)
            draft = target.with_suffix(".partial")
            draft.write_bytes(data)
            os.replace(draft, target)
        self._written.add(name)
        return f"{self.folder.name}/{name}"


class AnswersFile(MetricsFile):
    """A `MetricsFile` whose lines hold lists and mappings; the lines of one evaluation are appended at once."""

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append one line for each record."""
        if not self._started:
            self.start()
        lines = "".join(_line(record) + "\n" for record in records)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(lines)


def answer_record(row: Row, index: int, answer: str, scores: Mapping[str, float], store: ImageStore) -> dict[str, Any]:
    """Return the line of one answer: row, pictures, prompt, answer, what counts as right, scores."""
    return {
        "index": index,
        "id": row_id(row, index),
        "images": [store.reference(image) for image in row.get("images") or ()],
        "prompt": prompt_text(row),
        "answer": answer,
        "references": references_of(row),
        "scores": dict(scores),
    }


def _line(record: Mapping[str, Any]) -> str:
    """Letters of any language as they are; what would break a line or cannot be encoded, escaped."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return text if text.isprintable() else json.dumps(record, allow_nan=False)


def _extension(data: bytes) -> str:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((name for magic, name in _MAGIC if data.startswith(magic)), "bin")
