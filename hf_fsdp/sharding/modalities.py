"""Where a model takes in images, videos or sound beside text, found from the model itself.

transformers writes all its families alike: one module embeds the tokens, hands each kind of input to a method of its
own (``get_image_features(pixel_values, ...)``), puts what comes back in the place of placeholder tokens, and calls its
language model with ``inputs_embeds``. What is needed to run a tower without the text is read from there: the method,
the arguments of the forward that it takes, and the order.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_fsdp.policies.forward_source import forward_functions

_METHOD = re.compile(r"get_(image|video|audio)_features")
# Inputs of a forward that decide whether a tower runs at all.
_MEDIA = re.compile(r"^(pixel_values|image_patches|input_features|input_values)")


@dataclass(frozen=True)
class Modality:
    """One kind of input beside text: `name` is the argument whose absence skips a tower.

    `method` takes it and `companions`, the other arguments of the forward that it names; None where no tower can be
    run alone, for `reason`.
    """

    name: str
    method: str | None = None
    companions: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Fusion:
    """The module where features take the place of tokens, its kinds of input in the order in which it runs their
    towers, and the language model that it then calls with ``inputs_embeds``."""

    module: nn.Module
    modalities: tuple[Modality, ...]
    language_model: nn.Module | None


def find_fusion(model: nn.Module) -> Fusion | None:
    """Return where `model` joins other inputs with text; None where it takes one kind only, or must have all.

    Args:
        model: of transformers, maybe under PEFT; sharded or not.
    """
    found = [module for module in model.modules() if _media_inputs(module)]
    # Outer classes only hand on; the innermost module that still takes tokens and media is the one that joins them.
    innermost = [m for m in found if not any(other is not m and other in set(m.modules()) for other in found)]
    if not innermost:
        return None
    module = innermost[0]
    language_model = _language_model(module)
    methods = _feature_methods(module)
    modalities = [_modality(module, name, methods, language_model) for name in _media_inputs(module)]
    order = {method: index for index, method in enumerate(methods)}
    modalities.sort(key=lambda modality: order.get(modality.method or "", len(order)))
    return Fusion(module, tuple(modalities), language_model)


def _modality(module: nn.Module, name: str, methods: list[str], language_model: nn.Module | None) -> Modality:
    for method in methods:
        parameters = inspect.signature(getattr(module, method)).parameters.values()
        arguments = [item.name for item in parameters if item.kind is not inspect.Parameter.VAR_KEYWORD]
        if arguments[:1] != [name]:
            continue
        if language_model is None:
            return Modality(name, reason="it calls no language model with inputs_embeds")
        if not _embeds_before(module, method):
            return Modality(name, reason=f"it calls {method} before it embeds the tokens")
        taken = inspect.signature(module.forward).parameters
        return Modality(name, method, tuple(argument for argument in arguments[1:] if argument in taken))
    return Modality(name, reason=f"it has no method of its own for {name} (get_image_features) that its forward calls")


def _media_inputs(module: nn.Module) -> list[str]:
    """The inputs that a batch may lack, of a forward that takes tokens too."""
    if type(module).forward is nn.Module.forward:
        return []
    parameters = inspect.signature(module.forward).parameters
    if "input_ids" not in parameters:
        return []
    return [name for name, value in parameters.items() if _MEDIA.match(name) and value.default is None]


def _feature_methods(module: nn.Module) -> list[str]:
    """The feature methods that the forward calls, in the order of its source."""
    found: dict[str, None] = {}
    for function in forward_functions(module):
        for name in function.__code__.co_names:  # in the order of their first use
            if _METHOD.fullmatch(name) and hasattr(module, name):
                found.setdefault(name)
    return list(found)


def _embeds_before(module: nn.Module, method: str) -> bool:
    """Whether tokens are embedded before the tower runs: gathers have to come in one order on all ranks."""
    for function in forward_functions(module):
        names = function.__code__.co_names
        if method in names:
            embeds = [name for name in names if name in ("get_input_embeddings", "embed_tokens")]
            return bool(embeds) and names.index(embeds[0]) < names.index(method)
    return False


def _language_model(module: nn.Module) -> nn.Module | None:
    """The child that is called with embedded tokens. A projector may take `inputs_embeds` too (Gemma 3n), so the
    model's own word counts first."""
    children = [child for child in module.children() if _takes_embeddings(child)]
    get_decoder: Any = getattr(module, "get_decoder", None)
    decoder = get_decoder() if get_decoder is not None else None
    if any(child is decoder for child in children):
        return decoder
    return max(children, key=lambda child: sum(1 for _ in child.modules()), default=None)


def _takes_embeddings(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and (
        "inputs_embeds" in inspect.signature(module.forward).parameters
    )
