"""Write the vision demo's data and its untrained model: scikit-learn's handwritten digits, asked about in words.

1,797 real 8x8 pictures that come with a package, so nothing is downloaded. Data files are LLaVA's JSON, with some
rows of text alone among the training rows: then a batch of one rank has pictures where the other's has none.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

QUESTION = "Which digit is written here ?"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUM_TRAINING = 1500
IMAGE_SIZE, PATCH_SIZE, HIDDEN, LAYERS = 32, 8, 128, 2
NUM_TEXT_ROWS = 160
# Roles are words of their own, and only answers are between generation marks: the loss is on them alone.
TEMPLATE = (
    "{% for message in messages %}{{ 'USER: ' if message.role == 'user' else 'ASSISTANT: ' }}"
    "{% if message.role == 'assistant' %}{% generation %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{{ ' </s> ' }}{% endgeneration %}"
    "{% else %}{% for part in message.content %}{{ '<image> ' if part.type == 'image' else part.text + ' ' }}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)

Row = dict[str, Any]


def write_digits(folder: Path) -> tuple[Path, Path]:
    """Write the pictures and the two data files; return the training and the test file."""
    digits = load_digits()
    order = list(range(len(digits.target)))
    random.Random(0).shuffle(order)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in order:
        name = f"images/{number:04d}.png"
        Image.fromarray((digits.images[number] * (255 / 16)).astype("uint8")).save(folder / name)
        rows.append(_ask(f"digit-{number:04d}", QUESTION, WORDS[digits.target[number]], name))
    training = _with_text_rows(rows[:NUM_TRAINING])
    return _write(folder / "train.json", training), _write(folder / "test.json", rows[NUM_TRAINING:])


def build_processor() -> LlavaProcessor:
    """Return a processor with a vocabulary of the words that are asked and answered."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
    words = ["USER:", "ASSISTANT:", *QUESTION.split(), *WORDS, "Is", "even", "odd", "or"]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*special, *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )
    pixels = CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE},
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        image_mean=[0.3] * 3,
        image_std=[0.35] * 3,
    )
    return LlavaProcessor(
        image_processor=pixels,
        tokenizer=fast,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=1,  # CLIP's class token
        image_token="<image>",
        chat_template=TEMPLATE,
    )


def tower_config() -> CLIPVisionConfig:
    """Return the vision tower's config."""
    return CLIPVisionConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        projection_dim=HIDDEN,
    )


def write_model(folder: Path, tower: Path | None = None) -> Path:
    """Write a LLaVA of 0.7 M parameters with random weights, and its processor.

    Args:
        folder: where to.
        tower: a CLIP vision tower in a folder of its own, to begin with its weights.
    """
    torch.manual_seed(0)
    processor = build_processor()
    tokenizer = processor.tokenizer
    language = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=tower_config(),
            text_config=language,
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        )
    )
    if tower is not None:
        trained = type(model.model.vision_tower).from_pretrained(tower)
        model.model.vision_tower.load_state_dict(trained.state_dict())
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _ask(name: str, question: str, answer: str, image: str | None = None) -> Row:
    mark = "<image>\n" if image else ""
    turns = [{"from": "human", "value": f"{mark}{question}"}, {"from": "gpt", "value": answer}]
    return {"id": name, **({"image": image} if image else {}), "conversations": turns}


def _with_text_rows(rows: Sequence[Row]) -> list[Row]:
    """Mix in questions without a picture."""
    chooser = random.Random(1)
    mixed = list(rows)
    for number in range(NUM_TEXT_ROWS):
        digit = number % len(WORDS)
        answer = "odd" if digit % 2 else "even"
        row = _ask(f"text-{number:03d}", f"Is {WORDS[digit]} even or odd ?", answer)
        mixed.insert(chooser.randrange(len(mixed) + 1), row)
    return mixed


def _write(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return path
