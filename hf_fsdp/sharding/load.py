"""Load a model so that no rank ever holds it whole: weights stay in their files until each rank reads its shards.

The model is built by `from_pretrained` itself, which finds the files, names, joins and ties weights, computes buffers
and initialises what is missing. Only the values are left out: `UnreadParameter`s stand for them, and `apply_fsdp` has
every rank read its own slices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, modeling_utils
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging

from hf_fsdp.errors import CheckpointError
from hf_fsdp.sharding.origins import InFile
from hf_fsdp.sharding.unread import UnreadParameter, read_all, read_now
from hf_fsdp.storage.tensor_source import SafetensorsSource, TensorSource, hub_blobs


def load_from_files(model_class: Any, name: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    """Return ``model_class.from_pretrained(name, ...)`` with its weights still in their files, where that can be.

    In a single process it is `from_pretrained`. See `hf_fsdp.load_sharded`, which reads our checkpoints too.
    """
    if _world_size() == 1:
        return model_class.from_pretrained(name, *args, **kwargs)
    with _weights_left_in_files():
        return model_class.from_pretrained(name, *args, **kwargs)


def load_from_source(
    model_class: Any, folder: Path, source: TensorSource, files: Sequence[Path], *args: Any, **kwargs: Any
) -> Any:
    """Return the model of `folder`, which holds a config and no weights that `from_pretrained` knows.

    Args:
        model_class: as for `load_sharded`.
        folder: with config.json.
        source: the weights, under the names that the model gives them.
        files: where they are; `from_pretrained` looks for a dtype there when the config names none.
        args, kwargs: as for `load_sharded`.
    """

    def find(*args: Any, **kwargs: Any) -> Any:
        return [str(file) for file in files], None

    with _replaced(modeling_utils, "_get_resolved_checkpoint_files", find), _weights_left_in_files(source):
        model = model_class.from_pretrained(folder, *args, **kwargs)
    if _world_size() == 1:
        read_all(model.parameters())
        source.close()
    return model


@contextlib.contextmanager
def _weights_left_in_files(source: TensorSource | None = None) -> Iterator[None]:
    """Let `from_pretrained` fill models with unread parameters, of `source` or of the files that it finds."""
    load = functools.partial(_load, PreTrainedModel._load_pretrained_model, source)
    with _replaced(PreTrainedModel, "_load_pretrained_model", staticmethod(load)):
        yield


@contextlib.contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(holder)[name]
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, original)


def _load(
    original: Callable[..., Any],
    source: TensorSource | None,
    model: PreTrainedModel,
    state_dict: dict[str, Any] | None,
    checkpoint_files: Sequence[str] | None,
    load_config: Any,
    expected_keys: list[str] | None = None,
) -> Any:
    """Stand in for `PreTrainedModel._load_pretrained_model`."""
    if expected_keys is not None:  # an adapter, loaded on top of a model
        return original(model, state_dict, checkpoint_files, load_config, expected_keys=expected_keys)
    reason = _why_ordinary(state_dict, checkpoint_files, load_config)
    if reason is not None and source is not None:
        raise CheckpointError(
            f"a sharded checkpoint cannot be loaded this way: {reason}",
            fix="export it first: hf-fsdp checkpoint export FOLDER -o OUT",
        )
    if reason is not None:
        _say(f"{type(model).__name__} is loaded whole by every process: {reason}")
        return original(model, state_dict, checkpoint_files, load_config)
    if source is None:
        assert checkpoint_files is not None
        found = open_files(load_config.pretrained_model_name_or_path, [Path(file) for file in checkpoint_files])
        return _fill(original, model, found, load_config)
    # Names are the model's own already. Which names a folder for others has is then for `save_pretrained` to say.
    result = _fill(original, model, source, dataclasses.replace(load_config, weight_mapping=[]))
    del model._weight_conversions
    return result


def _fill(original: Callable[..., Any], model: PreTrainedModel, source: TensorSource, load_config: Any) -> Any:
    """Have transformers put unread parameters where it would put tensors."""
    buffers = {name for name, _ in model.named_buffers()}
    unread = {name: UnreadParameter(InFile(source, name), requires_grad=False) for name in source.tensors}
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # nothing is loaded here
    try:
        result = original(model, unread, None, load_config)
    finally:
        if shows_bars:
            logging.enable_progress_bar()
    _settle(model, buffers)
    return result


def _settle(model: nn.Module, buffers: set[str]) -> None:
    """Read what is small and not sharded; make parameters trainable as transformers makes them."""
    for path, module in model.named_modules():
        for attribute, parameter in list(module._parameters.items()):
            if not isinstance(parameter, UnreadParameter):
                continue
            if (f"{path}.{attribute}" if path else attribute) in buffers:
                read_now(parameter)
                values = parameter.detach()
                values._is_hf_initialized = True  # type: ignore[attr-defined]
                del module._parameters[attribute]
                module.register_buffer(attribute, values)
            elif parameter.dim() == 0:
                read_now(parameter)
            else:
                parameter.requires_grad_(parameter.is_floating_point())


def _why_ordinary(state_dict: Any, files: Sequence[str] | None, load_config: Any) -> str | None:
    """Return why a model cannot be left in its files, or None."""
    if load_config.hf_quantizer is not None:
        method = getattr(load_config.hf_quantizer.quantization_config.quant_method, "value", "?")
        return f"its weights are quantized ({method})"
    if load_config.device_map is not None or load_config.device_mesh is not None:
        return "device_map or a device mesh was given"
    if is_deepspeed_zero3_enabled():
        return "DeepSpeed ZeRO-3 is on"
    if state_dict is not None or not files:
        return "its weights were given and are in no file"
    odd = [file for file in files if not file.endswith(".safetensors")]
    return f"{Path(odd[0]).name} is not a safetensors file" if odd else None


def open_files(name: str | os.PathLike[str] | None, files: Sequence[Path]) -> SafetensorsSource:
    """Return the tensors of `files`, which belong to the model `name`.

    Raises:
        CheckpointError: one of them is damaged, or lies outside of the folder `name`.
    """
    if name is not None and Path(name).is_dir():
        folder = Path(name).resolve()
        places = [place.resolve() for place in (folder, hub_blobs(Path(name))) if place is not None]
        for file in files:
            if not any(file.resolve().is_relative_to(place) for place in places):
                raise CheckpointError(
                    f"{file} is named in {folder} and lies outside of it, so it is not read",
                    fix="use a copy of the folder from a source that you trust",
                )
    return SafetensorsSource(files)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE") or 1)


def _say(line: str) -> None:
    if int(os.environ.get("RANK") or 0) == 0:
        print(f"hf-fsdp: {line}", flush=True)
