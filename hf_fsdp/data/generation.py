"""A generation config that can be saved and that knows where an answer ends."""

from __future__ import annotations

from typing import Any


def prepare_generation_config(generation_config: Any, stop_token_id: int | None) -> None:
    """Add the token that ends an answer, and make the config one that `save_pretrained` accepts.

    Call it before training: a published config with a temperature but without sampling refuses to be saved, which
    would otherwise show after hours of training.

    Args:
        generation_config: the model's `GenerationConfig`, changed in place.
        stop_token_id: as `find_stop_token_id` found it; None adds nothing.
    """
    known = generation_config.eos_token_id
    ends = list(known) if isinstance(known, list | tuple) else [known] if known is not None else []
    if stop_token_id is not None and stop_token_id not in ends:
        generation_config.eos_token_id = [stop_token_id, *ends]
    try:
        generation_config.validate(strict=True)
    except ValueError:
        generation_config.do_sample = True  # what a temperature or a top_p asks for
        generation_config.validate(strict=True)
