"""Training arguments through the library's own parser, with every mistake told in our shape before anything loads."""

from __future__ import annotations

import math
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from hf_fsdp.data.run_config import RunConfig
from hf_fsdp.errors import ConfigError, Problem, nearest_names


class _Range(NamedTuple):
    """What a number may be, and an example of a good one for the advice."""

    least: float
    example: str
    whole: bool = True
    most: float = math.inf


# The libraries take these as they come and fail much later, or train on them without a word.
_NUMBERS: dict[str, _Range] = {
    "learning_rate": _Range(0, "2e-5", whole=False),
    "num_train_epochs": _Range(0, "3", whole=False),
    "weight_decay": _Range(0, "0.01", whole=False),
    "max_grad_norm": _Range(0, "1.0", whole=False),
    "global_batch_size": _Range(1, "64"),
    "per_device_train_batch_size": _Range(1, "1"),
    "per_device_eval_batch_size": _Range(1, "1"),
    "gradient_accumulation_steps": _Range(1, "1"),
    "max_length": _Range(1, "2048"),
    "lora_r": _Range(1, "16"),
    "print_examples": _Range(0, "2"),
    "preview": _Range(0, "2"),
    "answers": _Range(0, "64"),
    "answer_tokens": _Range(1, "32"),
    "min_pixels": _Range(1, "3136"),
    "max_pixels": _Range(1, "1003520"),
    "dataloader_num_workers": _Range(0, "4"),
    "seed": _Range(0, "42", most=2**32 - 1),
    "data_seed": _Range(0, "42", most=2**32 - 1),
}


def parse_arguments(
    parser: ArgumentParser,
    asked: RunConfig,
    *,
    refused: Mapping[str, tuple[str, str]],
    required: Sequence[str] = (),
) -> tuple[Any, ...]:
    """Return the parser's argument dataclasses, filled from its defaults and the flags of `asked`.

    Args:
        parser: an `HfArgumentParser`; the values of the run config are its defaults already.
        asked: what the person gave; its flags are parsed here.
        refused: key -> (why, what to write instead), for settings that must not be on.
        required: keys that must have a value.

    Raises:
        ConfigError: a value that cannot be read, a word that belongs to no flag, a refused or missing setting,
            numbers that cannot be trained with, or whatever the library's own checks refuse.
    """

    def fail(message: str) -> NoReturn:
        raise ConfigError(_unreadable_value(message, asked))

    setattr(parser, "error", fail)  # noqa: B010 - argparse would print its usage, hundreds of lines, and leave
    flags = list(asked.flags)
    namespace, extra = parser.parse_known_args(flags)
    given = vars(namespace)
    problems = [_stray_word(word, asked) for word in extra]
    problems += [
        Problem(message=f"{key} {why}", fix=fix, source=asked.sources.get(key, asked.path))
        for key, (why, fix) in refused.items()
        if given.get(key)
    ]
    problems += [
        Problem(message=f"{key} is missing", fix=f"--{key} HUB_ID_OR_PATH", source=asked.path)
        for key in required
        if not given.get(key) and not extra  # the stray word may be the file that has it
    ]
    problems += _check_numbers(given, asked)
    if problems:
        raise ConfigError(problems)
    try:
        # Without a look for a `train.args` beside the script, whose words nobody typed.
        return tuple(parser.parse_args_into_dataclasses(args=flags, look_for_args_file=False))  # type: ignore[attr-defined]
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(
            f"these settings do not fit together: {str(error).strip() or type(error).__name__}",
            fix="change the setting that it names, in the run config or on the command line",
            source=asked.path,
        ) from error


def _unreadable_value(message: str, asked: RunConfig) -> Problem:
    """Return the problem behind a message of argparse: ``argument --seed: invalid int value: 'x'``."""
    found = re.match(r"argument --([\w-]+)[^:]*: (.*)", message, flags=re.DOTALL)
    if found is None:
        return Problem(message=message, fix="--help lists every flag", source="the command line")
    key, reason = found[1].replace("-", "_"), found[2].strip()
    source, near = asked.sources.get(key, asked.path), []
    example = _NUMBERS[key].example if key in _NUMBERS else "VALUE"
    choice = re.match(r"invalid choice: '([^']*)' \(choose from (.*)\)", reason)
    if choice is not None:
        near = nearest_names(choice[1], re.findall(r"[\w.-]+", choice[2]))
        example = near[0] if near else example
    elif reason.startswith("Truthy value expected"):
        example = "true"
    return Problem(message=f"{key}: {reason}", fix=f"--{key} {example}", near=", ".join(near) or None, source=source)


def _stray_word(word: str, asked: RunConfig) -> Problem:
    fix = f"remove {word}"
    if word.endswith((".yaml", ".yml")):
        rest = [flag for flag in asked.flags if flag != word]
        fix = f"put the run config first: {shlex.join([word, *rest])}" if asked.path is None else f"{fix}; one is read"
    return Problem(message=f"{word!r} belongs to no flag", fix=fix, source="the command line")


def _check_numbers(given: Mapping[str, Any], asked: RunConfig) -> list[Problem]:
    problems = []
    for key, allowed in _NUMBERS.items():
        value = given.get(key)
        rule = None if value is None else _broken_rule(value, allowed)
        if rule:
            source = asked.sources.get(key, asked.path)
            problems.append(Problem(message=f"{key}={value!r} {rule}", fix=f"{key}: {allowed.example}", source=source))
    return problems


def _broken_rule(value: Any, allowed: _Range) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return "is not a finite number"
    if allowed.whole and not isinstance(value, int):
        return "is not a whole number"
    if value < allowed.least:
        return f"is below {allowed.least:g}"
    if value > allowed.most:
        return f"is above {allowed.most:.0f}"
    return None
