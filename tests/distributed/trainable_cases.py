"""What is trained in a vision-language model and what is not, on N processes: storage, gradients, memory, proof."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as t
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_fsdp import FSDPCallback, FSDPConfig, apply_fsdp, load_sharded, set_trainable
from hf_fsdp.checkpoint.export import ExportOptions, export_checkpoint
from hf_fsdp.errors import HfFsdpError
from hf_fsdp.integrations.optimizers import raw_optimizer
from hf_fsdp.integrations.part_rates import set_part_rates
from hf_fsdp.policies.four_bit_parts import four_bit_skips
from hf_fsdp.policies.frozen_inputs import release_frozen_inputs
from hf_fsdp.policies.frozen_statistics import hold_frozen_statistics
from hf_fsdp.policies.lora_targets import plan_lora
from hf_fsdp.policies.model_parts import find_parts
from hf_fsdp.sharding.audit_table import render_audit
from hf_fsdp.sharding.training_proof import TrainingProof, TrainingReport
from hf_fsdp.torch_private import local_shard
from tests.distributed.export_cases import differing, shared_folder
from tests.distributed.harness import forget_accelerate
from tests.distributed.training import QUIET_ARGUMENTS
from tests.distributed.vlm_part_models import build_llava, build_rows

BF16, FP32 = torch.bfloat16, torch.float32


class Proof(TrainerCallback):
    """Proves a training, and notes which parameters had a gradient."""

    def __init__(self) -> None:
        self.proof: TrainingProof | None = None
        self.report: TrainingReport | None = None
        self.with_gradient: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.proof = TrainingProof(model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        assert self.proof is not None
        self.proof.observe_gradients(model)
        self.with_gradient |= {name for name, parameter in model.named_parameters() if parameter.grad is not None}

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        assert self.proof is not None
        self.report = self.proof.compare(model)


def build_trainer(folder: Any, world_size: int, model: Any, *others: TrainerCallback, **changes: Any) -> Trainer:
    config = FSDPConfig(
        precision=changes.pop("precision", "bf16-mixed"),
        activation_checkpointing=changes.pop("checkpointing", "none"),
        checkpoint=changes.pop("checkpoint", "sharded"),
    )
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        **QUIET_ARGUMENTS,
        "max_steps": 3,
        "per_device_train_batch_size": 4 // world_size,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "optim": "adamw_torch",
        **changes,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(**arguments, **config.trainer_kwargs()),
        train_dataset=build_rows(),
        callbacks=[FSDPCallback(), Proof(), *others],
    )


def proof_of(trainer: Trainer) -> Proof:
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, Proof))


def backend_of(trainer: Trainer) -> FSDPCallback:
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, FSDPCallback))


def rows_of(report: TrainingReport | None) -> dict[str, dict[str, Any]]:
    assert report is not None
    return {row["part"]: row for row in report.to_mapping()["parts"]}


def by_part(model: nn.Module, names: Any) -> dict[str, int]:
    found = find_parts(model)
    parts = [found.part_of(name) for name in names]
    return {part: parts.count(part) for part in found.names if part in parts}


def lora(model: Any, **plan: Any) -> Any:
    """LoRA as the plan says, with a B that is not zero."""
    settings = plan_lora(model, **plan)
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=settings.target_modules, modules_to_save=settings.modules_to_save)
    model = get_peft_model(model, config)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


# -- storage, gradients, optimizer, proof -----------------------------------------------------------------------------


def frozen_tower(rank: int, world_size: int) -> dict[str, Any]:
    """A bf16 model under bf16-mixed: language and projector trained, the tower frozen."""
    with shared_folder() as folder:
        model = build_llava(BF16)
        set_trainable(model, ["language", "projector"])
        trainer = build_trainer(folder, world_size, model)
        set_part_rates(trainer, {"projector": 2e-3})
        trainer.train()
        named = dict(trainer.model.named_parameters())
        optimizer = raw_optimizer(trainer.optimizer)
        audit = backend_of(trainer).audit
        report = proof_of(trainer).report
        assert audit is not None and report is not None
        audit.add_training(report)
        dtypes: dict[str, set[str]] = {}
        for part, names in find_parts(trainer.model).names.items():
            dtypes[part] = {str(named[name].dtype) for name in names}
        return {
            "is_sharded": all(isinstance(parameter, DTensor) for parameter in named.values()),
            "dtypes": {part: sorted(kinds) for part, kinds in dtypes.items()},
            "gradients": by_part(trainer.model, proof_of(trainer).with_gradient),
            "state": by_part(trainer.model, [name for name, p in named.items() if optimizer.state.get(p)]),
            "report": rows_of(proof_of(trainer).report),
            "lines": report.lines(),
            "audit": audit.to_mapping()["parts"],
            "audit_json": json.loads(json.dumps(audit.to_mapping()))["after_training"],
            "table": render_audit(audit),
            "logged": [log["learning_rate_projector"] / log["learning_rate"] for log in _with_rates(trainer)],
        }


def _with_rates(trainer: Trainer) -> list[dict[str, Any]]:
    return [log for log in trainer.state.log_history if log.get("learning_rate")]


def everything_trained(rank: int, world_size: int) -> dict[str, Any]:
    """The tower trained too: its last layer is behind the features that are taken, so backward never reaches it."""
    with shared_folder() as folder:
        model = build_llava()
        set_trainable(model, "all")
        trainer = build_trainer(folder, world_size, model, precision="fp32")
        trainer.train()
        report = proof_of(trainer).report
        assert report is not None
        return {"report": rows_of(report), "lines": report.lines()}


class Meddler(TrainerCallback):
    """Writes to one value of the frozen tower, on the last rank's shard alone."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1 and state.global_step == 2:
            weight = dict(model.named_parameters())["model.vision_tower.encoder.layers.0.mlp.fc1.weight"]
            local_shard(weight).view(-1)[-1] += 1.0


