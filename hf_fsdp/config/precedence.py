"""Which layer wins: FSDPConfig over TrainingArguments over Accelerate's file over defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_fsdp.config.parse import DOTTED_KEYS
from hf_fsdp.config.schema import PYTHON_SOURCE, FSDPConfig
from hf_fsdp.config.values import Rejected, parse_field, yaml_value
from hf_fsdp.errors import ConfigError, Problem

# Known from the launch environment and needed by the loader, but no decision of FSDPConfig.
RAM_EFFICIENT_LOADING = "accelerate.cpu_ram_efficient_loading"


@dataclass(frozen=True)
class Stated:
    """One value that a layer below FSDPConfig states.

    Args:
        value: as that layer has it; it is parsed like a value of FSDPConfig.
        source: the setting in its own words, e.g. ``TrainingArguments(bf16=True)``.
        typed: a person typed it. A typed value that contradicts FSDPConfig is an error; any other is overridden.
    """

    value: Any
    source: str
    typed: bool = False


@dataclass(frozen=True)
class Merged:
    """The config in force, and one plain line for each value that lost."""

    config: FSDPConfig
    overrides: tuple[str, ...]


def merge(
    config: FSDPConfig, training_arguments: Mapping[str, Stated], accelerate_file: Mapping[str, Stated]
) -> Merged:
    """Return the config that is in force when all layers have spoken.

    Args:
        config: the highest layer; only what it says (`FSDPConfig.said`) counts, and ``auto`` means "follow
            the layers below". How to wrap, and which blocks to checkpoint, are each decided by one layer.
        training_arguments: dotted key -> what TrainingArguments state.
        accelerate_file: dotted key -> what Accelerate's launch file states.

    Raises:
        ConfigError: a typed value of TrainingArguments contradicts FSDPConfig, or a value cannot be used; all at once.
    """
    layers: list[dict[str, Stated]] = [_said_values(config)]
    problems: list[Problem] = []
    for stated in (training_arguments, accelerate_file):
        layers.append(_parse_stated(stated, problems))
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    overrides: list[str] = []
    for key in DOTTED_KEYS:
        asked = [(index, layer[key]) for index, layer in enumerate(layers) if key in layer]
        if key.startswith(("wrap.", "activation_checkpointing.")):
            asked = _drop_below_owner(key, asked, layers, overrides)
        if not asked:
            continue
        (winner_index, winner), losers = asked[0], asked[1:]
        values[key], sources[key] = winner.value, winner.source
        for index, loser in losers:
            if loser.value == winner.value:
                continue
            if winner_index == 0 and index == 1 and loser.typed:
                problems.append(_contradiction(key, winner, loser))
            else:
                overrides.append(_override_line(key, winner, loser))
    if problems:
        raise ConfigError(problems)
    return Merged(_rebuild(config, values, sources), tuple(overrides))


def stated_by(config: FSDPConfig, source: str) -> dict[str, Stated]:
    """Return what `config`, found at `source`, states as a layer below another; a person typed it there too."""
    return {key: Stated(item.value, source, typed=True) for key, item in _said_values(config).items()}


def _said_values(config: FSDPConfig) -> dict[str, Stated]:
    """Return what FSDPConfig states; `auto` leaves the decision to the layers below."""
    values = ((key, config.get(key)) for key in DOTTED_KEYS if key in config.said)
    return {
        key: Stated(value, config.sources.get(key, PYTHON_SOURCE), typed=True)
        for key, value in values
        if value != "auto"
    }


def _parse_stated(stated: Mapping[str, Stated], problems: list[Problem]) -> dict[str, Stated]:
    parsed = {}
    for key, item in stated.items():
        if key == RAM_EFFICIENT_LOADING:
            continue
        try:
            value = parse_field(key, item.value)
        except Rejected as rejected:
            problems.append(Problem(message=rejected.message, fix=rejected.fix, near=rejected.near, source=item.source))
            continue
        if value != "auto":
            parsed[key] = Stated(value, item.source, item.typed)
    return parsed


def _drop_below_owner(
    key: str, asked: list[tuple[int, Stated]], layers: list[dict[str, Stated]], overrides: list[str]
) -> list[tuple[int, Stated]]:
    """Drop what layers below the deciding one say about its section.

    Class names of one layer and a function of another do not mix, nor does ``none`` with "every second block".
    """
    decides = ("wrap.",) if key.startswith("wrap.") else ("activation_checkpointing.mode",)
    for owner, layer in enumerate(layers):
        deciding = next((item for name, item in layer.items() if name.startswith(decides)), None)
        if deciding is None:
            continue
        if key in layer:
            return asked
        for index, loser in asked:
            if index > owner and loser.value != "transformer_layers":  # the default policy: nothing is lost
                overrides.append(
                    f"{key}: {yaml_value(loser.value)} ({loser.source}) is not used, {deciding.source} decides"
                )
        return [(index, item) for index, item in asked if index < owner]
    return asked


def _override_line(key: str, winner: Stated, loser: Stated) -> str:
    return (
        f"{key}: {yaml_value(winner.value)} ({winner.source}) is used, not {yaml_value(loser.value)} ({loser.source})"
    )


def _contradiction(key: str, winner: Stated, loser: Stated) -> Problem:
    return Problem(
        message=f"{key} is stated twice: {yaml_value(winner.value)} in {winner.source} "
        f"and {yaml_value(loser.value)} by {loser.source}",
        fix=f"write {key}: {yaml_value(loser.value)} in {winner.source}, or remove {loser.source}",
        source=f"{winner.source}; {loser.source}",
    )


def _rebuild(config: FSDPConfig, values: Mapping[str, Any], sources: Mapping[str, str]) -> FSDPConfig:
    """Return a new config with the winning values, keeping what was said as ``auto``."""
    raw: dict[str, dict[str, Any]] = {}
    for key in DOTTED_KEYS:
        section, _, name = key.partition(".")
        if key in values:
            raw.setdefault(section, {})[name] = values[key]
        elif key in config.said:
            raw.setdefault(section, {})[name] = config.get(key)
    return FSDPConfig(**raw, said=config.said, sources={**config.sources, **sources})
