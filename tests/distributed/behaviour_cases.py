"""What people do with a Trainer, each as a case on N processes: the ways that break other FSDP paths."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_fsdp import FSDPCallback, FSDPConfig, apply_fsdp
from hf_fsdp.errors import HfFsdpError
from hf_fsdp.sharding.agree import checksum
from hf_fsdp.sharding.audit import audit_sharding
from tests.distributed.tiny_models import CONFIGS, build_model, build_t5
from tests.distributed.training import QUIET_ARGUMENTS, Run, build_dataset, build_run_model, fsdp_config, train, whole

FP32 = FSDPConfig(precision="fp32")


def make_arguments(folder: str, config: FSDPConfig | None = FP32, **overrides: Any) -> TrainingArguments:
    arguments: dict[str, Any] = {
        "output_dir": folder,
        **QUIET_ARGUMENTS,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        **(config.trainer_kwargs() if config is not None else {}),
        **overrides,
    }
    cls = arguments.pop("cls", TrainingArguments)
    return cls(**arguments)


@contextlib.contextmanager
def workspace() -> Any:
    """A folder that all ranks share."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    assert folders[0] is not None
    yield folders[0]
    dist.barrier()


def make_trainer(folder: str, config: FSDPConfig | None = FP32, callback: Any = None, **overrides: Any) -> Trainer:
    trainer_arguments = {
        "model": build_model("llama", tied=False),
        "train_dataset": build_dataset(20),
        "eval_dataset": build_dataset(7),
    }
    trainer_arguments |= {key: overrides.pop(key) for key in list(overrides) if key in _TRAINER_KEYS}
    cls = trainer_arguments.pop("trainer_cls", Trainer)
    callbacks = [callback or FSDPCallback(), *trainer_arguments.pop("callbacks", [])]
    return cls(args=make_arguments(folder, config, **overrides), callbacks=callbacks, **trainer_arguments)


_TRAINER_KEYS = {
    "model",
    "model_init",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "data_collator",
    "trainer_cls",
    "callbacks",
    "compute_metrics",
}


def all_sharded(model: nn.Module) -> bool:
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# -- ways of using a Trainer ------------------------------------------------------------------------------------------


def evaluate_and_predict_before_train(rank: int, world_size: int) -> dict[str, Any]:
    with workspace() as folder:
        trainer = make_trainer(folder)
        before = trainer.evaluate()["eval_loss"]
        predicted = trainer.predict(build_dataset(7)).predictions.shape
        sharded_by_evaluate = all_sharded(trainer.model)
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        return {
            "before": before,
            "after": after,
            "predicted": list(predicted),
            "sharded": sharded_by_evaluate and all_sharded(trainer.model),
            "losses": losses_of(trainer),
        }


def train_without_evaluating(rank: int, world_size: int) -> dict[str, Any]:
    with workspace() as folder:
        trainer = make_trainer(folder)
        trainer.train()
        return {"losses": losses_of(trainer)}


def model_init(rank: int, world_size: int) -> dict[str, Any]:
    with workspace() as folder:
        trainer = make_trainer(folder, model=None, model_init=lambda: build_model("llama", tied=True))
        trainer.train()
        first = losses_of(trainer)
        trainer.train()  # builds the model anew
        return {"first": first, "second": losses_of(trainer), "sharded": all_sharded(trainer.model)}


def two_train_calls(rank: int, world_size: int) -> dict[str, Any]:
    with workspace() as folder:
        trainer = make_trainer(folder)
        trainer.train()
        first = losses_of(trainer)
        trainer.train()
        return {"first": first, "second": losses_of(trainer), "sharded": all_sharded(trainer.model)}


def uneven_last_batches(rank: int, world_size: int) -> dict[str, Any]:
    with workspace() as folder:
        trainer = make_trainer(
            folder, train_dataset=build_dataset(11), eval_dataset=build_dataset(5), max_steps=-1, num_train_epochs=2
        )
        trainer.train()
        metrics = trainer.evaluate()
        return {"steps": trainer.state.global_step, "eval_loss": metrics["eval_loss"]}


