"""MODEL as a person types it: a folder, a config.json, a name of the built-in list, or a hub id."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_fsdp.errors import PlanError
from hf_fsdp.plan.job import ModelSpec
from hf_fsdp.plan.models.config_checks import check_config
from hf_fsdp.plan.models.hub_config import find_hub_config
from hf_fsdp.plan.models.known_models import catalog_names, find_known_model
from hf_fsdp.plan.models.local_config import check_file, check_folder, missing_path, read_config_file

# The address of a model's page, as it is copied from a browser.
_PAGE = re.compile(r"^https?://(www\.)?(huggingface\.co|hf\.co)/")


def resolve_model(
    text: str, *, revision: str | None = None, trust_remote_code: bool = False, method: str = "full"
) -> ModelSpec:
    """Return the model that `text` names. No weights are read; of a hub id only its config.json is fetched.

    In this order: a folder with a config.json; a config.json; a name of the built-in list (a short name or a hub id,
    also of a chat variant of the same shape), which needs no hub; any other hub id.

    Args:
        text: as typed.
        revision: branch, tag or commit of a hub id; one that is given is fetched, not taken from the built-in list.
        trust_remote_code: allow that a class that comes with the model is built. Its code runs on this machine, so
            never without a person's word.
        method: ``full``, ``lora`` or ``qlora``; a checkpoint stored in bitsandbytes' 4 bits is only for ``qlora``.

    Returns:
        The model by its config. The name of a built-in model is its hub id, so that it can be loaded by it.

    Raises:
        PlanError: unknown, unreachable or gated, no config.json, or one that cannot be planned; with what to do.

    Example:
        >>> resolve_model("llama-2-7b").num_parameters
        6738415616
    """
    text = _PAGE.sub("", text.strip()).rstrip("/") or text.strip()
    if not text:
        raise PlanError("MODEL is empty", fix=f"name one, such as {catalog_names()[0]}, a folder or a hub id")
    path = Path(text).expanduser()
    known, on_hub = None if revision else find_known_model(text), False
    if _is_folder(path) and (known is None or _is_file(path / "config.json")):
        file = check_folder(path, text)
    elif _is_file(path):
        file = check_file(path, text)
    elif known is not None:
        return ModelSpec(name=known.hub_id, config=known.read_config(), num_parameters=known.model.num_parameters)
    elif text.startswith((".", "/", "~")) or text.count("/") > 1 or "\\" in text or text.endswith(".json"):
        raise missing_path(path, text)
    else:
        known = find_known_model(text)
        if known is None and "/" not in text:
            _check_whole_name(text)
        file = find_hub_config(known.hub_id if known else text, revision=revision)
        on_hub = True
    config = read_config_file(file)
    if trust_remote_code:
        config = _with_code_paths(config, str(path.resolve()) if path.exists() else text)
    spec, problems = check_config(
        ModelSpec(
            name=text,
            config=config,
            trust_remote_code=trust_remote_code,
            revision=revision if on_hub else None,  # a folder has one state only
        ),
        source=str(file),
        method=method,
    )
    if problems:
        raise PlanError(problems)
    return spec


def _check_whole_name(text: str) -> None:
    """Ask for the rest of a name that was cut short, before a hub that may be far away is asked.

    Raises:
        PlanError: the list has names that go on from `text`.
    """
    longer = [name for name in catalog_names() if name.startswith(f"{text.lower()}-")]
    if longer:
        raise PlanError(
            f"MODEL {text!r} is the start of a name of the built-in list, and no whole one",
            near=", ".join(longer),
            fix=f"give its size or version too, such as {longer[0]}",
        )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name too long for a path
        return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _with_code_paths(config: Mapping[str, Any], home: str) -> dict[str, Any]:
    """Say in each entry of auto_map where its code is, so that the class is found from the config alone."""
    own = config.get("auto_map")
    if not isinstance(own, Mapping):
        return dict(config)
    folder = home.rsplit("/", 1)[0] if re.search(r"\.json$", home) else home
    full = {
        key: f"{folder}--{entry}" if isinstance(entry, str) and "--" not in entry else entry
        for key, entry in own.items()
    }
    return {**config, "auto_map": full}
