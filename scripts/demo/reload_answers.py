"""Load a written folder with plain transformers, in one process, and ask it all test pictures again.

    python reload_answers.py --model FOLDER --data FILE --answers FILE --output FILE

The answers must be those that the sharded run gave at its last step.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils import logging

BATCH_SIZE = 33
MAX_NEW_TOKENS = 2


def answer(folder: Path, file: Path) -> dict[str, str]:
    """Return row id -> the model's greedy answer, for every row of the data file."""
    processor: Any = AutoProcessor.from_pretrained(folder)
    processor.tokenizer.padding_side = "left"
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    rows = json.loads(file.read_text(encoding="utf-8"))
    answers = {}
    for start in range(0, len(rows), BATCH_SIZE):
        part = rows[start : start + BATCH_SIZE]
        texts = []
        for row in part:
            question = row["conversations"][0]["value"].removeprefix("<image>\n")
            content = [{"type": "image"}, {"type": "text", "text": question}]
            messages = [{"role": "user", "content": content}]
            texts.append(processor.apply_chat_template(messages, add_generation_prompt=True))
        pictures = [[Image.open(file.parent / row["image"]).convert("RGB")] for row in part]
        batch = processor(text=texts, images=pictures, padding=True, return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        given = processor.tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        answers.update({row["id"]: text.strip() for row, text in zip(part, given, strict=True)})
    return answers


def main() -> None:
    """Ask, compare, write both numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name in ("model", "data", "answers", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    asked = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    records = [json.loads(line) for line in asked.answers.read_text(encoding="utf-8").splitlines()]
    last = max(record["step"] for record in records)
    sharded = {record["id"]: record["answer"] for record in records if record["step"] == last}
    again = answer(asked.model, asked.data)
    rows = json.loads(asked.data.read_text(encoding="utf-8"))
    num_right = sum(again[row["id"]] == row["conversations"][1]["value"] for row in rows)
    found = {
        "num_rows": len(rows),
        "num_equal": sum(again.get(name) == text for name, text in sharded.items()),
        "accuracy": num_right / len(rows),
    }
    asked.output.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
