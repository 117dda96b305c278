"""What is asked of every processor, by the script that makes the golden data and by the tests that hold ours to it.

It imports nothing of hf_fsdp: it also runs in an environment that has only torch, torchvision and transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parent
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm", "llava_onevision")
# Fewest and most pixels of one picture in the case `limits`, for the families that have such limits.
LIMITS = {
    "qwen2_vl": (8 * 8 * 4, 8 * 8 * 20),
    "qwen2_5_vl": (8 * 8 * 6, 8 * 8 * 12),
    "qwen3_vl": (8 * 8 * 9, 8 * 8 * 30),
}
PLACEHOLDERS = {
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "internvl": "<IMG_CONTEXT>\n",
    "smolvlm": "<image>",
    "llava_onevision": "<image>\n",
}
# Pixels are kept thinned: this many values, evenly spread, beside the sums over all.
NUM_KEPT = 400
PIXELS = ("pixel_values", "pixel_attention_mask")


def read_pictures() -> dict[str, Image.Image]:
    """Return the pictures by name: handwritten digits and drawn ones of odd sizes."""
    return {name: Image.fromarray(array) for name, array in load_file(HERE / "pictures.safetensors").items()}


def one_and_two(family: str, processor: Any) -> Any:
    """Two samples as text: one picture, and two."""
    mark, pictures = PLACEHOLDERS[family], read_pictures()
    return processor(
        images=[[pictures["digit"]], [pictures["tall"], pictures["odd"]]],
        text=[f"{mark}Which digit?", f"The first {mark} and the second {mark} are not alike."],
        padding=True,
        return_tensors="pt",
    )


def mixed(family: str, processor: Any) -> Any:
    """Samples with and without pictures in one batch."""
    mark, pictures = PLACEHOLDERS[family], read_pictures()
    return processor(
        images=[[pictures["wide"]], [], [pictures["gray"], pictures["digit"], pictures["large"]]],
        text=[f"{mark}A line.", "No picture here, only text.", f"{mark}{mark}{mark}How many?"],
        padding=True,
        return_tensors="pt",
    )


def text_only(family: str, processor: Any) -> Any:
    """A batch without any picture."""
    return processor(text=["A short one.", "And one that is a little longer."], padding=True, return_tensors="pt")


def chat(family: str, processor: Any) -> Any:
    """Conversations of several turns through the chat template, with the mask of what the assistant says."""
    return processor.apply_chat_template(
        [
            _talk((["digit"], "Which digit?"), "A seven.", ([], "Sure?"), "Yes."),
            _talk((["odd", "wide"], "Compare."), "The second is wider."),
            _talk(([], "Only text?"), "Only text."),
        ],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        processor_kwargs={"padding": True},
    )


def _talk(*turns: Any) -> list[dict[str, Any]]:
    pictures = read_pictures()
    messages = []
    for turn in turns:
        if isinstance(turn, str):
            messages.append({"role": "assistant", "content": [{"type": "text", "text": turn}]})
        else:
            names, text = turn
            parts = [{"type": "image", "image": pictures[name]} for name in names]
            messages.append({"role": "user", "content": [*parts, {"type": "text", "text": text}]})
    return messages


def prompt(family: str, processor: Any) -> Any:
    """One conversation that is to be answered."""
    return processor.apply_chat_template(
        _talk((["large"], "What is it?")),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
    )


CASES: dict[str, Callable[[str, Any], Any]] = {
    "one_and_two": one_and_two,
    "mixed": mixed,
    "text_only": text_only,
    "chat": chat,
    "prompt": prompt,
}


def as_tensors(batch: Any) -> dict[str, torch.Tensor]:
    """Return what a batch holds as tensors, whatever lists it has."""
    return {key: value if torch.is_tensor(value) else torch.tensor(value) for key, value in batch.items()}


def summarise(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors to keep, pixels thinned, and the shapes and sums of the pixels."""
    kept: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {}
    for key, value in tensors.items():
        if key not in PIXELS:
            kept[key] = value.to(torch.int16).contiguous()
            continue
        flat = value.to(torch.float32).flatten()
        kept[key] = flat[:: max(1, flat.numel() // NUM_KEPT)].contiguous()
        facts[key] = {
            "shape": list(value.shape),
            "sum": float(flat.double().sum()),
            "sum_of_squares": float(flat.double().square().sum()),
        }
    return kept, facts


def read_expected(family: str) -> dict[str, Any]:
    """Return what `make.py` wrote beside the tensors of a family."""
    return json.loads((HERE / family / "expected.json").read_text(encoding="utf-8"))


def draw() -> dict[str, np.ndarray]:
    """Draw the pictures whose pixels do not come from a data set; integers only, so alike everywhere."""

    def mesh(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        rows, columns = np.mgrid[0:height, 0:width]
        return rows, columns

    pictures = {}
    for name, (height, width) in {"tall": (61, 19), "wide": (17, 58), "odd": (37, 53), "large": (70, 67)}.items():
        rows, columns = mesh(height, width)
        red = (rows * 7 + columns * 3) % 256
        green = ((rows // 5 + columns // 4) % 2) * 200 + 20
        blue = (rows * columns) % 251
        pictures[name] = np.stack([red, green, blue], axis=-1).astype(np.uint8)
    rows, columns = mesh(33, 24)
    pictures["gray"] = ((rows * rows + columns * 5) % 256).astype(np.uint8)
    return pictures


def write_old_layout(source: Path, target: Path) -> None:
    """Copy a processor folder as transformers 4 wrote it: one file for pictures and videos, limits as two names."""
    shutil.copytree(source, target)
    settings = json.loads((target / "processor_config.json").read_text(encoding="utf-8"))
    images = settings.pop("image_processor")
    settings.pop("video_processor")
    if "merge_size" in images:  # of Qwen-VL
        size = images.pop("size")
        images |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    name = settings.pop("processor_class")
    (target / "preprocessor_config.json").write_text(json.dumps({**images, "processor_class": name}), encoding="utf-8")
    (target / "processor_config.json").unlink()
    if settings:
        text = json.dumps({**settings, "processor_class": name})
        (target / "processor_config.json").write_text(text, encoding="utf-8")
    (target / "config.json").write_text(json.dumps({"model_type": target.parent.name}), encoding="utf-8")
    template = (target / "chat_template.jinja").read_text(encoding="utf-8")
    (target / "chat_template.jinja").unlink()
    (target / "chat_template.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
