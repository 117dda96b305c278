"""Fully sharded training you can trust inside the Hugging Face Trainer.

The public names are loaded on first use, so that importing the package (and `hf-fsdp --help`) stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_fsdp.checkpoint.start import load_sharded
    from hf_fsdp.config.schema import FSDPConfig
    from hf_fsdp.integrations.answers import AnswersCallback
    from hf_fsdp.integrations.callback import FSDPCallback
    from hf_fsdp.integrations.metrics import MetricsCallback
    from hf_fsdp.integrations.part_rates import check_part_rates, set_part_rates
    from hf_fsdp.integrations.plain_loop import build_accelerator
    from hf_fsdp.integrations.plan_link import MemoryPlanCallback
    from hf_fsdp.integrations.samples import SamplesCallback
    from hf_fsdp.integrations.wandb import prepare_wandb, wandb_sync_line
    from hf_fsdp.monitor.answer_grid import draw_answer_grid
    from hf_fsdp.monitor.answer_rounds import generate_answers
    from hf_fsdp.monitor.predict import predict_answers
    from hf_fsdp.policies.four_bit_parts import four_bit_skips
    from hf_fsdp.policies.lora_check import check_lora_targets
    from hf_fsdp.policies.lora_targets import lora_targets, plan_lora
    from hf_fsdp.policies.model_parts import describe_parts, set_trainable
    from hf_fsdp.policies.other_tools import answer_other_tools
    from hf_fsdp.sharding.apply import apply_fsdp
    from hf_fsdp.sharding.audit import audit_sharding

__version__ = "0.1.0"
__all__ = [
    "AnswersCallback",
    "FSDPCallback",
    "FSDPConfig",
    "MemoryPlanCallback",
    "MetricsCallback",
    "SamplesCallback",
    "__version__",
    "answer_other_tools",
    "apply_fsdp",
    "audit_sharding",
    "build_accelerator",
    "check_lora_targets",
    "check_part_rates",
    "describe_parts",
    "draw_answer_grid",
    "four_bit_skips",
    "generate_answers",
    "load_sharded",
    "lora_targets",
    "plan_lora",
    "predict_answers",
    "prepare_wandb",
    "set_part_rates",
    "set_trainable",
    "wandb_sync_line",
]

_HOMES = {
    "FSDPConfig": "hf_fsdp.config.schema",
    "FSDPCallback": "hf_fsdp.integrations.callback",
    "MetricsCallback": "hf_fsdp.integrations.metrics",
    "MemoryPlanCallback": "hf_fsdp.integrations.plan_link",
    "SamplesCallback": "hf_fsdp.integrations.samples",
    "build_accelerator": "hf_fsdp.integrations.plain_loop",
    "load_sharded": "hf_fsdp.checkpoint.start",
    "set_trainable": "hf_fsdp.policies.model_parts",
    "AnswersCallback": "hf_fsdp.integrations.answers",
    "check_part_rates": "hf_fsdp.integrations.part_rates",
    "set_part_rates": "hf_fsdp.integrations.part_rates",
    "plan_lora": "hf_fsdp.policies.lora_targets",
    "four_bit_skips": "hf_fsdp.policies.four_bit_parts",
    "predict_answers": "hf_fsdp.monitor.predict",
    "draw_answer_grid": "hf_fsdp.monitor.answer_grid",
    "lora_targets": "hf_fsdp.policies.lora_targets",
    "check_lora_targets": "hf_fsdp.policies.lora_check",
    "answer_other_tools": "hf_fsdp.policies.other_tools",
    "describe_parts": "hf_fsdp.policies.model_parts",
    "generate_answers": "hf_fsdp.monitor.answer_rounds",
    "prepare_wandb": "hf_fsdp.integrations.wandb",
    "wandb_sync_line": "hf_fsdp.integrations.wandb",
    "apply_fsdp": "hf_fsdp.sharding.apply",
    "audit_sharding": "hf_fsdp.sharding.audit",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
