"""What in a config.json the planner cannot simulate: every problem at once, none of the model's code run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hf_fsdp.errors import Problem, nearest_names
from hf_fsdp.plan.job import ModelSpec
from hf_fsdp.plan.models.config_values import check_values
from hf_fsdp.plan.models.known_models import find_known_model
from hf_fsdp.plan.models.model_config import PLANNED_KINDS, kind_of, read_config, uses_own_code

_KIND_WORDS = {
    "seq2seq": "an encoder-decoder",
    "speech": "a speech model",
    "masked-lm": "an encoder, which fills in masked words",
    "other": "no language model that transformers builds",
}
# What publishers and others put behind the name of a checkpoint that they quantized.
_QUANTIZED_ENDING = re.compile(
    r"[-_.](awq|gptq|int[48]|w[48]a(8|16)|fp8|bnb|[48]bit|4bits|unsloth|dynamic|quantized)+$"
)


def check_config(spec: ModelSpec, *, source: str, method: str) -> tuple[ModelSpec, list[Problem]]:
    """Return `spec` as it is planned (without a quantization that the method brings itself), and its problems.

    Args:
        spec: a config.json as it was read.
        source: the file that it was read from.
        method: ``full``, ``lora`` or ``qlora``.
    """
    problems = []
    if not isinstance(spec.config.get("model_type"), str):
        stated = "" if "model_type" not in spec.config else f" (model_type={spec.config['model_type']!r})"
        return spec, [
            Problem(
                message=f"MODEL {spec.name!r}: its config.json does not say which model it is: no model_type{stated}",
                fix='add it, e.g. "model_type": "llama", or name a folder that save_pretrained wrote',
                source=source,
            )
        ]
    spec, quantized = _check_quantization(spec, source, method)
    problems += quantized
    code = _check_code(spec, source)
    if code is not None:
        return spec, [*problems, code]
    kind = kind_of(spec.config)
    if kind not in PLANNED_KINDS:
        problems.append(_other_kind(spec, kind, source))
    return spec, problems + _check_values(spec, source)


def _check_code(spec: ModelSpec, source: str) -> Problem | None:
    """A class that transformers does not know: with the model, in a newer transformers, or misspelt."""
    if not uses_own_code(spec.config):
        return None
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = spec.config["model_type"]
    own = spec.config.get("auto_map") or {}
    if "AutoConfig" in own:
        if spec.trust_remote_code:
            return None
        return Problem(
            message=f"MODEL {spec.name!r} is built by code of its own ({own['AutoConfig']}), which transformers "
            f"{transformers.__version__} does not have (model_type {model_type})",
            fix="--trust-remote-code, which runs that code on this machine: read it first",
            source=source,
        )
    written_by = spec.config.get("transformers_version")
    near = nearest_names(model_type, CONFIG_MAPPING_NAMES)
    by = f"; its config.json was written by transformers {written_by}" if written_by else ""
    return Problem(
        message=f"MODEL {spec.name!r} is of model_type {model_type}, which transformers {transformers.__version__} "
        f"does not know{by}",
        near=", ".join(near) or None,
        fix="pip install -U transformers, if a newer one knows it" + ("; or correct model_type" if near else ""),
        source=source,
    )


def _other_kind(spec: ModelSpec, kind: str, source: str) -> Problem:
    return Problem(
        message=f"MODEL {spec.name!r} is {_KIND_WORDS[kind]} (model_type {spec.config['model_type']}); the planner "
        "simulates causal language models and those that answer in words about pictures",
        fix="name a model of AutoModelForCausalLM or AutoModelForImageTextToText, such as llama-2-7b or llava-1.5-7b",
        source=source,
    )


def _check_values(spec: ModelSpec, source: str) -> list[Problem]:
    """Let the config class of transformers look at the values, and then look at what it takes."""
    if uses_own_code(spec.config):
        return []  # its code runs where the model is built, once
    try:
        config = read_config(spec)
    except Exception as error:  # its validators raise classes of their own, and assertions
        reason = " ".join((str(error).strip() or type(error).__name__).split())
        return [
            Problem(
                message=f"MODEL {spec.name!r}: transformers refuses its config.json: {reason[:300]}",
                fix="correct that value, or name a folder that save_pretrained wrote",
                source=source,
            )
        ]
    return check_values(spec.name, spec.config, config, source)


def _check_quantization(spec: ModelSpec, source: str, method: str) -> tuple[ModelSpec, list[Problem]]:
    """Quantized weights have other shapes and no gradients: only 4-bit bitsandbytes can be planned, as QLoRA."""
    settings = _quantization_of(spec.config)
    if settings is None:
        return spec, []
    name = str(settings.get("quant_method") or "an unnamed method")
    if settings.get("load_in_8bit"):
        name = "bitsandbytes in 8 bits"
    elif name in ("bitsandbytes", "bnb") or settings.get("load_in_4bit"):
        if method == "qlora":
            return _without_quantization(spec), []
        return spec, [
            Problem(
                message=f"MODEL {spec.name!r} is stored in 4 bits (bitsandbytes), which --method {method} cannot train",
                fix=f"--method qlora{_or_base(spec.name, '; or, for its 16-bit weights, name ')}",
                source=source,
            )
        ]
    base = _or_base(spec.name, "")
    return spec, [
        Problem(
            message=f"MODEL {spec.name!r} is quantized by {name}; of the quantized bases, this release shards "
            "bitsandbytes' 4-bit layers only",
            near="--method qlora, which quantizes the 16-bit model as it loads",
            fix=f"name {base or 'the model that it was made from'}",
            source=source,
        )
    ]


def _quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for part in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config"):
            found = part.get(key) if isinstance(part, Mapping) else None
            if isinstance(found, Mapping) and found:
                return {"quant_method": "compressed-tensors", **found} if key == "compression_config" else found
    return None


def _without_quantization(spec: ModelSpec) -> ModelSpec:
    """Leave the quantization out: the method makes its own, and the simulation builds 16-bit shapes first."""
    import dataclasses

    config = {key: value for key, value in spec.config.items() if key != "quantization_config"}
    if isinstance(config.get("text_config"), Mapping):
        text = config["text_config"]
        config["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    return dataclasses.replace(spec, config=config)


def _or_base(name: str, before: str) -> str:
    """Return the 16-bit model of the built-in list that a quantized one was made from, as its name says; or nothing."""
    plain = name.rstrip("/").rsplit("/", 1)[-1].lower()
    while _QUANTIZED_ENDING.search(plain):
        plain = _QUANTIZED_ENDING.sub("", plain)
    found = find_known_model(plain)
    return f"{before}{found.hub_id}" if found is not None else ""
