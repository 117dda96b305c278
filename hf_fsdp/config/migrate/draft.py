"""The new config while it is being written: each value with the old settings it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_fsdp.config.migrate.setting import Left, OldConfig, OldSetting
from hf_fsdp.config.values import Rejected, parse_bool, parse_field, word_of, yaml_value
from hf_fsdp.errors import Problem


@dataclass
class Line:
    """One key of the new config: its value, and the old settings that say so."""

    value: Any
    reasons: list[str]
    sources: list[str]


@dataclass
class Draft:
    """Lines of the new config by dotted key, what was left behind, and what is wrong.

    Args:
        old: what was read.
        replicas: ``--replicas``, if it was given.
    """

    old: OldConfig
    replicas: int | None = None
    lines: dict[str, Line] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    _taken: set[str] = field(default_factory=set)

    def take(self, name: str) -> list[OldSetting]:
        """Return the old settings of one name; from now on they count as read."""
        self._taken.add(name)
        return [setting for setting in self.old.settings if setting.name == name]

    def take_one(self, name: str) -> OldSetting | None:
        """Return the one setting of a name; two that differ are a problem, and the first is returned."""
        found = self.take(name)
        for other in found[1:]:
            if word_of(other.value) != word_of(found[0].value):
                self._contradict(found[0].text, other.text, other.source)
        return found[0] if found else None

    def take_bool(self, name: str) -> tuple[bool | None, OldSetting | None]:
        """Return what a switch says, and the setting; None when nothing usable is said."""
        setting = self.take_one(name)
        if setting is None:
            return None, None
        try:
            return parse_bool(setting.text.partition(":")[0], setting.value), setting
        except Rejected as rejected:
            self.problems.append(Problem(message=rejected.message, fix=rejected.fix, source=setting.source))
            return None, setting

    def untaken(self) -> list[OldSetting]:
        """Return settings that nothing has read."""
        return [setting for setting in self.old.settings if setting.name not in self._taken]

    def put(self, dotted: str, value: Any, setting: OldSetting | None, note: str = "") -> None:
        """Write a value, with the old setting and a note as its reason; a different second value is a problem."""
        text = setting.text if setting else ""
        reason = "; ".join(part for part in (text, note) if part)
        source = setting.source if setting else self.old.path
        try:
            value = parse_field(dotted, value)
        except Rejected as rejected:
            message = f"{text}: {rejected.message}" if setting else rejected.message
            self.problems.append(Problem(message=message, fix=rejected.fix, near=rejected.near, source=source))
            return
        line = self.lines.get(dotted)
        if line is None:
            self.lines[dotted] = Line(value, [reason], [source])
        elif line.value != value:
            self._contradict(line.reasons[0], reason, source)
        elif reason not in line.reasons:
            line.reasons.append(reason)
            line.sources.append(source)

    def leave(self, setting: OldSetting, kind: str, why: str) -> None:
        """Say that an old setting is not carried over: ``changed``, ``not needed`` or ``no equivalent``."""
        self.left.append(Left(setting.text, why, kind))

    def refuse(self, setting: OldSetting, why: str, fix: str) -> None:
        """Record that a setting makes the whole file unusable."""
        self.problems.append(Problem(message=f"{setting.text}: {why}", fix=fix, source=setting.source))

    def _contradict(self, first: str, second: str, source: str) -> None:
        self.problems.append(
            Problem(
                message=f"{second} contradicts {first}",
                fix="keep the one that the old run followed, in a copy of the file",
                source=source,
            )
        )


def as_yaml(value: Any) -> str:
    """Return a value as the new file shows it; a tuple is a list there."""
    return yaml_value(list(value)) if isinstance(value, tuple) else yaml_value(value)
