"""Text data: only what TRL and transformers do not do.

Loading with errors a person can act on, checks before a model loads, chat templates with generation marks,
the share of samples that `max_length` cuts, and a preview of the tokens that count in the loss.
"""

from __future__ import annotations

from hf_fsdp.data.access import check_model_access
from hf_fsdp.data.arguments import parse_arguments
from hf_fsdp.data.batch import resolve_accumulation_steps
from hf_fsdp.data.chat_template import (
    find_stop_token_id,
    find_training_template,
    read_chat_template,
    resolve_chat_template,
)
from hf_fsdp.data.columns import check_examples, rename_columns
from hf_fsdp.data.generation import prepare_generation_config
from hf_fsdp.data.lengths import LengthReport, check_lengths, measure_lengths
from hf_fsdp.data.loading import load_splits, pick_split, select_eval_examples
from hf_fsdp.data.preview import format_examples
from hf_fsdp.data.run_config import RunConfig, override, read_run_config, write_run_config
from hf_fsdp.data.run_folder import check_output_dir, find_resume_checkpoint
from hf_fsdp.errors import ConfigError, DataError, HfFsdpError, ModelAccessError, Problem

__all__ = [
    "ConfigError",
    "DataError",
    "HfFsdpError",
    "LengthReport",
    "ModelAccessError",
    "Problem",
    "RunConfig",
    "check_examples",
    "check_lengths",
    "check_model_access",
    "check_output_dir",
    "find_resume_checkpoint",
    "find_stop_token_id",
    "find_training_template",
    "format_examples",
    "load_splits",
    "measure_lengths",
    "override",
    "parse_arguments",
    "pick_split",
    "prepare_generation_config",
    "read_chat_template",
    "read_run_config",
    "rename_columns",
    "resolve_accumulation_steps",
    "resolve_chat_template",
    "select_eval_examples",
    "write_run_config",
]
