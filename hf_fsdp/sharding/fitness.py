"""Models that cannot be sharded right, each refused by name before anything is changed."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.errors import PrecisionError, Problem, ShardingError, WrapPolicyError
from hf_fsdp.policies.precision import PrecisionTable, check_storable
from hf_fsdp.policies.quantization import check_quantization
from hf_fsdp.policies.wrap_plan import WrapPlan
from hf_fsdp.torch_private import GROUPS_CAST_EACH_MODULE

_LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "layer_drop", "speech_encoder_layerdrop")


def refuse_unfit_model(model: nn.Module, config: FSDPConfig, precision: PrecisionTable) -> None:
    """Refuse what would fail half-way or train wrong.

    Raises:
        ShardingError: with every problem of the model.
        PrecisionError: the precision does not fit the model or this torch.
    """
    checks = (_check_sharded_already, _check_scalars, _check_layer_drop, _check_prompt_learning)
    problems = [problem for check in checks if (problem := check(model)) is not None]
    if problems := problems + check_quantization(model, precision):
        raise ShardingError(problems)
    check_storable(model.named_parameters(), precision)
    if precision.keep_norms_fp32 and not GROUPS_CAST_EACH_MODULE:
        raise PrecisionError(
            f"precision.keep_norms_fp32 needs torch 2.13 or newer, and this is {torch.__version__}",
            fix="pip install -U 'torch>=2.13', or keep_norms_fp32: false",
            source=config.sources.get("precision.keep_norms_fp32"),
        )
    batch_norms = [name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if batch_norms and precision.compute is not torch.float32 and not precision.keep_norms_fp32:
        raise PrecisionError(
            f"precision.preset={precision.preset!r} gives {batch_norms[0]} and {len(batch_norms) - 1} more batch norms "
            f"weights in {str(precision.compute).removeprefix('torch.')} beside statistics in float32, "
            "which torch does not compute with",
            fix=f"precision: {{preset: {precision.preset}, keep_norms_fp32: true}}"
            if GROUPS_CAST_EACH_MODULE
            else "precision: fp32, or torch 2.13 and keep_norms_fp32: true",
        )


def refuse_unfit_plan(plan: WrapPlan, config: FSDPConfig) -> None:
    """Refuse activation checkpointing that would recompute nothing.

    Raises:
        WrapPolicyError: under `wrap.policy: size` every unit is a single layer.
    """
    if plan.by_size and config.activation_checkpointing.mode == "full" and not plan.blocks:
        size = config.wrap.min_num_params
        raise WrapPolicyError(
            f"activation_checkpointing: full has nothing to recompute: under wrap.min_num_params={size} every unit "
            f"is a single layer, whose input is kept anyway ({plan.units[0].label}, ...)",
            fix="wrap: transformer_layers, a larger wrap.min_num_params, or activation_checkpointing: none",
            source=config.sources.get("wrap.min_num_params"),
        )


def _check_sharded_already(model: nn.Module) -> Problem | None:
    if isinstance(model, FSDPModule) or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return Problem(
            message=f"{type(model).__name__} is sharded already, and not by hf-fsdp",
            fix="load it without tp_plan/distributed_config and do not call fully_shard yourself",
        )
    return None


def _check_scalars(model: nn.Module) -> Problem | None:
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0 and parameter.requires_grad]
    if scalars:
        return Problem(
            message=f"{', '.join(scalars)}: a trained scalar has no first dimension to shard",
            fix="freeze it with requires_grad_(False), or give it the shape (1,)",
        )
    return None


def _check_layer_drop(model: nn.Module) -> Problem | None:
    """Ranks that skip different layers pair up the gathers of different layers, without an error."""
    for name, module in model.named_modules():
        # wav2vec2 and its family read it from their config at every forward.
        in_config = (
            getattr(module, "config", None) if isinstance(getattr(module, "layers", None), nn.ModuleList) else None
        )
        for attribute in _LAYER_DROPS:
            value = vars(module).get(attribute, getattr(in_config, attribute, None))
            if isinstance(value, float) and value > 0:
                return Problem(
                    message=f"{name or type(module).__name__}.{attribute}={value}: every rank would skip layers of its "
                    "own choice, and gathers of different layers would be mixed",
                    fix=f"from_pretrained(..., {attribute}=0.0), or model.config.{attribute} = 0.0 before it is built",
                )
    return None


def _check_prompt_learning(model: nn.Module) -> Problem | None:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return None
    kinds = [
        str(getattr(c, "peft_type", name)) for name, c in configs.items() if getattr(c, "is_prompt_learning", False)
    ]
    if kinds:
        return Problem(
            message=f"{kinds[0]}: prompts are learned beside the model, and PEFT cannot save them from shards yet",
            fix="use LoRA (LoraConfig), or train prompts without FSDP: they need no sharding",
        )
    return None
