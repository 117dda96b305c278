"""A LoRA adapter merged into its base model, tensor by tensor, in float32.

PEFT builds the adapted model on the meta device and says which layers carry what; one layer at a time gets its values.
Plain LoRA is added some rows at a time; DoRA, convolutions and LoRA biases are merged by PEFT's own layers. What
cannot be merged exactly is refused by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_fsdp.checkpoint.export.base_model import find_base
from hf_fsdp.checkpoint.export.base_weights import BaseWeights
from hf_fsdp.checkpoint.export.blueprint import CONFIG_FILE, Blueprint, build_blueprint, read_config
from hf_fsdp.checkpoint.export.draft import (
    MERGED,
    ExportDraft,
    ExportOptions,
    base_documents,
    config_bytes,
    copies_of,
    settle_ties,
)
from hf_fsdp.checkpoint.export.merged_source import PREFIX, WITH_PEFT, Adapted, MergedSource
from hf_fsdp.checkpoint.export.plan import DtypeRule, main_dtype, plan_model
from hf_fsdp.checkpoint.export.saved_model import ADAPTER_CONFIG, SavedModel
from hf_fsdp.errors import CheckpointError
from hf_fsdp.sharding.adapters import DEFAULT_FOLDER, adapter_keys
from hf_fsdp.storage.files import read_json, safe_join

# These change the base model when they begin, and the base of the hub is not the one that they were trained on.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def draft_merged(saved: SavedModel, options: ExportOptions) -> ExportDraft:
    """Return what a merged model consists of; adapters are small and read at once, the base is not.

    Raises:
        CheckpointError: the base is not there, or something cannot be merged exactly.
    """
    draft = ExportDraft(MERGED, {})
    folder = _choose_adapter(saved, draft.lines)
    place = safe_join(saved.folder, folder)
    content = read_json(safe_join(place, ADAPTER_CONFIG))
    _refuse_kinds(content)
    name = options.base or saved.base.get("name") or content.get("base_model_name_or_path")
    if not name:
        raise CheckpointError(f"{saved.folder} does not say what its base model is", fix="--base NAME_OR_FOLDER")
    base_folder = find_base(name, None if options.base else content.get("revision"))
    config = {key: value for key, value in read_config(base_folder).items() if key != "quantization_config"}
    blueprint = _build(config, saved, content)
    config, blueprint = _with_saved_vocabulary(config, blueprint, saved, folder)
    base = BaseWeights(base_folder, blueprint)
    draft.opened.append(base)
    draft.bases.append(base_folder)
    adapted = _build_adapted(blueprint, saved, folder, place)
    merged = MergedSource(base, saved.source, blueprint, adapted)
    blueprint = _build(config, saved, content)  # the first one carries the adapter now
    config, blueprint, spare = settle_ties(config, blueprint, merged, draft.lines)
    rule = DtypeRule(asked=options.dtype, defaults=_base_dtypes(base), fallback=_most_common(base))
    unused = set(merged.tensors) - set(blueprint.shapes)
    planned = plan_model(merged, blueprint, {}, rule, spare=spare | unused)
    documents = {name: path for name, path in copies_of(saved).items() if not _is_adapter_file(name)}
    draft.copies = {**base_documents(base_folder), **documents}
    draft.weights = {DEFAULT_FOLDER: planned}
    draft.texts[CONFIG_FILE] = config_bytes(
        {**config, "architectures": [type(blueprint.model).__name__]}, main_dtype(planned)
    )
    draft.lines.append(f"merged into {name}")
    if saved.base.get("is_packed"):
        draft.lines.append(
            "the adapter was trained on a 4-bit base and is merged into the full weights, which differ slightly"
        )
    elif (fingerprint := saved.base.get("fingerprint")) and len(saved.adapters) == 1:
        draft.closing = lambda: merged.compare_base(fingerprint, set(saved.source.tensors))
    return draft


def _choose_adapter(saved: SavedModel, lines: list[str]) -> str:
    folders = list(saved.adapters)
    folder = DEFAULT_FOLDER if DEFAULT_FOLDER in folders else folders[0]
    if len(folders) > 1:
        if folder != DEFAULT_FOLDER:
            raise CheckpointError(f"--merge-lora: there are {len(folders)} adapters: {folders}", fix=WITH_PEFT)
        lines.append(f"left out: the adapters {', '.join(name for name in folders if name != folder)}")
    return folder


def _refuse_kinds(content: Mapping[str, Any]) -> None:
    kind = content.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"--merge-lora: the adapter is of the type {kind}", fix=WITH_PEFT)
    start = content.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_THE_BASE):
        raise CheckpointError(
            f"--merge-lora: init_lora_weights={start!r} changed the base weights before training, and they are in no "
            "file",
            fix=WITH_PEFT,
        )
    for key in (
        "target_parameters",
        "alora_invocation_tokens",
        "arrow_config",
        "use_bdlora",
        "megatron_config",
        "layer_replication",
        "ensure_weight_tying",
    ):
        if content.get(key):
            raise CheckpointError(f"--merge-lora: {key} of adapter_config.json is not merged here", fix=WITH_PEFT)


def _is_adapter_file(name: str) -> bool:
    return name.endswith(ADAPTER_CONFIG) or name == "README.md" or "/" in name


def _build(config: Mapping[str, Any], saved: SavedModel, content: Mapping[str, Any]) -> Blueprint:
    auto = content.get("auto_mapping") or {}
    blueprint = build_blueprint(config, saved.model_class or auto.get("base_model_class"))
    if blueprint is None:
        raise CheckpointError(
            f"--merge-lora: {saved.model_class or config.get('architectures')} is not one of transformers' classes, so "
            "its layers are not known here",
            fix=WITH_PEFT,
        )
    return blueprint


def _with_saved_vocabulary(
    config: dict[str, Any], blueprint: Blueprint, saved: SavedModel, folder: str
) -> tuple[dict[str, Any], Blueprint]:
    """Return config and model with as many tokens as the adapter's own embeddings have."""
    try:
        embeddings = blueprint.model.get_input_embeddings()
    except NotImplementedError:  # a model of sounds or images has no vocabulary
        return config, blueprint
    name = next((name for name, module in blueprint.model.named_modules() if module is embeddings), None)
    for inner in ("", ".base_layer"):
        source = saved.adapters[folder].get(f"{PREFIX}{name}{inner}.weight")
        if source is None or (rows := saved.source.tensors[source].shape[0]) == embeddings.weight.shape[0]:
            continue
        nested = {
            key: {**value, "vocab_size": rows}
            for key, value in config.items()
            if isinstance(value, dict) and "vocab_size" in value
        }
        config = {**config, **nested, **({"vocab_size": rows} if "vocab_size" in config or not nested else {})}
        rebuilt = build_blueprint(config, type(blueprint.model).__name__)
        assert rebuilt is not None
        return config, rebuilt
    return config, blueprint


