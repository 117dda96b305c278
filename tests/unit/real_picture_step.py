"""One real step of a tiny vision-language model, counted by the planner's own tracker: what its simulation must show.

The tensors are real and on the CPU, so every operator runs, and every value that a model reads is there. The process
group is a fake one of two ranks: it moves nothing, so gathered weights are whatever was in memory: sizes stay.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.plan.job import Batch, Job, Method, ModelSpec
from hf_fsdp.plan.simulation import PhasePeak
from hf_fsdp.plan.simulator.depth import find_depths
from hf_fsdp.plan.simulator.device import simulated_ranks
from hf_fsdp.plan.simulator.phases import HEAD, START, watch_phases
from hf_fsdp.plan.simulator.pictures import keep_what_pictures_need
from hf_fsdp.plan.simulator.replay import find_peaks
from hf_fsdp.plan.simulator.step import CLIP, OPTIMIZER
from hf_fsdp.plan.simulator.tracker import Tracker
from hf_fsdp.policies.model_parts import set_trainable
from hf_fsdp.sharding.apply import apply_fsdp
from tests.distributed.vlm_models import build_vlm, num_image_tokens, picture
from tests.unit.small_models import IMAGE_TOKEN, VOCABULARY

WORLD_SIZE = 2
ROWS = 2
NUM_TOKENS = 96
_FIRST_WORD = 8
_TILED = ("idefics3", "smolvlm")
# What is said to the planner about the pictures of `vlm_models`: pixels (height, width).
SIZES: Mapping[str, tuple[int, int]] = {
    "qwen2-vl": (140, 112),
    "qwen2.5-vl": (280, 196),  # more than one window in each direction, and windows of several sizes
    "qwen3-vl": (128, 160),
    "idefics3": (16, 16),
    "smolvlm": (16, 16),
    "llava-next": (32, 16),
}
_PATCHES = {"qwen2-vl": 14, "qwen2.5-vl": 14, "qwen3-vl": 16}
_TYPES = {
    "qwen2-vl": "mm_token_type_ids",
    "qwen2.5-vl": "mm_token_type_ids",
    "qwen3-vl": "mm_token_type_ids",
    "gemma3": "token_type_ids",
    "paligemma": "token_type_ids",
}


def picture_job(family: str, fsdp: FSDPConfig, *, trainable: tuple[str, ...] = (), num_images: int = 1) -> Job:
    """The job whose step `real_peaks` runs."""
    return Job(
        model=ModelSpec(name=family, config=build_vlm(family).config.to_dict()),
        fsdp=fsdp,
        world_size=WORLD_SIZE,
        method=Method(load_dtype="float32", trainable=trainable),
        batch=Batch(
            micro_batch_size=ROWS,
            num_tokens=NUM_TOKENS,
            padded=True,
            num_images=num_images,
            image_size=SIZES.get(family),
        ),
        device="cpu",
        exact=True,
    )


def real_batch(family: str, model: Any, num_images: int) -> dict[str, torch.Tensor]:
    """Rows of random words with pictures in front, as the family's processor makes them; one is padded."""
    generator = torch.Generator().manual_seed(0)
    pictures = [_picture(family, generator) for _ in range(ROWS * num_images)]
    ids = torch.randint(_FIRST_WORD, VOCABULARY, (ROWS, NUM_TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, -5:] = 0
    span = num_image_tokens(model, pictures[0])
    for index in range(num_images):  # a word before each: Qwen-VL takes two that touch for one
        start = 1 + index * (span + 1)
        ids[:, start : start + span] = IMAGE_TOKEN
    labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    if family in _TYPES:
        batch[_TYPES[family]] = (ids == IMAGE_TOKEN).long()
    for name in pictures[0]:
        batch[name] = torch.cat([one[name] for one in pictures])
    if family in _TILED:
        pixels = batch["pixel_values"].unflatten(0, (ROWS, num_images)).flatten(1, 2)
        batch["pixel_values"] = pixels
        batch["pixel_attention_mask"] = torch.ones((*pixels.shape[:2], *pixels.shape[3:]), dtype=torch.long)
    return batch


def _picture(family: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    if family in _TILED:  # what a square picture is cut into: 4 x 4 tiles and the whole
        return {"pixel_values": torch.randn(1, 17, 3, 16, 16, generator=generator)}
    if family in _PATCHES:
        grid = torch.tensor([[1, *(length // _PATCHES[family] for length in SIZES[family])]])
        pixels = torch.randn(int(grid.prod()), 3 * 2 * _PATCHES[family] ** 2, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": grid}
    return picture(family, generator)


def real_peaks(
    family: str, fsdp: FSDPConfig, *, trainable: tuple[str, ...] = (), num_images: int = 1
) -> list[PhasePeak]:
    """Run two steps of the family's tiny model and return the peaks of the second, phase by phase."""
    model = build_vlm(family).train()
    model.config.use_cache = False
    batch = real_batch(family, model, num_images)
    if trainable:
        set_trainable(model, trainable)
    job = picture_job(family, fsdp)
    towers = [keep_what_pictures_need(job, tower) for tower in find_depths(model)]
    depths = {tower.name: tower.num_layers for tower in towers}
    with simulated_ranks(WORLD_SIZE, fsdp.sharding, "cpu") as mesh:
        apply_fsdp(model, fsdp, mesh)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        _step(model, trained, optimizer, batch)
        gc.collect()
        tracker = Tracker("cpu", 1)
        tracker.hold(model.parameters(), "parameters")
        tracker.hold(model.buffers(), "buffers")
        values = (value for state in optimizer.state.values() for value in state.values())
        tracker.hold(values, "optimizer")
        num_before = len(tracker.events)
        watch_phases(model, tracker, towers, depths)
        with tracker:
            tracker.phase = f"forward: {START}"
            inputs = {name: value.clone() for name, value in batch.items()}
            loss = model(**inputs, num_items_in_batch=torch.ones((), dtype=torch.long)).loss * WORLD_SIZE
            tracker.phase = f"backward: {HEAD}"
            loss.backward()
            del loss  # Trainer holds the batch until the step is over
            tracker.phase = CLIP
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            tracker.phase = OPTIMIZER
            optimizer.step()
            optimizer.zero_grad()
        return list(find_peaks(tracker.events, num_before).values())


def _step(model: Any, trained: list[Any], optimizer: Any, batch: dict[str, torch.Tensor]) -> None:
    model(**batch, num_items_in_batch=torch.ones((), dtype=torch.long)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
