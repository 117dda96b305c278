"""Questions about tiny pictures, a collator that needs no image library, and vision-language models that answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.unit.small_models import IMAGE_TOKEN, TEXT, VISION, VOCABULARY, vision_language_models

_WORDS = "what is here how many see red blue cat dog".split()
NUM_WORDS = VOCABULARY
TOKENS_PER_IMAGE = 4  # both families, at these sizes
QWEN_GRID = (1, 4, 4)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One word a token, as many as the tiny models know."""
    words = ["<pad>", "<bos>", "<eos>", "<image>", *_WORDS]
    words += [f"w{index}" for index in range(len(words), NUM_WORDS)]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def build_row(index: int, num_images: int) -> dict[str, Any]:
    """A question whose length and pictures depend on `index`."""
    words = " ".join(_WORDS[(index + at) % len(_WORDS)] for at in range(2 + index % 4))
    content = [*({"type": "image", "text": None} for _ in range(num_images)), {"type": "text", "text": words}]
    answer = " ".join(f"w{20 + (index * 3 + at) % 40}" for at in range(1 + index % 3))
    return {
        "id": f"q{index}",
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ],
        "images": [{"path": None, "bytes": f"picture {index} {at}".encode()} for at in range(num_images)],
    }


def build_rows(num_rows: int, *, all_with_images: bool = False) -> list[dict[str, Any]]:
    """One picture in most rows, none or two in some, in an order that no rank's share has alone."""
    counts = (1, 1, 0, 2, 0, 1, 0, 1)
    return [build_row(index, max(counts[index % len(counts)], int(all_with_images))) for index in range(num_rows)]


class TinyCollator:
    """What `ImageTextCollator` does, for pictures whose pixels are drawn from their bytes."""

    def __init__(self, family: str):
        self.family = family
        self.processor = SimpleNamespace(tokenizer=build_tokenizer())
        self.num_encoded: list[int] = []

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self._encode(rows, with_answer=True, pad_left=False)

    def encode_prompts(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Left-padded prompts, without labels."""
        self.num_encoded.append(len(rows))
        batch = self._encode(rows, with_answer=False, pad_left=True)
        del batch["labels"]
        return batch

    def _encode(self, rows: Sequence[Mapping[str, Any]], *, with_answer: bool, pad_left: bool) -> dict[str, Any]:
        encoded = []
        for row in rows:
            # The tokens of two pictures must not touch: Qwen-VL counts pictures by them.
            prompt = [1, *[*[IMAGE_TOKEN] * TOKENS_PER_IMAGE, 1] * len(row["images"])]
            prompt += self._tokens(row["messages"][0])
            answer = [*self._tokens(row["messages"][1]), 2] if with_answer else []
            encoded.append((prompt + answer, [-100] * len(prompt) + answer))
        width = max(len(ids) for ids, _ in encoded)

        def padded(values: list[int], fill: int) -> list[int]:
            pads = [fill] * (width - len(values))
            return pads + values if pad_left else values + pads

        batch: dict[str, Any] = {
            "input_ids": torch.tensor([padded(ids, 0) for ids, _ in encoded]),
            "attention_mask": torch.tensor([padded([1] * len(ids), 0) for ids, _ in encoded]),
            "labels": torch.tensor([padded(labels, -100) for _, labels in encoded]),
        }
        images = [image["bytes"] for row in rows for image in row["images"]]
        if self.family == "qwen2.5-vl":
            batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE_TOKEN).int()
        if images:
            batch |= self._pixels(images)
        return batch

    def _tokens(self, message: Mapping[str, Any]) -> list[int]:
        text = " ".join(part["text"] for part in message["content"] if part["type"] == "text")
        return list(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _pixels(self, images: list[bytes]) -> dict[str, Any]:
        if self.family == "qwen2.5-vl":
            pixels = [_noise(data, (QWEN_GRID[1] * QWEN_GRID[2], 3 * 2 * 14 * 14)) for data in images]
            return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor([QWEN_GRID] * len(images))}
        return {"pixel_values": torch.stack([_noise(data, (3, 16, 16)) for data in images])}


def _noise(data: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    if data == b"broken":
        raise OSError("cannot identify image file")
    seed = int.from_bytes(hashlib.sha256(data).digest()[:4], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build_answering_model(family: str, *, dropout: float = 0.0) -> Any:
    """A tiny random model whose answers depend on the picture: its weights are larger than at initialisation."""
    torch.manual_seed(0)
    if family == "llava":
        model: Any = transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(
                vision_config=transformers.CLIPVisionConfig(**VISION, attention_dropout=dropout),
                text_config=transformers.LlamaConfig(**TEXT, attention_dropout=dropout),
                image_token_index=IMAGE_TOKEN,
            )
        )
    else:
        model = vision_language_models()[family]()
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    return enlarge_weights(model)


def enlarge_weights(model: Any) -> Any:
    """Draw weights again, larger: at the size of an initialisation every prompt has the same answer."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3, generator=generator)
    return model
