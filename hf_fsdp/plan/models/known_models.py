"""The built-in list of models: their names, and their config.json files, which come with the package.

`catalog/` holds one config.json a shape and `index.json`, which says of which repository each is, how many
parameters its publisher states, and which other repositories are of the same shape (with what differs in them, if
anything does). Reading it needs no torch and no transformers.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hf_fsdp.config.presets import MODEL_PRESETS

_FOLDER = Path(__file__).parent / "catalog"
# What publishers put behind the name of a model whose shape it does not change.
_ENDINGS = re.compile(r"(-(instruct|chat|it|hf|base|pt|v1\.0))+$")


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """One shape of the built-in list.

    Args:
        alias: its short name.
        hub_id: the repository that its config.json is of.
        num_parameters: as its publisher states them, tied weights once; None where that number is not known to us.
        same_shape: repository -> keys of its config.json that differ (none of them changes a weight's shape).
    """

    alias: str
    hub_id: str
    num_parameters: int | None
    same_shape: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class KnownName:
    """A name of the built-in list as it was found: which shape, and which repository of that shape."""

    model: KnownModel
    hub_id: str

    def read_config(self) -> dict[str, Any]:
        """Return the contents of this repository's config.json: the keys that decide about shapes and positions."""
        config = json.loads((_FOLDER / f"{self.model.alias}.json").read_text(encoding="utf-8"))
        return {**config, **self.model.same_shape.get(self.hub_id, {})}


@lru_cache(maxsize=1)
def known_models() -> tuple[KnownModel, ...]:
    """Return the built-in list, in the order in which it is shown."""
    presets = {preset.alias: preset for preset in MODEL_PRESETS}
    models = []
    for alias, entry in json.loads((_FOLDER / "index.json").read_text(encoding="utf-8")).items():
        more = presets[alias].same_shape if alias in presets else ()
        models.append(
            KnownModel(
                alias=alias,
                hub_id=entry["hub_id"],
                num_parameters=entry["num_parameters"],
                same_shape={**{name: {} for name in more}, **entry["same_shape"]},
            )
        )
    return tuple(models)


def catalog_names() -> tuple[str, ...]:
    """Return the short names of the built-in list; cheap enough for ``--help``.

    Example:
        >>> "llama-2-7b" in catalog_names()
        True
    """
    return tuple(model.alias for model in known_models())


def find_known_model(text: str) -> KnownName | None:
    """Return what `text` means in the built-in list, or None.

    Args:
        text: a short name, a hub id, or a hub id without its owner; case does not matter.

    Example:
        >>> find_known_model("llama-3.1-8b-instruct").hub_id
        'meta-llama/Llama-3.1-8B-Instruct'
    """
    return _names().get(text.strip().strip("/").lower())


def near_known_models(text: str, limit: int = 3) -> list[str]:
    """Return up to `limit` names of the built-in list that resemble `text`, best first, in the form that it has."""
    wanted = text.strip().lower()
    with_owner = "/" in wanted
    scores: dict[str, float] = {}
    for name, found in _names().items():
        # A hub id with another owner (a mirror, or a misspelt one) is compared by its last part too.
        parts = [(wanted, name)] + ([(wanted.rsplit("/", 1)[-1], name)] if with_owner and "/" not in name else [])
        score = max(difflib.SequenceMatcher(None, *pair).ratio() for pair in parts)
        score += 0.3 * (len(wanted) > 3 and name.startswith(wanted))  # cut short: a version or a size was left out
        shown = found.hub_id if with_owner else found.model.alias
        scores[shown] = max(score, scores.get(shown, 0.0))
    best = sorted(scores, key=lambda shown: -scores[shown])
    return [shown for shown in best if scores[shown] >= 0.6][:limit]


@lru_cache(maxsize=1)
def _names() -> dict[str, KnownName]:
    """Every accepted spelling in lower case; one that several could claim belongs to the first and most exact."""
    names: dict[str, KnownName] = {}
    for form in (_exact, _without_owner, _without_ending):
        for model in known_models():
            for text, hub_id in form(model):
                names.setdefault(text.lower(), KnownName(model=model, hub_id=hub_id))
    return names


def _exact(model: KnownModel) -> Iterator[tuple[str, str]]:
    yield model.alias, model.hub_id
    for hub_id in (model.hub_id, *model.same_shape):
        yield hub_id, hub_id


def _without_owner(model: KnownModel) -> Iterator[tuple[str, str]]:
    for hub_id in (model.hub_id, *model.same_shape):
        yield hub_id.rsplit("/", 1)[-1], hub_id


def _without_ending(model: KnownModel) -> Iterator[tuple[str, str]]:
    for text, hub_id in _without_owner(model):
        yield re.sub(r"-hf$", "", text.lower()), hub_id
        yield _ENDINGS.sub("", text.lower()), hub_id
