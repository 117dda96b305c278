"""One sample as tensors: its tokens, which of them are learned, and its pictures as the model takes them."""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hf_fsdp.data.images.chat import Chat, Messages, Span
from hf_fsdp.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

IGNORED = -100
# What has one value a token, beside the ids themselves; everything else that a processor returns belongs to pictures.
_TEXT_KEYS = ("attention_mask", "token_type_ids", "mm_token_type_ids")
_DROPPED_KEYS = ("offset_mapping", "text_replacement_offsets", "labels")


@dataclass
class Encoded:
    """One sample.

    Args:
        input_ids: shape (tokens,).
        labels: shape (tokens,), −100 where a token is not learned.
        per_token: other tensors of shape (tokens,), such as ``token_type_ids``.
        pixels: tensors that belong to the pictures, first axis as the processor returned it for this sample alone;
            empty without a picture.
        num_image_tokens: tokens that stand for pictures, with the marks around them.
        num_pixels: of the pictures as they were given to the processor.
    """

    input_ids: Tensor
    labels: Tensor
    per_token: dict[str, Tensor] = field(default_factory=dict)
    pixels: dict[str, Tensor] = field(default_factory=dict)
    num_image_tokens: int = 0
    num_pixels: int = 0


class Encoder(Protocol):
    """What turns samples into tensors for one kind of processor."""

    def encode(self, messages: Messages, images: Sequence[Image], *, is_prompt: bool = False) -> Encoded:
        """Return a sample as tensors; of a prompt, the conversation up to where the model goes on."""

    def text_of(self, messages: Messages) -> str:
        """Return a sample's text with one image token for each image."""

    def stop_token_id(self) -> int | None:
        """Return the id of the token that ends an answer."""


def build_encoder(processor: Any, *, assistant_only: bool, chat_template: str | None) -> Encoder:
    """Return the encoder for a processor.

    Raises:
        DataError: a tokenizer or something else without an image processor, no image token, no usable template.
    """
    if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
        raise DataError(
            f"{type(processor).__name__} is not a processor of images and text: it has no image processor. Is the "
            "model one that sees images?",
            fix="model_name_or_path: a vision-language model   (text models are trained by the text recipe)",
        )
    if not getattr(processor.tokenizer, "is_fast", False):
        raise DataError(
            f"{type(processor.tokenizer).__name__} is a slow tokenizer, which cannot say where its tokens lie in the "
            "text, so answers cannot be told from questions",
            fix="load the processor with use_fast=True",
        )
    has_suffix = "suffix" in inspect.signature(type(processor).__call__).parameters
    if has_suffix and chat_template is None:
        from hf_fsdp.data.images.prefix import PrefixEncoder

        return PrefixEncoder(processor, assistant_only=assistant_only)
    if not getattr(processor, "image_token", None):
        raise DataError(
            f"{type(processor).__name__} does not say which token stands for an image (image_token)",
            fix="set processor.image_token to it",
        )
    return ChatEncoder(processor, Chat(processor, chat_template), assistant_only=assistant_only)