def generate_with_different_lengths(rank: int, world_size: int) -> dict[str, Any]:
    with workspace() as folder:
        trainer = make_trainer(folder)
        trainer.train()
        prompt = torch.full((1, 3 + rank), 5)
        tokens = trainer.model.generate(
            input_ids=prompt, max_new_tokens=3 + 2 * rank, min_new_tokens=3 + 2 * rank, do_sample=False
        )
        reloaded = AutoModelForCausalLM.from_config(trainer.model.config, dtype=torch.float32)
        reloaded.load_state_dict({name: whole(value) for name, value in trainer.model.state_dict().items()})
        expected = reloaded.generate(
            input_ids=prompt, max_new_tokens=3 + 2 * rank, min_new_tokens=3 + 2 * rank, do_sample=False
        )
        return {"tokens": tokens.tolist(), "expected": expected.tolist()}


def seq2seq_with_generation(rank: int, world_size: int) -> dict[str, Any]:
    with workspace() as folder:
        trainer = make_trainer(
            folder,
            FSDPConfig(precision="fp32", activation_checkpointing="full"),
            model=build_t5(dropout=0.1),
            trainer_cls=Seq2SeqTrainer,
            cls=Seq2SeqTrainingArguments,
            predict_with_generate=True,
            generation_max_length=6,
            train_dataset=build_dataset(20, uneven=False),
            eval_dataset=build_dataset(5, uneven=False),
        )
        trainer.train()
        predictions = trainer.predict(build_dataset(5, uneven=False)).predictions
        return {"losses": losses_of(trainer), "shape": list(predictions.shape), "sharded": all_sharded(trainer.model)}


def _with_arguments(**arguments: Any) -> Any:
    def case(rank: int, world_size: int) -> dict[str, Any]:
        result = train(Run(arguments=arguments), world_size)
        return {"losses": result["losses"], "sharded": all(result["is_sharded"].values())}

    return case


def _dropout_pair(method: str) -> Any:
    """Dropout on: the same run without and with checkpointing; every gradient and weight must agree to the bit."""

    def case(rank: int, world_size: int) -> dict[str, Any]:
        plain = train(Run(method=method, dropout=0.3), world_size)
        checkpointed = train(Run(method=method, dropout=0.3, checkpointing="full"), world_size)
        other_seed = train(Run(method=method, dropout=0.3, seed=1), world_size)
        return {
            "equal": all(torch.equal(plain["gradients"][n], checkpointed["gradients"][n]) for n in plain["gradients"]),
            "weights_equal": all(
                torch.equal(plain["weights"][n], checkpointed["weights"][n]) for n in plain["weights"]
            ),
            "losses_equal": plain["losses"] == checkpointed["losses"],
            "dropout_is_on": plain["losses"] != other_seed["losses"],
        }

    return case


def sync_each_batch_or_deferred(rank: int, world_size: int) -> dict[str, Any]:
    """Counts how often gradients are reduced: once a micro-batch, or once an update when deferral is asked for."""
    results = {}
    for name, sync in (("each", True), ("deferred", False)):
        calls = 0

        class Count(TrainerCallback):
            def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
                nonlocal calls
                calls += sum(parameter.grad is not None for parameter in model.parameters())

        printed = io.StringIO()
        with workspace() as folder, contextlib.redirect_stdout(printed):
            config = FSDPConfig(precision="fp32", sharding={"sync_each_batch": sync})
            trainer = make_trainer(folder, config, gradient_accumulation_steps=2, callbacks=[Count()])
            trainer.train()
        results[name] = {
            "losses": losses_of(trainer),
            "reduced_early": calls > 0,
            "printed": printed.getvalue(),
        }
    return results


