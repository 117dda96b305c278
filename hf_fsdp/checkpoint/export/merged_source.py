"""A base model with an adapter in it, a tensor at a time: plain LoRA some rows at a time, the rest by PEFT's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_fsdp.checkpoint.export.base_weights import BaseWeights, piece_offsets
from hf_fsdp.checkpoint.export.blueprint import Blueprint
from hf_fsdp.errors import CheckpointError
from hf_fsdp.storage.tensor_source import TensorInfo, TensorSource, read_whole

# Float32 values that are in memory beside the merged tensor.
PIECE_BYTES = 64 * 1024**2
PREFIX = "base_model.model."
WITH_PEFT = "export without --merge-lora and use the adapter as it is, or merge it with: model.merge_and_unload()"


@dataclass(frozen=True)
class Adapted:
    """A model with an adapter on the meta device.

    Args:
        model: PEFT's.
        name: of the adapter.
        sources: name of a tensor in `model` -> its name in the checkpoint.
    """

    model: Any
    name: str
    sources: Mapping[str, str]


class MergedSource:
    """A base model with an adapter in it, by the names of the base.

    Args:
        base: the weights that are merged into.
        saved: what was trained.
        blueprint: the base model, with the adapter on it.
        adapted: the adapter.

    Raises:
        CheckpointError: a layer cannot be merged exactly.
    """

    def __init__(self, base: BaseWeights, saved: TensorSource, blueprint: Blueprint, adapted: Adapted):
        self._base, self._saved, self._adapted = base, saved, adapted
        self._replaced: dict[str, str] = {}
        copies: set[str] = set()  # trained beside the tensor that they are a copy of
        known = {*blueprint.shapes, *(name for names in blueprint.ties.values() for name in names)}
        for live, source in adapted.sources.items():
            name = self._base_name(live)
            if name in known and ".original_module." not in live:
                self._replaced[name] = source
                if ".modules_to_save." in live:
                    copies.add(name)
        self._originals = self._split_ties(blueprint, copies)
        self._layers = self._find_layers(blueprint)
        # Rows of them are not cheaper than all of them.
        self.whole_only = set(self._layers)
        self.tensors: dict[str, TensorInfo] = dict(base.tensors)
        for name, source in self._replaced.items():
            self.tensors[name] = saved.tensors[source]
        for name, source in self._originals.items():
            self.tensors[name] = base.tensors[source]
        if lost := sorted(name for name in self._layers if name not in self.tensors):
            raise CheckpointError(
                f"--merge-lora: {lost[0]} is stored in {base.folder} in parts that transformers merges when it loads",
                fix=WITH_PEFT,
            )

    def read(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill `out` with the box of tensor `name` that begins at `offsets`; merged tensors are read whole."""
        if name not in self._layers:
            self._read_unmerged(name, offsets, out)
            return
        if tuple(out.shape) == self.tensors[name].shape:
            self._merge(name, out)
            return
        whole = torch.empty(self.tensors[name].shape, dtype=out.dtype)
        self._merge(name, whole)
        for dim, (start, size) in enumerate(zip(offsets, out.shape, strict=True)):
            whole = whole.narrow(dim, start, size)
        out.copy_(whole)

    def close(self) -> None:
        self._base.close()

    def compare_base(self, fingerprint: int, saved: set[str]) -> list[str]:
        """Return a line when the base is not the one that the adapter was trained on, as far as that can be told."""
        live = {name: self._base_name(name) for name, _ in self._adapted.model.named_parameters() if name not in saved}
        found = self._base.fingerprints(live)
        if found is None or fingerprint in found:
            return []
        return [
            f"the weights in {self._base.folder} are not those that the adapter was trained on: another model or "
            "revision, or they were cast for training"
        ]

    def _base_name(self, live: str) -> str:
        name = live.removeprefix(PREFIX)
        for part in (f".modules_to_save.{self._adapted.name}.", ".original_module.", ".token_adapter.", ".base_layer."):
            name = name.replace(part, ".")
        return name

    def _split_ties(self, blueprint: Blueprint, copies: set[str]) -> dict[str, str]:
        """Return name -> base tensor for what stayed as it was while a copy of a tensor it was tied to was trained."""
        originals = {}
        for names in blueprint.ties.values():
            held = next((name for name in names if name in self._base.tensors), None)
            if held is not None and copies & set(names):
                originals.update({name: held for name in names if name not in self._replaced})
        return originals

    def _find_layers(self, blueprint: Blueprint) -> dict[str, tuple[str, Any]]:
        """Return name of a base tensor -> path and layer that change it."""
        from peft.tuners.lora import layer as lora
        from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
        from peft.tuners.tuners_utils import BaseTunerLayer

        mergeable = (lora.Linear, lora.Embedding, lora.Conv1d, lora.Conv2d, lora.Conv3d)
        tied = {name: names for names in blueprint.ties.values() for name in names}
        layers: dict[str, tuple[str, Any]] = {}
        for path, module in self._adapted.model.named_modules():
            if not isinstance(module, BaseTunerLayer):
                continue
            weight = self._base_name(f"{path}.weight")
            is_tokens = isinstance(module, TrainableTokensLayer)
            if not is_tokens and (not isinstance(module, mergeable) or isinstance(module, lora.ParamWrapper)):
                raise CheckpointError(f"--merge-lora: {weight} has a {type(module).__name__} on it", fix=WITH_PEFT)
            if is_tokens and module.tied_adapter is not None and weight not in self._base.tensors:
                continue  # the tensor goes by its first name
            if weight in layers or (weight in tied and not is_tokens):
                others = [name for name in tied.get(weight, ()) if name != weight]
                raise CheckpointError(
                    f"--merge-lora: {weight} is tied to {', '.join(others) or 'another layer'}, which the adapter "
                    "leaves as it is: merging would change both",
                    fix="export without --merge-lora and use the adapter as it is",
                )
            layers[weight] = (path, module)
            if not is_tokens and module.lora_bias.get(self._adapted.name):
                layers[weight.removesuffix("weight") + "bias"] = (path, module)
        return layers

    def _read_unmerged(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        if name in self._replaced:
            self._saved.read(self._replaced[name], offsets, out)
            return
        held = self._originals.get(name, name)
        self._base.read(held, offsets, out)
        if out.dtype == self._base.tensors[held].dtype:
            self._base.count_bits(held, out, offsets[0] if offsets else 0)

    def _merge(self, name: str, out: torch.Tensor) -> None:
        from peft.tuners.lora import layer as lora
        from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

        path, layer = self._layers[name]
        adapter = self._adapted.name
        if isinstance(layer, TrainableTokensLayer):
            self._read_unmerged(name, (0,) * out.dim(), out)
            self._fill(path, layer)
            delta = layer.trainable_tokens_delta[adapter]
            out[torch.tensor(layer.token_indices[adapter])] = delta.detach().to(out.dtype)
            return
        self._fill(path, layer)
        is_plain = adapter not in layer.lora_variant and not layer.lora_bias.get(adapter)
        if is_plain and isinstance(layer, (lora.Linear, lora.Embedding)):
            self._merge_rows(name, layer, out)
        else:
            self._merge_layer(name, layer, out)

    def _fill(self, path: str, layer: Any) -> None:
        """Give a layer the adapter's values, in float32."""
        for local, _ in list(layer.named_parameters()):
            source = self._adapted.sources.get(f"{path}.{local}")
            if source is None or ".base_layer." in f".{local}":
                continue
            owner, _, attribute = local.rpartition(".")
            value = read_whole(self._saved, source).float()
            layer.get_submodule(owner)._parameters[attribute] = torch.nn.Parameter(value, requires_grad=False)

    def _merge_rows(self, name: str, layer: Any, out: torch.Tensor) -> None:
        """Add ``scaling * B @ A`` to some rows at a time."""
        adapter = self._adapted.name
        if adapter in layer.lora_A:
            first, second = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            is_transposed = layer.fan_in_fan_out
        else:
            first, second = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
            is_transposed = True
        for start, count in piece_offsets(out.shape, PIECE_BYTES, 4):
            rows = slice(start, start + count)
            delta = (second @ first[:, rows]).T if is_transposed else second[rows] @ first
            piece = torch.empty((count, *out.shape[1:]), dtype=self.tensors[name].dtype)
            self._read_base_piece(name, start, piece)
            out[rows] = piece.float().add_(delta * layer.scaling[adapter]).to(out.dtype)

    def _read_base_piece(self, name: str, start: int, piece: torch.Tensor) -> None:
        offsets = (start, *(0 for _ in piece.shape[1:]))
        if name in self._replaced:
            self._saved.read(self._replaced[name], offsets, piece)
        else:
            self._base.read(name, offsets, piece)
            self._base.count_bits(name, piece, start)

    def _merge_layer(self, name: str, layer: Any, out: torch.Tensor) -> None:
        """Let PEFT merge a layer that is whole in memory, and empty it again."""
        inner = layer.get_base_layer()
        empty = dict(inner._parameters)
        stem = name.rpartition(".")[0]
        try:
            for attribute in [key for key, value in empty.items() if value is not None]:
                full = f"{stem}.{attribute}"
                value = torch.empty(self.tensors[full].shape, dtype=self.tensors[full].dtype)
                self._read_unmerged(full, (0,) * value.dim(), value)
                inner._parameters[attribute] = torch.nn.Parameter(value.float(), requires_grad=False)
            layer.merge(adapter_names=[self._adapted.name])
            out.copy_(inner._parameters[name.rpartition(".")[2]].data)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise CheckpointError(f"--merge-lora: {name}: {error}", fix=WITH_PEFT) from error
        finally:
            inner._parameters.update(empty)
            layer.merged_adapters.clear()
            layer._caches.clear()
