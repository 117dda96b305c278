"""QLoRA: a 4-bit base, sharded, against one process; evaluation, saving and resuming in the middle of it."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from hf_fsdp import FSDPCallback, FSDPConfig, apply_fsdp
from hf_fsdp.policies.packed_weights import four_bit_layers, quantization_tensors
from hf_fsdp.sharding.apply import get_applied_sharding
from hf_fsdp.sharding.gather import gather_state_dict
from tests.distributed.behaviour_cases import losses_of, workspace
from tests.distributed.harness import forget_accelerate
from tests.distributed.qlora_models import bits, build_qlora, load_base, packed_weights
from tests.distributed.sft_cases import build_rows, build_tokenizer
from tests.distributed.tiny_models import VOCABULARY
from tests.distributed.training import QUIET_ARGUMENTS, GradientRecorder, build_dataset, whole

FP32, BF16 = torch.float32, torch.bfloat16
COMPUTE = {"fp32": FP32, "bf16-mixed": BF16, "bf16-true": BF16, "fp16-mixed": torch.float16}


def build_trainer(
    folder: str,
    world_size: int,
    *,
    precision: str = "fp32",
    checkpointing: str = "none",
    model: Any = None,
    **other: Any,
) -> Trainer:
    """A Trainer whose global batch does not depend on the number of processes."""
    config = FSDPConfig(
        precision=precision,
        activation_checkpointing=checkpointing,
        checkpoint=other.pop("checkpoint", "full"),
    )
    arguments: dict[str, Any] = {
        "output_dir": folder,
        **QUIET_ARGUMENTS,
        "max_steps": 4,
        "per_device_train_batch_size": 12 // world_size,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "optim": "adamw_torch",
        **other,
    }
    return Trainer(
        model=model if model is not None else build_qlora(COMPUTE[precision]),
        args=TrainingArguments(**arguments, **config.trainer_kwargs()),
        train_dataset=build_dataset(),
        eval_dataset=build_dataset(8),
        callbacks=[FSDPCallback(), GradientRecorder()],
    )


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p).clone() for name, p in model.named_parameters() if p.requires_grad}


def results(trainer: Trainer) -> dict[str, Any]:
    """What parity compares, and how the parameters were held."""
    recorder = next(c for c in trainer.callback_handler.callbacks if isinstance(c, GradientRecorder))
    packed = packed_weights(trainer.model)
    return {
        "losses": losses_of(trainer),
        "norms": [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry],
        "gradients": recorder.gradients,
        "weights": trained_weights(trainer.model),
        "is_sharded": [isinstance(p, DTensor) for p in trainer.model.parameters()],
        "packed": {
            name: (p.numel(), p.to_local().numel() if isinstance(p, DTensor) else p.numel())
            for name, p in packed.items()
        },
        "packed_bits": {name: bits(whole(p)) for name, p in packed.items()},
        "trained_dtypes": sorted({str(p.dtype) for p in trainer.model.parameters() if p.requires_grad}),
    }


# -- parity -----------------------------------------------------------------------------------------------------------


def _parity(double: bool, checkpointing: str) -> Callable[[int, int], Any]:
    def case(rank: int, world_size: int) -> dict[str, Any]:
        found = {}
        for optimizer in ("sgd", "adamw_torch"):
            with _folder(world_size) as folder:
                trainer = build_trainer(
                    folder,
                    world_size,
                    checkpointing=checkpointing,
                    model=build_qlora(FP32, double=double),
                    optim=optimizer,
                    optim_args="momentum=0.9" if optimizer == "sgd" else None,
                    learning_rate=0.05 if optimizer == "sgd" else 1e-3,
                    max_grad_norm=0.5,
                )
                trainer.train()
                found[optimizer] = results(trainer)
            forget_accelerate()
        return found

    return case


@contextlib.contextmanager
def _folder(world_size: int) -> Iterator[str]:
    import tempfile

    if world_size > 1:
        with workspace() as folder:
            yield folder
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield folder


NUM_STEPS, LEARNING_RATE = 3, 0.1


def _batches(world_size: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        [torch.randint(3, VOCABULARY, (2, 10), generator=generator) for _ in range(world_size)]
        for _ in range(NUM_STEPS)
    ]


def _reference(world_size: int, storage: torch.dtype, double: bool, reduce: torch.dtype = FP32) -> dict[str, Any]:
    """bf16 QLoRA written out: adapters stored in `storage`, computed in bf16, gradients summed in `reduce`."""
    model = build_qlora(BF16, double=double).train()
    stored = {n: p.detach().to(storage).clone() for n, p in model.named_parameters() if p.requires_grad}
    gradients: dict[str, torch.Tensor] = {}
    for step, batch in enumerate(_batches(world_size)):
        total = {name: torch.zeros_like(value, dtype=reduce) for name, value in stored.items()}
        for ids in batch:
            leaves = {name: value.to(BF16).clone().requires_grad_() for name, value in stored.items()}
            loss = functional_call(model, leaves, kwargs={"input_ids": ids, "labels": ids, "use_cache": False}).loss
            loss.float().backward()
            for name, leaf in leaves.items():
                total[name] += leaf.grad.to(reduce)
        for name, value in stored.items():
            gradient = (total[name] / world_size).to(value.dtype)
            if step == 0:
                gradients[name] = gradient.clone()
            value.add_(gradient, alpha=-LEARNING_RATE)
    return {"weights": stored, "gradients": gradients}


def _sharded(precision: str, rank: int, world_size: int, double: bool, checkpointing: str) -> dict[str, Any]:
    model = build_qlora(BF16, double=double).train()
    before = {name: bits(parameter) for name, parameter in packed_weights(model).items()}
    apply_fsdp(model, FSDPConfig(precision=precision, activation_checkpointing=checkpointing))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    gradients: dict[str, torch.Tensor] = {}
    for step, batch in enumerate(_batches(world_size)):
        model(input_ids=batch[rank], labels=batch[rank]).loss.backward()
        if step == 0:
            gradients = {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return {
        "weights": trained_weights(model),
        "gradients": gradients,
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
        "packed_as_before": all(torch.equal(bits(whole(p)), before[name]) for name, p in packed_weights(model).items()),
    }


def _written_reference(precision: str, double: bool, checkpointing: str) -> Callable[[int, int], Any]:
    storage = FP32 if precision == "bf16-mixed" else BF16

    def case(rank: int, world_size: int) -> dict[str, Any]:
        wrong = BF16 if storage is FP32 else FP32
        return {
            "sharded": _sharded(precision, rank, world_size, double, checkpointing),
            "reference": _reference(world_size, storage, double),
            "wrong": _reference(world_size, wrong, double, reduce=BF16),
        }

    return case


def uneven(rank: int, world_size: int) -> dict[str, Any]:
    """More or fewer packed rows on the last rank: the gradients of the whole batch in one unsharded model."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2 * world_size, 10), generator=generator)
    whole_model = build_qlora(FP32, double=True).train()
    whole_model(input_ids=ids, labels=ids).loss.backward()
    model = build_qlora(FP32, double=True).train()
    apply_fsdp(model, FSDPConfig(precision="fp32"))
    mine = ids[2 * rank : 2 * rank + 2]
    model(input_ids=mine, labels=mine).loss.backward()
    return {
        "expected": {n: p.grad for n, p in whole_model.named_parameters() if p.grad is not None},
        "gradients": {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None},
        "rows": {n: (p.to_local().shape[0], p.shape[0]) for n, p in packed_weights(model).items()},
    }