def classification_head_smaller_than_the_world(rank: int, world_size: int) -> dict[str, Any]:
    """A head of one row on several processes (empty shards), freshly made with another seed on every rank."""
    config = CONFIGS["llama"]()
    config.num_labels = 1
    torch.manual_seed(100 + rank)
    model = LlamaForSequenceClassification(config)
    reference = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    applied = apply_fsdp(model, FP32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    audit_sharding(model, optimizer)
    start = {name: whole(parameter).clone() for name, parameter in model.named_parameters()}
    ids = torch.full((2, 5), 3 + rank)
    ids[:, -1] = 4
    model(input_ids=ids, labels=torch.tensor([0.0, 1.0])).loss.backward()
    optimizer.step()
    moved = {name: not torch.equal(whole(parameter), start[name]) for name, parameter in model.named_parameters()}
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, {name: checksum(tensor) for name, tensor in start.items()})
    return {
        "equal_on_all_ranks": all(other == everyone[0] for other in everyone),
        "is_rank_0s": rank != 0 or all(torch.equal(start[name], reference[name]) for name in start),
        "num_replaced": len(applied.agreement.replaced),
        "local_head": model.score.weight.to_local().numel(),
        "head_moved": moved["score.weight"],
    }


def optimizer_built_before_with_empty_shards(rank: int, world_size: int) -> dict[str, Any]:
    """Small parameters leave empty shards, all with data pointer 0: the optimizer's must be matched by name."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1), nn.Linear(1, 4)) for _ in range(3))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x

    model = Net()
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], "lr": 0.0},
        {"params": [p for n, p in model.named_parameters() if n.endswith("weight")], "lr": 0.5},
    ]
    optimizer = torch.optim.SGD(groups)
    apply_fsdp(model, FP32, optimizers=[optimizer])
    before = {name: whole(parameter).clone() for name, parameter in model.named_parameters()}
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    moved = {name: not torch.equal(whole(parameter), before[name]) for name, parameter in model.named_parameters()}
    return {"moved": moved}


def weights_on_meta_except_on_rank_0(rank: int, world_size: int) -> dict[str, Any]:
    """As RAM-efficient loading leaves them: rank 0 has the values, the others meta tensors, ties included."""
    model = build_model("llama", tied=True)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if rank > 0:
        model.to("meta")
        model.tie_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    apply_fsdp(model, FP32, optimizers=[optimizer])
    audit_sharding(model, optimizer)
    same = all(torch.equal(whole(parameter), expected[name]) for name, parameter in model.named_parameters())
    same_buffers = all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    output = model(input_ids=torch.full((1, 4), 5), labels=torch.full((1, 4), 5))
    output.loss.backward()
    optimizer.step()
    return {"same": same, "same_buffers": same_buffers, "tied": model.lm_head.weight is model.model.embed_tokens.weight}


def lora_differs_between_replicas(rank: int, world_size: int) -> dict[str, Any]:
    """Unseeded adapters under hybrid sharding: replicas must start equal and stay equal."""
    torch.manual_seed(rank)
    run = Run(method="lora", sharding={"dp_replicate_size": 2})
    model = build_run_model(run)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.add_(float(rank))
    apply_fsdp(model, fsdp_config(run))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        ids = torch.full((2, 6), 3 + rank + step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    audit = audit_sharding(model, optimizer)
    return {"replicas_equal": audit.replicas_equal, "mesh": audit.mesh}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class _OddStructure(nn.Module):
    """Weights tied between two blocks, between a block and the root, and one block's weight read by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _Block()
        self.layers = nn.ModuleList(_Block() for _ in range(4))
        self.out = nn.Linear(8, 12)
        self.layers[1].up.weight = self.layers[2].up.weight
        self.out.weight = self.layers[3].up.weight
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.scale * self.out(x) + nn.functional.linear(x, self.first.up.weight)


