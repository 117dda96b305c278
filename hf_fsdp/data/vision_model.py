"""Which model it is and what it is made of, known from its config before any of its weights is read."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from hf_fsdp.data.setting_values import read_names
from hf_fsdp.errors import ConfigError, HfFsdpError, ModelAccessError, Problem

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

_FAMILIES = "give a model of a family in docs/vlm.md, such as llava-hf/llava-1.5-7b-hf"


def read_vision_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the config of a model that reads pictures and text.

    Args:
        name: a folder, or a hub id.
        revision: branch, tag or commit on the hub; None is ``main``.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        ModelAccessError: a config that cannot be read, a kind of model that this transformers does not know, or one
            that does not answer in words about pictures.

    Example:
        >>> read_vision_config("llava-hf/llava-1.5-7b-hf").model_type  # doctest: +SKIP
        'llava'
    """
    import transformers
    from transformers import AutoConfig, AutoModelForImageTextToText

    try:
        config: Any = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = f"{_FAMILIES}; for a newer one: pip install -U transformers (here {transformers.__version__})"
        if "trust_remote_code" in str(error):
            fix = "trust_remote_code: true, which runs the code that comes with the model"
        raise ModelAccessError(f"model_name_or_path={name!r}: its config cannot be read: {reason}", fix=fix) from error
    own_code = getattr(config, "auto_map", None) or {}
    if type(config) not in AutoModelForImageTextToText._model_mapping and not (
        trust_remote_code and AutoModelForImageTextToText.__name__ in own_code
    ):
        kind = ", ".join(config.architectures or [type(config).__name__])
        raise ModelAccessError(
            f"model_name_or_path={name!r} is {kind} (model_type {config.model_type}), which does not answer in words "
            "about pictures",
            fix=f"{_FAMILIES}; a text model belongs to recipes/text/train.py",
        )
    return config


def choose_parts(trainable: Any, lora_parts: Any, *, use_peft: bool) -> tuple[list[str] | None, list[str] | None]:
    """Return the parts to train in full, and those that get adapters, with what is meant where nothing is said.

    Args:
        trainable: as typed; without LoRA ``language`` and ``projector`` by default, beside LoRA none.
        lora_parts: as typed; ``language`` by default, and only for LoRA.
        use_peft: whether there are adapters.

    Raises:
        ConfigError: values that are no lists of names, or parts for adapters without LoRA; both at once.

    Example:
        >>> choose_parts(None, None, use_peft=False)
        (['language', 'projector'], None)
    """
    problems: list[Problem] = []
    read: list[list[str] | None] = []
    for key, value, example in (
        ("trainable", trainable, "language, projector"),
        ("lora_parts", lora_parts, "language"),
    ):
        try:
            read.append(read_names(value, key, example=example))
        except HfFsdpError as error:
            problems += error.problems
            read.append(None)
    if lora_parts is not None and not use_peft:
        fix = "use_peft: true   or   remove lora_parts"
        problems.append(Problem(message=f"lora_parts={lora_parts!r} without use_peft: there are no adapters", fix=fix))
    if problems:
        raise ConfigError(problems)
    if use_peft:
        return read[0], read[1] or ["language"]
    return read[0] or ["language", "projector"], None


def build_outline(config: PretrainedConfig, *, trust_remote_code: bool = False) -> nn.Module:
    """Return the model of a config without memory for its weights: its modules, names and shapes.

    What is to be trained can be tried on it in a second or two, where the model itself takes minutes to load.

    Args:
        config: of `read_vision_config`.
        trust_remote_code: whether code that comes with the model may run.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    copied = copy.deepcopy(config)  # `from_config` writes into it, e.g. which attention was chosen
    with torch.device("meta"):
        outline: nn.Module = AutoModelForImageTextToText.from_config(copied, trust_remote_code=trust_remote_code)
    return outline
