"""A Hugging Face folder that is replaced as a whole: nobody loads the old index with the new weights."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.files import files_under, fsync_file, fsync_folder
from hf_fsdp.storage.safetensors_file import read_header

_STAGING = ".hf-fsdp-saving-model"
_WEIGHTS = re.compile(r"(pytorch_model|model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")


@contextmanager
def replaced_files(folder: Path) -> Iterator[Path]:
    """Give a folder to write a model into; what was written is checked, made durable, and then takes its place.

    Weights of an earlier save that the new one does not have are deleted: `from_pretrained` prefers an old
    `model.safetensors` to a new index. Other files of `folder` stay.

    Raises:
        CheckpointError: no weights were written, a file cannot be read back, or an adapter is empty; `folder` is as
            it was.
    """
    staging = folder / _STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        written = list(files_under(staging))
        _check(folder, staging, written)
        for name in written:
            fsync_file(staging / name)
        # The index last: until then it names the earlier weights, which are still there.
        for name in sorted(written, key=lambda name: (name.endswith(".index.json"), name)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / name, folder / name)
        for path in folder.iterdir():
            if _WEIGHTS.fullmatch(path.name) and path.name not in written:
                path.unlink()
        fsync_folder(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check(folder: Path, staging: Path, written: list[str]) -> None:
    weights = [name for name in written if name.endswith(".safetensors")]
    empty = [name for name in weights if not read_header(staging / name).entries]
    if not weights or empty:
        what = f"{empty[0]} would be empty" if empty else "no weights were written"
        raise CheckpointError(
            f"{what}, so {folder} is left as it was",
            fix="call it with the model that is trained, or an adapter whose target_modules are in the model",
        )
