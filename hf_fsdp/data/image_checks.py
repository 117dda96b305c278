"""The check of a recipe's pictures before any weights are loaded, shared out among the processes."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import psutil

from hf_fsdp.data.images import ImageDataReport, ImageTextCollator, check_image_data, spread
from hf_fsdp.errors import DataError
from hf_fsdp.sharding.mesh import agree_all, rank, world_size

if TYPE_CHECKING:
    from datasets import Dataset


def check_images(dataset: Dataset, collator: ImageTextCollator, num_samples: str | int, *, what: str) -> Dataset:
    """Pass samples through all that training does with them, each process its share; collective.

    Args:
        dataset: of `read_image_examples`, the same in all processes.
        collator: of the run; its `max_length` and `on_too_long` say what is refused.
        num_samples: a number, ``all``, or ``0`` for no check.
        what: ``training`` or ``held-out``, for the printed line.

    Returns:
        The dataset, without the samples that do not fit where all were looked at and they are to be dropped.

    Raises:
        DataError: in all processes alike: samples that cannot be used, or that do not fit; every kind at once.
    """
    count = _read_count(num_samples)
    if count == 0:
        return dataset
    positions = spread(len(dataset), count)
    mine = positions[rank() :: world_size()]
    is_shown = rank() == 0
    found = check_image_data(
        dataset, collator, positions=mine, num_workers=_share_of_cores(len(mine)), show_progress=is_shown
    )
    samples = sorted((sample for share in agree_all(found.samples) for sample in share), key=lambda item: item.position)
    report = ImageDataReport(num_rows=len(dataset), samples=tuple(samples), max_length=collator.max_length)
    if is_shown:
        print(f"{what} {report}", flush=True)
    report.check(on_too_long=collator.on_too_long)
    if count == "all" and report.too_long:
        return dataset.select(report.kept)
    return dataset


def _read_count(value: Any) -> int | str:
    """A file gives a number as a number, a command line as text."""
    text = value.strip().lower() if isinstance(value, str) else value
    if text == "all":
        return "all"
    if isinstance(text, str) and re.fullmatch(r"[0-9]+", text):
        return int(text)
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    raise DataError(f"check_data={value!r} is neither a number of samples nor all", fix="check_data: all   or   0")


def _share_of_cores(num_samples: int) -> int:
    """Return how many processes this one starts: pictures take milliseconds, a process a second."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    cores: Any = psutil.cpu_count() or 1
    return 0 if num_samples < 200 else max(0, cores // num_local - 1)
