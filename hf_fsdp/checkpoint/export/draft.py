"""What an export consists of, before a byte is written: weights with their names and dtypes, configs, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_fsdp.checkpoint.export.base_model import find_base
from hf_fsdp.checkpoint.export.blueprint import CONFIG_FILE, Blueprint, build_blueprint, read_config
from hf_fsdp.checkpoint.export.plan import AUTO, DtypeRule, main_dtype, plan_as_it_is, plan_model, same_values
from hf_fsdp.checkpoint.export.saved_model import ADAPTER_CONFIG, SavedModel, document_names
from hf_fsdp.checkpoint.manifest import dtype_name
from hf_fsdp.errors import CheckpointError
from hf_fsdp.sharding.adapters import DEFAULT_FOLDER
from hf_fsdp.storage.files import safe_join
from hf_fsdp.storage.safetensors_file import TensorToWrite
from hf_fsdp.storage.tensor_source import TensorSource, hub_blobs

MODEL, ADAPTER, MERGED = "model", "adapter", "merged"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How a checkpoint is exported.

    Args:
        dtype: ``auto``: what each tensor was loaded in before training; ``saved``: the training dtype; ``bf16``,
            ``fp16`` or ``fp32`` for all parameters.
        merge_lora: write the base model with the adapter added to it, and not the adapter.
        max_shard_size: bytes of one file at most, or text such as ``5GB``.
        force: replace an exported folder that is there.
        base: of an adapter, or of a checkpoint without a config: name or folder of the model; default: as saved.
        check_hashes: whether all bytes that are read are compared with the manifest.
    """

    dtype: str = AUTO
    merge_lora: bool = False
    max_shard_size: int | str = "5GB"
    force: bool = False
    base: str | Path | None = None
    check_hashes: bool = True


@dataclass
class ExportDraft:
    """What will be written: weights, files to copy, files made here.

    Args:
        kind: see `ExportReport`.
        weights: folder in the output -> its tensors.
        copies: name -> file that is copied.
        texts: name -> content.
        lines: what a person should know.
        opened: sources to be closed at the end.
        bases: folders of models that are read, which the export must not replace.
        closing: gives lines that are known only when all was read.
    """

    kind: str
    weights: dict[str, list[TensorToWrite]]
    copies: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    opened: list[TensorSource] = field(default_factory=list)
    bases: list[Path] = field(default_factory=list)
    closing: Callable[[], list[str]] = list

    @property
    def tensors(self) -> list[TensorToWrite]:
        return [item for items in self.weights.values() for item in items]

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.tensors)


def draft_model(saved: SavedModel, options: ExportOptions) -> ExportDraft:
    draft = ExportDraft(MODEL, {}, copies_of(saved))
    if CONFIG_FILE in draft.copies:
        config = read_config(saved.folder)
    else:
        if options.base is None:
            read_config(saved.folder)  # raises, and says what to do
        base = find_base(options.base or "", with_weights=False)
        config = read_config(base)
        draft.copies = {**base_documents(base), **draft.copies}
        draft.lines.append(f"config and tokenizer are those of {options.base}")
    rule = DtypeRule(asked=options.dtype, defaults=saved.export_dtypes, fallback=_dtype_in(config, saved))
    blueprint = build_blueprint(config, saved.model_class)
    if blueprint is None:
        name = saved.model_class or next(iter(config.get("architectures") or ()), "its class")
        draft.lines.append(f"{name} is not one of transformers' classes, so names and shapes were not compared with it")
        planned = plan_as_it_is(saved.source, {name: name for name in saved.source.tensors}, rule)
    else:
        config, blueprint, spare = settle_ties(config, blueprint, saved.source, draft.lines)
        planned = plan_model(saved.source, blueprint, saved.ties, rule, spare=spare)
        config = {**config, "architectures": [type(blueprint.model).__name__]}
    draft.weights = {DEFAULT_FOLDER: planned}
    draft.texts[CONFIG_FILE] = config_bytes(config, main_dtype(planned))
    return draft