def frozen_changed(rank: int, world_size: int) -> dict[str, Any]:
    with shared_folder() as folder:
        model = build_llava()
        set_trainable(model, "language")
        name = "model.vision_tower.encoder.layers.0.mlp.fc1.weight"
        assert name in dict(model.named_parameters())
        trainer = build_trainer(folder, world_size, model, Meddler(), precision="fp32")
        # The order of callbacks is the order of events: the proof looks behind the meddler's last step.
        try:
            trainer.train()
        except HfFsdpError as error:
            return {"error": f"{type(error).__name__}: {error}", "name": name}
        return {"error": "nothing was refused", "name": name}


# -- batch norm of a frozen tower -------------------------------------------------------------------------------------


class TowerWithBatchNorm(nn.Module):
    """A tower with running statistics, a projector and a language model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision_tower = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))
        self.projector = nn.Linear(8, 8)
        self.language_model = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.vision_tower:
            inputs = layer(inputs)
        inputs = self.projector(inputs)
        for layer in self.language_model:
            inputs = layer(inputs)
        return inputs


def batch_norm(rank: int, world_size: int) -> dict[str, Any]:
    """With and without holding the statistics of the frozen tower."""
    found: dict[str, Any] = {}
    for held in (True, False):
        model = TowerWithBatchNorm()
        set_trainable(model, ["language", "projector"])
        apply_fsdp(model, FSDPConfig(precision="fp32"))
        if held:
            found["names"] = hold_frozen_statistics(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        proof = TrainingProof(model)
        torch.manual_seed(rank)
        for _ in range(2):
            model.train()
            model(torch.randn(4, 8)).square().mean().backward()
            proof.observe_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        try:
            found[f"held={held}"] = rows_of(proof.compare(model))
        except HfFsdpError as error:
            found[f"held={held}"] = str(error)
    return found


# -- activations that are kept for backward ---------------------------------------------------------------------------


@contextlib.contextmanager
def counting(model: nn.Module) -> Iterator[dict[str, int]]:
    """Count the tensors that each tower's forward keeps for backward, parameters left out."""
    counts = {"vision": 0, "language": 0}
    inside: list[str] = []
    handles = []
    for name, module in model.named_modules():
        part = next((part for end, part in _TOWERS.items() if name.endswith(end)), None)
        if part is not None:
            enter = lambda module, inputs, part=part: inside.append(part)  # noqa: E731
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(lambda module, inputs, output: inside.pop() and None))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if inside and not isinstance(tensor, nn.Parameter):
            counts[inside[-1]] += 1
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield counts
    finally:
        for handle in handles:
            handle.remove()