def every_bit_pattern(rank: int, world_size: int) -> dict[str, bool]:
    """All 65,536 patterns of a 16-bit number, NaNs included, pass through a gather unchanged; so do 32-bit NaNs."""
    found = {}
    for name, precision in (("bf16", "bf16-mixed"), ("fp16", "fp16-mixed"), ("fp32", "fp32")):
        dtype = COMPUTE[precision]
        layer = bitsandbytes.nn.Linear4bit(512, 512, bias=False, compute_dtype=dtype, quant_storage=dtype).to("cpu")
        patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
        if dtype is FP32:  # each pattern once in the upper half, where exponents and the sign of a NaN are
            patterns = torch.stack([patterns.flip(0), patterns], dim=1).flatten()[: 2 * 32768]
        layer.weight.data.copy_(patterns.view(dtype)[: layer.weight.numel()].view_as(layer.weight.data))
        assert torch.isnan(layer.weight).any()
        expected, seen = bits(layer.weight), []
        model = torch.nn.Sequential(torch.nn.Sequential(layer), torch.nn.Sequential(torch.nn.Linear(512, 4)))
        model.requires_grad_(False)
        layer.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(bits(module.weight)))
        apply_fsdp(model, FSDPConfig(precision=precision, wrap={"callable": lambda model: list(model)}))
        local = layer.weight.to_local().numel()
        model(torch.ones(2, 512))
        found[f"{name} gathered"] = torch.equal(seen[0], expected) and local * world_size == layer.weight.numel()
        found[f"{name} whole"] = torch.equal(bits(layer.weight.full_tensor()), expected)
    return found


