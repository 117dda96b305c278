"""Data with images: read, opened, checked, and collated for vision-language models."""

from __future__ import annotations

from hf_fsdp.data.images.check import ImageDataReport, check_image_data, spread
from hf_fsdp.data.images.collator import ImageTextCollator
from hf_fsdp.data.images.examples import ImageExamples, read_image_examples
from hf_fsdp.data.images.lengths import add_lengths, lengths_for_grouping
from hf_fsdp.data.images.open import ImageLimits, open_image, read_image_size
from hf_fsdp.data.images.splits import read_image_splits

__all__ = [
    "ImageDataReport",
    "ImageExamples",
    "ImageLimits",
    "ImageTextCollator",
    "add_lengths",
    "check_image_data",
    "lengths_for_grouping",
    "open_image",
    "read_image_examples",
    "read_image_splits",
    "read_image_size",
    "spread",
]
