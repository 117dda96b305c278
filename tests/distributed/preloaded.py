"""Imports, once, in the process that the ranks are forked from, what takes every rank seconds to import."""

import gc

import datasets  # noqa: F401
import peft  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
from transformers import LlamaForCausalLM, Trainer  # noqa: F401
from trl import DPOTrainer, SFTTrainer  # noqa: F401

import hf_fsdp  # noqa: F401

gc.collect()
gc.freeze()  # a rank's collections need not copy every page that was imported