# -- evaluation in the middle -----------------------------------------------------------------------------------------


def evaluation(rank: int, world_size: int) -> dict[str, Any]:
    """Training with an evaluation after every step against training without one, as this processor does it.

    In one process, training without one never enters eval mode: what nothing can have rewritten.
    """
    found: dict[str, Any] = {}
    for precision in ("fp32", "bf16-mixed") if world_size > 1 else ("fp32",):
        for name, strategy in (("without", {}), ("with", {"eval_strategy": "steps", "eval_steps": 1})):
            with _folder(world_size) as folder:
                trainer = build_trainer(folder, world_size, precision=precision, learning_rate=1e-3, **strategy)
                trainer.train()
                log = trainer.state.log_history
                found[f"{precision} {name}"] = {
                    **results(trainer),
                    "eval_losses": [entry["eval_loss"] for entry in log if "eval_loss" in entry],
                    "num_rewritten": sum(
                        getattr(layer.quant_state, "packing_format_for_cpu", False)
                        for _, layer in four_bit_layers(trainer.model)
                    ),
                }
            forget_accelerate()
    return found


def rewriting(rank: int, world_size: int) -> dict[str, Any]:
    """The processor is said to have avx512_bf16: no weight may be rewritten; with the switch back on, they would be."""
    import bitsandbytes.nn.modules as modules

    kept = modules.has_avx512bf16, modules._convert_weight_packed_for_cpu
    calls: list[int] = []
    modules.has_avx512bf16 = lambda: True
    modules._convert_weight_packed_for_cpu = lambda weight, state: (calls.append(1), (weight, state))[1]
    try:
        model = build_qlora(BF16)
        layers = [layer for _, layer in four_bit_layers(model)]
        offered = all(layer.support_avx512bf16_for_cpu for layer in layers)
        apply_fsdp(model, FSDPConfig(precision="bf16-mixed"))
        ids = torch.full((1, 4), 5)
        with torch.no_grad():
            model.eval()(input_ids=ids)
            protected = len(calls)
            for layer in layers:
                layer.support_avx512bf16_for_cpu = True
            model(input_ids=ids)
        return {"offered": offered, "protected": protected, "unprotected": len(calls), "layers": len(layers)}
    finally:
        modules.has_avx512bf16, modules._convert_weight_packed_for_cpu = kept


