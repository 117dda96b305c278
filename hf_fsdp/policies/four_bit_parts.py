"""Which parts of a model stay in 16 bits when it is loaded in 4: vision towers and projectors suffer, and are small.

Told nothing, transformers packs every linear layer but the head, those of the tower and the projector too. Told what
to skip, it skips that alone and packs the head, so a list has to name the head as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_fsdp.policies.linear_layers import head_of
from hf_fsdp.policies.model_parts import LANGUAGE, as_part_names, find_parts, part_paths, resolve_parts

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def four_bit_skips(
    model_or_config: nn.Module | PretrainedConfig, parts_in_4_bits: str | Sequence[str] = (LANGUAGE,)
) -> list[str]:
    """Return what ``BitsAndBytesConfig(llm_int8_skip_modules=...)`` must name so that the other parts keep 16 bits.

    Args:
        model_or_config: a model, on the meta device is enough; or a config, of which one is built there.
        parts_in_4_bits: whose linear layers are packed, without the head. A projector that is trained in full must
            not be among them: packed weights have no gradient.

    Returns:
        Module paths. Never empty for a model with a head.

    Raises:
        ConfigError: an unknown part.

    Example:
        >>> from transformers import LlamaConfig
        >>> four_bit_skips(LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                            num_attention_heads=1, num_key_value_heads=1, vocab_size=16))
        ['lm_head']
    """
    model: Any = model_or_config if isinstance(model_or_config, nn.Module) else _on_meta(model_or_config)
    found = find_parts(model)
    packed = resolve_parts(model, found, as_part_names(parts_in_4_bits), "parts_in_4_bits")
    kept = [name for part, names in found.names.items() if part not in packed for name in names]
    skips = list(part_paths(model, kept))
    head = head_of(model)
    skips += [path for path, module in model.named_modules() if module is head and head is not None]
    parameters = {name for name, _ in model.named_parameters()}
    return [path for path in dict.fromkeys(skips) if path not in parameters]


def _on_meta(config: PretrainedConfig) -> nn.Module:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    has_images = type(config) in AutoModelForImageTextToText._model_mapping
    with torch.device("meta"):
        return (AutoModelForImageTextToText if has_images else AutoModelForCausalLM).from_config(config)
