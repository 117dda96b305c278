"""The folder of the model that an adapter, or a checkpoint without a config, belongs to."""

from __future__ import annotations

from pathlib import Path

from hf_fsdp.errors import CheckpointError

# What a model's folder on the Hub holds beside weights in formats that are not read here.
_PATTERNS = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py")
_CONFIGS = ("*.json", "*.model", "*.txt", "*.jinja", "*.py")


def find_base(name: str | Path, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """Return the folder of a model: `name` itself, or its snapshot in the Hub's cache, fetched if it is not there.

    Args:
        name: of a folder or a repository.
        revision: of the repository.
        with_weights: whether weights are wanted too.

    Raises:
        CheckpointError: there is no such folder, and no such repository can be reached.
    """
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_absolute() or str(name).count("/") > 1 or str(name).startswith((".", "~")):
        raise CheckpointError(f"the base model {name} is not there", fix="--base FOLDER, where it is now")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = list(_PATTERNS if with_weights else _CONFIGS)
    try:
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(
            f"the base model {name} is no folder, and not in the Hub's cache or within reach "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})",
            fix="--base FOLDER, a copy of it; or run where the Hub can be reached",
        ) from error
