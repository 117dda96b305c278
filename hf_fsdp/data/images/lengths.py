"""How long each sample is, from the headers of its pictures alone, so that batches can be made of alike samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_fsdp.data.images.collator import ImageTextCollator, Row
from hf_fsdp.data.images.open import read_image_size
from hf_fsdp.data.images.sweep import sweep
from hf_fsdp.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

# The name that `TrainingArguments.length_column_name` has by default.
COLUMN = "length"


def lengths_for_grouping(
    dataset: Dataset, collator: Any, *, num_workers: int | None = None, show_progress: bool = True
) -> list[int]:
    """Return an estimate of each sample's tokens: those of its text, and those of its images by their size.

    Args:
        dataset: of `read_image_examples`.
        collator: an `ImageTextCollator`, or a processor, from which one is made.
        num_workers: processes that read; 0 reads in this one, None takes every core but one (at most 16).
        show_progress: whether to show a bar.

    Returns:
        One length a sample; of a picture whose header cannot be read, none counts: `check_image_data` names it.
    """
    collator = collator if isinstance(collator, ImageTextCollator) else ImageTextCollator(collator)
    positions = range(len(dataset))
    return sweep(
        dataset,
        positions,
        _Estimate(collator),
        num_workers=num_workers,
        desc="Measuring samples",
        show_progress=show_progress,
    )


def add_lengths(dataset: Dataset, collator: Any, **options: Any) -> Dataset:
    """Return `dataset` with the column ``length``, by which Trainer makes batches of samples of alike length.

    With ``train_sampling_strategy="group_by_length"`` neighbouring batches hold alike samples, and the ranks take
    neighbouring batches: no rank waits for another that has all the long samples or all the pictures.

    Args:
        dataset: of `read_image_examples`.
        collator: as for `lengths_for_grouping`.
        **options: as for `lengths_for_grouping`.
    """
    lengths = lengths_for_grouping(dataset, collator, **options)
    if COLUMN in dataset.column_names:
        dataset = dataset.remove_columns(COLUMN)
    return dataset.add_column(COLUMN, lengths)


class _Estimate:
    """Measures rows in a worker process."""

    def __init__(self, collator: ImageTextCollator):
        self.collator = collator

    def __call__(self, rows: list[Row]) -> list[int]:
        texts = [self._text(row) for row in rows]
        tokens = self.collator.processor.tokenizer(texts)["input_ids"]
        return [len(ids) + self._extra(row) for ids, row in zip(tokens, rows, strict=True)]

    def _text(self, row: Row) -> str:
        try:
            return self.collator.encoder.text_of(row["messages"])
        except DataError:  # what is wrong with it is the check's to say
            return ""

    def _extra(self, row: Row) -> int:
        """Return the tokens that the images take beyond the one that stands for each in the text."""
        from hf_fsdp.data.processors import image_token_counts

        try:
            sizes = [read_image_size(image, self.collator.limits)[::-1] for image in row["images"] or []]
            return sum(image_token_counts(self.collator.processor, sizes)) - len(sizes) if sizes else 0
        except DataError:
            return 0
