"""Values of a run config as the recipe reads them: numbers, switches and names, every problem of the file at once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from hf_fsdp.errors import Problem

# Words that transformers' argument parser takes for a switch.
_TRUE, _FALSE = ("true", "yes", "y", "t", "1"), ("false", "no", "n", "f", "0")


class RunValues:
    """Values of a run config, each as what it has to be; what is something else is kept as a problem.

    Args:
        content: of the file, over what holds where it says nothing.
        defaults: what a message proposes in place of a wrong value.
        source: path of the file, for messages.
    """

    def __init__(self, content: Mapping[str, Any], defaults: Mapping[str, Any], source: str):
        self.problems: list[Problem] = []
        self._content = content
        self._defaults = defaults
        self._source = source

    def __contains__(self, key: str) -> bool:
        return self._content.get(key) is not None

    def text(self, key: str) -> str | None:
        """Return a value as a word; None where there is none."""
        value = self._content.get(key)
        return None if value is None else str(value)

    def whole(self, key: str, *, least: int = 1) -> int:
        """Return a whole number; transformers takes one in quotes too."""
        value = self._content.get(key)
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = int(value) if isinstance(value, str) else value
            if isinstance(number, (int, float)) and not isinstance(number, bool) and least <= number == int(number):
                return int(number)
        self._refuse(key, f"no whole number from {least} on", self._defaults.get(key, least))
        return least

    def number(self, key: str, *, below: float = math.inf) -> float:
        """Return a number from 0 on."""
        value = self._content.get(key)
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if not isinstance(value, bool) and 0 <= float(value) < below:  # type: ignore[arg-type]
                return float(value)  # type: ignore[arg-type]
        limits = "from 0 on" if below == math.inf else f"from 0 to below {below:g}"
        self._refuse(key, f"no number {limits}", self._defaults.get(key, 0))
        return 0.0

    def flag(self, key: str) -> bool:
        """Return whether something is on; in quotes it is a word, and any word would be on."""
        value = self._content.get(key)
        word = str(value).lower()
        if value is None or word in _FALSE:
            return False
        if word not in _TRUE:
            self._refuse(key, "neither true nor false", "true")
        return True

    def words(self, key: str) -> tuple[str, ...]:
        """Return a list of words; one word alone is a list of it."""
        value = self._content.get(key) or ()
        words = (value,) if isinstance(value, str) else value
        if isinstance(words, (list, tuple)) and all(isinstance(word, str) for word in words):
            return tuple(words)
        self._refuse(key, "no list of names", "[NAME, ...], or leave it out")
        return ()

    def _refuse(self, key: str, what: str, instead: Any) -> None:
        said = f"{key}={self._content.get(key)!r} is {what}"
        self.problems.append(Problem(message=said, fix=f"{key}: {instead}", source=self._source))
