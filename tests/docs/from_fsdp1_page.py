"""The snippets of docs/from-fsdp1.md: before, YAML and after of each section."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-fsdp1.md"


@dataclass(frozen=True)
class Snippet:
    """One section: its title, the old code, the YAML, the new code."""

    title: str
    before: str
    yaml: str
    after: str

    @property
    def name(self) -> str:
        """The title as a name of a case."""
        return re.sub(r"\W+", "_", self.title.lower()).strip("_")


def read_snippets() -> list[Snippet]:
    """Return the sections below "Calls, before and after"; each must have exactly three blocks."""
    body = PAGE.read_text(encoding="utf-8").partition("## Calls, before and after\n")[2].partition("\n## ")[0]
    snippets = []
    for section in body.split("\n### ")[1:]:
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        assert [language for language, _ in blocks] == ["python", "yaml", "python"], section[:80]
        snippets.append(Snippet(section.partition("\n")[0].strip(), *(text for _, text in blocks)))
    return snippets
