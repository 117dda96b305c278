"""The config layer: no torch, so that the command line starts at once."""

from __future__ import annotations

from hf_fsdp.config.precedence import Merged, Stated, merge
from hf_fsdp.config.schema import (
    ActivationCheckpointingConfig,
    CheckpointConfig,
    CompileConfig,
    FSDPConfig,
    OffloadConfig,
    PrecisionConfig,
    ShardingConfig,
    WrapConfig,
)

__all__ = [
    "ActivationCheckpointingConfig",
    "CheckpointConfig",
    "CompileConfig",
    "FSDPConfig",
    "Merged",
    "OffloadConfig",
    "PrecisionConfig",
    "ShardingConfig",
    "Stated",
    "WrapConfig",
    "merge",
]