def _base_dtypes(base: BaseWeights) -> dict[str, torch.dtype]:
    return {name: info.dtype for name, info in base.tensors.items()}


def _most_common(base: BaseWeights) -> torch.dtype | None:
    dtypes = [info.dtype for info in base.tensors.values() if info.dtype.is_floating_point]
    return max(set(dtypes), key=dtypes.count) if dtypes else None


def _build_adapted(blueprint: Blueprint, saved: SavedModel, folder: str, place: Path) -> Adapted:
    """Let PEFT put the adapter on the model, and match its tensors with those that were saved."""
    from peft import PeftConfig, get_peft_model

    config = PeftConfig.from_pretrained(str(place))
    config.inference_mode, config.init_lora_weights = True, True
    blueprint.model.name_or_path = config.base_model_name_or_path
    name = "default" if folder == DEFAULT_FOLDER else folder
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            model = get_peft_model(
                blueprint.model, config, adapter_name=name, autocast_adapter_dtype=False, low_cpu_mem_usage=True
            )
            keys = adapter_keys(model)[folder]
        except (ValueError, TypeError, NotImplementedError) as error:
            raise CheckpointError(
                f"--merge-lora: PEFT cannot put the adapter on its base: {error}", fix=WITH_PEFT
            ) from error
    there = saved.adapters[folder]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    sources = {keys[key]: source for key, source in there.items() if key in keys}
    for key, source in there.items():  # what PEFT saves beside an adapter, such as resized embeddings
        if key not in keys and key in parameters:
            sources[key] = source
    known = {key for names in saved.adapters.values() for key in names.values()}
    sources.update({name: name for name in saved.source.tensors if name not in known and name.startswith(PREFIX)})
    missing = sorted(set(keys) - set(there))
    extra = sorted(key for key in there if key not in keys and key not in parameters)
    if missing or extra:
        lost = f"lacks {missing[0]}" if missing else f"holds {extra[0]}, which has no place in the model"
        raise CheckpointError(
            f"--merge-lora: the adapter in {place} {lost}: it is of another base, or of another config",
            fix="--base NAME_OR_FOLDER, with the model that it was trained on",
        )
    for live, source in sources.items():
        if live in parameters and tuple(parameters[live].shape) != saved.source.tensors[source].shape:
            raise CheckpointError(
                f"--merge-lora: {live} is {list(saved.source.tensors[source].shape)} in the checkpoint and "
                f"{list(parameters[live].shape)} on this base",
                fix="--base NAME_OR_FOLDER, with the model that it was trained on",
            )
    return Adapted(model, name, sources)
