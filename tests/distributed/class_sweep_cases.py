"""One case for every causal language model class: units, a training step, saving and loading, against one process.

A case never raises for a fault of the class: it returns how far it came and why it stopped, so that one spawn can run
all classes. The unsharded twin is trained in the same process, on the whole batch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp import FSDPConfig, apply_fsdp
from hf_fsdp.errors import HfFsdpError
from hf_fsdp.sharding.audit import audit_sharding
from tests.distributed.training import whole
from tests.small_configs import VOCABULARY, build_small, causal_lm_classes

# A multiple of every family's chunk and axis lengths.
NUM_TOKENS = 16
ROWS_PER_RANK = 2
LEARNING_RATE = 0.1
MAX_PARAMETERS = 20_000_000
GRANULARITIES = ("layer", "attention_and_mlp")


def sweep_case(class_name: str, model_type: str, rank: int, world_size: int) -> dict[str, Any]:
    """Take a class through all stages under both granularities."""
    row: dict[str, Any] = {"class": class_name}
    with warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        try:
            model = _build(class_name, model_type)
            row["num_parameters"] = sum(parameter.numel() for parameter in model.parameters())
            if row["num_parameters"] > MAX_PARAMETERS:
                return {**row, "upstream": f"{row['num_parameters'] / 1e6:.0f}M parameters at the smallest found"}
            twin = train_twin(copy.deepcopy(model), _batch(model, world_size))
        except Exception as error:
            return {**row, "upstream": _short(error)}
        row["loss"] = twin["loss"]
        for granularity in GRANULARITIES:
            row[granularity] = _run(model, granularity, twin, rank, world_size)
    return row


def _run(unsharded: nn.Module, granularity: str, twin: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"reached": "trains unsharded"}
    model = copy.deepcopy(unsharded)
    try:
        config = FSDPConfig(precision="fp32", wrap={"granularity": granularity})
        applied = apply_fsdp(model, config)
        audit_sharding(model)
        kinds = Counter(unit.kind for unit in applied.plan.units)
        found |= {"units": dict(kinds), "num_blocks": len(applied.plan.blocks), "notes": list(applied.plan.notes)}
        found["num_local"] = sum(_local(parameter) for parameter in model.parameters())
        found["unsharded"] = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        found["reached"] = "units"
        found |= train_sharded(model, twin, rank, world_size)
        found["reached"] = "step"
        if granularity == "layer":
            found |= save_and_load(model, copy.deepcopy(unsharded), rank)
            found["reached"] = "loads"
    except HfFsdpError as error:
        found["refused"] = _short(error)
    except Exception as error:
        found["failed"] = _short(error)
        found["traceback"] = traceback.format_exc()[-3000:]
    _agree_or_die()
    return found


def train_twin(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One step of SGD in one process on the whole batch."""
    model.train()
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    norm = torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm()
    return {"loss": loss.item(), "gradients": gradients, "weights": weights, "norm": norm.item()}


def train_sharded(model: nn.Module, twin: dict[str, Any], rank: int, world_size: int) -> dict[str, float]:
    """The same step on this rank's rows; the largest errors against the twin."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batch = _batch(model, world_size)
    rows = {name: value.chunk(world_size)[rank] for name, value in batch.items()}
    loss = model(**rows).loss
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    worst = 0.0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            expected = twin["gradients"].get(name)
            actual = whole(parameter.grad)
            error = actual if expected is None else actual - expected
            worst = max(worst, error.double().norm().item() / twin["norm"])
    optimizer.step()
    errors = [
        (whole(parameter) - twin["weights"][name]).double().norm().item()
        for name, parameter in model.named_parameters()
    ]
    return {
        "loss_error": abs(mean.item() / world_size - twin["loss"]),
        "gradient_error": worst,
        "weight_error": max(errors),
    }


def save_and_load(model: Any, unsharded: Any, rank: int) -> dict[str, list[str]]:
    """Save on all ranks, load in one process.

    Returns:
        Names of tensors that are not the same to the bit, and names in the files that one process would not write.
    """
    weights = {name: whole(value).clone() for name, value in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:  # only rank 0 writes
        model.save_pretrained(folder)
        if rank != 0:
            return {"differs_after_load": [], "other_names": []}
        unsharded.save_pretrained(other)
        assert (Path(folder) / "config.json").is_file()
        loaded = _original_class(model).from_pretrained(folder).state_dict()
        expected, again = unsharded.state_dict(), type(unsharded).from_pretrained(other).state_dict()
        return {
            "differs_after_load": _differing(weights, loaded),
            "differs_in_one_process": _differing(expected, again),
            "other_names": sorted(_saved_names(folder) ^ _saved_names(other)),
        }


def _differing(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> list[str]:
    return sorted(name for name in {*expected, *actual} if not _equal(expected.get(name), actual.get(name)))


def _saved_names(folder: str) -> set[str]:
    return {name for file in Path(folder).glob("*.safetensors") for name in load_file(file)}


def _original_class(model: Any) -> Any:
    return next(cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models"))


def _equal(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is not None and right is not None and torch.equal(left, right)


def _build(class_name: str, model_type: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_small(class_name, model_type).float()
    torch.manual_seed(0)
    with torch.no_grad():  # some classes leave parts of themselves uninitialised, some initialise them to zero
        for parameter in model.parameters():
            if parameter.is_floating_point() and (parameter.dim() > 1 or not torch.isfinite(parameter).all()):
                parameter.copy_(torch.randn(parameter.shape) * 0.05)
    return model


def _batch(model: nn.Module, world_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = ROWS_PER_RANK * world_size
    config = getattr(model, "config", None)
    num_codebooks = getattr(config, "num_codebooks", None) if "Musicgen" in type(model).__name__ else None
    if num_codebooks:  # every codebook is a row of its own, and the labels are not
        ids = torch.randint(3, 90, (rows, NUM_TOKENS, num_codebooks), generator=generator)
        return {"input_ids": ids.transpose(1, 2).reshape(-1, NUM_TOKENS), "labels": ids}
    ids = torch.randint(3, VOCABULARY - 2, (rows, NUM_TOKENS), generator=generator)
    pixels = torch.randn(rows, 3, 16, 16, generator=generator)
    images = {"pixel_values": pixels} if type(model).__name__ == "GitForCausalLM" else {}  # its loss wants one
    return {"input_ids": ids, "labels": ids.clone(), **images}


def _local(parameter: torch.Tensor) -> int:
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


def _agree_or_die() -> None:
    """Leave the process when ranks went different ways: no later case could be trusted."""
    from hf_fsdp.sharding.mesh import agree_all

    agree_all("here")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield


CASES: dict[str, Callable[[int, int], dict[str, Any]]] = {
    name: functools.partial(sweep_case, name, model_type) for name, model_type in causal_lm_classes().items()
}
