"""A config.json on this machine, and what is said where a folder has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_fsdp.errors import PlanError, nearest_names


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the contents of a config.json.

    Raises:
        PlanError: it cannot be read, is no JSON, or no object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise PlanError(
            f"{path} cannot be read as JSON: {(str(error) or type(error).__name__).splitlines()[0]}",
            fix="restore the file, e.g. by saving the model again with save_pretrained",
            source=f"{path}:{line}" if line else str(path),
        ) from error
    if not isinstance(data, dict):
        raise PlanError(
            f"{path} holds a {type(data).__name__} and not an object of settings",
            fix="name the config.json that save_pretrained wrote",
            source=str(path),
        )
    return data


def check_folder(folder: Path, text: str) -> Path:
    """Return the config.json of a model's folder.

    Raises:
        PlanError: there is none; says what the folder is instead.
    """
    if (folder / "config.json").is_file():
        return folder / "config.json"
    if (folder / "adapter_config.json").is_file():
        base = base_of_adapter(folder)
        raise PlanError(
            f"MODEL {text!r} is a LoRA adapter, not a model",
            fix=f"name its base model: {base}" if base else "name the model that it was trained on",
            source=str(folder / "adapter_config.json"),
        )
    if (folder / "model_index.json").is_file():
        raise PlanError(
            f"MODEL {text!r} is a diffusers pipeline (it has a model_index.json)",
            fix="name a language model: the planner simulates those that answer in words",
            source=str(folder / "model_index.json"),
        )
    near = sorted(str(path.parent) for path in folder.glob("*/config.json"))[:3]
    raise PlanError(
        f"MODEL {text!r} is a folder without a config.json",
        near=", ".join(near) or None,
        fix=f"name {near[0]}" if near else "name a folder that save_pretrained wrote, or a hub id",
        source=str(folder),
    )


def check_file(path: Path, text: str) -> Path:
    """Return `path` if it can be a config.json.

    Raises:
        PlanError: it is a file of another kind.
    """
    if path.suffix == ".json" and not path.name.endswith(".index.json"):
        return path
    beside = path.parent / "config.json"
    raise PlanError(
        f"MODEL {text!r} is a file, and no config.json",
        fix=f"name {beside}" if beside.is_file() else "name a config.json, the folder that holds one, or a hub id",
    )


def missing_path(path: Path, text: str) -> PlanError:
    """Return the error of a path that does not exist, with the folders beside it that resemble it."""
    parent = path.parent
    names = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    near = [str(parent / name) for name in nearest_names(path.name, names)]
    return PlanError(
        f"MODEL {text!r}: there is no such folder or file",
        near=", ".join(near) or None,
        fix=f"name {near[0]}"
        if near
        else "name an existing folder with a config.json, or a hub id such as Qwen/Qwen3-8B",
    )


def base_of_adapter(folder: Path) -> str | None:
    """Return the base model that an adapter's folder names, if it does."""
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return base if isinstance(base, str) and base else None
