"""Where a model with pictures reads values, and fake tensors have none: the same step by shapes alone.

Each family's code that asks for numbers is given them, or is replaced for one model by code that makes tensors of the
same sizes in the same order. What is replaced, and why, is in the table at the end.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_fsdp.plan.job import Job
from hf_fsdp.plan.simulator.depth import Tower
from hf_fsdp.plan.simulator.picture_sizes import Picture
from hf_fsdp.plan.simulator.pictures import measure_picture, special_list
from hf_fsdp.sharding.modalities import find_fusion

# Grids and sizes of pictures are read as numbers: three of a picture, and no step has more pictures than this allows.
MAX_KNOWN_VALUES = 3 * 1024


def stand_in_for_values(
    job: Job, model: nn.Module, device: str, towers: Sequence[Tower], depths: Mapping[str, int]
) -> None:
    """Make the forward of `model` with pictures run without values; without pictures nothing is done.

    Args:
        job: what is simulated.
        model: of its family, sharded: what is put before its modules must come after what FSDP puts there.
        device: where it computes.
        towers: of the whole model.
        depths: tower -> layers of this one.
    """
    picture = measure_picture(job)
    change = _CHANGES.get(str(job.model.config.get("model_type")))
    if picture is None or change is None:
        return
    fusion = find_fusion(model)
    assert fusion is not None  # every family of the table joins its features in a module of its own
    change(fusion.module, picture, job, device)
    for tower in towers:
        if tower.special:
            kept = tower.kept(depths[tower.name])
            places = [kept.index(layer) for layer in tower.special]
            setattr(model.get_submodule(_owner(model, tower)), special_list(job), places)


def _owner(model: nn.Module, tower: Tower) -> str:
    """The path of the module whose list of layers the tower is, maybe under PEFT's wrapper."""
    path = tower.path.rpartition(".")[0]
    return f"base_model.model.{path}" if hasattr(model, "get_base_model") else path


def _give_numbers(fusion: Any, name: str, numbers: Sequence[int], job: Job) -> None:
    """Let the model read the input `name`, the same `numbers` for every picture: only on the host does a constant last.

    In front of the joining module and not in the batch, since FSDP's root moves the batch to the device.
    """
    count = job.batch.micro_batch_size * job.batch.num_images

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, name: torch.tensor([list(numbers)] * count)}

    fusion.register_forward_pre_hook(before, with_kwargs=True)


def _count_layers(fusion: Any, picture: Picture, job: Job, device: str) -> None:
    """Tell a shallow tower its number of layers, from which the layer that features are taken of is counted."""
    tower = fusion.vision_tower
    count = max(len(module) for module in tower.modules() if isinstance(module, nn.ModuleList))
    for module in tower.modules():
        if hasattr(getattr(module, "config", None), "num_hidden_layers"):
            module.config.num_hidden_layers = count


def _give_sizes(fusion: Any, picture: Picture, job: Job, device: str) -> None:
    assert picture.size is not None
    _count_layers(fusion, picture, job, device)
    _give_numbers(fusion, "image_sizes", picture.size, job)


# -- Qwen-VL ----------------------------------------------------------------------------------------------------------


class Bounds:
    """Where stretches of tokens begin and end: numbers where a model expects a tensor of them and asks for its values.

    It can do what the towers do with it: ``(bounds[1:] - bounds[:-1]).tolist()``.
    """

    def __init__(self, values: Sequence[int]):
        self._values = list(values)

    def __getitem__(self, index: slice) -> Bounds:
        return Bounds(self._values[index])

    def __sub__(self, other: Bounds) -> Bounds:
        return Bounds([mine - theirs for mine, theirs in zip(self._values, other._values, strict=True)])

    def tolist(self) -> list[int]:
        """Return the numbers."""
        return list(self._values)


