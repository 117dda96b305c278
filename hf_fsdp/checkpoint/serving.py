"""How a finished model is loaded and served: the lines that are printed after an export and after a push."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADAPTER_CONFIG = "adapter_config.json"
MODEL_CONFIG = "config.json"
# The ranks that `vllm serve --max-lora-rank` takes, and the one it assumes.
_VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
# By the end of an architecture's name; the second is whether vLLM serves such models as generators.
_AUTO_CLASSES = {
    "ForCausalLM": ("AutoModelForCausalLM", True),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", False),
    "ForTokenClassification": ("AutoModelForTokenClassification", False),
    "ForQuestionAnswering": ("AutoModelForQuestionAnswering", False),
    "ForMaskedLM": ("AutoModelForMaskedLM", False),
}
_PEFT_CLASSES = {
    "CAUSAL_LM": ("AutoPeftModelForCausalLM", True),
    "SEQ_2_SEQ_LM": ("AutoPeftModelForSeq2SeqLM", False),
    "SEQ_CLS": ("AutoPeftModelForSequenceClassification", False),
    "TOKEN_CLS": ("AutoPeftModelForTokenClassification", False),
    "QUESTION_ANS": ("AutoPeftModelForQuestionAnswering", False),
}


@dataclass(frozen=True)
class ServingLine:
    """One way to use a model: the `tool` it is for and the `text` to paste."""

    tool: str
    text: str

    def __str__(self) -> str:
        return f"{self.tool}: {self.text}"


def serving_lines(name: str | Path, folder: str | Path | None = None, base: str | None = None) -> list[ServingLine]:
    """Return how an exported model is loaded in Python and how vLLM serves it, one line each.

    Args:
        name: what a person writes: the exported folder, or the repository that it was pushed to.
        folder: where its configs can be read; default: `name`.
        base: what to call an adapter's base model; default: what `adapter_config.json` says.

    Returns:
        The line for transformers or PEFT, then the one for vLLM; without the latter where vLLM serves no such model,
        and with a sentence in its place where it would refuse the adapter as it is.
    """
    where = Path(folder if folder is not None else name)
    config, adapter = read_config(where / MODEL_CONFIG), read_config(where / ADAPTER_CONFIG)
    if adapter:
        return _adapter_lines(str(name), adapter, config, base or adapter.get("base_model_name_or_path") or "BASE")
    auto_class, generates = _auto_class(config)
    lines = [_python_line("transformers", auto_class, str(name))]
    return [*lines, ServingLine("vLLM", f"vllm serve {shlex.quote(str(name))}")] if generates else lines


def _adapter_lines(name: str, adapter: dict[str, Any], config: dict[str, Any], base: str) -> list[ServingLine]:
    task = adapter.get("task_type")
    peft_class, generates = _PEFT_CLASSES.get(str(task), ("", False))
    auto_class, base_generates = _auto_class(config)
    if peft_class and (not config or auto_class == "AutoModelForCausalLM" or task != "CAUSAL_LM"):
        lines = [_python_line("peft", peft_class, name)]
    else:  # PEFT's own classes know text tasks only, so the base is loaded by name
        lines = [
            ServingLine(
                "peft",
                f"from transformers import {auto_class}; from peft import PeftModel; "
                f'model = PeftModel.from_pretrained({auto_class}.from_pretrained("{base}"), "{name}")',
            )
        ]
    if not (generates if peft_class else base_generates):
        return lines
    if reason := _vllm_refuses(adapter):
        return [*lines, ServingLine("vLLM", f"serves no adapter with {reason}: merge it into its base first")]
    rank = max([adapter.get("r") or 0, *(adapter.get("rank_pattern") or {}).values()])
    limit = next((known for known in _VLLM_RANKS if known >= rank), _VLLM_RANKS[-1])
    option = f" --max-lora-rank {limit}" if limit > _VLLM_RANKS[0] else ""
    module = f"{Path(name).name}={name}"
    command = f"vllm serve {shlex.quote(base)} --enable-lora{option} --lora-modules {shlex.quote(module)}"
    return [*lines, ServingLine("vLLM", command)]


def _vllm_refuses(adapter: dict[str, Any]) -> str | None:
    """Return what of an adapter vLLM does not serve, or None."""
    if (kind := adapter.get("peft_type", "LORA")) != "LORA":
        return f"peft_type {kind}"
    if adapter.get("use_dora"):
        return "use_dora"
    for key in ("modules_to_save", "trainable_token_indices"):
        if adapter.get(key):
            return key
    ranks = [adapter.get("r") or 0, *(adapter.get("rank_pattern") or {}).values()]
    return f"rank {max(ranks)}" if max(ranks) > _VLLM_RANKS[-1] else None


def _auto_class(config: dict[str, Any]) -> tuple[str, bool]:
    """Return the class that loads a model of this config, and whether vLLM serves it as a generator."""
    architecture = next(iter(config.get("architectures") or ()), "")
    for ending, known in _AUTO_CLASSES.items():
        if architecture.endswith(ending):
            return known
    if architecture.endswith("ForConditionalGeneration"):
        has_images = "vision_config" in config
        return ("AutoModelForImageTextToText", True) if has_images else ("AutoModelForSeq2SeqLM", False)
    return ("AutoModelForCausalLM", True) if not config else ("AutoModel", False)


def _python_line(library: str, auto_class: str, name: str) -> ServingLine:
    return ServingLine(library, f'from {library} import {auto_class}; model = {auto_class}.from_pretrained("{name}")')


def read_config(path: Path) -> dict[str, Any]:
    """Return the mapping in a small JSON file; empty where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