def odd_structures(rank: int, world_size: int) -> dict[str, Any]:
    """Every kind of tensor that two units want, against the same model in one piece."""
    torch.manual_seed(0)
    reference, model = _OddStructure(), _OddStructure()
    model.load_state_dict(reference.state_dict())
    applied = apply_fsdp(model, FSDPConfig(precision="fp32", wrap=["_Block"], activation_checkpointing="full"))
    audit_sharding(model)
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(other)) for other in range(world_size)]
    (sum(reference(batch).square().mean() for batch in batches) / world_size).backward()
    model(batches[rank]).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.requires_grad}
    errors = {
        name: (whole(parameter.grad) - expected[name]).norm().item()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return {
        "worst": max(errors.values()),
        "units": [list(unit.names) for unit in applied.plan.units],
        "notes": list(applied.plan.notes),
        "tied": model.out.weight is model.layers[3].up.weight,
    }


# -- saving -----------------------------------------------------------------------------------------------------------


def _save(format: str, save_dtype: str, load_dtype: str, method: str) -> Any:
    def case(rank: int, world_size: int) -> dict[str, Any]:
        config = FSDPConfig(
            precision={"preset": "bf16-mixed", "save_dtype": save_dtype},
            checkpoint=format,
            activation_checkpointing="full",
        )
        run = Run(method=method, load_dtype=load_dtype, tied=True, dropout=0.1 if method == "lora" else 0.0)
        with workspace() as folder:
            trainer = make_trainer(folder, config, model=build_run_model(run), learning_rate=0.1)
            trainer.train()
            trainer.save_model(f"{folder}/final")
            live = {name: whole(value) for name, value in trainer.model.state_dict().items()}
            dist.barrier()
            if method == "lora":
                from peft import PeftModel

                model: Any = PeftModel.from_pretrained(
                    build_run_model(Run(load_dtype=load_dtype, tied=True)), f"{folder}/final"
                )
            else:
                model = AutoModelForCausalLM.from_pretrained(f"{folder}/final")
            loaded = model.state_dict()
            missing = sorted(set(live) ^ set(loaded))
            wrong = [
                name
                for name in loaded
                if name in live and not torch.allclose(live[name].float(), loaded[name].float(), rtol=1e-2, atol=1e-6)
            ]
            dtypes = sorted({str(value.dtype) for name, value in loaded.items() if method == "full" or "lora" in name})
            trained = [name for name in live if "lora" in name] if method == "lora" else list(live)
            base = build_run_model(run).state_dict()
            return {
                "missing": missing,
                "wrong": wrong,
                "dtypes": dtypes,
                "num_moved": sum(not torch.equal(live[name].float(), base[name].float()) for name in trained),
                "num_trained": len(trained),
                "files": sorted(os.listdir(f"{folder}/final")),
            }

    return case


# -- what the audit and the step monitor see --------------------------------------------------------------------------


def audit_files_and_table(rank: int, world_size: int) -> dict[str, Any]:
    with workspace() as folder:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            trainer = make_trainer(folder, FSDPConfig(precision="bf16-mixed", activation_checkpointing={"every": 2}))
            trainer.train()
        dist.barrier()
        audit = json.loads(Path(folder, "audit.json").read_text())
        return {"audit": json.dumps(audit), "printed": printed.getvalue()}


def audit_fails_when_a_parameter_is_whole(rank: int, world_size: int) -> dict[str, Any]:
    model = build_model("llama", tied=False)
    apply_fsdp(model, FP32)
    model.model.norm.weight = nn.Parameter(torch.ones(32))
    return {"error": _error(lambda: audit_sharding(model))}


def audit_fails_when_nothing_is_sharded(rank: int, world_size: int) -> dict[str, Any]:
    return {"error": _error(lambda: audit_sharding(build_model("llama", tied=False)))}


def audit_fails_on_another_policy(rank: int, world_size: int) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = build_model("llama", tied=False)
    apply_fsdp(model, FP32)
    model.model.layers[1]._get_fsdp_state()._mp_policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    return {"error": _error(lambda: audit_sharding(model))}


def audit_fails_when_replicas_differ(rank: int, world_size: int) -> dict[str, Any]:
    model = build_model("llama", tied=False)
    apply_fsdp(model, FSDPConfig(precision="fp32", sharding={"dp_replicate_size": 2}))
    if rank == 0:
        with torch.no_grad():
            model.model.norm.weight.to_local().add_(1.0)
    return {"error": _error(lambda: audit_sharding(model))}


def audit_fails_on_a_foreign_optimizer(rank: int, world_size: int) -> dict[str, Any]:
    model = build_model("llama", tied=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply_fsdp(model, FP32)
    return {"error": _error(lambda: audit_sharding(model, optimizer))}


class _PoisonOnOneRank(TrainerCallback):
    """Makes one rank's loss NaN from a given step on, through a hook on the model."""

    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step and dist.get_rank() == 1:
            model.register_forward_hook(self._poison)

    @staticmethod
    def _poison(module: Any, inputs: Any, output: Any) -> Any:
        output["loss"] = output["loss"] * float("nan")
        return output


def _nan_loss(step: int) -> Any:
    def case(rank: int, world_size: int) -> dict[str, Any]:
        with workspace() as folder:
            trainer = make_trainer(folder, callbacks=[_PoisonOnOneRank(step)], logging_nan_inf_filter=True)
            error = _error(trainer.train)
            finite = all(torch.isfinite(whole(parameter)).all().item() for parameter in trainer.model.parameters())
            return {"error": error, "weights_finite": finite, "steps": trainer.state.global_step}

    return case


def parameter_without_gradient(rank: int, world_size: int) -> dict[str, Any]:
    model = build_model("llama", tied=False)
    model.model.layers[0].unused = nn.Linear(4, 4)
    printed = io.StringIO()
    with workspace() as folder, contextlib.redirect_stdout(printed):
        make_trainer(folder, model=model).train()
        dist.barrier()
        first_step = json.loads(Path(folder, "audit.json").read_text())["first_step"]
    return {"first_step": json.dumps(first_step), "printed": printed.getvalue()}


def warm_up_from_zero_is_no_finding(rank: int, world_size: int) -> dict[str, Any]:
    printed = io.StringIO()
    with workspace() as folder, contextlib.redirect_stdout(printed):
        make_trainer(folder, warmup_steps=2).train()
        dist.barrier()
        first_step = json.loads(Path(folder, "audit.json").read_text())["first_step"]
    return {"first_step": json.dumps(first_step), "printed": printed.getvalue()}


# -- refusals, each with its advice followed --------------------------------------------------------------------------


def _error(call: Any) -> str:
    """The text of the error that `call` raises, or "" when it raises none."""
    try:
        call()
    except HfFsdpError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _refused(follow: dict[str, Any], **wrong: Any) -> Any:
    """Build and train with `wrong` settings, then with the advice followed."""

    def case(rank: int, world_size: int) -> dict[str, Any]:
        from tests.distributed.harness import forget_accelerate

        with workspace() as folder:
            error = _error(lambda: make_trainer(folder, **wrong).train())
            os.environ.pop("ACCELERATE_USE_FSDP", None)
            forget_accelerate()
            trainer = make_trainer(folder, **follow)
            trainer.train()
            return {"error": error, "followed": all_sharded(trainer.model)}

    return case


def callback_added_too_late(rank: int, world_size: int) -> dict[str, Any]:
    with workspace() as folder:
        trainer = Trainer(
            model=build_model("llama", tied=False),
            args=make_arguments(folder, None),
            train_dataset=build_dataset(8),
            eval_dataset=build_dataset(4),
        )
        trainer.add_callback(FSDPCallback(FP32))
        return {"train": _error(trainer.train), "evaluate": _error(trainer.evaluate)}


def wrap_callable(rank: int, world_size: int) -> dict[str, Any]:
    config = FSDPConfig(precision="fp32", wrap=lambda model: list(model.model.layers))
    plain = FSDPConfig(precision="fp32")
    with workspace() as folder:
        trainer = make_trainer(folder, plain, callback=FSDPCallback(config))
        trainer.train()
        return {"sharded": all_sharded(trainer.model), "losses": losses_of(trainer)}


def plain_loop(rank: int, world_size: int) -> dict[str, Any]:
    """`apply_fsdp` in a loop without Trainer; calling it twice changes nothing."""
    model = build_model("llama", tied=True)
    first = apply_fsdp(model, FP32)
    second = apply_fsdp(model, FP32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        ids = torch.arange(36).reshape(6, 6) % 60 + 3
        shard = ids[rank * 6 // world_size : (rank + 1) * 6 // world_size]
        loss = model(input_ids=shard, labels=shard).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    return {"same": first is second, "losses": losses}


def different_models_are_refused(rank: int, world_size: int) -> dict[str, Any]:
    model = build_model("llama", tied=False)
    if rank == 1:
        model.resize_token_embeddings(80)
    return {"error": _error(lambda: apply_fsdp(model, FP32))}


def mesh_sizes_that_do_not_multiply(rank: int, world_size: int) -> dict[str, Any]:
    config = FSDPConfig(precision="fp32", sharding={"dp_replicate_size": 3})
    return {"error": _error(lambda: apply_fsdp(build_model("llama", tied=False), config))}


_OFF = FSDPConfig(precision="fp32", activation_checkpointing="none")
REFUSALS = {
    "full_eval": _refused({}, bf16_full_eval=True),
    "auto_find_batch_size": _refused({}, auto_find_batch_size=True),
    "jit_checkpoint": _refused({}, enable_jit_checkpoint=True),
    "save_on_each_node": _refused({}, save_on_each_node=True),
    "config_without_fsdp": _refused({}, config=None, fsdp_config={"version": 2}),
    "callback_without_fsdp": _refused({}, config=None),
    "plugin_checkpointing": _refused(
        {"config": FSDPConfig(precision="fp32", activation_checkpointing="full")},
        config=None,
        fsdp=True,
        fsdp_config={"activation_checkpointing": True},
        callback=None,
    ),
    "typed_twice": _refused({}, config=_OFF, gradient_checkpointing=True),
    "unknown_key": _refused({}, config=None, fsdp=True, fsdp_config={"reshard_after_foward": True}),
}

CASES = {
    **{
        function.__name__: function
        for function in (
            evaluate_and_predict_before_train,
            train_without_evaluating,
            model_init,
            two_train_calls,
            uneven_last_batches,
            generate_with_different_lengths,
            seq2seq_with_generation,
            sync_each_batch_or_deferred,
            classification_head_smaller_than_the_world,
            optimizer_built_before_with_empty_shards,
            weights_on_meta_except_on_rank_0,
            lora_differs_between_replicas,
            odd_structures,
            audit_files_and_table,
            audit_fails_when_a_parameter_is_whole,
            audit_fails_when_nothing_is_sharded,
            audit_fails_on_another_policy,
            audit_fails_when_replicas_differ,
            audit_fails_on_a_foreign_optimizer,
            parameter_without_gradient,
            warm_up_from_zero_is_no_finding,
            callback_added_too_late,
            wrap_callable,
            plain_loop,
            different_models_are_refused,
            mesh_sizes_that_do_not_multiply,
        )
    },
    "label_smoothing": _with_arguments(label_smoothing_factor=0.1),
    "neftune": _with_arguments(neftune_noise_alpha=5.0),
    "plain": _with_arguments(),
    "prefetch": lambda rank, world_size: {
        "losses": train(Run(sharding={"forward_prefetch": 2, "backward_prefetch": 2}), world_size)["losses"]
    },
    "dropout_full": _dropout_pair("full"),
    "dropout_lora": _dropout_pair("lora"),
    "save_full": _save("full", "auto", "bfloat16", "full"),
    "save_sharded": _save("sharded", "float32", "bfloat16", "full"),
    "save_lora_sharded": _save("sharded", "auto", "bfloat16", "lora"),
    "nan_loss_at_first_step": _nan_loss(1),
    "nan_loss_later": _nan_loss(3),
    **REFUSALS,
}