def draft_adapters(saved: SavedModel, options: ExportOptions) -> ExportDraft:
    draft = ExportDraft(ADAPTER, {}, copies_of(saved))
    rule = DtypeRule(asked=options.dtype, defaults=saved.export_dtypes)
    inside: set[str] = set()
    for folder, names in saved.adapters.items():
        config = ADAPTER_CONFIG if folder == DEFAULT_FOLDER else f"{folder}/{ADAPTER_CONFIG}"
        if config not in draft.copies:
            raise CheckpointError(f"{saved.folder} lacks {config}, without which PEFT loads nothing", fix=_ADAPTER_FIX)
        draft.weights[folder] = plan_as_it_is(saved.source, names, rule)
        inside.update(names.values())
    draft.copies.pop(CONFIG_FILE, None)  # PEFT folders have none: it would say that here is a whole model
    outside = sorted(set(saved.source.tensors) - inside)
    if trained := [name for name in outside if name in saved.trained_names]:
        raise CheckpointError(
            f"{len(trained)} tensors were trained and belong to no adapter, among them {trained[0]}: "
            "a PEFT folder has no place for them",
            fix="--merge-lora, which puts them into the merged model; or train them through modules_to_save",
        )
    if outside:
        draft.lines.append(f"left out, since PEFT keeps them with the base: {len(outside)} tensors, {outside[0]} first")
    return draft


_ADAPTER_FIX = "put the adapter_config.json of the run beside the adapter"


def copies_of(saved: SavedModel) -> dict[str, Path]:
    """Return name -> file for what a checkpoint keeps beside its weights."""
    return {name: safe_join(saved.folder, name) for name in saved.documents}


def base_documents(folder: Path) -> dict[str, Path]:
    """Return name -> file for config, tokenizer and code at the top of a base model's folder."""
    names = document_names([path.name for path in folder.iterdir() if path.is_file()])
    names = tuple(name for name in names if name not in ("README.md", "LICENSE", "USE_POLICY.md"))
    return {name: safe_join(folder, name, trusted=hub_blobs(folder)) for name in names}


def settle_ties(
    config: dict[str, Any], blueprint: Blueprint, source: TensorSource, lines: list[str]
) -> tuple[dict[str, Any], Blueprint, set[str]]:
    """Return config and model as the source's tensors are tied, and names that are copies of others.

    Raises:
        CheckpointError: tensors that the model's class always shares have different values.
    """
    copies: set[str] = set()
    apart: list[tuple[str, str]] = []
    for first, names in blueprint.ties.items():
        for name in names:
            if name != first and name in source.tensors and first in source.tensors:
                if same_values(source, first, name):
                    copies.add(name)
                else:
                    apart.append((first, name))
    if not apart:
        return config, blueprint, copies
    first, name = apart[0]
    config = untied(config)
    rebuilt = build_blueprint(config, type(blueprint.model).__name__)
    if rebuilt is None or any(name in names for names in rebuilt.ties.values()):
        raise CheckpointError(
            f"{first} and {name} are one tensor in {type(blueprint.model).__name__}, and differ in the checkpoint",
            fix="set config.tie_word_embeddings = False before training",
        )
    lines.append(f"{name} is not tied to {first} any more, so config.json says tie_word_embeddings: false")
    return config, rebuilt, copies


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose input and output embeddings are two tensors."""
    inner = {
        key: {**value, "tie_word_embeddings": False}
        for key, value in config.items()
        if isinstance(value, dict) and "tie_word_embeddings" in value
    }
    return {**config, **inner, "tie_word_embeddings": False}


def config_bytes(config: Mapping[str, Any], dtype: torch.dtype) -> bytes:
    """Return `config.json` with the dtype of the weights beside it, in the sub-configs too."""
    name = dtype_name(dtype)
    content = {key: value for key, value in config.items() if key != "torch_dtype"}
    content = {
        key: {**value, "dtype": name} if isinstance(value, dict) and value.get("dtype") else value
        for key, value in content.items()
    }
    return (json.dumps({**content, "dtype": name}, indent=2, sort_keys=True) + "\n").encode("utf-8")


def _dtype_in(config: Mapping[str, Any], saved: SavedModel) -> torch.dtype | None:
    """Return the dtype that another program's config names; ours says more in the manifest."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    dtype = getattr(torch, name, None) if saved.manifest is None and name else None
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None
