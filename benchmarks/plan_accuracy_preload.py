"""Imports, once, in the process that `plan_accuracy.py`'s ranks are forked from, what takes seconds to import."""

import gc

import datasets  # noqa: F401
import peft  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
from transformers import (  # noqa: F401
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    Trainer,
)

import hf_fsdp.integrations.callback  # noqa: F401
import hf_fsdp.monitor.memory  # noqa: F401

gc.collect()
gc.freeze()  # a rank's collections need not look at what was imported
