"""The model of a job: built of its config on meta, made ready for its method, and given storages without values."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from typing import Any

import torch
from torch import nn

from hf_fsdp.errors import HfFsdpError, PlanError
from hf_fsdp.plan.job import Job, ModelSpec
from hf_fsdp.plan.models.model_config import PLANNED_KINDS, model_kind, read_config
from hf_fsdp.plan.simulator.attention import KERNELS
from hf_fsdp.plan.simulator.depth import Tower, shortened
from hf_fsdp.plan.simulator.four_bits import pack_linears, state_tensors
from hf_fsdp.policies.blocks import base_model
from hf_fsdp.policies.four_bit_parts import four_bit_skips
from hf_fsdp.policies.lora_targets import plan_lora
from hf_fsdp.policies.model_parts import set_trainable
from hf_fsdp.policies.precision import PrecisionTable, find_norms

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def whole_model(job: Job) -> nn.Module:
    """Return the model of `job` on the meta device, all layers, float32; kept, so do not change it.

    Raises:
        PlanError: transformers cannot build a language model of this config.
    """
    needed = "_supports_flash_attn" if job.attention.startswith("flash") else "_supports_sdpa"
    return _whole_model(json.dumps(dataclasses.asdict(job.model)), _implementation(job), needed)


@functools.lru_cache(maxsize=2)
def _whole_model(spec: str, attention: str, needed: str) -> nn.Module:
    model = _build_on_meta(ModelSpec(**json.loads(spec)), attention)
    part: Any
    for part in model.modules():
        # transformers takes a kernel of a name that it does not know for every class, also for those that have no sdpa
        # (Gemma 2, GPT-OSS, Bloom) and are trained with eager attention.
        if hasattr(part, needed) and not getattr(part, needed):
            part.config._attn_implementation_internal = "eager"  # this part's alone; the property sets all below it
    return model


def _implementation(job: Job) -> str:
    if job.attention == "eager":
        return "eager"
    return KERNELS if job.device == "gpu" else "sdpa"


def _build_on_meta(spec: ModelSpec, attention: str) -> nn.Module:
    import transformers
    from transformers.initialization import no_init_weights

    model_type = str(spec.config.get("model_type"))
    try:
        config = read_config(spec)
        kind = _model_class(spec)
        config.use_cache = False
        options = {"dtype": torch.float32, "trust_remote_code": spec.trust_remote_code}
        with torch.device("meta"), no_init_weights():
            try:
                model = kind.from_config(config, attn_implementation=attention, **options)
            # A model without sdpa; or one that looks its classes up by the name of a kernel (GPT-Neo, Falcon).
            except (ValueError, ImportError, KeyError):
                model = kind.from_config(config, attn_implementation="eager", **options)
    except HfFsdpError:
        raise
    except Exception as error:  # every class checks its own sizes, by whatever it stumbles over
        said = (str(error).splitlines() or [""])[0]
        raise PlanError(
            f"transformers {transformers.__version__} builds no language model of {spec.name}'s config "
            f"(model_type {model_type}): {type(error).__name__}: {said}",
            fix="give a config.json that AutoModelForCausalLM or AutoModelForImageTextToText takes",
        ) from error
    model.tie_weights()
    model.train()
    return model


def _model_class(spec: ModelSpec) -> Any:
    import transformers

    kind = model_kind(spec)
    if kind not in PLANNED_KINDS:
        raise PlanError(
            f"{spec.name} (model_type {spec.config.get('model_type')}) is neither a causal language model nor one with "
            "pictures",
            fix="plan for a model of AutoModelForCausalLM or AutoModelForImageTextToText",
        )
    return transformers.AutoModelForCausalLM if kind == "causal-lm" else transformers.AutoModelForImageTextToText


def build_model(job: Job, depths: dict[str, int], towers: list[Tower], table: PrecisionTable) -> nn.Module:
    """Return the model of `job` with so many layers, adapters and 4-bit layers in place, dtypes as stored; on meta.

    Args:
        job: what is planned.
        depths: tower -> layers.
        towers: of the whole model.
        table: the precision in force.
    """
    whole = whole_model(job)
    with shortened(whole, depths, towers):
        model = copy.deepcopy(whole)
    load_dtype = resolve_load_dtype(job, table)
    model = apply_method(job, model, table)
    norms = {id(module) for _, module in find_norms(model)} if table.keep_norms_fp32 else set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and not hasattr(parameter, "quant_state"):
                is_adapter = parameter.requires_grad and job.method.name != "full"
                if not is_adapter:
                    parameter.data = parameter.data.to(load_dtype)
                stored = table.storage_dtype(parameter, is_norm=id(module) in norms)
                parameter.data = parameter.data.to(stored)
    if job.loss == "chunked":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(base_model(model), outputs=("log_probs", "entropy", "is_top1"))
    return model


def apply_method(job: Job, model: nn.Module, table: PrecisionTable) -> nn.Module:
    """Freeze, pack and adapt `model` as the job's method says; returns the model to train."""
    method = job.method
    if method.name == "full":
        if method.trainable:
            set_trainable(model, method.trainable)
        return model
    if method.name == "qlora":
        parts = method.lora_parts or ("language",)
        pack_linears(model, four_bit_skips(model, parts), table.compute, nested=method.double_quantization)
    from peft import LoraConfig, get_peft_model

    kinds: Any = method.lora_targets[0] if method.lora_targets == ("all-linear",) else list(method.lora_targets)
    targets, save = kinds, None
    if method.lora_parts or method.lora_full:
        plan = plan_lora(model, method.lora_parts or ("language",), kinds, train_in_full=method.lora_full)
        targets, save = plan.target_modules, plan.modules_to_save
    with torch.device("meta"):
        adapted = get_peft_model(
            model,
            LoraConfig(
                r=method.lora_r,
                lora_alpha=method.lora_r,
                lora_dropout=method.lora_dropout,
                target_modules=targets,
                modules_to_save=save,
                task_type="CAUSAL_LM",
            ),
            low_cpu_mem_usage=True,
        )
    adapted.train()
    return adapted


