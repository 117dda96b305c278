"""Loops of a person's own, with Accelerate and without a Trainer: `build_accelerator`, and the rest unchanged."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from hf_fsdp import FSDPConfig, apply_fsdp, build_accelerator
from hf_fsdp.errors import HfFsdpError
from hf_fsdp.sharding.apply import get_applied_sharding
from hf_fsdp.sharding.mesh import agree_all
from tests.distributed.tiny_models import VOCABULARY, build_model
from tests.distributed.training import whole

CONFIG = FSDPConfig(precision="fp32")


def rows(num_rows: int = 24) -> Any:
    return list(torch.randint(3, VOCABULARY, (num_rows, 10), generator=torch.Generator().manual_seed(3)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def run_steps(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any = None) -> dict[str, Any]:
    """One pass over the loader: the loop that Accelerate's documentation shows."""
    losses, norms = [], []
    gradients: dict[str, torch.Tensor] = {}
    for ids in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(whole(accelerator.clip_grad_norm_(model.parameters(), 0.5))))
                if not gradients:
                    gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
    return {"losses": losses, "norms": norms, "gradients": gradients}


def look_at(model: nn.Module) -> dict[str, Any]:
    parameters = list(model.parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return {
        "sharded": all(isinstance(parameter, DTensor) for parameter in parameters),
        "num_local": sum(part.numel() for part in local),
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "weights": {name: whole(parameter).clone() for name, parameter in model.named_parameters()},
    }


def _loop(world_size: int, *, shard_first: bool = False, config: FSDPConfig = CONFIG) -> dict[str, Any]:
    with workspace() as (_, printed):
        accelerator = build_accelerator(config, gradient_accumulation_steps=2)
        model: Any = build_model("llama", tied=True)
        if shard_first and world_size > 1:
            apply_fsdp(model, CONFIG)
        optimizer = sgd(model)
        # Accelerate steps a scheduler once for each process, so that schedules made for one process keep their length.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step // world_size))
        loader: Any = DataLoader(rows(), batch_size=4 // world_size)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        result = run_steps(accelerator, model, optimizer, loader, scheduler)
        evaluated = accelerator.prepare(DataLoader(rows(5), batch_size=4 // world_size))
        model.eval()
        with torch.no_grad():
            seen = [accelerator.gather_for_metrics(model(input_ids=ids).logits[:, -1]) for ids in evaluated]
        state = accelerator.get_state_dict(model)
        return {
            **result,
            **look_at(model),
            "logits": torch.cat(seen),
            "saved_names": sorted(state),
            "rate": optimizer.param_groups[0]["lr"],
            "printed": printed.getvalue(),
        }


def loop(rank: int, world_size: int) -> dict[str, Any]:
    return _loop(world_size)


def loop_sharded_before(rank: int, world_size: int) -> dict[str, Any]:
    return _loop(world_size, shard_first=True)


def loop_that_defers(rank: int, world_size: int) -> dict[str, Any]:
    """Gradients are reduced once an update instead of once a micro-batch."""
    return _loop(world_size, config=FSDPConfig(precision="fp32", sharding={"sync_each_batch": False}))


def two_models(rank: int, world_size: int) -> dict[str, Any]:
    """Two trained models, their optimizers the other way round, and a frozen teacher; saved, spoiled, loaded."""
    with workspace() as (folder, _):
        accelerator = build_accelerator(CONFIG)
        first, second = build_model("llama", tied=False), build_model("qwen3", tied=True)
        teacher: Any = build_model("llama", tied=False)
        loader: Any = DataLoader(rows(8), batch_size=4 // world_size)
        prepared = accelerator.prepare(first, second, sgd(second), sgd(first), loader)
        first, second, second_optimizer, first_optimizer, loader = prepared
        teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
        results = {
            "first": run_steps(accelerator, first, first_optimizer, loader),
            "second": run_steps(accelerator, second, second_optimizer, loader),
        }
        for name, model in (("first", first), ("second", second), ("teacher", teacher)):
            results.setdefault(name, {}).update(look_at(model))
        momenta = _momenta(first_optimizer)
        accelerator.save_state(f"{folder}/state")
        run_steps(accelerator, first, first_optimizer, loader)
        run_steps(accelerator, second, second_optimizer, loader)
        changed = not _equal(look_at(first)["weights"], results["first"]["weights"])
        accelerator.load_state(f"{folder}/state")
        back = all(
            _equal(look_at(m)["weights"], results[n]["weights"]) for n, m in (("first", first), ("second", second))
        )
        return {
            **results,
            "changed": changed,
            "back": back,
            "momenta_back": _equal(momenta, _momenta(first_optimizer)),
            "teacher_is_frozen": not any(p.requires_grad for p in teacher.parameters()) and not teacher.training,
        }


def _momenta(optimizer: Any) -> dict[str, torch.Tensor]:
    states = optimizer.optimizer.state.values()
    return {str(index): whole(state["momentum_buffer"]).clone() for index, state in enumerate(states)}


def _equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _resumed(world_size: int, format: str) -> dict[str, Any]:
    """Two more passes from a saved state give the same weights to the bit as going on."""
    with workspace() as (folder, _):
        accelerator = build_accelerator(FSDPConfig(precision="fp32", checkpoint={"format": format}))
        model: Any = build_model("llama", tied=False)
        loader: Any = DataLoader(rows(8), batch_size=4 // world_size)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), loader)
        run_steps(accelerator, model, optimizer, loader)
        accelerator.save_state(f"{folder}/state")
        run_steps(accelerator, model, optimizer, loader)
        straight = look_at(model)["weights"]
        accelerator.load_state(f"{folder}/state")
        run_steps(accelerator, model, optimizer, loader)
        resumed = look_at(model)
        return {"equal": _equal(straight, resumed["weights"]), "sharded": resumed["sharded"]}


def resumed_full(rank: int, world_size: int) -> dict[str, Any]:
    return _resumed(world_size, "full")


def resumed_sharded(rank: int, world_size: int) -> dict[str, Any]:
    return _resumed(world_size, "sharded")


def refusals(rank: int, world_size: int) -> dict[str, Any]:
    """What cannot work, and the advice followed."""
    refused: dict[str, str] = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
        except HfFsdpError as error:
            refused[name] = str(error)

    with workspace():
        accelerator = build_accelerator(CONFIG)
        first, second = build_model("llama", tied=False), build_model("llama", tied=False)
        both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        attempt("one optimizer", lambda: accelerator.prepare(first, second, both))
        untouched = get_applied_sharding(first) is None
        accelerator.prepare(first, second, sgd(first), sgd(second))
        attempt("plugin", lambda: build_accelerator(CONFIG, fsdp_plugin=accelerator.state.fsdp_plugin))
        attempt("precision", lambda: build_accelerator(CONFIG, mixed_precision="bf16"))
        attempt("fp8", lambda: build_accelerator(CONFIG, mixed_precision="fp8"))
        other: Any = build_model("llama", tied=False)
        apply_fsdp(other, FSDPConfig(precision="bf16-mixed"))
        attempt("other precision", lambda: accelerator.prepare(other, sgd(other)))
        model: Any = build_model("llama", tied=False)
        model, optimizer = accelerator.prepare(model, sgd(model))
        with torch.no_grad():
            model.lm_head.weight.fill_(float("nan"))
        batches = [torch.full((2, 8), 5)]
        attempt("not finite", lambda: run_steps(accelerator, model, optimizer, batches))
        return {"refused": refused, "untouched": untouched, "sharded": get_applied_sharding(first) is not None}


@contextlib.contextmanager
def workspace() -> Iterator[tuple[str, io.StringIO]]:
    """One folder for all ranks, and what is printed meanwhile."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as own, contextlib.redirect_stdout(printed):
        yield agree_all(own)[0], printed
        agree_all("done")


CASES = {
    function.__name__: function
    for function in (loop, loop_sharded_before, loop_that_defers, two_models, resumed_full, resumed_sharded, refusals)
}
TWINS = ["loop", "two_models"]
