"""Optimizers and quantized bases that sharding refuses or changes: data and training keys that cannot stay as they are.

Which optimizers is decided by the words in their names; a test compares that with `integrations/optimizers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_fsdp.config.migrate.setting import Left, OldConfig
from hf_fsdp.config.values import TRUE_WORDS, word_of, yaml_value

OPTIMIZER_KEYS = ("optim", "optimizer")
_WHOLE_MATRICES = "it works on whole matrices, of which no process has more than some rows"
_FEW_BITS = "its kernels or its few-bit state do not fit the shards of a parameter"
# A word in the optimizer's name -> why it cannot work on shards.
REFUSED_WORDS = {
    "adafactor": _WHOLE_MATRICES,
    "galore": _WHOLE_MATRICES,
    "apollo": _WHOLE_MATRICES,
    "lomo": "it takes its step inside the backward pass, before gradients are summed",
    "adagrad": "it makes its state when it is built, before parameters are sharded",
    "8bit": _FEW_BITS,
    "4bit": _FEW_BITS,
    "paged": _FEW_BITS,
    "bnb": _FEW_BITS,
    "32bit": _FEW_BITS,
    "lion": _FEW_BITS,
    "ademamix": _FEW_BITS,
}
EIGHT_BITS = "int8 weights carry scales that a shard loses; write load_in_4bit: true"
FOUR_BITS = (
    "bnb_4bit_quant_storage must be the dtype that is computed in, or packed weights do not survive the gather; the "
    "recipe's load_in_4bit: true sets it; in your script, see QLoRA in docs/guide.md"
)


def explain(key: str, value: Any, text: str) -> Left | None:
    """Return why a training key cannot stay as it is, or None.

    Args:
        key: its name in the old file.
        value: its value; an enum's member as its name.
        text: key and value as a person wrote them.
    """
    word = word_of(value)
    if key in OPTIMIZER_KEYS:
        for part, why in REFUSED_WORDS.items():
            if part in word:
                return Left(
                    text, f"refused on sharded parameters: {why}; write optim: adamw_torch_fused", "no equivalent"
                )
    bits = word if key == "quantization_bit" else ""
    if bits == "8" or (key == "load_in_8bit" and word in TRUE_WORDS):
        return Left(text, EIGHT_BITS, "no equivalent")
    if bits == "4" or (key == "load_in_4bit" and word in TRUE_WORDS):
        return Left(text, FOUR_BITS, "changed")
    return None


def explain_training_keys(old: OldConfig, data: Mapping[Any, Any]) -> None:
    """Move keys that cannot stay as they are from the bare names of `old` to what was left behind, with the reason."""
    for key in list(old.other_keys):
        left = explain(key, data.get(key), f"{key}: {yaml_value(data.get(key))}")
        if left is not None:
            old.left.append(left)
            old.other_keys.remove(key)
