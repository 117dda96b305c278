"""All ranks start from rank 0's weights and buffers, proven by checksums.

`fully_shard` cuts each rank's own copy: if the copies differ (a freshly initialised head, unseeded LoRA, a parameter
that RAM-efficient loading left on meta), the sharded model is a patchwork of them and hybrid replicas drift apart,
without an error. So before a unit is sharded its tensors are hashed on every rank, and those that differ from rank 0
are replaced by rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from hf_fsdp.errors import ShardingError
from hf_fsdp.policies.packed_weights import quantization_structure
from hf_fsdp.sharding.mesh import agree_all, agreement_group, is_simulated


@dataclass
class AgreementReport:
    """What was compared and what was replaced by rank 0's values."""

    num_tensors: int = 0
    replaced: list[str] = field(default_factory=list)
    checksum: str = ""


def checksum(tensor: torch.Tensor) -> str:
    """Return a 64-bit hash of a tensor's bytes, dtype and shape; `meta` for one without values."""
    if tensor.is_meta:
        return "meta"
    flat = tensor.detach().cpu().contiguous().reshape(-1)  # one element may keep a stride that no view can take
    digest = xxhash.xxh3_64(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_same_structure(model: nn.Module) -> None:
    """Refuse to shard models that are not the same model on every rank; collective.

    Raises:
        ShardingError: on all ranks alike, naming the first difference.
    """
    mine = {
        name: (tuple(tensor.shape), str(tensor.dtype), bool(tensor.requires_grad))
        for name, tensor in _named_tensors(model)
    }
    mine.update(quantization_structure(model))
    everyone = agree_all(mine)
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        name = next(
            name for name in [*everyone[0], *theirs] if everyone[0].get(name, "absent") != theirs.get(name, "absent")
        )
        raise ShardingError(
            f"the model is not the same on every rank: {name} is {_describe(everyone[0].get(name))} on rank 0 "
            f"and {_describe(theirs.get(name))} on rank {rank}",
            fix="build the model by the same code on every rank: no `if rank == 0` around resizing or adapters",
        )


def agree_on_tensors(tensors: Mapping[str, tuple[Any, str]], report: AgreementReport) -> None:
    """Give every rank rank 0's values of `tensors`; collective, and called in the same order on every rank.

    Args:
        tensors: name -> (module or quantization state that holds it, attribute). Meta tensors get storage on the CPU.
        report: counts are added to it.
    """
    if is_simulated():  # tensors without values, on one rank
        return
    names = list(tensors)
    hashes = agree_all([checksum(_read(*tensors[name])) for name in names])
    differing = [name for index, name in enumerate(names) if any(other[index] != hashes[0][index] for other in hashes)]
    missing = [name for index, name in enumerate(names) if hashes[0][index] == "meta"]
    if missing:
        raise ShardingError(
            f"{len(missing)} tensors have no values on rank 0 (still on the meta device): {', '.join(missing[:3])}",
            fix="load the weights on rank 0 at least: from_pretrained(...), or to_empty(device='cpu') and initialise",
        )
    for name in differing:
        module, attribute = tensors[name]
        tensor = _read(module, attribute)
        if tensor.is_meta:
            tensor = _materialize(module, attribute)
        elif not isinstance(tensor, nn.Parameter):
            tensor = tensor.clone(memory_format=torch.contiguous_format)  # an expanded buffer cannot be written to
            setattr(module, attribute, tensor)
        _broadcast(tensor)
    report.num_tensors += len(names)
    report.replaced += differing
    after = {name: checksum(_read(*tensors[name])) for name in differing}
    combined = xxhash.xxh3_64(report.checksum.encode())
    for index, name in enumerate(names):
        combined.update((after.get(name) or hashes[0][index]).encode())
    report.checksum = combined.hexdigest()


def prove_agreement(report: AgreementReport) -> None:
    """Compare the combined checksum of all tensors over all ranks; collective.

    Raises:
        ShardingError: ranks still differ, which means that a broadcast did not arrive.
    """
    checksums = agree_all(report.checksum)
    if len(set(checksums)) != 1:
        raise ShardingError(
            f"initial weights differ between ranks after they were agreed on: checksums {checksums}",
            fix="do not change the model from another thread while it is being prepared",
        )


def _read(module: Any, attribute: str) -> torch.Tensor:
    return getattr(module, attribute)


def _materialize(module: Any, attribute: str) -> torch.Tensor:
    """Give a meta tensor storage, in place for everyone who holds it."""
    tensor = _read(module, attribute)
    empty = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        # `.data` cannot go from meta to CPU; swapping keeps the object, so ties and optimizers stay right.
        torch.utils.swap_tensors(tensor, nn.Parameter(empty, requires_grad=tensor.requires_grad))
        return tensor
    setattr(module, attribute, empty)
    return empty


def _broadcast(tensor: torch.Tensor) -> None:
    values = tensor.detach()
    on_cpu = values.cpu().contiguous()
    dist.broadcast(on_cpu.view(-1).view(torch.uint8), src=0, group=agreement_group())
    with torch.no_grad():
        values.copy_(on_cpu)


def _named_tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _describe(entry: tuple[tuple[int, ...], str, bool] | None) -> str:
    if entry is None:
        return "absent"
    shape, dtype, trained = entry
    return f"{list(shape)} {dtype.removeprefix('torch.')}{'' if trained else ', frozen'}"