_TOWERS = {"model.vision_tower": "vision", "model.language_model": "language"}


def _counted(model: Any, checkpointing: Any, *, mark_again: bool = False) -> dict[str, Any]:
    applied = apply_fsdp(model, FSDPConfig(precision="bf16-mixed", activation_checkpointing=checkpointing))
    if mark_again:  # sharding has taken the marks off
        model.enable_input_require_grads()
    rows = build_rows(4)
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    model.train()
    inputs: dict[str, weakref.ref[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if name.endswith(("vision_tower.encoder.layers.1", "language_model.layers.1")):
            part = "vision" if "vision" in name else "language"
            module.register_forward_pre_hook(
                lambda module, args, kwargs, part=part: inputs.update({part: weakref.ref(_first(args, kwargs))}),
                with_kwargs=True,
            )
    with counting(model) as counts:
        loss = model(**batch).loss
    alive = sorted(part for part, reference in inputs.items() if reference() is not None)
    loss.backward()
    blocks = applied.activations.checkpointed if applied.activations else ()
    return {
        **counts,
        "alive": alive,
        "loss": float(loss),
        "checkpointed": sorted({"vision" if "vision" in name else "language" for name in blocks}),
        "num_checkpointed": len(blocks),
        "trained_without_gradient": sum(p.requires_grad and p.grad is None for p in model.parameters()),
        "gradients": by_part(model, [name for name, p in model.named_parameters() if p.grad is not None]),
    }


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value) and value.dim() == 3)


def saved_activations(rank: int, world_size: int) -> dict[str, Any]:
    def full(parts: Any) -> Any:
        model = build_llava(BF16)
        set_trainable(model, parts)
        return model

    def embeddings_only() -> Any:
        model = full("language")
        model.requires_grad_(False)
        model.get_input_embeddings().requires_grad_(True)
        return model

    def marked(release: bool) -> Any:
        """As TRL leaves a model with adapters, whose arguments say `gradient_checkpointing`."""
        model = lora(build_llava(BF16))
        model.enable_input_require_grads()
        if release:
            assert release_frozen_inputs(model) == 2
        return model

    language = {"towers": ["language"]}
    builders: dict[str, tuple[Callable[[], Any], Any]] = {
        "all": (lambda: full("all"), "none"),
        "language": (lambda: full("language"), "none"),
        "language and projector": (lambda: full(["language", "projector"]), "none"),
        "LoRA": (lambda: lora(build_llava(BF16)), "none"),
        "LoRA and projector": (lambda: lora(build_llava(BF16), train_in_full="projector"), "none"),
        "token embeddings": (embeddings_only, "none"),
        "all, language recomputed": (lambda: full("all"), language),
        "language, recomputed": (lambda: full("language"), language),
        "LoRA, recomputed": (lambda: lora(build_llava(BF16)), language),
        "LoRA, all recomputed": (lambda: lora(build_llava(BF16)), "full"),
        "LoRA, inputs marked": (lambda: marked(release=False), "none"),
        "LoRA, inputs released": (lambda: marked(release=True), "none"),
    }
    return {
        name: _counted(build(), checkpointing, mark_again=name == "LoRA, inputs marked")
        for name, (build, checkpointing) in builders.items()
    }


# -- LoRA with the projector in full ----------------------------------------------------------------------------------


def _adapter_trainer(folder: Path, base: Path, world_size: int, *, steps: int) -> Trainer:
    model = load_sharded(t.LlavaForConditionalGeneration, str(base), dtype=FP32)
    trainer = build_trainer(
        folder,
        world_size,
        lora(model, train_in_full="projector"),
        precision="fp32",
        max_steps=steps,
        save_strategy="steps",
        save_steps=2,
        lr_scheduler_type="constant",
    )
    set_part_rates(trainer, {"projector": 2e-3}, {"projector": 0.01})
    return trainer


def _whole_trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def _groups(trainer: Trainer) -> list[tuple[str, float, float, int]]:
    groups = raw_optimizer(trainer.optimizer).param_groups
    return [(g.get("part", ""), g["lr"], g["weight_decay"], len(g["params"])) for g in groups]


