"""Runs in which blocks are recomputed, partly kept, moved to host memory and compiled, on any number of processes."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Trainer, TrainingArguments

from hf_fsdp import FSDPCallback, FSDPConfig, apply_fsdp, audit_sharding
from hf_fsdp.sharding.apply import get_applied_sharding
from tests.distributed.tiny_models import build_model
from tests.distributed.training import QUIET_ARGUMENTS, Run, build_dataset, train, whole
from tests.unit.small_models import IMAGE_TOKEN, VISION, vision_language_models

AOT = {"blocks": True, "backend": "aot_eager"}
SELECTIVE = {"selective": ["attention", "matmul"]}
IDS = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(5))

# Through Trainer, without dropout: held against one process that keeps everything.
PARITY: dict[str, dict[str, Any]] = {
    "full-inputs_in_host_memory": {"checkpointing": "full", "offload": {"activations": "block_inputs"}},
    "lora-selective": {"method": "lora", "checkpointing": SELECTIVE},
    "saved_tensors_in_host_memory": {"offload": {"activations": "saved_tensors"}, "accumulation": 2},
    "fraction-compiled": {"checkpointing": {"fraction": 0.5}, "compile": AOT},
    "lora-selective-compiled-offloaded": {
        "method": "lora",
        "checkpointing": {"selective": ["matmul"]},
        "compile": AOT,
        "offload": "activations",
    },
    "every2-compiled-offloaded-kept": {
        "checkpointing": {"every": 2},
        "compile": AOT,
        "offload": "activations",
        "reshard": False,
        "family": "gpt2",
    },
}
# With dropout no twin of another batch shape has the same masks: held against the same processes keeping everything.
DROPOUT: dict[str, dict[str, Any]] = {
    "full-selective": {"checkpointing": SELECTIVE},
    "full-every2-offloaded": {"checkpointing": {"every": 2}, "offload": "activations"},
    "full-recomputed-compiled": {"checkpointing": "full", "compile": AOT},
    "lora-recomputed": {"method": "lora", "checkpointing": "full"},
    "lora-selective": {"method": "lora", "checkpointing": SELECTIVE},
    "lora-selective-compiled-offloaded": {
        "method": "lora",
        "checkpointing": SELECTIVE,
        "compile": AOT,
        "offload": "activations",
    },
}


def _parity(row: dict[str, Any]) -> Callable[[int, int], dict[str, Any]]:
    def case(rank: int, world_size: int) -> dict[str, Any]:
        torch._dynamo.reset()
        return train(Run(**row), world_size)

    return case


def dropout(rank: int, world_size: int) -> dict[str, Any]:
    """Gradients of the first step under every mode, for full training and for LoRA."""
    gradients: dict[str, Any] = {}
    for name, row in {"full-none": {}, "lora-none": {"method": "lora"}, **DROPOUT}.items():
        torch._dynamo.reset()
        result = train(Run(dropout=0.2, num_steps=2, **row), world_size)
        gradients[name] = {"gradients": result["gradients"], "losses": result["losses"]}
    return gradients


# -- apply_fsdp -------------------------------------------------------------------------------------------------------


def _step(model: nn.Module, **inputs: Any) -> dict[str, torch.Tensor]:
    """One forward and backward in training; whole gradients by name."""
    inputs = inputs or {"input_ids": IDS, "labels": IDS}
    model.train()
    model.zero_grad()
    torch.manual_seed(11)
    model(**inputs).loss.backward()
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def _sharded(world_size: int, *, dropout: float = 0.0, **sections: Any) -> nn.Module:
    torch._dynamo.reset()
    model = build_model("llama", tied=False, dropout=dropout)
    if world_size > 1:
        apply_fsdp(model, FSDPConfig(**{"precision": "fp32", **sections}))
    return model


GATHERS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": SELECTIVE},
    "inputs_offloaded": {"activation_checkpointing": "full", "offload": "activations"},
    "saved_offloaded": {"offload": "activations"},
    "compiled": {"compile": AOT},
    "full-compiled": {"activation_checkpointing": "full", "compile": AOT},
    "selective-compiled": {"activation_checkpointing": SELECTIVE, "compile": AOT},
}


def gathers(rank: int, world_size: int) -> dict[str, Any]:
    """The number of all-gathers in the second step, and the gradients."""
    found: dict[str, Any] = {}
    for name, sections in GATHERS.items():
        torch._dynamo.utils.counters.clear()
        model = _sharded(world_size, **sections)
        gradients = _step(model)
        # Not `CommDebugMode`: under a mode, torch compiles nothing.
        with mock.patch.object(group, "foreach_all_gather", wraps=group.foreach_all_gather) as gather:
            _step(model)
        found[name] = {
            "count": gather.call_count,
            "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
            "gradients": gradients,
            "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
        }
    return found


NESTED: dict[str, dict[str, Any]] = {
    "norms_fp32": {"precision": {"preset": "bf16-mixed", "keep_norms_fp32": True}},
    "attention_and_mlp": {"wrap": {"granularity": "attention_and_mlp"}},
}


def nested_units(rank: int, world_size: int) -> dict[str, Any]:
    """Gathers inside a recomputed block: every mode gives what plain keeping gives, selective counts as full does."""
    found: dict[str, Any] = {}
    for name, sections in NESTED.items():
        for mode, more in {key: GATHERS[key] for key in ("none", "selective", "inputs_offloaded")}.items():
            model = _sharded(world_size, dropout=0.2, **sections, **more)
            found[f"{name}-{mode}"] = _step(model)
        model = _sharded(world_size, **sections, activation_checkpointing="full", compile=AOT)
        found[f"{name}-compiled"] = _step(model)
        found[f"{name}-uncompiled"] = _step(_sharded(world_size, **sections))
    return found


def held_on_device(rank: int, world_size: int) -> dict[str, Any]:
    """Between forward and backward the device holds no input of a block, and no weight was moved."""
    found: dict[str, Any] = {}
    for name, sections in {"kept": "full", "moved": "full"}.items():
        more = {"offload": {"activations": "block_inputs"}} if name == "moved" else {}
        model: Any = _sharded(world_size, activation_checkpointing=sections, **more)
        inputs: list[StorageWeakRef] = []

        def remember(module: nn.Module, args: Any, inputs: list[StorageWeakRef] = inputs) -> None:
            inputs.append(StorageWeakRef(args[0].untyped_storage()))

        handles = [layer.register_forward_pre_hook(remember) for layer in model.model.layers]
        model.train()
        loss = model(input_ids=IDS, labels=IDS).loss
        found[name] = [reference.expired() for reference in inputs[:3]]
        loss.backward()
        for handle in handles:
            handle.remove()
        applied = get_applied_sharding(model)
        if applied is not None and applied.activations is not None and (store := applied.activations.store):
            found["bytes"] = [store.bytes_moved, store.bytes_returned, store.bytes_held]
    return found


def towers(rank: int, world_size: int) -> dict[str, Any]:
    """LLaVA with only its language model recomputed."""
    torch.manual_seed(0)
    model = vision_language_models()["llava"]()
    report = ""
    if world_size > 1:
        section = {"towers": ["language"], "fraction": 0.5, "selective": ["matmul"]}
        apply_fsdp(model, FSDPConfig(precision="fp32", activation_checkpointing=section, offload="activations"))
        audit = audit_sharding(model)
        report = f"{audit.num_checkpointed_blocks} of {audit.num_blocks}: {audit.activations}"
    ids = torch.tensor([[1, *[IMAGE_TOKEN] * 4, 9, 10, 11]])
    pixels = torch.randn(1, 3, VISION["image_size"], VISION["image_size"], generator=torch.Generator().manual_seed(2))
    return {"report": report, "gradients": _step(model, input_ids=ids, pixel_values=pixels, labels=ids)}


def everything_together(rank: int, world_size: int) -> dict[str, Any]:
    """Compiled, selective and offloaded: names, evaluation and generation are those of the plain model."""
    plain = build_model("llama", tied=False).eval()
    model: Any = _sharded(world_size, activation_checkpointing=SELECTIVE, compile=AOT, offload="activations")
    _step(model)
    model.eval()
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    with torch.no_grad():
        loss = model(input_ids=IDS, labels=IDS).loss
        expected = plain(input_ids=IDS, labels=IDS).loss
    return {
        "names": list(model.state_dict()) == list(plain.state_dict()),
        "loss": [loss.item(), expected.item()],
        "tokens": torch.equal(model.generate(IDS[:, :4], **options), plain.generate(IDS[:, :4], **options)),
        "report": audit_sharding(model).activations if world_size > 1 else "",
    }


def graphs_in_bf16(rank: int, world_size: int) -> dict[str, Any]:
    """Forward and recompute of all blocks share a graph, though losses run under a mode that the recompute lacks."""
    model = _sharded(world_size, precision="bf16-mixed", activation_checkpointing="full", compile=AOT)
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        gradients = _step(model)
    statistics = dict(torch._dynamo.utils.counters["stats"])
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    expected = _step(_sharded(world_size, precision="bf16-mixed"))
    return {"graphs": statistics["unique_graphs"], "breaks": breaks, "gradients": gradients, "expected": expected}


def inductor(rank: int, world_size: int) -> dict[str, Any]:
    """The compiler that people use, with recomputation; blocks of few kernels, for each costs a run of the C++ one."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
    model.forward = lambda x: functools.reduce(lambda value, layer: layer(value), model.layers, x)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # nothing of an earlier run
        torch._inductor.config.compile_threads = 1  # no pool of processes that import torch
        if world_size > 1:
            config = FSDPConfig(precision="fp32", activation_checkpointing={"selective": ["matmul"]}, compile="blocks")
            apply_fsdp(model, config)
        model.train()
        model(torch.linspace(-1, 1, 64).view(4, 16)).square().sum().backward()
    gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"gradients": gradients, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


