"""What ranks with and without pictures do besides training: evaluation, answers, other inputs, refusals, no traces."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp import FSDPConfig, apply_fsdp
from hf_fsdp.errors import ShardingError
from tests.distributed.training import whole
from tests.distributed.two_tower_model import TwoTowers, two_tower_batch
from tests.distributed.vlm_cases import VlmRun, build_trainer
from tests.distributed.vlm_models import build_rows, build_vlm, collate
from tests.unit.small_models import IMAGE_TOKEN, vision_language_models

PLAIN = FSDPConfig(precision="fp32")
# SmolVLM casts features to its `self.dtype`, LLaVA reads its tower's output by attribute.
BF16_FAMILIES = ("qwen3-vl", "smolvlm", "llava")


def share_of(rows: Any, rank: int, world_size: int) -> list[Any]:
    """This rank's part of the rows, in order."""
    each = len(rows) // world_size
    return [rows[index] for index in range(rank * each, (rank + 1) * each)]


def sharded(model: nn.Module, world_size: int, config: FSDPConfig = PLAIN) -> nn.Module:
    """The model, sharded where there is more than one process."""
    if world_size > 1:
        apply_fsdp(model, config)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients on every rank."""
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def evaluates(rank: int, world_size: int) -> dict[str, Any]:
    """Trains two steps and evaluates, before and behind them, with pictures on some ranks, on others, and nowhere."""
    rows = {name: build_rows("llava", counts, seed=4) for name, counts in EVALUATED.items()}
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(VlmRun(family="llava", num_steps=2), world_size, folder, eval_dataset=rows)
        before = trainer.evaluate()
        trainer.train()
        after = trainer.evaluate()
    return {name: [before[name], after[name]] for name in before if name.endswith("_loss")}


EVALUATED = {"first": [1, 1, 1, 0, 0, 0], "last": [0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0], "none": [0] * 6}


def generates(family: str) -> Any:
    """Answers with the cache on, pictures in the prompts of some ranks; twice, and a training step in between."""

    def case(rank: int, world_size: int) -> dict[str, Any]:
        model: Any = sharded(build_vlm(family), world_size)
        answers = []
        for counts in ([1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]):
            rows = build_rows(family, counts, seed=6)
            loss = model.train()(**collate(family)(share_of(rows, rank, world_size))).loss
            loss.backward()
            model.zero_grad()
            model.eval()
            # In a single process one prompt at a time: a batch that mixes both kinds is not what is compared here.
            part = share_of(rows, rank, world_size)
            for row in part:
                batch = collate(family)([row])
                length = len(row["input_ids"])
                batch = {k: v[:, :length] if k in _BY_TOKEN else v for k, v in batch.items() if k != "labels"}
                tokens = model.generate(
                    **batch,
                    max_new_tokens=4,
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=2,
                    synced_gpus=world_size > 1,
                )
                answers.append(tokens[0, length:].tolist()[:4])
        return {"answers": answers}

    return case


_BY_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


def image_beside_video(rank: int, world_size: int) -> dict[str, Any]:
    """Qwen2.5-VL: pictures on rank 0, a video on rank 1; each lacks what the other has."""
    model = build_vlm("qwen2.5-vl")
    video_token = IMAGE_TOKEN + 1
    model.config.video_token_id = video_token
    rows = build_rows("qwen2.5-vl", [1, 1, 1, 1], seed=8).rows
    videos = [row["pictures"].pop() for row in rows[2:]]  # of one frame, which is what a picture is
    for row in rows[2:]:
        row["input_ids"][row["input_ids"] == IMAGE_TOKEN] = video_token
    sharded(model, world_size)

    def batch(part: list[Any], first: int) -> dict[str, Any]:
        found = collate("qwen2.5-vl")(part)
        found["mm_token_type_ids"] = (found["input_ids"] == IMAGE_TOKEN).int()
        found["mm_token_type_ids"] += 2 * (found["input_ids"] == video_token).int()
        mine = [videos[index] for index in range(2) if first <= index + 2 < first + len(part)]
        if mine:
            found["pixel_values_videos"] = torch.cat([one["pixel_values"] for one in mine])
            found["video_grid_thw"] = torch.cat([one["image_grid_thw"] for one in mine])
        return found

    each = len(rows) // world_size
    num_items = sum(int((row["labels"][1:] != -100).sum()) for row in rows)
    mine = batch(rows[rank * each : (rank + 1) * each], rank * each)
    (model(**mine, num_items_in_batch=num_items).loss * world_size).backward()  # the ranks are averaged
    return {"gradients": gradients_of(model)}


def two_towers(rank: int, world_size: int) -> dict[str, Any]:
    """Two towers of their own: each rank has the input of the one that the other rank has not."""
    torch.manual_seed(0)
    model = sharded(TwoTowers(), world_size)
    halves = [two_tower_batch("image"), two_tower_batch("audio")]
    parts = halves if world_size == 1 else [halves[rank % 2]]
    model.train()
    for part in parts:
        (model(**part)["loss"] / len(parts)).backward()
    return {"gradients": gradients_of(model)}


def leaves_no_trace(rank: int, world_size: int) -> dict[str, Any]:
    """A rank without pictures: random state and running statistics are as if its tower had not run."""
    torch.manual_seed(0)
    model = sharded(TwoTowers(dropout=0.5), world_size)
    torch.manual_seed(100 + rank)
    before = torch.get_rng_state()
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    model(**two_tower_batch("image" if rank == 0 else "text"))["loss"].backward()
    return {
        "same_random_state": bool(torch.equal(before, torch.get_rng_state())),
        "same_statistics": all(torch.equal(statistics[name], buffer) for name, buffer in model.named_buffers()),
        "shadowed": [name for name in vars(model) if name.startswith("get_")],
    }


def _mllama_batch(with_pictures: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    ids = torch.randint(8, 60, (1, 12))
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    if with_pictures:
        batch["pixel_values"] = torch.randn(1, 1, 4, 3, 16, 16)  # four tiles, one of them used
        batch["aspect_ratio_ids"] = torch.ones(1, 1, dtype=torch.long)
        batch["aspect_ratio_mask"] = torch.tensor([[[1, 0, 0, 0]]])
        batch["cross_attention_mask"] = torch.tensor([1, 0, 0, 0]).expand(1, 12, 1, 4)
    return batch


def mllama_is_refused(rank: int, world_size: int) -> dict[str, Any]:
    """Mllama skips its cross attention too: an error on all ranks, and the advice of that error trains."""
    torch.manual_seed(0)
    model: Any = sharded(vision_language_models()["mllama"](), world_size)
    error = ""
    try:
        model(**_mllama_batch(rank == 0))
    except ShardingError as caught:
        error = str(caught)
    torch.manual_seed(0)
    model = sharded(vision_language_models()["mllama"](), world_size)
    losses = []
    for with_pictures in (False, True):
        loss = model(**_mllama_batch(with_pictures)).loss
        loss.backward()
        losses.append(float(loss))
    return {"error": error, "losses": losses}


def bf16(family: str) -> Any:
    """Under bf16-mixed with norms in fp32 and prefetching, pictures on one rank only: trained, finite, and asked."""

    def case(rank: int, world_size: int) -> dict[str, Any]:
        config = FSDPConfig(
            precision={"preset": "bf16-mixed", "keep_norms_fp32": True}, sharding={"forward_prefetch": 2}
        )
        model: Any = sharded(build_vlm(family), world_size, config)
        kept = model.model.dtype
        rows = build_rows(family, [1, 1, 0, 0], seed=9)
        mine = share_of(rows, rank, world_size)
        model(**collate(family)(mine)).loss.backward()
        gradients = gradients_of(model)
        model.eval()
        batch = collate(family)(mine[:1])
        length = len(mine[0]["input_ids"])
        batch = {k: v[:, :length] if k in _BY_TOKEN else v for k, v in batch.items() if k != "labels"}
        tokens = model.generate(
            **batch, max_new_tokens=2, do_sample=False, pad_token_id=0, synced_gpus=world_size > 1, use_cache=True
        )
        return {
            "finite": all(g.isfinite().all().item() for g in gradients.values()),
            "num": len(gradients),
            "num_new": tokens.shape[1] - length,
            "same_dtype": kept == model.model.dtype == torch.float32,
        }

    return case


CASES = {
    "evaluates": evaluates,
    "generates_llava": generates("llava"),
    "generates_qwen": generates("qwen2.5-vl"),
    "image_beside_video": image_beside_video,
    "two_towers": two_towers,
    "leaves_no_trace": leaves_no_trace,
    "mllama_is_refused": mllama_is_refused,
    **{f"bf16_{family}": bf16(family) for family in BF16_FAMILIES},
}
