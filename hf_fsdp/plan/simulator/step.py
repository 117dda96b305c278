"""One optimizer step of a job, run on fake tensors by our own sharding: what it held and did, phase by phase."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_fsdp.config.schema import CompileConfig
from hf_fsdp.plan.job import Job
from hf_fsdp.plan.simulator.attention import rows_are_packed
from hf_fsdp.plan.simulator.batch import make_batch
from hf_fsdp.plan.simulator.build import build_model, materialize
from hf_fsdp.plan.simulator.depth import Tower
from hf_fsdp.plan.simulator.device import GPU, simulated_ranks
from hf_fsdp.plan.simulator.four_bits import state_tensors
from hf_fsdp.plan.simulator.fused_loss import kernels_of_gpu
from hf_fsdp.plan.simulator.optimizer import ShardOptimizer
from hf_fsdp.plan.simulator.phases import HEAD, START, watch_phases
from hf_fsdp.plan.simulator.picture_values import MAX_KNOWN_VALUES, stand_in_for_values
from hf_fsdp.plan.simulator.repeats import REPEATS
from hf_fsdp.plan.simulator.rope import hold_frequencies
from hf_fsdp.plan.simulator.tracker import ROUNDING_BYTES, Tracker
from hf_fsdp.policies.precision import resolve_precision
from hf_fsdp.sharding.apply import AppliedSharding, apply_fsdp
from hf_fsdp.torch_private import fake_values, known_values

CLIP, OPTIMIZER = "clip", "optimizer"


@dataclass(frozen=True)
class Step:
    """A finished step.

    Args:
        tracker: the log.
        model: sharded.
        optimizer: with its state.
        applied: what sharding did; None without.
        num_events_before: of the log, what was there before the step began.
    """

    tracker: Tracker
    model: nn.Module
    optimizer: ShardOptimizer
    applied: AppliedSharding | None
    num_events_before: int


def run_step(job: Job, depths: dict[str, int], towers: Sequence[Tower]) -> Step:
    """Build, shard and step the model of `job` with so many layers, in this process.

    Raises:
        HfFsdpError: the model or the settings cannot be sharded; the same errors as in training.
    """
    device = GPU if job.device == "gpu" and is_sharded(job) else "cpu"  # autocast is not known on the other
    table = resolve_precision(job.fsdp.precision)
    model = build_model(job, depths, list(towers), table)
    with (
        simulated_ranks(job.world_size, job.fsdp.sharding, device) as mesh,
        fake_values(),
        known_values(MAX_KNOWN_VALUES),
        REPEATS,
    ):
        materialize(model, device)
        hold_frequencies(model)
        applied = None
        if is_sharded(job):
            # No graph can be compiled for a device that is not there: blocks are simulated as if compile were off.
            applied = apply_fsdp(model, dataclasses.replace(job.fsdp, compile=CompileConfig()), mesh)
        elif job.fsdp.activation_checkpointing.mode == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        stand_in_for_values(job, model, device, towers, depths)
        optimizer = ShardOptimizer(job.optimizer, model, foreach=job.device == "gpu")
        gc.collect()
        tracker = Tracker(device, ROUNDING_BYTES if job.device == "gpu" else 1)
        _hold_state(tracker, model, optimizer)
        num_before = len(tracker.events)
        watch_phases(model, tracker, towers, depths)
        needs_mask = job.batch.packed and not job.attention.startswith("flash")
        # Backward in this thread: how constants are made under fake tensors is known to each thread for itself, and a
        # recomputed layer that makes one (Gemma 3n) would end the process in a thread of the device.
        one_thread = torch.autograd.set_multithreading_enabled(False)
        with tracker, rows_are_packed(needs_mask), kernels_of_gpu(job.device == "gpu"), one_thread:
            _step(job, model, optimizer, tracker, device)
        return Step(tracker, model, optimizer, applied, num_before)


def is_sharded(job: Job) -> bool:
    """Return whether the model is cut; a single process trains it whole, as DDP does on each of many."""
    return job.strategy == "fsdp" and job.world_size > 1


def _hold_state(tracker: Tracker, model: nn.Module, optimizer: ShardOptimizer) -> None:
    tracker.hold(model.parameters(), "parameters")
    tracker.hold((getattr(holder, name) for holder, name in state_tensors(model)), "parameters")
    buffers = list(model.buffers())
    buffers += [value for module in model.modules() for value in vars(module).values() if _is_tensor(value)]
    tracker.hold(buffers, "buffers")
    tracker.hold((value for _, value in optimizer.state), "optimizer")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def _step(job: Job, model: nn.Module, optimizer: ShardOptimizer, tracker: Tracker, device: str) -> None:
    """What Trainer does between two steps, as far as it makes tensors."""
    sync_each = job.fsdp.sharding.sync_each_batch
    count = simulated_micro_batches(job)
    tracker.phase = f"forward: {START}"
    # Trainer counts the tokens of a step before its first forward: the batches of all micro-batches are on the device
    # until the step is over. Those that are not simulated lie in one tensor: pictures may be hundreds of MiB.
    batches = [make_batch(job, model, device) for _ in range(count)]
    held = [value for inputs in batches for value in inputs.values() if isinstance(value, torch.Tensor)]
    of_one = sum(value.nbytes for value in batches[0].values() if isinstance(value, torch.Tensor))
    held.append(torch.empty((job.num_micro_batches - count) * of_one, dtype=torch.uint8, device=device))
    tracker.hold(held, "inputs")
    for index, inputs in enumerate(batches):
        tracker.micro_batch = index
        tracker.phase = f"forward: {START}"
        if not sync_each and is_sharded(job):
            model.set_requires_gradient_sync(index == count - 1)  # type: ignore[operator]
        loss = _compute_loss(job, model, inputs, device)
        tracker.phase = f"backward: {HEAD}"
        loss.backward()
        del loss
    tracker.forget(optimizer.forget_unused())
    optimizer.take_gradients()
    tracker.hold(optimizer.gradients, "gradients")
    tracker.phase = CLIP
    if job.max_grad_norm is not None:
        optimizer.clip(job.max_grad_norm)
    tracker.phase = OPTIMIZER
    optimizer.step()


def simulated_micro_batches(job: Job) -> int:
    """Return how many forwards are run: the first, and one that meets the gradients of others."""
    return min(job.num_micro_batches, 2)


def _compute_loss(job: Job, model: nn.Module, inputs: Mapping[str, Any], device: str) -> torch.Tensor:
    num_items = torch.ones((), dtype=torch.long, device=device)
    if not is_sharded(job):
        with _autocast(job, device):
            if job.loss == "chunked":
                return -model(**inputs, fused_lm_head=True).log_probs.sum() / num_items
            return model(**inputs, num_items_in_batch=num_items).loss.float() * job.world_size
    if job.loss == "chunked":
        outputs = model(**inputs, fused_lm_head=True)
        loss = -outputs.log_probs.sum() / num_items
    else:
        loss = model(**inputs, num_items_in_batch=num_items).loss
    return loss * job.world_size


def _autocast(job: Job, device: str) -> Any:
    """What Accelerate puts around the forward of a model that is not sharded."""
    table = resolve_precision(job.fsdp.precision)
    return torch.autocast(device, dtype=table.compute, enabled=table.compute is not table.storage)
