"""A folder of pictures as splits: by the names of its subfolders, or by a metadata file beside them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hf_fsdp.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".jp2", ".avif")
# How many entries are looked at: a folder of a million pictures shows what it is in its first ones.
_NUM_LOOKED_AT = 5000


def holds_pictures(folder: Path) -> bool:
    """Return whether a folder, or one below it, has picture files."""
    num_seen = 0
    for _, _, names in os.walk(folder):
        for name in names:
            if name.lower().endswith(SUFFIXES):
                return True
            num_seen += 1
            if num_seen >= _NUM_LOOKED_AT:
                return False
    return False


def load_image_folder(folder: Path) -> dict[str, Dataset]:
    """Return every split of a folder of pictures, as `datasets` reads it.

    A split is a subfolder named ``train``, ``test`` or ``validation``; otherwise all is ``train``. The rows have
    ``image`` and what a ``metadata.csv`` or ``.jsonl`` beside the pictures says (``text``, ``question``, ``messages``
    ...), or ``label``, the name of the picture's own folder. No picture is decoded.

    Raises:
        DataError: the metadata names files that are not there, or cannot be read.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        loaded = load_dataset("imagefolder", data_dir=str(folder))
    except (DatasetGenerationError, ValueError) as error:
        reason = error.__cause__ or error
        raise DataError(
            f"dataset_name={str(folder)!r} could not be read as a folder of pictures: {reason}",
            fix="write a metadata.jsonl beside the pictures, a line for each: "
            '{"file_name": "a.png", "question": "...", "answer": "..."}',
        ) from error
    return {str(split): dataset for split, dataset in loaded.items()}