def _give_positions(fusion: Any, picture: Picture, job: Job, device: str) -> None:
    """Hand the tower what it would compute of the grids' values, under the names by which it takes it precomputed."""
    tower = fusion.visual
    count = job.batch.micro_batch_size * job.batch.num_images
    assert picture.grid is not None
    frames, height, width = picture.grid
    num_patches = count * frames * height * width
    stretches = Bounds(range(0, num_patches + 1, height * width))
    windows = _window_bounds(tower, picture.grid, count)
    has_table = hasattr(tower, "num_grid_per_side")

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given: dict[str, Any] = {"cu_seqlens": stretches}
        given["position_ids"] = torch.empty((num_patches, 2), dtype=torch.long, device=device)
        if windows is not None:
            given["cu_window_seqlens"] = windows
            unit = tower.spatial_merge_unit
            given["window_index"] = torch.empty(num_patches // unit, dtype=torch.long, device=device)
        if has_table:  # four neighbours of each patch in the table of positions
            given["interp_indices"] = torch.empty((num_patches, 4), dtype=torch.long, device=device)
            given["interp_weights"] = torch.empty((num_patches, 4), device=device)
        return args, {**kwargs, **given}

    for block in tower.blocks:
        block.attn.forward = functools.partial(_attend_in_groups, block.attn)
    _give_numbers(fusion, "image_grid_thw", picture.grid, job)
    tower.register_forward_pre_hook(before, with_kwargs=True)
    if hasattr(fusion.language_model, "_deepstack_process"):
        fusion.language_model._deepstack_process = _add_features
    fusion.get_rope_index = _positions_of_tokens


def _attend_in_groups(
    attention: Any, hidden: torch.Tensor, cu_seqlens: Bounds, position_embeddings: Any = None, **kwargs: Any
) -> torch.Tensor:
    """The tower's attention with one call of the kernel for all stretches of one length, not one for each.

    A large picture has hundreds of windows, and every operator costs time under fake tensors. The same bytes are held.
    """
    own = sys.modules[type(attention).__module__]
    num_tokens = hidden.shape[0]
    heads = attention.qkv(hidden).reshape(num_tokens, 3, attention.num_heads, -1).permute(1, 0, 2, 3).unbind(0)
    query, key = own.apply_rotary_pos_emb_vision(heads[0], heads[1], *position_embeddings)
    lengths = Counter((cu_seqlens[1:] - cu_seqlens[:-1]).tolist())
    attend = own.ALL_ATTENTION_FUNCTIONS.get_interface(
        attention.config._attn_implementation, own.eager_attention_forward
    )
    outputs = []
    parts = [tensor.split([length * count for length, count in lengths.items()]) for tensor in (query, key, heads[2])]
    for (length, count), *group in zip(lengths.items(), *parts, strict=True):
        stretches = [tensor.view(count, length, *tensor.shape[1:]).transpose(1, 2) for tensor in group]
        output, _ = attend(attention, *stretches, attention_mask=None, scaling=attention.scaling, is_causal=False)
        outputs.append(output.flatten(0, 1))
    return attention.proj(torch.cat(outputs).reshape(num_tokens, -1))


def _window_bounds(tower: Any, grid: tuple[int, int, int], count: int) -> Bounds | None:
    """Windows of Qwen2.5-VL's tower, by transformers' own function; None where a tower has none."""
    if not hasattr(tower, "window_size"):
        return None
    from transformers.vision_utils import get_vision_window_index

    from hf_fsdp.torch_private import real_values

    with real_values():
        grids = torch.tensor([list(grid)] * count)
        _, bounds = get_vision_window_index(grids, tower.spatial_merge_size, tower.window_size, tower.patch_size)
        return Bounds(bounds.tolist())


def _positions_of_tokens(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in three directions of every token, and each row's offset."""
    positions = torch.empty((3, *input_ids.shape), dtype=torch.long, device=input_ids.device)
    return positions, torch.empty((input_ids.shape[0], 1), dtype=torch.long, device=input_ids.device)


def _add_features(hidden: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Add the tower's features to the tokens of pictures: as many as there are features."""
    hidden = hidden.clone()
    rows, columns = (torch.empty(features.shape[0], dtype=torch.long, device=hidden.device) for _ in range(2))
    hidden[rows, columns] = hidden[rows, columns] + features.to(hidden.dtype)
    return hidden


# -- Idefics3 and SmolVLM ---------------------------------------------------------------------------------------------


def _take_all_tiles(fusion: Any, picture: Picture, job: Job, device: str) -> None:
    """No tile is padding (rows have as many pictures), and none has a border: the tower sees no mask."""

    side = fusion.config.vision_config.patch_size

    def features_of_tiles(pixel_values: torch.Tensor, pixel_attention_mask: torch.Tensor, **kwargs: Any) -> Any:
        rows = pixel_values.shape[0]
        pixels = pixel_values.to(fusion.dtype).flatten(0, 1)
        is_zero = pixels == 0.0  # as large as the pixels, for a moment
        del is_zero
        pixels = pixels.clone()  # of those that are no padding
        mask = pixel_attention_mask.flatten(0, 1).clone()  # held until the tower is through, as there
        patches = mask.unfold(1, side, side).unfold(2, side, side).sum(dim=(-1, -2)) > 0
        outputs = fusion.vision_model(pixel_values=pixels, patch_attention_mask=patches, return_dict=True)
        features = fusion.connector(outputs.last_hidden_state)
        outputs.pooler_output = [part.flatten(0, 1) for part in features.chunk(rows)]
        return outputs

    def without_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "attention_mask": None}

    fusion.get_image_features = features_of_tiles
    fusion.vision_model.encoder.register_forward_pre_hook(without_mask, with_kwargs=True)


_CHANGES: Mapping[str, Callable[[Any, Picture, Job, str], None]] = {
    # Features are taken of a layer counted from the end of as many as the config says.
    "llava": _count_layers,
    "internvl": _count_layers,
    # Also: tiles are put together by the sizes of the pictures.
    "llava_next": _give_sizes,
    # Positions, windows and stretches of pixels are computed of the grids' values; with them `get_rope_index`, which
    # walks through the tokens. Qwen3-VL adds features where the ids are those of pictures: a mask of unknown count.
    "qwen2_vl": _give_positions,
    "qwen2_5_vl": _give_positions,
    "qwen3_vl": _give_positions,
    # Tiles that are all zero are padding and are dropped: a mask of unknown count. With real values a mask of ones is
    # dropped too; with none it would be kept.
    "idefics3": _take_all_tiles,
    "smolvlm": _take_all_tiles,
}
