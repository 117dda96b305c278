"""Training rows with pictures, and those that are held out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_fsdp.data.images.examples import ImageExamples, describe_examples, read_image_examples
from hf_fsdp.data.loading import pick_split, select_eval_examples

if TYPE_CHECKING:
    from datasets import Dataset


def read_image_splits(
    splits: Mapping[str, Dataset],
    train_split: str,
    eval_split: str | None,
    *,
    source: str,
    eval_file: str | None = None,
    eval_fraction: float | None = None,
    seed: int = 42,
    **reading: Any,
) -> tuple[ImageExamples, ImageExamples | None]:
    """Read the training rows and those that are held out from a split, a file, or the training rows themselves.

    These are drawn after they are read, so that a message names the rows as the file has them.

    Args:
        splits, train_split, eval_split, eval_file, eval_fraction, seed: as for `select_eval_examples`.
        source: where the splits come from.
        **reading: as for `read_image_examples`.

    Raises:
        DataError: as both.
    """
    if eval_fraction is not None and not eval_file:
        whole = read_image_examples(pick_split(splits, train_split, "dataset_train_split"), source=source, **reading)
        rows, held_out = select_eval_examples(
            {train_split: whole.dataset}, train_split, None, eval_fraction=eval_fraction, seed=seed
        )
        assert held_out is not None
        return describe_examples(rows, whole.format, whole.line), describe_examples(held_out, whole.format, whole.line)
    rows, held_out = select_eval_examples(
        splits, train_split, eval_split, eval_file=eval_file, eval_fraction=eval_fraction, seed=seed
    )
    examples = read_image_examples(rows, source=source, **reading)
    if held_out is None:
        return examples, None
    return examples, read_image_examples(held_out, source=eval_file or source, **reading)