def resolve_load_dtype(job: Job, table: PrecisionTable) -> torch.dtype:
    """Return the dtype that weights are loaded in: what frozen ones keep."""
    if job.method.load_dtype != "auto":
        return _DTYPES[job.method.load_dtype]
    if job.method.name == "qlora":
        return table.compute
    stated = str(job.model.config.get("dtype") or job.model.config.get("torch_dtype") or "bfloat16")
    if table.preset == "fp32":
        return torch.float32
    dtype = _DTYPES.get(stated, torch.bfloat16)
    # As large, and what is computed in; autocast knows no mixture of the two.
    return table.compute if dtype.itemsize == 2 else dtype


def materialize(model: nn.Module, device: str) -> None:
    """Give every tensor of a model on meta a storage without values on `device`, shared ones once; under fake tensors.

    In place of the parameters, since a tensor with storage and one on meta cannot be swapped under fake tensors.
    """
    made: dict[int, torch.Tensor] = {}

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            storage = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                storage = nn.Parameter(storage, requires_grad=tensor.requires_grad)
                storage.__dict__.update(vars(tensor))
            made[id(tensor)] = storage
        return made[id(tensor)]

    kept = list(model.modules())  # ids are only names while their tensors live
    sources = [tensor for module in kept for tensor in (*module._parameters.values(), *module._buffers.values())]
    for module in kept:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = real(tensor)  # type: ignore[assignment]
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):  # rotary tables keep a second reference to a buffer
                sources.append(value)
                setattr(module, name, real(value))
    for holder, attribute in state_tensors(model):
        setattr(holder, attribute, real(getattr(holder, attribute)))
    del sources
