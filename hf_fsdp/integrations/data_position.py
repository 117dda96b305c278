"""Where in its data a Trainer is, and what changes when a run is continued in another shape.

The same samples come in the same order on any number of processes as long as the global batch is the same and divides
the dataset (or `dataloader_drop_last`). Everything else is said, with what changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import Trainer, TrainerState


def read_data_position(trainer: Trainer) -> dict[str, Any]:
    """Return what decides which samples come next, for JSON."""
    args, state = trainer.args, trainer.state
    per_step = args.per_device_train_batch_size * max(1, args.n_gpu) * args.world_size
    return {
        "global_step": state.global_step,
        "epoch": state.epoch,
        "global_batch_samples": per_step * args.gradient_accumulation_steps,
        "per_device_batch_samples": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "world_size": args.world_size,
        "num_dataset_samples": _length(trainer.train_dataset),
        "drop_last": args.dataloader_drop_last,
        "sampling": str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy)),
        "seed": args.seed,
        "data_seed": args.data_seed,
    }


def compare_data_position(saved: Mapping[str, Any], trainer: Trainer) -> list[str]:
    """Return a line for everything that makes the continued run see other samples, or draw otherwise, than before."""
    now = read_data_position(trainer)
    lines = []
    before, after = saved.get("global_batch_samples"), now["global_batch_samples"]
    steps = saved.get("global_step", 0)
    if before != after:
        lines.append(
            f"resume: the global batch was {before} samples and is {after}: the first {steps} steps count as "
            f"{steps * after} samples seen, so some are skipped or seen twice. Keep it by "
            "per_device_train_batch_size x gradient_accumulation_steps x processes"
        )
    for key, what in (
        ("num_dataset_samples", "the dataset has {after} samples and had {before}: other samples in another order"),
        ("seed", "seed is {after} and was {before}: the rest of the epoch is shuffled otherwise"),
        ("data_seed", "data_seed is {after} and was {before}: the rest of the epoch is shuffled otherwise"),
        ("sampling", "samples are taken by {after} and were by {before}: the order changes"),
    ):
        if key in saved and saved[key] != now[key]:
            lines.append("resume: " + what.format(before=saved[key], after=now[key]))
    if saved.get("world_size") != now["world_size"]:
        lines += _after_other_world(saved, now, trainer)
    return lines


def place_in_stream(state: TrainerState, num_batches: int) -> tuple[int, int]:
    """Return how often a dataset without a length was gone through, and how many batches it gave this rank since then.

    Args:
        state: as it was saved; its epoch counts passes.
        num_batches: of the whole run, which Trainer takes for the length of one pass.
    """
    passes = int(state.epoch or 0.0)
    return passes, round(((state.epoch or 0.0) - passes) * num_batches)


def _after_other_world(saved: Mapping[str, Any], now: Mapping[str, Any], trainer: Trainer) -> list[str]:
    start = f"resume: {saved.get('world_size')} processes saved and {now['world_size']} go on; "
    lines = []
    samples, batch = now["num_dataset_samples"], now["global_batch_samples"]
    if samples is None:
        lines.append(start + "a dataset without a length is dealt out otherwise: samples and order change")
    elif samples % batch and not now["drop_last"]:
        lines.append(
            start + f"{samples} samples are no multiple of the global batch of {batch}, so the last step of each "
            "epoch has other samples (dataloader_drop_last=True keeps them equal)"
        )
    if now["sampling"] == "group_by_length":
        lines.append(start + "grouping by length depends on the number of processes: the order changes")
    if active_dropout(trainer.model):
        lines.append(start + "dropout draws other masks: losses are those of another run, on the same samples")
    return lines


def active_dropout(model: nn.Module) -> bool:
    """Return whether training draws random numbers in the model's dropout layers."""
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules()) or (
        float(getattr(getattr(model, "config", None), "attention_dropout", 0.0) or 0.0) > 0
    )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None
