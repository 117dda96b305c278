"""What `hf-fsdp checkpoint inspect` shows of one checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_fsdp.checkpoint.find import TRAINER_STATE_FILE, choose_checkpoint
from hf_fsdp.checkpoint.manifest import Manifest, dtype_name
from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.files import read_json, safe_join
from hf_fsdp.storage.tensor_source import TensorInfo
from hf_fsdp.units import format_bytes, format_count

TENSOR_HEADER = ("TENSORS", "NUMBER", "PARAMETERS", "DTYPE", "SIZE", "SHAPE")
_DATA_FILE, _GROUPS_FILE = "state/data.json", "optimizer/groups.json"


def describe(path: Path, *, with_tensors: bool) -> dict[str, Any]:
    """Return everything about a checkpoint, or the newest one of a run, for JSON.

    Raises:
        CheckpointError: it is damaged or not committed.
    """
    folder, lines = choose_checkpoint(path)
    if not (folder / "manifest.json").is_file():
        return _describe_foreign(folder, lines, with_tensors)
    manifest = Manifest.read(folder)
    groups = _document(folder, _GROUPS_FILE, manifest)
    return {
        "path": str(folder),
        "notes": list(lines),
        "written_by": "hf-fsdp",
        "step": manifest.step,
        "created": manifest.created,
        "save_seconds": manifest.save_seconds,
        "world_size": manifest.world_size,
        "mesh": dict(manifest.mesh),
        "content": manifest.content,
        "model_class": manifest.model_class,
        "model": _section(manifest.model, with_tensors),
        "ties": {first: list(names) for first, names in manifest.ties.items()},
        "export_dtypes": dict(Counter(dtype_name(dtype) for dtype in manifest.export_dtypes.values())),
        "adapters": {name: len(keys) for name, keys in manifest.adapters.items()},
        "base": dict(manifest.base),
        "optimizer": {
            **_section(manifest.optimizer, False),
            "state_keys": dict(Counter(name.rpartition(".")[2] for name in manifest.optimizer)),
            "class": groups.get("class") if isinstance(groups, dict) else None,
            "groups": _groups(groups),
        },
        "data": _document(folder, _DATA_FILE, manifest),
        "trainer": _trainer(folder),
        "versions": dict(manifest.versions),
        "files": {name: record.size for name, record in manifest.files.items()},
        "bytes": manifest.num_bytes,
    }


def _describe_foreign(folder: Path, lines: Iterable[str], with_tensors: bool) -> dict[str, Any]:
    from hf_fsdp.checkpoint.foreign import open_foreign  # seconds of imports that our own checkpoints need not wait for

    foreign = open_foreign(folder)
    try:
        return {
            "path": str(folder),
            "notes": [*lines, *(f"missing: {line}" for line in foreign.missing)],
            "written_by": foreign.kind,
            "model": _section(foreign.model.tensors if foreign.model is not None else {}, with_tensors),
            "optimizer": _section(foreign.optimizer.tensors if foreign.optimizer is not None else {}, False),
            "trainer": _trainer(folder),
        }
    finally:
        foreign.close()


def _section(tensors: Mapping[str, TensorInfo], with_tensors: bool) -> dict[str, Any]:
    blocks: dict[str, dict[str, Any]] = {}
    for name, info in tensors.items():
        block = blocks.setdefault(block_of(name), {"tensors": 0, "parameters": 0, "bytes": 0, "dtypes": Counter()})
        block["tensors"] += 1
        block["parameters"] += math.prod(info.shape)
        block["bytes"] += math.prod(info.shape) * info.dtype.itemsize
        block["dtypes"][dtype_name(info.dtype)] += 1
    content: dict[str, Any] = {
        "num_tensors": len(tensors),
        "num_parameters": sum(block["parameters"] for block in blocks.values()),
        "bytes": sum(block["bytes"] for block in blocks.values()),
        "blocks": [{"name": name, **block, "dtypes": dict(block["dtypes"])} for name, block in blocks.items()],
    }
    if with_tensors:
        content["tensors"] = [
            {"name": name, "dtype": dtype_name(info.dtype), "shape": list(info.shape)} for name, info in tensors.items()
        ]
    return content


def block_of(name: str) -> str:
    """Return the block that a tensor is counted under: ``model.layers.*`` for all layers, else its module."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join([*parts[:index], "*"])
    return ".".join(parts[:-1]) or name


