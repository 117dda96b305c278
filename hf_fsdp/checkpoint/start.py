"""Load a model to start a run from: a Hugging Face model, or a checkpoint of ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hf_fsdp.checkpoint.manifest import MANIFEST_FILE, Manifest
from hf_fsdp.checkpoint.verify import open_model_source
from hf_fsdp.errors import CheckpointError
from hf_fsdp.sharding.load import load_from_files, load_from_source
from hf_fsdp.storage.files import safe_join


def load_sharded(model_class: Any, name: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    """Load a model for sharded training: each process reads only what it will keep.

    Use it in place of ``AutoModelForCausalLM.from_pretrained(name, ...)`` and hand the model on as ever: to `Trainer`
    with `FSDPCallback`, to `get_peft_model`, to `apply_fsdp`. Weights stay in their files until the model is sharded;
    code in between that asks for a weight's values gets them, whole. In a single process it is `from_pretrained`.

    Args:
        model_class: `AutoModelForCausalLM`, `LlamaForCausalLM`, …
        name: a hub id, a folder with safetensors, or a `checkpoint-N` that hf-fsdp has written.
        args: as for ``from_pretrained``.
        kwargs: as for ``from_pretrained``. Quantized models, `device_map` and files that are not safetensors are
            loaded whole by every process in the ordinary way, with a line that says so.

    Returns:
        The model in eval mode, as from ``from_pretrained``.

    Raises:
        CheckpointError: a file is damaged, or an index names files outside of its folder.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_fsdp import load_sharded
        >>> # model = load_sharded(AutoModelForCausalLM, "meta-llama/Llama-2-7b-hf", dtype="bfloat16")
        >>> # trainer = Trainer(model=model, callbacks=[FSDPCallback()], ...)
    """
    folder = Path(name)
    if not (folder / MANIFEST_FILE).is_file():
        return load_from_files(model_class, name, *args, **kwargs)
    manifest = Manifest.read(folder)
    files = [file for file in manifest.files if file.startswith("model/") and file.endswith(".safetensors")]
    if not files:  # format `full`, or an adapter: what `from_pretrained` reads
        return load_from_files(model_class, name, *args, **kwargs)
    if manifest.adapters:
        raise CheckpointError(
            f"{folder} holds an adapter and trained weights beside it, which from_pretrained would not find",
            fix="load the base model, put the adapter on it as in the run that saved, and resume_from_checkpoint",
        )
    source = open_model_source(folder, manifest)
    return load_from_source(model_class, folder, source, [safe_join(folder, file) for file in files], *args, **kwargs)
