"""A base model's weights by the names of the live model, read from its folder a tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import xxhash

from hf_fsdp.checkpoint.export.blueprint import Blueprint
from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.tensor_source import TensorInfo, hf_folder_source

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BaseWeights:
    """The tensors of a base model's folder.

    Args:
        folder: with safetensors.
        blueprint: the model that they are of.

    Raises:
        CheckpointError: they cannot be read, or are stored in 4 bits.
    """

    def __init__(self, folder: Path, blueprint: Blueprint):
        self.folder = folder
        self._files = hf_folder_source(folder)
        if packed := [name for name in self._files.tensors if name.endswith((".absmax", ".quant_state"))]:
            raise CheckpointError(
                f"{folder} holds its weights in 4 bits ({packed[0]}), and an adapter is merged into full ones only",
                fix="--base FOLDER, with the model as it was before it was quantized",
            )
        self._keys = _live_keys(self._files.tensors, blueprint)
        self.tensors: Mapping[str, TensorInfo] = {name: self._files.tensors[key] for name, key in self._keys.items()}
        self._sums: dict[str, tuple[torch.dtype, int]] = {}

    def read(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill `out` with the box of tensor `name` that begins at `offsets`."""
        self._files.read(self._keys[name], offsets, out)

    def close(self) -> None:
        self._files.close()

    def count_bits(self, name: str, piece: torch.Tensor, start: int = 0) -> None:
        """Take note of the rows of `name` from `start` on, as they are in the file, for `fingerprints`."""
        bits = piece.contiguous().view(-1).view(_BITS[piece.element_size()])
        total = int(bits.sum(dtype=torch.int64)) if bits.numel() else 0
        before = self._sums[name][1] if start else 0  # a tensor that is read again counts once
        self._sums[name] = (piece.dtype, before + total)

    def fingerprints(self, live: Mapping[str, str]) -> set[int] | None:
        """Return what `frozen_fingerprint` may have given for these weights; None when not all were read.

        Args:
            live: name in the model that was trained -> name here.
        """
        if any(name not in self._sums for name in live.values()):
            return None
        as_stored = as_float32 = 0
        for trained, name in live.items():
            dtype, total = self._sums[name]
            weight = xxhash.xxh3_64_intdigest(trained.encode()) >> 8
            as_stored += weight * total
            # bfloat16 is the upper half of float32.
            as_float32 += weight * total * (2**16 if dtype == torch.bfloat16 else 1)
        return {as_stored % 2**61, as_float32 % 2**61}


def _live_keys(keys: Mapping[str, TensorInfo], blueprint: Blueprint) -> dict[str, str]:
    """Return name -> key in the files: live names for what transformers loads as it is, keys for what it merges."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    model = blueprint.model
    conversions = get_model_conversion_mapping(model)
    renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
    converters = [item for item in conversions if isinstance(item, WeightConverter)]
    known = model.state_dict()
    names: dict[str, str] = {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        if name in known:
            names[key if pattern is not None else name] = key
    return names


def piece_offsets(shape: Sequence[int], max_bytes: int, itemsize: int) -> list[tuple[int, int]]:
    """Return (first row, number of rows) of pieces of a tensor that take `max_bytes` each."""
    if not shape:
        return [(0, 1)]
    rows = max(1, max_bytes // max(1, math.prod(shape[1:]) * itemsize))
    return [(start, min(rows, shape[0] - start)) for start in range(0, shape[0], rows)]