def dropout_under_checkpointing(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for mode in ("none", "full"):
        with workspace() as folder:
            model = build_qlora(BF16, dropout=0.2)
            trainer = build_trainer(folder, world_size, precision="bf16-mixed", checkpointing=mode, model=model)
            trainer.train()
            found[mode] = results(trainer)
            found[f"{mode}_blocks"] = get_applied_sharding(trainer.model).num_checkpointed
        forget_accelerate()
    return found


# -- saving and resuming ----------------------------------------------------------------------------------------------


def saved_adapter(rank: int, world_size: int) -> dict[str, Any]:
    """`save_model`, then the adapter on a base that is loaded afresh, unsharded."""
    found: dict[str, Any] = {}
    ids = torch.arange(3, 15)[None]
    for precision, double in (("fp32", False), ("bf16-mixed", True)):
        with workspace() as folder:
            dtype = COMPUTE[precision]
            trainer = build_trainer(folder, world_size, precision=precision, model=build_qlora(dtype, double=double))
            trainer.train()
            with torch.no_grad():
                sharded = trainer.model.eval()(input_ids=ids).logits
            trainer.save_model(f"{folder}/final")
            dist.barrier()
            fresh = PeftModel.from_pretrained(load_base(dtype, double=double), f"{folder}/final").eval()
            _switch_rewriting_off(fresh)
            saved = {n: p for n, p in fresh.named_parameters() if "lora_" in n}
            trained = {n: w for n, w in trained_weights(trainer.model).items()}
            with torch.no_grad():
                if precision == "bf16-mixed":
                    for parameter in saved.values():  # computed in bf16, as the units do
                        parameter.data = parameter.data.bfloat16()
                loaded = fresh(input_ids=ids).logits.float()
            found[precision] = {
                "logits": (sharded - loaded).abs().max().item(),
                "size": loaded.abs().max().item(),
                "equal": all(torch.equal(trained[n].to(p.dtype), p) for n, p in saved.items()),
                "count": len(saved),
                "files": sorted(os.listdir(f"{folder}/final")),
            }
        forget_accelerate()
    return found


def _switch_rewriting_off(model: torch.nn.Module) -> None:
    for _, layer in four_bit_layers(model):
        layer.support_avx512bf16_for_cpu = False


def saved_base_in_4_bits(rank: int, world_size: int) -> dict[str, Any]:
    """The whole quantized model, gathered and saved, loads in 4 bits and gives the same logits; no cast of its bits."""
    ids = torch.arange(3, 15)[None]
    model = load_base(BF16, double=True).eval().requires_grad_(False)
    before = {name: bits(p) for name, p in packed_weights(model).items()}
    apply_fsdp(model, FSDPConfig(precision={"preset": "bf16-mixed", "save_dtype": "float32"}))
    applied = get_applied_sharding(model)
    gathered = gather_state_dict(model, applied)
    with torch.no_grad():
        sharded = model(input_ids=ids).logits
    with workspace() as folder:
        model.save_pretrained(folder)
        dist.barrier()
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=BF16).eval()
        _switch_rewriting_off(loaded)
        for parameter in loaded.parameters():  # saved in float32 as asked, computed in bf16 before
            parameter.data = parameter.data.to(BF16)
        with torch.no_grad():
            logits = loaded(input_ids=ids).logits.float()
    return {
        "bits": all(torch.equal(bits(gathered[name]), before[name]) for name in before) if rank == 0 else not gathered,
        "scales": sum("quant_state.bitsandbytes__nf4" in name for name in gathered),
        "layers": len(before),
        "in_4_bits": len(four_bit_layers(loaded)),
        "equal": torch.equal(sharded, logits),
    }


# -- initial state, audit, TRL ----------------------------------------------------------------------------------------


