"""Every sample opened, rendered and counted before the first step, so that nothing of it ends the run at step 900."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_fsdp.data.images.collator import ImageTextCollator, Row
from hf_fsdp.data.images.encode import Encoded
from hf_fsdp.data.images.examples import name_row
from hf_fsdp.data.images.sweep import sweep
from hf_fsdp.errors import DataError, Problem

if TYPE_CHECKING:
    from datasets import Dataset

MAX_SHOWN = 5
_NUM_LONGEST = 5
# A limit is proposed that all but this share of the samples fit in.
_TAIL = 0.05


@dataclass(frozen=True, kw_only=True)
class SampleCount:
    """What one sample comes to.

    Args:
        position: in the dataset, from 0.
        name: for a person: ``row 5 (id 0042)``.
        num_tokens: length in tokens, image tokens counted.
        num_image_tokens: those that stand for pictures, with the marks around them.
        num_learned: tokens that count in the loss.
        num_images: pictures.
        num_pixels: of all its pictures, after `ImageLimits`.
        problems: why it cannot be used; empty where it can.
    """

    position: int
    name: str
    num_tokens: int = 0
    num_image_tokens: int = 0
    num_learned: int = 0
    num_images: int = 0
    num_pixels: int = 0
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImageDataReport:
    """What `check_image_data` found; plain data, so that one process can find it and tell the others.

    Args:
        num_rows: samples in the dataset.
        samples: the ones that were checked, in order.
        max_length: tokens a sample may have, or None.
    """

    num_rows: int
    samples: tuple[SampleCount, ...]
    max_length: int | None

    @property
    def usable(self) -> tuple[SampleCount, ...]:
        """Samples without a problem, of any length."""
        return tuple(sample for sample in self.samples if not sample.problems)

    @property
    def broken(self) -> tuple[SampleCount, ...]:
        """Samples that cannot be used."""
        return tuple(sample for sample in self.samples if sample.problems)

    @property
    def too_long(self) -> tuple[SampleCount, ...]:
        """Usable samples that `max_length` does not hold."""
        limit = self.max_length
        return tuple(sample for sample in self.usable if limit is not None and sample.num_tokens > limit)

    @property
    def longest(self) -> tuple[SampleCount, ...]:
        """The five longest usable samples, the longest first."""
        return tuple(sorted(self.usable, key=lambda sample: -sample.num_tokens)[:_NUM_LONGEST])

    @property
    def kept(self) -> list[int]:
        """Positions without those that are broken or too long, for ``dataset.select(report.kept)``."""
        left_out = {sample.position for sample in (*self.broken, *self.too_long)}
        return [position for position in range(self.num_rows) if position not in left_out]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Every problem of every broken sample, named by its row."""
        return tuple(
            replace(problem, message=f"{sample.name}: {problem.message}")
            for sample in self.broken
            for problem in sample.problems
        )

    @property
    def fitting_tokens(self) -> int:
        """The length that all but 5 % of the usable samples fit in."""
        ordered = sorted(sample.num_tokens for sample in self.usable)
        return ordered[-1 - int(len(ordered) * _TAIL)] if ordered else 0

    def check(self, *, on_too_long: str = "refuse") -> None:
        """Refuse data that training would stumble over.

        Args:
            on_too_long: ``refuse`` takes samples that do not fit for a problem; ``drop`` only when none fits.

        Raises:
            DataError: broken samples (the first five shown), samples that do not fit, or none that teaches anything.
        """
        problems = list(self.problems[:MAX_SHOWN])
        if len(self.broken) > MAX_SHOWN or len(self.problems) > MAX_SHOWN:
            rows = ", ".join(sample.name for sample in self.broken[: 4 * MAX_SHOWN])
            more = " ..." if len(self.broken) > 4 * MAX_SHOWN else ""
            problems.append(
                Problem(
                    message=f"{len(self.broken)} of {len(self.samples)} samples cannot be used: {rows}{more}",
                    fix="repair them, or take these rows out of the data (in a script: dataset.select(report.kept))",
                )
            )
        fits = len(self.usable) - len(self.too_long)
        if self.too_long and (on_too_long == "refuse" or not fits):
            problems.append(self._too_long(on_too_long))
        learning = [sample for sample in self.usable if sample.num_learned]
        if self.usable and not learning:
            problems.append(
                Problem(
                    message=f"no token of {len(self.usable)} samples counts in the loss",
                    fix="assistant_only_loss: false   or   a chat template that marks the answers",
                )
            )
        if problems:
            raise DataError(problems)

    def _too_long(self, on_too_long: str) -> Problem:
        shown = "; ".join(
            f"{sample.name}: {_sum_in_words(sample)}" for sample in self.longest if sample in self.too_long
        )
        longest = self.longest[0].num_tokens
        return Problem(
            message=f"max_length={self.max_length} does not hold {len(self.too_long)} of {len(self.usable)} samples "
            f"({len(self.too_long) / len(self.usable):.1%}), and image tokens are never cut; longest: {shown}",
            fix=f"max_length: {longest}   (holds all; {self.fitting_tokens} holds all but 5 %)"
            + ("" if on_too_long == "drop" else "   or   on_too_long: drop")
            + "   or   a smaller max_pixels, where the model has such a choice",
        )

    def __str__(self) -> str:
        checked = len(self.samples)
        some = "" if checked == self.num_rows else f" ({checked} of {self.num_rows} checked)"
        usable = self.usable
        if not usable:
            return f"images: none of {checked} samples can be used{some}"
        images = [sample.num_images for sample in usable]
        with_images = [sample for sample in usable if sample.num_images]
        text = (
            f"images: {sum(images)} in {len(usable)} samples (at most {max(images)} a sample, {images.count(0)} "
            f"samples without){some}"
        )
        if with_images:
            tokens = sorted(sample.num_image_tokens for sample in with_images)
            pixels = sum(sample.num_pixels for sample in with_images) / sum(images) / 1e6
            text += f", {tokens[len(tokens) // 2]} image tokens a sample (median), {_megapixels(pixels)} an image"
        limit = "no limit" if self.max_length is None else f"max_length {self.max_length}"
        text += f"; longest {_sum_in_words(self.longest[0])} tokens, {limit}"
        if self.too_long:
            text += f"; {len(self.too_long)} samples ({len(self.too_long) / len(usable):.1%}) do not fit"
        return text + (f"; {len(self.broken)} samples cannot be used" if self.broken else "")