class ChatEncoder:
    """Samples of every processor that has a chat template.

    Each sample passes through the processor alone. Together, several processors mistake samples without an image, and
    one broken sample would take its batch with it.
    """

    def __init__(self, processor: Any, chat: Chat, *, assistant_only: bool):
        self.processor = processor
        self.chat = chat
        self.assistant_only = assistant_only
        self._image_ids = image_token_ids(processor)
        self._image_tokens = processor.tokenizer.convert_ids_to_tokens(self._image_ids)

    def encode(self, messages: Messages, images: Sequence[Image], *, is_prompt: bool = False) -> Encoded:
        """Return one sample as tensors.

        Raises:
            DataError: images and image parts differ, or the template or the processor refuses it.
        """
        check_counts(messages, images)
        text = self.chat.render(messages, add_generation_prompt=is_prompt)
        bos = self.processor.tokenizer.bos_token
        try:
            made = self.processor(
                text=[text],
                images=[list(images)] if images else None,
                return_tensors="pt",
                # A template may write the first token itself; the tokenizer would add a second one.
                add_special_tokens=not (bos is not None and text.startswith(bos)),
                return_offsets_mapping=True,
                return_text_replacement_offsets=True,
            )
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            raise DataError(
                f"{type(self.processor).__name__} refuses it: {error}", fix="repair the sample, or leave it out"
            ) from error
        return self._assemble(made, messages, text, len(images), is_prompt)

    def text_of(self, messages: Messages) -> str:
        """Return a sample's text with one image token for each image."""
        return self.chat.render(messages)

    def stop_token_id(self) -> int | None:
        """Return the id of the token that ends an answer."""
        token = self.chat.stop_token()
        return None if token is None else self.processor.tokenizer.convert_tokens_to_ids(token)

    def _assemble(self, made: Any, messages: Messages, text: str, num_images: int, is_prompt: bool) -> Encoded:
        import torch

        found = made.get("text_replacement_offsets")  # without an image some processors make an empty tensor of it
        replaced = (
            [place for place in found[0] if place["type"] == "image"] if isinstance(found, list) and found else []
        )
        if num_images and len(replaced) != num_images:
            raise DataError(
                f"{type(self.processor).__name__} does not say where it put the tokens of {num_images} images, so "
                "answers cannot be told from questions",
                fix="assistant_only_loss needs a processor of transformers; please report this one",
            )
        ids, offsets = made["input_ids"][0], made["offset_mapping"][0]
        in_image = overlaps(offsets, [place["new_span"] for place in replaced])
        image_ids = torch.isin(ids, torch.tensor(self._image_ids))
        promised = sum(place["replacement"].count(token) for place in replaced for token in self._image_tokens)
        if int(image_ids.sum()) != promised:
            raise DataError(
                f"{type(self.processor).__name__} made room for {promised} image tokens, and its tokens have "
                f"{int(image_ids.sum())}",
                fix=f"write {' and '.join(self._image_tokens)} nowhere in the text yourself, and set no truncation on "
                "the tokenizer",
            )
        learned = torch.ones_like(ids, dtype=torch.bool)
        if self.assistant_only and not is_prompt:
            spans = [_shift(span, replaced) for span in self.chat.answer_spans(messages, text)]
            learned = overlaps(offsets, spans)
        learned &= ~(in_image | image_ids)
        return Encoded(
            input_ids=ids,
            labels=torch.where(learned, ids, IGNORED),
            per_token={key: made[key][0] for key in _TEXT_KEYS if key in made},
            pixels={
                key: torch.as_tensor(value)
                for key, value in made.items()
                if key not in ("input_ids", *_TEXT_KEYS, *_DROPPED_KEYS)
            },
            num_image_tokens=int((in_image | image_ids).sum()),
        )


def overlaps(offsets: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return which tokens, given as (tokens, 2) character offsets, share a character with one of `spans`.

    A token without a character (padding, an added special token) shares none.
    """
    import torch

    mask = torch.zeros(len(offsets), dtype=torch.bool)
    for start, end in spans:
        mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return mask


def image_token_ids(processor: Any) -> list[int]:
    """Return the ids that stand for a picture in ``input_ids``; of some processors also those of its frame."""
    ids = [token for token in getattr(processor, "image_token_ids", None) or [] if token is not None]
    if not ids and getattr(processor, "image_token_id", None) is not None:
        ids = [processor.image_token_id]
    return ids or [processor.tokenizer.convert_tokens_to_ids(processor.image_token)]


def _shift(span: Span, replaced: list[dict[str, Any]]) -> Span:
    """Move a span of the template's text to where it lies after image tokens were put in."""
    ends = [place["span"][1] for place in replaced]
    gained = [0, *(place["new_span"][1] - place["span"][1] for place in replaced)]
    start, end = (position + gained[bisect_right(ends, position)] for position in span)
    return start, end


def check_counts(messages: Messages, images: Sequence[Any]) -> None:
    """Refuse a sample whose image parts and images differ in number.

    Raises:
        DataError: with both numbers.
    """
    marks = sum(part["type"] == "image" for turn in messages for part in turn["content"])
    if marks != len(images):
        raise DataError(
            f"it has {marks} image parts and {len(images)} images", fix="give every image part one image, in order"
        )