def _document(folder: Path, name: str, manifest: Manifest) -> Any:
    return read_json(safe_join(folder, name)) if name in manifest.files else None


def _groups(content: Any) -> list[dict[str, Any]]:
    """Return the optimizer's hyperparameters, a group at a time, without the names of its parameters."""
    groups = content.get("groups") if isinstance(content, dict) else None
    if not isinstance(groups, list):
        return []
    settings = [group.get("settings") for group in groups if isinstance(group, dict)]
    return [
        {key: value for key, value in values.items() if isinstance(value, str | int | float)}
        for values in settings
        if isinstance(values, dict)
    ]


def _trainer(folder: Path) -> dict[str, Any]:
    try:
        state = read_json(safe_join(folder, TRAINER_STATE_FILE))
    except CheckpointError:
        return {}
    keys = ("global_step", "max_steps", "epoch", "num_train_epochs", "best_metric", "best_model_checkpoint")
    return {key: state.get(key) for key in keys} if isinstance(state, dict) else {}


# -- for people -------------------------------------------------------------------------------------------------------


def summary_lines(content: dict[str, Any]) -> list[str]:
    """Return what stands above the table of tensors."""
    model, optimizer = content["model"], content["optimizer"]
    lines = [*content["notes"], f"{content['path']}, written by {content['written_by']}"]
    if "step" in content:
        lines.append(
            f"step {content['step']}, saved {content['created']} by {content['world_size']} processes "
            f"{content['mesh'] or ''} in {content['save_seconds']} s; {format_bytes(content['bytes'])} in "
            f"{len(content['files'])} files; content: {content['content']}"
        )
    lines.append(
        f"model: {content.get('model_class') or ''} {model['num_tensors']} tensors, "
        f"{format_count(model['num_parameters'])} parameters, {format_bytes(model['bytes'])}"
    )
    if content.get("export_dtypes"):
        lines.append(f"exported by default in: {_counts(content['export_dtypes'])}")
    lines += [f"tied: {', '.join(names)}" for names in content.get("ties", {}).values()]
    lines += [f"adapter {name}: {count} tensors" for name, count in content.get("adapters", {}).items()]
    if content.get("base"):
        lines.append(f"base: {content['base'].get('name')}")
    if optimizer["num_tensors"]:
        size, keys = format_bytes(optimizer["bytes"]), optimizer.get("state_keys")
        line = f"optimizer: {optimizer.get('class') or ''} {optimizer['num_tensors']} tensors, {size}"
        lines.append(f"{line} ({_counts(keys)})" if keys else line)
    else:
        lines.append("optimizer: none")
    for index, group in enumerate(optimizer.get("groups", ())):
        lines.append(f"group {index}: " + ", ".join(f"{key} {value}" for key, value in sorted(group.items())))
    for title in ("data", "trainer", "versions"):
        if content.get(title):
            known = {key: value for key, value in content[title].items() if value is not None}
            lines.append(f"{title}: " + ", ".join(f"{key} {value}" for key, value in known.items()))
    return lines


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ×{count}" for name, count in counts.items())


def table_rows(content: dict[str, Any], *, with_tensors: bool) -> list[list[str]]:
    """Return the cells under `TENSOR_HEADER`: a row a block, or a row a tensor."""
    model = content["model"]
    if not with_tensors:
        return [
            [
                block["name"],
                str(block["tensors"]),
                format_count(block["parameters"]),
                ", ".join(block["dtypes"]),
                format_bytes(block["bytes"]),
                "",
            ]
            for block in model["blocks"]
        ]
    rows = []
    for item in model["tensors"]:
        size = TensorInfo(_dtype(item["dtype"]), tuple(item["shape"]))
        count = math.prod(size.shape)
        cells = [item["name"], "1", format_count(count), item["dtype"], format_bytes(count * size.dtype.itemsize)]
        rows.append([*cells, "×".join(str(length) for length in size.shape) or "scalar"])
    return rows


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)
