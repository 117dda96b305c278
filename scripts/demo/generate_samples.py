"""Let the model answer three held-out questions before and after training, greedily, and write both down.

    python generate_samples.py --base FOLDER --trained FOLDER --model FOLDER --data FILE --output FILE

The model after training is written to the folder `--model` as one whole model (LoRA weights merged in) and loaded
back from there, so that what is shown is what `from_pretrained` gives.
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


def write_whole_model(base: Path, trained: Path, target: Path) -> None:
    """Write what training left in `trained` to `target` as one folder that ``from_pretrained`` loads by itself."""
    if (trained / "adapter_config.json").is_file():
        from peft import PeftModel

        # Added up in fp32, stored as the weights came.
        whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        stored = AutoModelForCausalLM.from_pretrained(base).dtype
        model = PeftModel.from_pretrained(whole, trained).merge_and_unload().to(stored)
    else:
        model = AutoModelForCausalLM.from_pretrained(trained)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(trained).save_pretrained(target)


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
    """Write the whole model, and the samples as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name in ("base", "trained", "model", "data", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    questions = read_questions(arguments.data)
    before = answer(arguments.base, questions)
    write_whole_model(arguments.base, arguments.trained, arguments.model)
    after = answer(arguments.model, questions)
    samples = [
        {"question": messages[0]["content"], "true": messages[1]["content"], "before": one, "after": other}
        for messages, one, other in zip(questions, before, after, strict=True)
    ]
    arguments.output.write_text(json.dumps(samples, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