# -- Trainer's own switch ---------------------------------------------------------------------------------------------


def torch_compile_argument(rank: int, world_size: int) -> dict[str, Any]:
    """`TrainingArguments(torch_compile=True)`, evaluated before it is trained."""
    return _run_trainer({"torch_compile": True, "torch_compile_backend": "aot_eager"}, {})


def dynamo_in_launch_file(rank: int, world_size: int) -> dict[str, Any]:
    """What `accelerate launch` exports for `dynamo_config: {dynamo_backend: AOT_EAGER}`."""
    return _run_trainer({}, {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER", "ACCELERATE_DYNAMO_USE_FULLGRAPH": "True"})


def _run_trainer(arguments: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    os.environ.update(environment)
    config = FSDPConfig(
        precision="fp32",
        activation_checkpointing={"selective": ["attention", "aten._scaled_dot_product_cudnn_attention"]},
    )
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        args = TrainingArguments(
            output_dir=folder,
            **QUIET_ARGUMENTS,
            max_steps=2,
            per_device_train_batch_size=6,
            **arguments,
            **config.trainer_kwargs(),
        )
        callback = FSDPCallback(config)
        trainer = Trainer(
            model=build_model("llama", tied=False),
            args=args,
            train_dataset=build_dataset(),
            eval_dataset=build_dataset(12),
            callbacks=[callback],
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    assert callback.audit is not None
    return {
        "report": callback.audit.activations,
        "names": list(trainer.model.state_dict()) == list(build_model("llama", tied=False).state_dict()),
        "is_model": type(trainer.model_wrapped).__name__,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "losses": [before, after],
        "printed": printed.getvalue() if dist.get_rank() == 0 else "",
    }


CASES: dict[str, Callable[[int, int], Any]] = {name: _parity(row) for name, row in PARITY.items()}
TWINS = [*PARITY, "towers", "inductor"]
OTHERS = [
    "dropout",
    "gathers",
    "nested_units",
    "held_on_device",
    "towers",
    "everything_together",
    "graphs_in_bf16",
    "torch_compile_argument",
    "dynamo_in_launch_file",
    "inductor",
]
CASES |= {name: globals()[name] for name in OTHERS}
