"""What is planned: a model by its config alone, how it is fine-tuned, and one step of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_fsdp.config.schema import FSDPConfig


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model without weights.

    Args:
        name: as a person calls it.
        config: the contents of its config.json.
        num_parameters: parameters that its publisher states, if known; the simulation's own count is compared with it.
        trust_remote_code: build a class that comes with the model; only by a person's word.
        revision: branch, tag or commit that the config is of; None: what the hub gives without a word.
    """

    name: str
    config: Mapping[str, Any]
    num_parameters: int | None = None
    trust_remote_code: bool = False
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """Which weights are trained, and how.

    Args:
        name: ``full``, ``lora`` or ``qlora``.
        load_dtype: ``float32``, ``bfloat16`` or ``auto``: what our recipes load: float32 for full fine-tuning under a
            mixed precision (trained weights are stored in it), bfloat16 for a frozen base.
        lora_r: rank of the adapters.
        lora_dropout: above 0 each adapter keeps a dropped copy of its input.
        lora_targets: ``all-linear``, or names of modules.
        lora_parts: ``language``, ``vision``, ``projector``: where adapters go; empty: everywhere.
        lora_full: parts that are trained in full beside the adapters.
        trainable: parts that are trained under ``full``; empty: all.
    """

    name: str = "full"
    load_dtype: str = "auto"
    lora_r: int = 16
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ("all-linear",)
    lora_parts: tuple[str, ...] = ()
    lora_full: tuple[str, ...] = ()
    trainable: tuple[str, ...] = ()
    double_quantization: bool = True


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one process is given in one forward.

    Args:
        micro_batch_size: rows.
        num_tokens: tokens a row, image tokens counted.
        padded: rows are of different lengths, so there is a mask. False for one row, for packed rows under a varlen
            kernel, and for rows of one length.
        packed: several samples a row. Under SDPA they need a mask between them.
        num_images: pictures a row; 0 for text.
        image_size: (height, width) in pixels as the processor hands them over; None: the model's own.
    """

    micro_batch_size: int = 1
    num_tokens: int = 2048
    padded: bool = False
    packed: bool = False
    num_images: int = 0
    image_size: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training as the planner simulates it: a step of one process of `world_size`.

    Args:
        model: the model.
        fsdp: the sharding config; `auto` values are what they are in training without any other word.
        strategy: ``fsdp``, or ``ddp`` for a comparison: every process holds everything, under autocast.
        world_size: processes of the training, not of this machine.
        method: which weights are trained.
        batch: what a process gets in a forward.
        num_micro_batches: forwards a step (gradient accumulation).
        optimizer: transformers' word: ``adamw_torch_fused``, ``adamw_torch``, ``sgd``, …
        max_grad_norm: None: gradients are not clipped.
        loss: ``logits``: the model's own loss, over logits of all tokens; ``chunked``: TRL's, which never holds them.
        attention: ``sdpa``, ``flash_attention_2``, ``eager``.
        device: ``gpu``: kernels and dtypes of a GPU; ``cpu``: those of a CPU, for comparing with a real run here.
        exact: simulate all layers instead of a few that are extended over the others.
        timeline: keep what was held after every operator; needs `exact` to be of the whole model.
    """

    model: ModelSpec
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    strategy: str = "fsdp"
    world_size: int = 8
    method: Method = field(default_factory=Method)
    batch: Batch = field(default_factory=Batch)
    num_micro_batches: int = 1
    optimizer: str = "adamw_torch_fused"
    max_grad_norm: float | None = 1.0
    loss: str = "logits"
    attention: str = "sdpa"
    device: str = "gpu"
    exact: bool = False
    timeline: bool = False

    def to_json(self) -> str:
        """Return the job as JSON, for another process."""
        data = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        for name in ("model", "method", "batch"):
            data[name] = dataclasses.asdict(data[name])
        data["fsdp"] = self.fsdp.to_mapping()
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that `to_json` wrote."""
        data = json.loads(text)
        method, batch = _with_tuples(data["method"]), _with_tuples(data["batch"])
        data |= {
            "model": ModelSpec(**data["model"]),
            "method": Method(**method),
            "batch": Batch(**batch),
            "fsdp": FSDPConfig.from_mapping(data["fsdp"], source="the job"),
        }
        return cls(**data)


def _with_tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists only."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
