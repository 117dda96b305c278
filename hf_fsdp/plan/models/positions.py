"""How long a sequence a model can take."""

from __future__ import annotations

from typing import Any

from hf_fsdp.errors import Problem
from hf_fsdp.plan.job import ModelSpec
from hf_fsdp.plan.models.model_config import read_config

# Kinds of rotary scaling whose factor is not yet in max_position_embeddings, as their files are written. Llama 3.1's,
# longrope's and every table of several kinds (Gemma 3) state the stretched length themselves.
_STRETCHING = ("linear", "dynamic")


def max_positions(spec: ModelSpec) -> int | None:
    """Return the longest sequence of `spec` in tokens, image tokens counted; None where its config states no limit.

    The language model's ``max_position_embeddings`` (or what its family calls it), stretched by the rotary scaling of
    the config where that is not in the number already.

    Args:
        spec: of `resolve_model`.

    Example::

        max_positions(resolve_model("llama-3.1-8b"))
        # 131072
    """
    text = _text_config(spec)
    stated = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    if not isinstance(stated, int) or stated < 1:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if not isinstance(factor, (int, float)) or factor <= 1:
        return stated
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or stated
        return max(stated, int(factor * original))
    return int(stated * factor) if kind in _STRETCHING else stated


def check_sequence_length(spec: ModelSpec, num_tokens: int) -> Problem | None:
    """Return what is wrong with rows of `num_tokens`, or None.

    Args:
        spec: of `resolve_model`.
        num_tokens: tokens a row, image tokens counted.
    """
    most = max_positions(spec)
    if most is None or num_tokens <= most:
        return None
    if getattr(_text_config(spec), "rope_parameters", None):
        why = "what it was made for; further positions would be untrained"
        more = f"; for longer rows, name a folder whose config.json has a rope_scaling that reaches {num_tokens}"
    else:
        why, more = "its table of learned positions; the next one is an index error", ""
    return Problem(
        message=f"--max-length {num_tokens}: {spec.name} has {most} positions, {why}",
        fix=f"--max-length {most}{more}",
    )


def _text_config(spec: ModelSpec) -> Any:
    return read_config(spec).get_text_config(decoder=True)
