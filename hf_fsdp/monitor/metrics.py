"""The run's numbers as JSON lines: one line for each log event, readable while the run goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class MetricsFile:
    """A JSON-lines file that is complete after every line, and right after a resume.

    Args:
        path: the file; its folder is made when the first line is written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._started = False

    def start(self, resume_step: int = 0) -> None:
        """Keep the lines up to `resume_step` and drop the rest; 0 begins a new file.

        A run that resumes at step 100 repeats steps 101 and on, and must not leave them in the file twice.
        """
        kept = []
        if resume_step and self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= resume_step:
                        kept.append(line)
                except (ValueError, KeyError, TypeError):
                    continue  # the last line of a run that was killed while it wrote
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._started = True

    def write(self, record: dict[str, Any]) -> None:
        """Append one line. Values that JSON cannot hold (nan, inf, tensors) are written as text."""
        if not self._started:
            self.start()
        line = json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


def _plain(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # more than one element
            return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return str(value)
