"""Let the model answer three held-out questions before and after training, greedily, and write both down.

    python generate_samples.py --base FOLDER --model FOLDER --data FILE --output FILE

The model after training is the folder that ``hf-fsdp checkpoint export`` wrote, so that what is shown is what plain
`from_pretrained` gives.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

NUM_SAMPLES = 3
MAX_NEW_TOKENS = 32


def read_questions(data: Path) -> list[list[dict[str, str]]]:
    """Return the first conversations of the JSONL file `data`, question and true answer."""
    with data.open(encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line, _ in zip(lines, range(NUM_SAMPLES), strict=False)]


def answer(folder: Path, questions: list[list[dict[str, str]]]) -> list[str]:
    """Return the greedy answer of the model in `folder` to each question."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [messages[:1] for messages in questions]
    inputs: Any = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Write the samples as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name in ("base", "model", "data", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    questions = read_questions(arguments.data)
    before = answer(arguments.base, questions)
    after = answer(arguments.model, questions)
    samples = [
        {"question": messages[0]["content"], "true": messages[1]["content"], "before": one, "after": other}
        for messages, one, other in zip(questions, before, after, strict=True)
    ]
    arguments.output.write_text(json.dumps(samples, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
