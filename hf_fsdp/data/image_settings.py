"""Settings of TRL and Accelerate that batches with pictures cannot have, refused before any weights are loaded."""

from __future__ import annotations

from typing import Any

from hf_fsdp.errors import ConfigError, Problem


def check_image_settings(training: Any, tokenizer: Any) -> None:
    """Refuse what would end the run once the model is loaded, or would be ignored.

    Args:
        training: an `SFTConfig`.
        tokenizer: of the processor.

    Raises:
        ConfigError: every such setting at once.
    """
    problems = []
    if training.padding_free:
        problems.append(Problem(message="padding_free is not possible with pictures", fix="remove padding_free"))
    if training.truncation_mode != "keep_start":
        problems.append(
            Problem(
                message=f"truncation_mode={training.truncation_mode!r}: a sample with pictures is never cut",
                fix="remove truncation_mode, and say what is done with long samples: on_too_long: drop",
            )
        )
    for key in ("eos_token", "pad_token"):
        asked, own = getattr(training, key, None), getattr(tokenizer, key)
        if asked not in (None, own):
            problems.append(
                Problem(
                    message=f"{key}={asked!r} is not the tokenizer's own, {own!r}, with which the samples are made",
                    fix=f"remove {key}, or change it in the model's tokenizer_config.json",
                )
            )
    for key in ("dispatch_batches", "split_batches"):
        if getattr(training.accelerator_config, key, None):
            problems.append(
                Problem(
                    message=f"accelerator_config.{key} would cut the pictures of a batch by the number of its samples",
                    fix=f"remove {key}",
                )
            )
    if problems:
        raise ConfigError(problems)
