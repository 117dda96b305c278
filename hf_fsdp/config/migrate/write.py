"""The new file: our `fsdp:` section, on each line the old setting it came from, and below what was left behind."""

from __future__ import annotations

import textwrap

from hf_fsdp.config.migrate.draft import Draft, as_yaml
from hf_fsdp.config.migrate.setting import Left
from hf_fsdp.config.parse import SECTION_FIELDS

TITLES = {
    "assumed": "Read as if it always ran, so check it:",
    "changed": "Works differently now:",
    "no equivalent": "No equivalent in the fsdp section:",
    "not needed": "Not needed any more:",
}
COMMENT_COLUMN = 38
COMMENT_WIDTH = 116


def write_section(draft: Draft) -> str:
    """Return the ``fsdp:`` section as YAML text, sections and keys in the order of the schema."""
    lines = []
    for section, names in SECTION_FIELDS.items():
        own = [name for name in names if f"{section}.{name}" in draft.lines]
        if not own:
            continue
        lines.append(f"  {section}:")
        for name in own:
            line = draft.lines[f"{section}.{name}"]
            text = f"    {name}: {as_yaml(line.value)}"
            reason = "; ".join(reason for reason in line.reasons if reason)
            lines.append(f"{text:<{COMMENT_COLUMN}}  # {one_line(reason)}" if reason else text)
    return "\n".join(["fsdp:" if lines else "fsdp: {}", *lines]) + "\n"


def write_left(left: list[Left], prefix: str = "") -> list[str]:
    """Return what was not carried over as lines, grouped: what changed first, what is simply gone last."""
    lines: list[str] = []
    for kind, title in TITLES.items():
        group = dict.fromkeys((item.text, item.why) for item in left if item.kind == kind)
        if group:
            lines.append(title)
        for text, why in group:
            lines.append(f"  {one_line(text)}")
            lines += textwrap.wrap(why, COMMENT_WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return [prefix + line for line in lines]


def one_line(text: str) -> str:
    """Return `text` without line breaks and never longer than a comment may be."""
    flat = " ".join(text.split())
    return flat if len(flat) <= COMMENT_WIDTH else flat[: COMMENT_WIDTH - 3] + "..."
