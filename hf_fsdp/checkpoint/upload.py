"""An exported folder goes to the Hub: which files, in one commit, and what a failure means.

Only an export is uploaded, never a checkpoint: a repository of shards, optimizer state and pickles is of no use to
`from_pretrained`. One commit, so that nobody downloads half of the new weights with half of the old.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi

from hf_fsdp.checkpoint.serving import ADAPTER_CONFIG, MODEL_CONFIG
from hf_fsdp.errors import CheckpointError

ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Trainer and PEFT write these beside a model; they are pickles, or of this machine.
_NOT_UPLOADED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.distcp", "trainer_state.json", "audit.json", "._*")
# A folder with one of these is a checkpoint and not an export.
_OF_A_CHECKPOINT = ("manifest.json", "optimizer", "state", "model/shard-*", "shard-*", ".metadata")
# What the HTTP client adds to every error.
_MORE = re.compile(r" ?For more information check: \S+")
_MODEL_FILES = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model-*-of-*.bin",
    "pytorch_model.bin.index.json",
)
_ADAPTER_FILES = (ADAPTER_WEIGHTS, "adapter_model.bin", ADAPTER_CONFIG)
# Transformers reads these before what else is there, so an earlier push must not leave them beside the new weights.
_REPLACED = {"model": (*_MODEL_FILES, *_ADAPTER_FILES), "adapter": _ADAPTER_FILES}


@dataclass(frozen=True, kw_only=True)
class HubTarget:
    """Where an export goes.

    Args:
        repo_id: ``name/repository``; it exists.
        token: with write access; None for the one that `hf auth login` stored. Never printed.
        revision: a branch, None for the main one.
    """

    repo_id: str
    token: str | None = field(default=None, repr=False)
    revision: str | None = None


def upload_export(api: HfApi, folder: Path, target: HubTarget, *, message: str, path_in_repo: str = "") -> CommitInfo:
    """Upload the exported model in `folder` as one commit; weights of earlier pushes that it replaces are deleted.

    Args:
        api: the client; its endpoint is that of the environment.
        folder: what `from_pretrained` loads. Pickles in it (`training_args.bin`) stay here.
        target: repository, branch and token.
        message: the commit's first line.
        path_in_repo: a folder of the repository, for the export of one step beside the newest at the top.

    Raises:
        CheckpointError: `folder` holds no exported model.
        Exception: whatever the client raises for the network or the Hub; see `describe_failure`.
    """
    files = export_files(folder)
    prefix = f"{path_in_repo}/" if path_in_repo else ""
    additions = [CommitOperationAdd(prefix + name, str(folder / name)) for name in files]
    there = api.list_repo_files(target.repo_id, revision=target.revision, token=target.token)
    known = [name.removeprefix(prefix) for name in there if name.startswith(prefix)]
    deletions = [CommitOperationDelete(prefix + name) for name in replaced_files(known, files)]
    return api.create_commit(
        repo_id=target.repo_id,
        operations=[*additions, *deletions],
        commit_message=message,
        token=target.token,
        revision=target.revision,
    )


def export_files(folder: Path) -> list[str]:
    """Return what of an exported folder is uploaded, by name inside it.

    Raises:
        CheckpointError: there is no exported model in it, or it is a checkpoint.
    """
    for pattern in _OF_A_CHECKPOINT:
        if found := next(iter(sorted(folder.glob(pattern))), None):
            raise CheckpointError(
                f"{folder} is a checkpoint (it holds {found.relative_to(folder)}), "
                "and from_pretrained loads no checkpoint",
                fix=f"hf-fsdp checkpoint export {shlex.quote(str(folder))} -o EXPORTED   # and push that folder",
            )
    names = []
    for root, subfolders, files in os.walk(folder):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name != "__pycache__")
        inside = [Path(root, name) for name in sorted(files) if not _stays_here(name)]
        names += [path.relative_to(folder).as_posix() for path in inside if path.is_file() and not path.is_symlink()]
    has_model = MODEL_CONFIG in names and any(_matches(name, _MODEL_FILES[:2]) for name in names)
    has_adapter = any(PurePosixPath(name).name == ADAPTER_WEIGHTS for name in names)
    if not (has_model or has_adapter):
        raise CheckpointError(
            f"{folder} holds no exported model: neither {MODEL_CONFIG} with safetensors, nor an adapter",
            fix="trainer.save_model(FOLDER) on all ranks, or hf-fsdp checkpoint export CHECKPOINT -o FOLDER",
        )
    return names


def not_uploaded(folder: Path) -> list[str]:
    """Return the files directly in an exported folder that stay on this machine: pickles, above all."""
    return sorted(path.name for path in folder.iterdir() if path.is_file() and _stays_here(path.name))


def replaced_files(there: list[str], new: list[str]) -> list[str]:
    """Return which of the files `there` would be loaded in place of the export `new`, or in part.

    A single `model.safetensors` of an earlier push is read before the index of a new sharded one; an
    `adapter_config.json` makes a whole model be loaded as an adapter.
    """
    kind = "model" if any(_matches(name, _MODEL_FILES) for name in new) else "adapter"
    return sorted(name for name in set(there) - set(new) if _matches(name, _REPLACED[kind]))


def name_hub_base(folder: Path) -> str | None:
    """Let `adapter_config.json` name its base by repository where it names a snapshot in this machine's cache.

    Returns:
        The base's path where it is a local folder that no repository is known for, and which stays as it is.
    """
    local = None
    for path in sorted(folder.rglob(ADAPTER_CONFIG)):
        config = json.loads(path.read_text(encoding="utf-8"))
        base = config.get("base_model_name_or_path")
        if not base or not is_local(base):
            continue
        found = repository_of_snapshot(base)
        if found is None:
            local = str(base)
            continue
        config["base_model_name_or_path"], revision = found
        if config.get("revision") in (None, "main"):
            config["revision"] = revision
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return local


def repository_of_snapshot(path: str) -> tuple[str, str] | None:
    """Return repository and commit of a folder in the Hub's cache, or None for any other folder."""
    parts = Path(path).parts
    for index, part in enumerate(parts[:-2]):
        if part.startswith("models--") and parts[index + 1] == "snapshots":
            return part.removeprefix("models--").replace("--", "/"), parts[index + 2]
    return None


def is_local(name: str) -> bool:
    """Return whether a model's name is a path of this machine and not a repository."""
    return Path(name).is_absolute() or name.startswith(("./", "../", "~")) or Path(name).is_dir()


def upload_command(folder: Path, target: HubTarget, path_in_repo: str = "") -> str:
    """Return the command that pushes `folder` by hand."""
    words = ["hf", "upload", target.repo_id, str(folder), path_in_repo or "."]
    words += ["--revision", target.revision] if target.revision else []
    return shlex.join(words)


def describe_failure(error: BaseException, token: str | None = None) -> str:
    """Return what went wrong in one line, without the token."""
    text = _MORE.sub("", " ".join(str(error).split())) or type(error).__name__
    for secret in (token, os.environ.get("HF_TOKEN")):
        text = text.replace(secret, "***") if secret else text
    return f"{type(error).__name__}: {text[:400]}"


def _stays_here(name: str) -> bool:
    return name.startswith(".") or _matches(name, _NOT_UPLOADED)


def _matches(name: str, patterns: Any) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