def different_scales(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 comes with other packed bits and other scales: all ranks end with rank 0's."""
    model = build_qlora(FP32, double=True)
    expected = {name: bits(p) for name, p in packed_weights(model).items()}
    layers = dict(four_bit_layers(model))
    name = next(iter(layers))
    state = layers[name].quant_state
    scales = state.absmax.clone(), state.state2.absmax.clone()
    if rank == 1:
        layers[name].weight.data.zero_()
        state.absmax = state.absmax + 1
        state.state2.absmax = state.state2.absmax * 2
    applied = apply_fsdp(model, FSDPConfig(precision="fp32"))
    return {
        "name": name,
        "replaced": applied.agreement.replaced,
        "num_tensors": applied.agreement.num_tensors,
        "expected_num": len(list(model.named_parameters())) + len(list(model.named_buffers())) + 5 * len(layers),
        "equal": torch.equal(state.absmax, scales[0]) and torch.equal(state.state2.absmax, scales[1]),
        "bits": all(torch.equal(bits(whole(p)), expected[n]) for n, p in packed_weights(model).items()),
        "tensors": len(quantization_tensors(name, layers[name])),
    }


def other_blocksize_on_one_rank(rank: int, world_size: int) -> dict[str, Any]:
    from tests.distributed.behaviour_cases import _error

    changes = {"bnb_4bit_quant_type": "fp4"} if rank == 1 else {}
    model = load_base(FP32, **changes).requires_grad_(False)
    return {"error": _error(lambda: apply_fsdp(model, FSDPConfig(precision="fp32")))}


def sft(rank: int, world_size: int) -> dict[str, Any]:
    """SFTTrainer given a 4-bit model and a LoRA config: dtypes of everything, the audit, the saved adapter."""
    found = {}
    for preset in ("bf16-mixed", "bf16-true"):
        printed = io.StringIO()
        config = FSDPConfig(precision=preset)
        with workspace() as folder, contextlib.redirect_stdout(printed):
            arguments: dict[str, Any] = {"output_dir": folder, **QUIET_ARGUMENTS, "max_steps": 2, "max_length": 32}
            trainer = SFTTrainer(
                model=load_base(BF16, double=True),
                args=SFTConfig(**arguments, **config.trainer_kwargs()),
                train_dataset=build_rows(),
                processing_class=build_tokenizer(),
                callbacks=[FSDPCallback(config)],
                peft_config=LoraConfig(r=4, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"),
            )
            trainer.train()
            trainer.save_model(f"{folder}/final")
            dist.barrier()
            from safetensors.torch import load_file

            saved = load_file(f"{folder}/final/adapter_model.safetensors")
        callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, FSDPCallback))
        parameters = dict(trainer.model.named_parameters())
        found[preset] = {
            "sharded": all(isinstance(p, DTensor) for p in parameters.values()),
            "lora": sorted({str(p.dtype) for n, p in parameters.items() if "lora_" in n}),
            "frozen": sorted({str(p.dtype) for p in parameters.values() if not p.requires_grad}),
            "saved": sorted({str(tensor.dtype) for tensor in saved.values()}),
            "printed": printed.getvalue(),
            "notes": callback.audit.notes,
            "share": callback.audit.sharded_share,
            "not_moved": callback.audit.first_step["not_moved"] if rank == 0 else [],
            "losses": losses_of(trainer),
        }
        forget_accelerate()
    return found


def prepared_by_peft(rank: int, world_size: int) -> dict[str, Any]:
    """prepare_model_for_kbit_training upcasts what is not packed: it trains, and the audit says what it costs."""
    from peft import prepare_model_for_kbit_training

    from hf_fsdp.sharding.audit import audit_sharding
    from tests.distributed.qlora_models import add_lora

    found = {}
    for name in ("plain", "prepared"):
        base = load_base(BF16)
        if name == "prepared":
            base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
        model = add_lora(base).train()
        apply_fsdp(model, FSDPConfig(precision="bf16-mixed"))
        batch = _batches(world_size)[0][rank]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        found[name] = {"loss": loss.item(), "notes": audit_sharding(model).notes}
    return found


PARITY = {
    "fp32": _parity(double=False, checkpointing="none"),
    "fp32-double-checkpointed": _parity(double=True, checkpointing="full"),
}
TWINS = [*PARITY, "evaluation"]
WRITTEN = {
    "bf16-mixed": _written_reference("bf16-mixed", double=False, checkpointing="none"),
    "bf16-mixed-double-checkpointed": _written_reference("bf16-mixed", double=True, checkpointing="full"),
    "bf16-true-double": _written_reference("bf16-true", double=True, checkpointing="none"),
}
CASES: dict[str, Callable[[int, int], Any]] = {
    **PARITY,
    **WRITTEN,
    **{
        case.__name__: case
        for case in (
            uneven,
            every_bit_pattern,
            evaluation,
            rewriting,
            dropout_under_checkpointing,
            saved_adapter,
            saved_base_in_4_bits,
            different_scales,
            other_blocksize_on_one_rank,
            sft,
            prepared_by_peft,
        )
    },
}
