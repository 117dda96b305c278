"""Is a model there and may this person read it? Asked before anything loads."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hf_fsdp.errors import ModelAccessError, nearest_names

_WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def check_model_access(name: str, *, revision: str | None = None) -> None:
    """Check that the model `name` can be read, before a rank spends minutes on loading it.

    A local folder is looked into (config, weights, every shard that its index names). A hub id costs one small
    download, its `config.json`, which a gated repository refuses just as it would refuse the weights.

    Args:
        name: a folder, or a hub id such as ``meta-llama/Llama-2-7b-hf``.
        revision: branch, tag or commit on the hub; ``None`` is ``main``.

    Raises:
        ModelAccessError: missing, gated, private or incomplete, with what to do about it.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_folder(folder)
    elif folder.is_file():
        raise ModelAccessError(
            f"model_name_or_path={name!r} is a file, and a model is a folder",
            fix=f"model_name_or_path: {folder.parent}",
        )
    elif name.startswith((".", "/", "~")) or name.count("/") > 1 or name.count(os.sep) > 1:
        _raise_missing_folder(name, folder)
    else:
        _check_hub(name, revision)


def _raise_missing_folder(name: str, folder: Path) -> None:
    near = _near_folders(folder)
    raise ModelAccessError(
        f"model_name_or_path={name!r}: there is no such folder",
        near=", ".join(near) or None,
        fix=f"model_name_or_path: {near[0]}"
        if near
        else "give an existing folder with a config.json, or a hub id such as meta-llama/Llama-2-7b-hf",
    )


def _near_folders(folder: Path) -> list[str]:
    """Return existing folders that resemble `folder`, with any part of the path misspelt."""
    if folder.is_dir():
        return [str(folder)]
    if folder == folder.parent:
        return []
    near: list[str] = []
    for parent in _near_folders(folder.parent):
        children = [child.name for child in _list_folder(Path(parent)) if child.is_dir()]
        names = [folder.name] if folder.name in children else nearest_names(folder.name, children)
        near += [str(Path(parent) / name) for name in names]
    return near[:3]


def _list_folder(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # not ours to read, so nothing to suggest from it
        return []


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
            base_name = base.get("base_model_name_or_path") or "the model it was trained on"
            raise ModelAccessError(
                f"model_name_or_path={str(folder)!r} is a LoRA adapter, not a model",
                fix=f"model_name_or_path: {base_name}",
            )
        near = sorted(str(path.parent) for path in folder.glob("*/config.json"))[:3]
        raise ModelAccessError(
            f"model_name_or_path={str(folder)!r} has no config.json, so it is not a model folder",
            near=", ".join(near) or None,
            fix=f"model_name_or_path: {near[0]}" if near else "give the folder that save_pretrained wrote",
        )
    _check_weights(folder)


def _check_weights(folder: Path) -> None:
    for index in _WEIGHT_INDEXES:
        if (folder / index).is_file():
            shards = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
            missing = sorted(shard for shard in shards if not (folder / shard).is_file())
            if missing:
                raise ModelAccessError(
                    f"model_name_or_path={str(folder)!r} is incomplete: {len(missing)} of {len(shards)} weight "
                    f"files that {index} names are missing, first {missing[0]}",
                    fix="finish the download or the copy, then start again",
                )
            return
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelAccessError(
            f"model_name_or_path={str(folder)!r} has a config.json but no weights (*.safetensors or *.bin)",
            fix="give the folder that save_pretrained wrote, with its weights",
        )


def _check_hub(name: str, revision: str | None) -> None:
    import huggingface_hub
    from huggingface_hub import errors as hub

    page = f"https://huggingface.co/{name}"
    # A folder of almost that name is the likelier meaning, where the hub cannot say otherwise.
    near = _near_folders(Path(name))
    try:
        huggingface_hub.hf_hub_download(name, "config.json", revision=revision)
    except hub.HFValidationError as error:
        raise ModelAccessError(
            f"model_name_or_path={name!r} is neither a folder nor a hub id",
            near=", ".join(near) or None,
            fix=f"model_name_or_path: {near[0]}"
            if near
            else "give an existing folder, or a hub id such as meta-llama/Llama-2-7b-hf",
        ) from error
    except hub.GatedRepoError as error:  # before RepositoryNotFoundError, which it inherits from
        raise ModelAccessError(
            f"model_name_or_path={name!r} is gated, and this account has no access to it yet",
            fix=f"accept the licence at {page}, then run: hf auth login",
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise ModelAccessError(
            f"model_name_or_path={name!r}: the hub knows no such model, or it is private",
            near=", ".join(near) or None,
            fix=f"check the spelling at {page}; for a private model run: hf auth login",
        ) from error
    except hub.RevisionNotFoundError as error:
        raise ModelAccessError(
            f"model_revision={revision!r} does not exist in {name}",
            fix=f"see the branches and tags at {page}/tree/main, or leave model_revision out",
        ) from error
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        raise ModelAccessError(
            f"model_name_or_path={name!r} is not in the local cache, and the hub cannot be reached "
            "(offline, or HF_HUB_OFFLINE is set)",
            near=", ".join(near) or None,
            fix=f"model_name_or_path: {near[0]}"
            if near
            else f"with a connection run: hf download {name}   or give a local folder as model_name_or_path",
        ) from error
    except hub.EntryNotFoundError as error:
        raise ModelAccessError(
            f"model_name_or_path={name!r} has no config.json: an adapter, or weights of another format (GGUF)",
            fix=f"look at {page}/tree/main and give the model that it was made from",
        ) from error
