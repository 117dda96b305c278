"""Samples of PaliGemma: a prefix of images and question, and an answer after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_fsdp.data.images.chat import Messages
from hf_fsdp.data.images.encode import IGNORED, Encoded, check_counts
from hf_fsdp.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


class PrefixEncoder:
    """Samples of PaliGemma, which has no chat template: images and question attend both ways, then the answer.

    The text is what its processor writes; it is written here because the processor refuses samples without an image.
    """

    def __init__(self, processor: Any, *, assistant_only: bool):
        self.processor = processor
        self.assistant_only = assistant_only
        self._image_id = processor.image_token_id

    def encode(self, messages: Messages, images: Sequence[Image], *, is_prompt: bool = False) -> Encoded:
        """Return one sample as tensors.

        Raises:
            DataError: more than one question and answer, a system message, or images and image parts that differ.
        """
        import torch

        check_counts(messages, images)
        question, answer = self._split(messages)
        tokenizer, image_token = self.processor.tokenizer, self.processor.image_token
        room = self.processor.image_seq_length * len(images)
        head = f"{image_token * room}{tokenizer.bos_token}{question}\n"
        prefix = tokenizer(head, add_special_tokens=False)["input_ids"]
        suffix = [] if is_prompt else tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        ids = torch.tensor(prefix + suffix)
        if int((ids == self._image_id).sum()) != room:
            raise DataError(
                f"its text has {image_token} in it, which stands for an image", fix=f"write {image_token} differently"
            )
        types = torch.tensor([0] * len(prefix) + [1] * len(suffix))
        learned = (types == 1) if self.assistant_only else ids != self._image_id
        pixels = self.processor.image_processor(list(images), return_tensors="pt") if images else {}
        return Encoded(
            input_ids=ids,
            labels=torch.where(learned & (ids != self._image_id), ids, IGNORED),
            per_token={"attention_mask": torch.ones_like(ids), "token_type_ids": types},
            pixels=dict(pixels),
            num_image_tokens=room,
        )

    def text_of(self, messages: Messages) -> str:
        """Return a sample's text with one image token for each image."""
        question, answer = self._split(messages)
        num_images = sum(part["type"] == "image" for turn in messages for part in turn["content"])
        bos, eos = self.processor.tokenizer.bos_token, self.processor.tokenizer.eos_token
        return f"{self.processor.image_token * num_images}{bos}{question}\n{answer}{eos}"

    def stop_token_id(self) -> int | None:
        """Return the id of the token that ends an answer."""
        eos: int | None = self.processor.tokenizer.eos_token_id
        return eos

    def _split(self, messages: Messages) -> tuple[str, str]:
        roles = [turn["role"] for turn in messages]
        if roles not in (["user", "assistant"], ["user"]):
            raise DataError(
                f"{type(self.processor).__name__} takes one question and one answer, and it has the turns "
                f"{', '.join(roles)}",
                fix="write each question and its answer as a sample of their own, without a system message   or   set "
                "chat_template",
            )
        texts = ["".join(part["text"] for part in turn["content"] if part["type"] == "text") for turn in messages]
        return texts[0].strip(), texts[1].strip() if len(texts) == 2 else ""
