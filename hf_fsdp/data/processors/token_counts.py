"""How many tokens a picture becomes, from its size alone.

Transformers has a formula on most processors, written for serving; some leave out the tokens around a picture, some
processors have none. So a formula is first tried on a few blank pictures. It is believed when it is right for all of
them, or off by the same number for all of them; otherwise blank pictures are counted, each size once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_fsdp.errors import DataError

Size = tuple[int, int]
Formula = Callable[[Any, Size], int]

# Small, large, square, wide, tall and odd: what cuts pictures into tiles decides by size and by shape.
_PROBES: tuple[Size, ...] = ((40, 40), (53, 171), (420, 130), (333, 1000), (800, 700))


@dataclass
class _Counter:
    """What is known of one processor; it must not hold the processor, or the weak dictionary never forgets it."""

    formulas: dict[bool, Formula | None] = field(default_factory=dict)
    known: dict[tuple[Size, bool], int] = field(default_factory=dict)

    def count(self, processor: Any, size: Size, is_several: bool) -> int:
        key = (size, is_several)
        if key not in self.known:
            if is_several not in self.formulas:
                self.formulas[is_several] = _find_formula(processor, is_several)
            formula = self.formulas[is_several]
            try:
                count = formula(processor, size) if formula else None
            except ValueError:  # a picture that it refuses, which processing one says better
                count = None
            self.known[key] = _count_blank(processor, size, is_several) if count is None else count
        return self.known[key]


_COUNTERS: weakref.WeakKeyDictionary[Any, _Counter] = weakref.WeakKeyDictionary()


def image_token_counts(processor: Any, sizes: Sequence[Size]) -> list[int]:
    """Return how many tokens each picture of one sample becomes, without reading its pixels.

    Everything that the processor writes in the place of the picture's placeholder counts: also marks of rows and the
    tokens around it. Marks that the chat template writes do not.

    Args:
        processor: of `load_processor`, or any processor of transformers with an image processor and a tokenizer. What
            it makes of a size is remembered, so change its image settings before the first call.
        sizes: (height, width) in pixels of the pictures of ONE sample. Some processors (LLaVA-OneVision) treat the
            pictures of a sample with several otherwise than a single one.

    Returns:
        One count a picture, each at least 1.

    Raises:
        DataError: a size is not two positive numbers, or the processor refuses a picture of that size.

    Example::

        image_token_counts(processor, [(336, 336), (480, 640)])
        # [144, 391]
    """
    for size in sizes:
        if len(size) != 2 or min(size) < 1:
            raise DataError(
                f"the size of a picture is (height, width) in pixels, both at least 1, not {tuple(size)!r}",
                fix="leave out pictures without pixels",
            )
    counter = _COUNTERS.setdefault(processor, _Counter())
    return [counter.count(processor, (int(height), int(width)), len(sizes) > 1) for height, width in sizes]


def _count_blank(processor: Any, size: Size, is_several: bool) -> int:
    """Count the tokens of a blank picture by processing it, alone or as one of two alike in its sample."""
    from PIL import Image

    pictures = [Image.new("RGB", (size[1], size[0]))] * (2 if is_several else 1)
    # The processor's own way from pictures to the text in their place, which no other text can merge with.
    settings = _image_settings(processor)
    try:
        _, replacements = processor._process_images([pictures], **settings)
    except ValueError as error:
        raise DataError(
            f"{type(processor).__name__} refuses a picture of {size[0]} x {size[1]} pixels (height x width): {error}",
            fix="crop such pictures, or leave them out",
        ) from error
    return _num_tokens(processor, replacements[0])


def _image_settings(processor: Any) -> dict[str, Any]:
    """Return what the processor hands to its image processor when it is called without settings."""
    names, own = processor.valid_processor_kwargs, processor.tokenizer.init_kwargs
    return dict(processor._merge_kwargs(names, tokenizer_init_kwargs=own)["images_kwargs"])


def _num_tokens(processor: Any, text: str) -> int:
    return len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])


def _find_formula(processor: Any, is_several: bool) -> Formula | None:
    """Return the first formula that agrees with blank pictures, corrected by what it always leaves out."""
    real = {}
    for size in _PROBES:
        try:
            real[size] = _count_blank(processor, size, is_several)
        except DataError:  # too small or too long for this processor
            continue
    for formula in (_official_formula, _rows_formula):
        try:
            off = {count - formula(processor, size) for size, count in real.items()}
        except (AttributeError, KeyError, TypeError, NotImplementedError):  # it has no such formula, or a broken one
            continue
        if len(off) == 1:
            return _corrected(formula, off.pop())
    return None


def _corrected(formula: Formula, missing: int) -> Formula:
    return lambda processor, size: formula(processor, size) + missing


def _official_formula(processor: Any, size: Size) -> int:
    return int(processor._get_num_multimodal_tokens(image_sizes=[size])["num_image_tokens"][0])


def _rows_formula(processor: Any, size: Size) -> int:
    """Of processors that write a picture as rows of tiles, from how many there are."""
    settings = _image_settings(processor)
    _, num_rows, num_columns = processor.image_processor.get_number_of_image_patches(*size, settings)
    text = processor.replace_image_token({"rows": [[num_rows]], "cols": [[num_columns]]}, image_idx=0)
    return _num_tokens(processor, text)
