"""Rows with images as batches: opened, rendered, tokenized, masked, padded; nothing is ever cut."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_fsdp.data.chat_template import prepare_pad_token
from hf_fsdp.data.images.chat import Messages
from hf_fsdp.data.images.decode import ImageDecoder
from hf_fsdp.data.images.encode import IGNORED, Encoded, build_encoder
from hf_fsdp.data.images.merge import merge
from hf_fsdp.data.images.open import ImageLimits
from hf_fsdp.data.images.sample_error import SampleError
from hf_fsdp.errors import DataError, Problem

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

Row = dict[str, Any]
ON_TOO_LONG = ("refuse", "drop")
MAX_SHOWN = 5


class ImageTextCollator:
    """Makes batches of the rows that `read_image_examples` returns, for `Trainer` and for generation.

    Works with every processor of transformers that has a chat template, and with PaliGemma's. It may be pickled, and
    used in forked and in spawned `DataLoader` workers. The same rows always give the same batch.

    Args:
        processor: an image processor and a fast tokenizer in one, as `AutoProcessor` loads it.
        max_length: tokens of a sample, image tokens counted; None for no limit. A longer sample is never cut: image
            tokens without their picture, or a picture without its tokens, end the run or train nonsense.
        assistant_only: learn the answers only; otherwise every token but those of images.
        on_too_long: ``refuse`` raises with the arithmetic; ``drop`` leaves the sample out and counts it in
            `num_dropped`. `check_image_data` tells beforehand which ones, so that they can be left out of the dataset.
        max_pixels: shorthand for ``limits.max_pixels``.
        limits: what a picture may be.
        num_threads: pictures opened at a time, in each process. 4 keeps up with a processor's own work.
        cache_bytes: decoded pixels kept in each process, for data that shows a picture many times; 64 MiB.
        pad_to_multiple_of: make the length of a batch a multiple of this.
        chat_template: a Jinja text or file, or one of our names, in place of the processor's own.

    Raises:
        DataError: a text tokenizer, a template that shows no images, no template, or no pad token.

    Example::

        collator = ImageTextCollator(processor, max_length=2048)
        trainer = Trainer(model, args, data_collator=collator, train_dataset=examples.dataset)
    """

    def __init__(
        self,
        processor: Any,
        *,
        max_length: int | None = None,
        assistant_only: bool = True,
        on_too_long: str = "refuse",
        max_pixels: int | None = None,
        limits: ImageLimits | None = None,
        num_threads: int = 4,
        cache_bytes: int = 64 << 20,
        pad_to_multiple_of: int | None = None,
        chat_template: str | None = None,
    ):
        if on_too_long not in ON_TOO_LONG:
            raise DataError(
                f"on_too_long={on_too_long!r} is not one of: {', '.join(ON_TOO_LONG)}", fix="on_too_long: drop"
            )
        self.encoder = build_encoder(processor, assistant_only=assistant_only, chat_template=chat_template)
        self.processor = processor
        self.max_length = max_length
        self.on_too_long = on_too_long
        self.pad_to_multiple_of = pad_to_multiple_of
        self.pad_id = _pad_id(processor.tokenizer)
        limits = limits or ImageLimits()
        self.limits = limits if max_pixels is None else replace(limits, max_pixels=max_pixels)
        self.decoder = ImageDecoder(self.limits, num_threads=num_threads, cache_bytes=cache_bytes)
        self.num_dropped = 0

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return the batch of some rows, with ``labels``.

        Raises:
            DataError: rows that cannot be used, each with its id; all of the batch at once.
        """
        samples = self.encode(rows)
        fitting = [sample for sample in samples if self.max_length is None or len(sample.input_ids) <= self.max_length]
        self._count_dropped(len(samples) - len(fitting))
        return merge(fitting or [self._empty()], pad_id=self.pad_id, multiple_of=self.pad_to_multiple_of)

    def encode(self, rows: Sequence[Row], *, any_length: bool = False) -> list[Encoded]:
        """Return each row as tensors of its own; with ``on_too_long="drop"``, or `any_length`, also those too long.

        Raises:
            DataError: as for a call.
        """
        results = self.try_encode(rows)
        problems = [_named(problem, row) for result, row in zip(results, rows, strict=True)
                    if isinstance(result, DataError) for problem in result.problems]  # fmt: skip
        samples = [result for result in results if isinstance(result, Encoded)]
        if self.on_too_long == "refuse" and not any_length and not problems:
            problems = [
                _named(problem, row)
                for sample, row in zip(samples, rows, strict=True)
                if (problem := self.too_long(sample)) is not None
            ]
        if problems:
            raise SampleError(problems[:MAX_SHOWN])
        return samples

    def try_encode(self, rows: Sequence[Row], *, is_prompt: bool = False) -> list[Encoded | DataError]:
        """Return each row as tensors of its own, or why it cannot be."""
        references = [reference for row in rows for reference in row["images"] or []]
        opened = iter(self.decoder.open_all(references))
        results: list[Encoded | DataError] = []
        for row in rows:
            made = [next(opened) for _ in row["images"] or []]
            broken = [problem for item in made if isinstance(item, DataError) for problem in item.problems]
            images = [item for item in made if not isinstance(item, DataError)]
            try:
                if broken:
                    raise DataError(broken)
                sample = self.encoder.encode(row["messages"], images, is_prompt=is_prompt)
                sample.num_pixels = sum(image.width * image.height for image in images)
                results.append(sample)
            except DataError as error:
                results.append(error)
        return results

    def encode_prompts(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return a batch to generate answers from: without each row's last answer, filled on the left, no labels.

        Raises:
            DataError: rows that cannot be used, each with its id.
        """
        prompts = [_without_last_answer(row) for row in rows]
        results = self.try_encode(prompts, is_prompt=True)
        problems = [_named(problem, row) for result, row in zip(results, rows, strict=True)
                    if isinstance(result, DataError) for problem in result.problems]  # fmt: skip
        if problems:
            raise SampleError(problems[:MAX_SHOWN])
        batch = merge([result for result in results if isinstance(result, Encoded)], pad_id=self.pad_id, left=True)
        del batch["labels"]
        return batch

    def too_long(self, sample: Encoded) -> Problem | None:
        """Return the arithmetic of a sample that `max_length` does not hold; None where it fits."""
        length = len(sample.input_ids)
        if self.max_length is None or length <= self.max_length:
            return None
        images, text = sample.num_image_tokens, length - sample.num_image_tokens
        fixes = [f"max_length: {length}", "on_too_long: drop"]
        if images > 0 and text < self.max_length:
            fixes.insert(1, "a smaller max_pixels (fewer tokens an image, where the model has such a choice)")
        return Problem(
            message=f"max_length={self.max_length} does not hold it: {images} image tokens + {text} text tokens = "
            f"{length} > {self.max_length}; image tokens are never cut",
            fix="   or   ".join(fixes),
        )

    @property
    def stop_token_id(self) -> int | None:
        """The token that ends an answer, for `prepare_generation_config`; None where there is none."""
        return self.encoder.stop_token_id()

    def _count_dropped(self, count: int) -> None:
        if count and not self.num_dropped:
            logger.warning(
                "a sample longer than max_length=%s is left out of its batch, and so will others be; check_image_data "
                "counts them beforehand", self.max_length,
            )  # fmt: skip
        self.num_dropped += count

    def _empty(self) -> Encoded:
        """A rank must take part in every step: when all its samples are dropped, it learns nothing from one token."""
        import torch

        ids = torch.tensor([self.pad_id, self.pad_id])
        zeros = {key: torch.zeros_like(ids) for key in ("token_type_ids", "mm_token_type_ids")}
        names = set(getattr(self.processor, "model_input_names", ()))
        return Encoded(
            input_ids=ids,
            labels=torch.full_like(ids, IGNORED),
            per_token={key: value for key, value in zeros.items() if key in names},
        )


def _pad_id(tokenizer: Any) -> int:
    prepare_pad_token(tokenizer)
    if tokenizer.pad_token_id is None:
        raise DataError(
            f"{type(tokenizer).__name__} has no pad token, so samples of other lengths make no batch",
            fix="give the model's tokenizer_config.json a pad_token of its vocabulary that ends nothing",
        )
    return int(tokenizer.pad_token_id)


def _named(problem: Problem, row: Row) -> Problem:
    row_id = str(row.get("id") or "")
    name = row_id if row_id.startswith("row ") else f"sample {row_id}".strip()
    return replace(problem, message=f"{name}: {problem.message}")


def _without_last_answer(row: Row) -> Row:
    messages: Messages = list(row["messages"])
    last = max((i for i, turn in enumerate(messages) if turn["role"] == "assistant"), default=len(messages))
    kept = messages[:last]
    num_images = sum(part["type"] == "image" for turn in kept for part in turn["content"])
    return {**row, "messages": kept, "images": (row["images"] or [])[:num_images]}
