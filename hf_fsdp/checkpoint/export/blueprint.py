"""The model that a config describes, built without memory: which tensors it has, and under which names files hold them.

Transformers renames and merges weights while it loads (Mixtral's experts become one tensor, LLaVA's towers move) and
takes that back while it saves. A file that everybody can load holds the names of the hub, so an export takes it back
too, a group of tensors at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_fsdp.errors import CheckpointError
from hf_fsdp.policies.wrap_plan import shared_owners
from hf_fsdp.sharding.buffers import persistent_buffers
from hf_fsdp.storage.files import read_json

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class NameGroup:
    """Tensors of the live model that become tensors of the files together.

    Args:
        live: names in the model.
        outputs: name in the files -> shape.
        is_converted: whether values are split or moved; else it is one tensor with, perhaps, another name.
    """

    live: tuple[str, ...]
    outputs: Mapping[str, tuple[int, ...]]
    is_converted: bool


@dataclass(frozen=True)
class Blueprint:
    """A model on the meta device.

    Args:
        model: without values.
        shapes: every tensor of its state dict, aliases left out, in its order.
        ties: first name -> all names of a tensor that the model shares with itself.
        parameters: the names in `shapes` that are no buffers.
    """

    model: Any
    shapes: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, tuple[str, ...]]
    parameters: frozenset[str]

    def first_name(self, name: str) -> str:
        """Return the name that a shared tensor is saved under."""
        return next((first for first, names in self.ties.items() if name in names), name)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `config.json`.

    Raises:
        CheckpointError: there is none.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{folder} holds no {CONFIG_FILE}, without which nobody knows what model its weights are of",
            fix="--base NAME_OR_FOLDER: the model that the run started from",
        )
    content = read_json(folder / CONFIG_FILE)
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder / CONFIG_FILE} is no config", fix="--base NAME_OR_FOLDER")
    return content


def build_blueprint(config: Mapping[str, Any], model_class: str | None) -> Blueprint | None:
    """Build the model of a config on the meta device; None for a class that is not one of transformers'.

    Args:
        config: the content of `config.json`.
        model_class: the class that was trained; default: what the config names.
    """
    import transformers

    names = [model_class] if model_class else list(config.get("architectures") or ())
    kind = getattr(transformers, names[0].removeprefix("FSDP"), None) if names else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        return None  # a name in a file is not to make anything but a model
    if config.get("model_type") not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        return None
    values = {key: value for key, value in config.items() if key not in ("quantization_config", "model_type")}
    # Not `from_config`: it sets torch's default dtype, which a training in another thread would see.
    try:
        live_config = transformers.AutoConfig.for_model(config["model_type"], **values)
        with torch.device("meta"):
            model = kind(live_config)
    except Exception as error:  # every class checks its own sizes, by whatever it stumbles over
        raise CheckpointError(
            f"config.json does not describe a {kind.__name__}: {type(error).__name__}: {str(error).splitlines()[:1]}",
            fix="give config.json the sizes and the class of the model that was trained",
        ) from error
    ties = _ties(model)
    aliases = {name for first, all_names in ties.items() for name in all_names if name != first}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in aliases and name not in ignored
    }
    return Blueprint(model, shapes, ties, frozenset(set(shapes) - set(persistent_buffers(model))))


def _ties(model: Any) -> dict[str, tuple[str, ...]]:
    """Return the name that `from_pretrained` looks for -> all names, for every tensor that the model shares."""
    sources = set((getattr(model, "all_tied_weights_keys", None) or {}).values())
    ties = {}
    for first, names in shared_owners(model).items():
        ties[next((name for name in names if name in sources), first)] = tuple(names)
    return ties


def name_groups(blueprint: Blueprint) -> list[NameGroup]:
    """Return how the model's tensors are named and cut in files, as `save_pretrained` would write them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
        dot_natural_key,
    )

    model = blueprint.model
    conversions = [
        item for item in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(item, PrefixChange)
    ]
    backwards = [item.reverse_transform() for item in conversions[::-1]]
    renamings = [item for item in backwards if isinstance(item, WeightRenaming)]
    converters = [item for item in backwards if isinstance(item, WeightConverter)]
    members: dict[str, list[str]] = {}
    converted = set()
    for name in sorted(blueprint.shapes, key=dot_natural_key):
        target, pattern = apply_converters(name, converters)
        if pattern is None:
            target = apply_renamings(name, renamings)
        else:
            converted.add(target)
        members.setdefault(target, []).append(name)
    groups = []
    for target, live in members.items():
        if target not in converted:
            groups.append(NameGroup(tuple(live), {target: blueprint.shapes[live[0]]}, False))
            continue
        empty = {name: torch.empty(blueprint.shapes[name], device="meta") for name in live}
        outputs = {name: tuple(tensor.shape) for name, tensor in to_file_layout(blueprint, empty).items()}
        groups.append(NameGroup(tuple(live), outputs, True))
    order = {name: index for index, name in enumerate(blueprint.shapes)}
    return sorted(groups, key=lambda group: order[group.live[0]])


def to_file_layout(blueprint: Blueprint, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of one group as files hold them."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, torch.Tensor] = revert_weight_conversion(blueprint.model, tensors)
    return converted
