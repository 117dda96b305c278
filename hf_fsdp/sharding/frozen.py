"""Models that are only run beside the trained one: a DPO reference, a teacher, a reward model."""

from __future__ import annotations

import dataclasses

from torch import nn

from hf_fsdp.config.schema import ActivationCheckpointingConfig, CompileConfig, FSDPConfig, WrapConfig
from hf_fsdp.sharding.apply import AppliedSharding, apply_fsdp, get_applied_sharding


def shard_frozen_model(model: nn.Module, config: FSDPConfig, device_type: str | None = None) -> AppliedSharding:
    """Shard a model that gets no gradients, layer by layer and in the precision of the trained one; collective.

    It is frozen before it is sharded, so that a bf16 model stays bf16 between steps instead of being stored in fp32
    for an optimizer that it has not.

    Args:
        model: changed in place: `requires_grad` off, eval mode. A model that is sharded already is left as it is:
            a trained one may serve as its own teacher.
        config: the trained model's; what only a backward needs does not apply (`frozen_config`).
        device_type: as for `apply_fsdp`.

    Raises:
        HfFsdpError: as `apply_fsdp`.
    """
    if (applied := get_applied_sharding(model)) is not None:
        return applied
    model.requires_grad_(False)
    model.eval()
    return apply_fsdp(model, frozen_config(model, config), device_type=device_type)


def frozen_config(model: nn.Module, config: FSDPConfig) -> FSDPConfig:
    """Return the trained model's config without what only a backward needs: recomputation, offload of activations."""
    return dataclasses.replace(
        config,
        activation_checkpointing=ActivationCheckpointingConfig(mode="none"),
        compile=CompileConfig(),
        offload=dataclasses.replace(config.offload, activations="none"),
        wrap=_wrap_for(model, config.wrap),
    )


def _wrap_for(model: nn.Module, wrap: WrapConfig) -> WrapConfig:
    """The trained model's wrap, unless it names layer classes of which another architecture has none."""
    present = {type(module).__name__ for module in model.modules()}
    return WrapConfig() if wrap.layer_classes and not present.intersection(wrap.layer_classes) else wrap