def adapter_with_projector(rank: int, world_size: int) -> dict[str, Any]:
    """Train, stop, resume, save, reload under PEFT, merge by export."""
    found: dict[str, Any] = {}
    with shared_folder() as folder:
        base = folder / "base"
        if rank == 0:
            build_llava().save_pretrained(base)
        dist.barrier()
        whole = _adapter_trainer(folder / "whole", base, world_size, steps=4)
        whole.train()
        found["is_sharded"] = all(isinstance(p, DTensor) for p in whole.model.parameters())
        found["report"] = rows_of(proof_of(whole).report)
        found["groups"] = _groups(whole)
        expected = _whole_trained(whole.model)
        forget_accelerate()

        resumed = _adapter_trainer(folder / "whole", base, world_size, steps=4)
        resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
        found["resumed_differs"] = differing(_whole_trained(resumed.model), expected)
        found["resumed_groups"] = _groups(resumed)
        found["resumed_report"] = rows_of(proof_of(resumed).report)
        resumed.save_model(str(folder / "final"))
        forget_accelerate()
        finished = _adapter_trainer(folder / "whole", base, world_size, steps=4)
        finished.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-4"))
        report = proof_of(finished).report
        found["lines_without_steps"] = report.lines() if report else None
        forget_accelerate()
        dist.barrier()
        if rank == 0:
            found |= _reloaded(folder, base, expected)
    return found


def _reloaded(folder: Path, base: Path, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    model = PeftModel.from_pretrained(
        t.LlavaForConditionalGeneration.from_pretrained(base, dtype=FP32), folder / "final", is_trainable=True
    )
    batch = {key: torch.stack([row[key] for row in build_rows(2)]) for key in ("input_ids", "pixel_values")}
    adapted = model.eval()(**batch).logits
    untrained = t.LlavaForConditionalGeneration.from_pretrained(base, dtype=FP32).eval()(**batch).logits
    export_checkpoint(folder / "whole" / "checkpoint-4", folder / "merged", ExportOptions(merge_lora=True))
    merged, info = t.LlavaForConditionalGeneration.from_pretrained(
        folder / "merged", dtype=FP32, output_loading_info=True
    )
    peft_merged = model.merge_and_unload()
    return {
        "reload_differs": differing(_whole_trained_of(folder, base), expected),
        "loading_info": {key: sorted(map(str, value)) for key, value in info.items()},
        "merged_differs": float((merged.eval()(**batch).logits - adapted).abs().max()),
        "trained_differs": float((untrained - adapted).abs().max()),
        "merged_weights": max(
            float((a - peft_merged.state_dict()[name]).abs().max()) for name, a in merged.state_dict().items()
        ),
    }


def _whole_trained_of(folder: Path, base: Path) -> dict[str, torch.Tensor]:
    model = t.LlavaForConditionalGeneration.from_pretrained(base, dtype=FP32)
    return _whole_trained(PeftModel.from_pretrained(model, folder / "final", is_trainable=True))


def four_bit_base(rank: int, world_size: int) -> dict[str, Any]:
    """QLoRA: the language model in 4 bits, tower and projector in bf16, the projector trained in full."""
    import bitsandbytes

    with shared_folder() as folder:
        base = folder / "base"
        if rank == 0:
            build_llava(BF16).save_pretrained(base)
        dist.barrier()
        skips = four_bit_skips(t.AutoConfig.from_pretrained(base))
        config = t.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=BF16,
            bnb_4bit_quant_storage=BF16,
            bnb_4bit_use_double_quant=True,
            llm_int8_skip_modules=skips,
        )
        model = t.LlavaForConditionalGeneration.from_pretrained(base, dtype=BF16, quantization_config=config)
        packed = [name for name, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
        trainer = build_trainer(folder / "run", world_size, lora(model, train_in_full="projector"))
        trainer.train()
        return {
            "packed": sorted({name.split(".")[1] for name in packed}),
            "is_sharded": all(isinstance(p, DTensor) for p in trainer.model.parameters()),
            "report": rows_of(proof_of(trainer).report),
        }


CASES = {
    "frozen_tower": frozen_tower,
    "everything_trained": everything_trained,
    "frozen_changed": frozen_changed,
    "batch_norm": batch_norm,
    "saved_activations": saved_activations,
    "adapter_with_projector": adapter_with_projector,
    "four_bit_base": four_bit_base,
}
