"""Tiny processors of every kind and pictures of every kind, made on the spot; nothing is downloaded."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from tests.recipes.tiny import byte_level_tokenizer

# Written from the published templates' formats, shortened to what the tests ask for.
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' or 'image' in c %}"
    "IMAGE{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# LLaVA 1.5: images first, generation marks, and no token that ends an answer.
LLAVA = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role.upper() + ': ' }}{% endif %}"
    "{% for c in m.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if m.role != 'assistant' %}{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text + ' ' }}"
    "{% endfor %}{% else %}{% for c in m.content | selectattr('type', 'equalto', 'text') %}{% generation %}"
    "{{ c.text + ' ' }}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
IDEFICS = (
    "<s>{% for m in messages %}{{ m.role.capitalize() }}{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}"
    "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% else %}<image>{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}<boi>"
    "{% else %}{{ c.text | trim }}{% endif %}{% endfor %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
SIZE = {"height": 32, "width": 32}


def tokenizer(*special: str, bos: bool = False) -> Any:
    """Return a byte-level tokenizer with its own pad token; with `bos`, one that puts it first as Llama's does."""
    from tokenizers import processors

    made = byte_level_tokenizer(("<pad>", "<s>", "</s>", *special), bos="<s>", eos="</s>", pad="<pad>")
    if bos:
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", made.bos_token_id)]
        )
    return made


def llava(template: str | None = LLAVA) -> Any:
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=SIZE)
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer("<image>", "<|im_start|>", "<|im_end|>", bos=True),
        patch_size=8,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def llava_next() -> Any:
    from transformers import LlavaNextImageProcessorPil, LlavaNextProcessor

    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 32}, crop_size=SIZE, image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]]
    )
    return LlavaNextProcessor(
        image_processor=images,
        tokenizer=tokenizer("<image>", "<|im_start|>", "<|im_end|>"),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHATML.replace("IMAGE", "<image>"),
    )


def idefics3() -> Any:
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    marks = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
    return Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}),
        tokenizer=tokenizer(*marks),
        image_seq_len=4,
        chat_template=IDEFICS,
    )


def gemma3() -> Any:
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor

    made = tokenizer("<boi>", "<eoi>", "<img>", "<start_of_turn>", "<end_of_turn>", bos=True)
    for name, token in (("boi_token", "<boi>"), ("eoi_token", "<eoi>"), ("image_token", "<img>")):
        setattr(made, name, token)
        setattr(made, f"{name}_id", made.convert_tokens_to_ids(token))
    return Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size=SIZE), tokenizer=made, image_seq_length=4, chat_template=GEMMA
    )


def paligemma() -> Any:
    from transformers import PaliGemmaProcessor, SiglipImageProcessorPil

    images = SiglipImageProcessorPil(size=SIZE)
    images.image_seq_length = 16
    return PaliGemmaProcessor(image_processor=images, tokenizer=tokenizer("<image>"))


FAMILIES = {
    "llava": llava,
    "llava_next": llava_next,
    "idefics3": idefics3,
    "gemma3": gemma3,
    "paligemma": paligemma,
}


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return a picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def stored(image: Image.Image, format: str = "PNG", **options: Any) -> dict[str, Any]:
    """Return a picture as a row holds it."""
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return {"path": None, "bytes": buffer.getvalue()}


def row(*turns: str | int, images: list[dict[str, Any]] | None = None, row_id: str = "row 1") -> dict[str, Any]:
    """Return a row: user and assistant in turn, with an image for each ``<image>`` of a text."""
    messages = []
    for index, text in enumerate(turns):
        pieces = str(text).split("<image>")
        parts: list[dict[str, Any]] = []
        for number, piece in enumerate(pieces):
            parts += [{"type": "image", "text": None}] if number else []
            parts += [{"type": "text", "text": piece}] if piece else []
        messages.append({"role": "user" if index % 2 == 0 else "assistant", "content": parts})
    count = sum(str(text).count("<image>") for text in turns)
    return {
        "messages": messages,
        "images": images if images is not None else [stored(picture(70, 50, seed)) for seed in range(count)],
        "id": row_id,
    }


def learned_text(processor: Any, batch: dict[str, Any], index: int = 0) -> list[str]:
    """Return each learned run of a sample as text."""
    runs: list[list[int]] = []
    before = False
    for token, label in zip(batch["input_ids"][index].tolist(), batch["labels"][index].tolist(), strict=True):
        if label != -100:
            runs.append([]) if not before else None
            runs[-1].append(token)
        before = label != -100
    return [processor.tokenizer.decode(run) for run in runs]
