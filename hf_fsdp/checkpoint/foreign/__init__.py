"""Checkpoints that Trainer and Accelerate wrote: read without running any code that lies in them."""

from hf_fsdp.checkpoint.foreign.checkpoint import ForeignCheckpoint, open_foreign

__all__ = ["ForeignCheckpoint", "open_foreign"]
