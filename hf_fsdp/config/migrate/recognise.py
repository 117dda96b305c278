"""Which program an old config belongs to, by what is in it; the name of the file counts for nothing but `.py`."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_fsdp.config.io import load_yaml
from hf_fsdp.config.migrate.accelerate_file import read_accelerate_file
from hf_fsdp.config.migrate.axolotl import read_axolotl
from hf_fsdp.config.migrate.llama_factory import read_llama_factory, read_llama_factory_v1
from hf_fsdp.config.migrate.python_calls import read_python
from hf_fsdp.config.migrate.refused import explain_training_keys
from hf_fsdp.config.migrate.setting import FSDP_BLOCK_NAMES, OldConfig, YamlFile
from hf_fsdp.config.migrate.trainer import read_trainer
from hf_fsdp.config.parse import strip_prefix
from hf_fsdp.errors import ConfigError

ACCELERATE_MARKS = frozenset({"distributed_type", "compute_environment", "num_processes", "num_machines"})
AXOLOTL_MARKS = frozenset({"base_model", "micro_batch_size", "sequence_len", "fsdp_version", "dataset_prepared_path"})
LLAMA_FACTORY_MARKS = frozenset({"finetuning_type", "stage", "cutoff_len", "pure_bf16", "quantization_bit"})
PYTHON_MARKS = re.compile(
    r"\bimport FullyShardedDataParallel\b|\b(FSDP|FullyShardedDataParallel\w*|fully_shard|\w*Arguments)\s*\("
)
KINDS = (
    "Accelerate's launch file, TrainingArguments (fsdp, fsdp_config), Axolotl's or LLaMA-Factory's YAML, or a .py file"
)


def read_old_config(path: str | os.PathLike[str]) -> OldConfig:
    """Read an old config of any kind.

    Args:
        path: a YAML, JSON or Python file.

    Raises:
        ConfigError: it cannot be read, is already ours, or is of no known kind.
    """
    file = Path(path)
    _require_file(file)
    if file.suffix == ".py":
        return read_python(file)
    try:
        data, lines = load_yaml(path)
    except ConfigError:
        text = _text_of(file)
        if text is not None and PYTHON_MARKS.search(text):
            return read_python(file)
        data = _as_json(text)
        if data is None:
            raise
        lines = {}
    if isinstance(data, str) and PYTHON_MARKS.search(data):
        return read_python(file)
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{path} holds no mapping of settings", fix=f"name a file that is {KINDS}", source=f"{path}:1"
        )
    old = _find_reader(str(path), data)(YamlFile(str(path), data, lines))
    explain_training_keys(old, data)
    return old


def _require_file(file: Path) -> None:
    """Refuse a path without a file; only a file whose name is nearly the same is suggested."""
    try:
        file.stat()
    except FileNotFoundError:
        kinds = (".yaml", ".yml", ".json", ".py")
        folder = file.parent
        names = {other.stem: str(other) for other in folder.glob("*") if other.suffix in kinds and other.is_file()}
        # Without the suffix: `.yaml` alone makes any two names look alike.
        near = [names[stem] for stem in difflib.get_close_matches(file.stem, names, cutoff=0.75)]
        raise ConfigError(
            f"{file} does not exist",
            fix=f"use {near[0]}" if near else "check the path",
            near=", ".join(near) or None,
            source=str(file),
        ) from None
    except OSError:
        return  # whoever reads it says what is wrong


def _find_reader(path: str, data: Mapping[Any, Any]) -> Callable[[YamlFile], OldConfig]:
    keys = {str(key) for key in data}
    if isinstance(data.get("fsdp"), Mapping) and "fsdp_config" not in keys:
        raise ConfigError(
            f"{path} is already a config of hf-fsdp: its fsdp section is a mapping",
            fix=f"FSDPConfig.from_yaml({path!r})",
            source=f"{path}:1",
        )
    if keys & ACCELERATE_MARKS:
        return read_accelerate_file
    if "dist_config" in keys:
        return read_llama_factory_v1
    if keys & AXOLOTL_MARKS:
        return read_axolotl
    if keys & LLAMA_FACTORY_MARKS:
        return read_llama_factory
    if keys & {"fsdp", "fsdp_config"}:
        return read_trainer
    known = {strip_prefix(key) for key in keys} & (set(FSDP_BLOCK_NAMES) - {"version"})
    if known:  # the JSON file that TrainingArguments.fsdp_config names
        return read_trainer
    raise ConfigError(
        f"{path} has no settings of FSDP that hf-fsdp recognises",
        fix=f"name a file that is {KINDS}",
        source=f"{path}:1",
    )


def _text_of(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _as_json(text: str | None) -> Any:
    """Return JSON that is no YAML, such as one indented by tabs; None otherwise."""
    try:
        return json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        return None