def check_image_data(
    dataset: Dataset,
    collator: Any,
    *,
    num_samples: int | str = "all",
    positions: Sequence[int] | None = None,
    max_length: int | None = None,
    num_workers: int | None = None,
    show_progress: bool = True,
) -> ImageDataReport:
    """Pass samples through opening, template, processor and masking, as training will, and count what they come to.

    Args:
        dataset: of `read_image_examples`.
        collator: an `ImageTextCollator`, or a processor, from which one is made.
        num_samples: how many to check, evenly spread, or ``all``.
        positions: which ones to check instead.
        max_length: tokens a sample may have; None takes the collator's.
        num_workers: processes that read; 0 reads in this one, None takes every core but one (at most 16).
        show_progress: whether to show a bar.

    Returns:
        The report. It raises nothing by itself: ``report.check()`` does.

    Raises:
        DataError: a processor that cannot be trained with.

    Example::

        report = check_image_data(examples.dataset, collator, num_samples=1000)
        print(report); report.check()
        # images: 1000 in 1000 samples (at most 1 a sample, 0 samples without), 577 image tokens a sample (median) ...
    """
    collator = collator if isinstance(collator, ImageTextCollator) else ImageTextCollator(collator)
    measure = _Measure(collator)
    positions = spread(len(dataset), num_samples) if positions is None else positions
    found = sweep(
        dataset, positions, measure, num_workers=num_workers, desc="Checking images", show_progress=show_progress
    )
    measure.collator.decoder.close()
    samples = tuple(
        replace(sample, position=position, name=name_row(position, sample.name))
        for position, sample in zip(positions, found, strict=True)
    )
    limit = collator.max_length if max_length is None else max_length
    return ImageDataReport(num_rows=len(dataset), samples=samples, max_length=limit)


def spread(num_rows: int, num_samples: int | str) -> list[int]:
    """Return `num_samples` positions, evenly spread.

    Raises:
        DataError: neither ``all`` nor a positive number.
    """
    if num_samples == "all":
        return list(range(num_rows))
    if not isinstance(num_samples, int) or num_samples < 1:
        raise DataError(f"num_samples={num_samples!r} is neither 'all' nor a positive number", fix="num_samples: all")
    count = min(num_samples, num_rows)
    return [index * num_rows // count for index in range(count)]


class _Measure:
    """Counts rows in a worker process: what it returns is small, the pictures stay there."""

    def __init__(self, collator: ImageTextCollator):
        self.collator = copy.copy(collator)
        # Each sample is seen once, and there are as many processes as cores: neither cache nor threads would help.
        self.collator.decoder = type(collator.decoder)(collator.limits, num_threads=1, cache_bytes=0)

    def __call__(self, rows: list[Row]) -> list[SampleCount]:
        return [self._count(row, result) for row, result in zip(rows, self._encode(rows), strict=True)]

    def _encode(self, rows: Sequence[Row]) -> list[Encoded | DataError]:
        return [self.collator.try_encode([row])[0] for row in rows]

    def _count(self, row: Row, result: Encoded | DataError) -> SampleCount:
        name = str(row.get("id"))
        if isinstance(result, DataError):
            return SampleCount(position=0, name=name, problems=result.problems)
        return SampleCount(
            position=0,
            name=name,
            num_tokens=len(result.input_ids),
            num_image_tokens=result.num_image_tokens,
            num_learned=int((result.labels >= 0).sum()),
            num_images=len(row["images"] or []),
            num_pixels=result.num_pixels,
        )


def _sum_in_words(sample: SampleCount) -> str:
    text = sample.num_tokens - sample.num_image_tokens
    return f"{sample.num_image_tokens} image + {text} text = {sample.num_tokens}"


def _megapixels(millions: float) -> str:
    return f"{millions:.2g} megapixels" if millions >= 0.01 else f"{millions * 1e6:.0f} pixels"
