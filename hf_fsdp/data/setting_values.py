"""Settings that a file gives as a list or a mapping and a command line as text, read as one and the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hf_fsdp.errors import ConfigError


def read_mapping(value: Mapping[str, Any] | str | None, key: str) -> dict[str, Any]:
    """Return a setting that a file gives as a mapping and a command line as its text; empty without one.

    Args:
        value: ``{projector: 2.0e-5}``, as YAML has read it or not.
        key: the setting's name, for the message.

    Raises:
        ConfigError: the text is no mapping.
    """
    import yaml

    try:
        read = yaml.safe_load(value) if isinstance(value, str) else value
    except (yaml.YAMLError, ValueError):
        read = value
    if not isinstance(read, Mapping | None):
        raise ConfigError(f"{key}={value!r} is not a mapping", fix=f"--{key} '{{projector: 2.0e-5}}'")
    return dict(read or {})


def read_names(value: Sequence[str] | str | None, key: str, *, example: str) -> list[str] | None:
    """Return a setting of names as a list; None where it is not given.

    Args:
        value: a list, or names in one text, with commas or blanks between them and brackets around them or not.
        key: the setting's name, for the message.
        example: names that are right, for the message: ``language, projector``.

    Raises:
        ConfigError: neither a list of texts nor a text, or one without any name, which would be taken for the default.

    Example:
        >>> read_names("[language, projector]", "trainable", example="language")
        ['language', 'projector']
    """
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{key}={value!r} is not a list of names", fix=f"{key}: [{example}]")
    names = [word for text in texts for word in re.split(r"[,\s\[\]'\"]+", text) if word]
    if not names:
        raise ConfigError(f"{key}={value!r} names nothing", fix=f"{key}: [{example}]   or   remove {key}")
    return list(dict.fromkeys(names))
