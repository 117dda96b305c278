"""Data of text and of pictures: only what TRL and transformers do not do.

Loading with errors a person can act on, checks before a model loads, chat templates with generation marks,
the share of samples that `max_length` cuts, a preview of the tokens that count in the loss, formats recognised by
their columns, attention chosen for the machine, and a proof that packed samples do not see each other.
"""

from __future__ import annotations

from hf_fsdp.data.access import check_model_access
from hf_fsdp.data.arguments import parse_arguments
from hf_fsdp.data.attention import Attention, choose_attention, compute_dtype
from hf_fsdp.data.batch import resolve_accumulation_steps
from hf_fsdp.data.chat_template import (
    find_stop_token_id,
    find_training_template,
    prepare_chat,
    prepare_pad_token,
    read_chat_template,
    resolve_chat_template,
)
from hf_fsdp.data.columns import rename_columns
from hf_fsdp.data.examples import Examples, read_examples, read_train_and_held_out
from hf_fsdp.data.formats import FORMATS
from hf_fsdp.data.four_bits import settle_four_bits
from hf_fsdp.data.generation import prepare_generation_config
from hf_fsdp.data.image_checks import check_images
from hf_fsdp.data.image_settings import check_image_settings
from hf_fsdp.data.images import (
    ImageDataReport,
    ImageExamples,
    ImageLimits,
    ImageTextCollator,
    add_lengths,
    check_image_data,
    open_image,
    read_image_examples,
    read_image_splits,
)
from hf_fsdp.data.lengths import LengthReport, check_lengths, measure_lengths
from hf_fsdp.data.loading import load_splits, pick_split, select_eval_examples
from hf_fsdp.data.packing import check_packing, packs_samples, prove_packing
from hf_fsdp.data.preview import (
    format_collated_examples,
    format_examples,
    format_training_examples,
    preview_training,
)
from hf_fsdp.data.processors import image_token_counts, load_processor
from hf_fsdp.data.recipe_arguments import RecipeRun, read_recipe_arguments
from hf_fsdp.data.run_config import RunConfig, override, read_run_config, write_run_config
from hf_fsdp.data.run_folder import check_output_dir, find_resume_checkpoint
from hf_fsdp.data.setting_values import read_mapping, read_names
from hf_fsdp.data.vision_model import build_outline, choose_parts, read_vision_config
from hf_fsdp.errors import ConfigError, DataError, HfFsdpError, ModelAccessError, Problem

__all__ = [
    "Attention",
    "ConfigError",
    "DataError",
    "Examples",
    "FORMATS",
    "HfFsdpError",
    "ImageDataReport",
    "ImageExamples",
    "ImageLimits",
    "ImageTextCollator",
    "LengthReport",
    "ModelAccessError",
    "Problem",
    "RecipeRun",
    "RunConfig",
    "add_lengths",
    "build_outline",
    "check_image_data",
    "check_image_settings",
    "check_images",
    "check_lengths",
    "check_model_access",
    "check_output_dir",
    "check_packing",
    "choose_attention",
    "choose_parts",
    "compute_dtype",
    "find_resume_checkpoint",
    "find_stop_token_id",
    "find_training_template",
    "format_collated_examples",
    "format_examples",
    "format_training_examples",
    "image_token_counts",
    "load_processor",
    "load_splits",
    "measure_lengths",
    "open_image",
    "override",
    "packs_samples",
    "parse_arguments",
    "pick_split",
    "prepare_chat",
    "prepare_generation_config",
    "prepare_pad_token",
    "preview_training",
    "prove_packing",
    "read_chat_template",
    "read_examples",
    "read_image_examples",
    "read_image_splits",
    "read_mapping",
    "read_names",
    "read_recipe_arguments",
    "read_run_config",
    "read_train_and_held_out",
    "read_vision_config",
    "rename_columns",
    "resolve_accumulation_steps",
    "resolve_chat_template",
    "select_eval_examples",
    "settle_four_bits",
    "write_run_config",
]
