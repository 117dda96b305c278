"""What of a run's data is drawn at random, so that a resumed run draws it again: orders of samples, and batches.

A sampler that draws its order from torch's global generator has another order on every rank once dropout has drawn
differently there, and no order that a resumed run could find again. Here its generator is its own, seeded by the
epoch, as Accelerate does for `RandomSampler` alone.

Building a batch may draw too: a collator's masks, a dataset's augmentation. Accelerate's loader has built one batch
more than it gave, so when a step is saved its successor's batch exists, from numbers that were drawn before that step.
To build it again, a resumed run needs the generators as they were then. The loader's workers, if any, draw for
themselves and are not reached from here.

Pinned by `tests/unit/test_checkpoint_seams.py`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler, SkipBatchSampler
from transformers import Trainer, TrainingArguments

from hf_fsdp.checkpoint.random_state import RandomState, get_generators, set_generators
from hf_fsdp.integrations.accelerate import replace_method

_BEFORE, _SEED = "_hf_fsdp_before_next_batch", "_hf_fsdp_seed"
Loader = Any  # a DataLoaderShard or a DataLoaderDispatcher


def install_data_draws_seams() -> None:
    """Put the seams in place; calling it again changes nothing."""
    replace_method(DataLoaderShard, "__iter__", _iterate)
    replace_method(DataLoaderDispatcher, "__iter__", _iterate)


@contextlib.contextmanager
def nothing_watched_after() -> Iterator[None]:
    """At the end of a training, forget its data."""
    global _trained
    try:
        yield
    finally:
        _trained = None
        await_batch(None)


# -- orders of samples ------------------------------------------------------------------------------------------------


def watch_training_data(loader: Any, args: TrainingArguments) -> None:
    """Watch what is drawn for a training, from before its first epoch on.

    Its sampler draws each epoch's order from that epoch's seed, the same on all ranks: of a sampler that was given a
    generator, the generator's own seed counts, and `data_seed`, or else `seed`, otherwise.
    """
    global _trained
    _trained = getattr(loader, "dataset", None)
    sampler = _sampler_of(loader)
    if hasattr(sampler, "generator") and not isinstance(sampler, SeedableRandomSampler):
        generator, seed = sampler.generator, args.seed if args.data_seed is None else args.data_seed
        setattr(sampler, _SEED, seed if generator is None else generator.initial_seed())


def _sampler_of(loader: Any) -> Any:
    sampler = getattr(loader, "batch_sampler", None)
    while (inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)) is not None:
        sampler = inner
    return sampler


# -- batches ----------------------------------------------------------------------------------------------------------


@dataclass
class BatchToRebuild:
    """The first batch that a resumed run builds, while the generators are as they were when it was built before.

    Args:
        before: the generators before it was built.
        after: the generators when the checkpoint was saved, for everything after it.
        is_done: whether it was built.
    """

    before: RandomState
    after: RandomState
    is_done: bool = False


# The generators belong to the process, so does what is to be done with them.
_awaited: BatchToRebuild | None = None
# The dataset of the training that goes on: an evaluation's loaders draw for themselves.
_trained: Any = None


def generators_before_next_batch(trainer: Trainer) -> RandomState | None:
    """Return the generators as they were before the batch was built that training takes next; None: it is not built."""
    for loader in trainer.accelerator.gradient_state.dataloader_references:
        if loader is not None and loader.dataset is _trained:
            return getattr(loader, _BEFORE, None)
    return None


def await_batch(batch: BatchToRebuild | None) -> None:
    """Let the next loader that leaves out batches of before rebuild `batch`; None takes that back."""
    global _awaited
    _awaited = batch


def _iterate(original: Callable[[], Iterator[Any]], loader: Loader) -> Iterator[Any]:
    if _trained is None or loader.dataset is not _trained:
        yield from original()
        return
    sampler = _sampler_of(loader)
    if (seed := getattr(sampler, _SEED, None)) is not None:
        sampler.generator = sampler.generator or torch.Generator()
        sampler.generator.manual_seed(seed + loader.iteration)
    own, iterator = loader.base_dataloader, original()
    loader.base_dataloader = _Watched(own, loader)
    try:
        first = next(iterator)  # which asks the base for its iterator
    except StopIteration:
        return
    finally:
        loader.base_dataloader = own
    yield first
    yield from iterator


class _Watched:
    """A loader that notes the generators before it builds a batch."""

    def __init__(self, loader: Any, owner: Loader):
        self._loader, self._owner = loader, owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        # Asked for on every rank, though of a dispatcher only rank 0 goes on.
        return self._build(iter(self._loader))

    def _build(self, iterator: Iterator[Any]) -> Iterator[Any]:
        global _awaited
        rebuilt, owner = None, self._owner
        if owner.skip_batches or isinstance(self._loader.batch_sampler, SkipBatchSampler):
            rebuilt, _awaited = _awaited, None
        # A dispatcher builds a batch for every process before it gives each of them its own.
        is_shared = isinstance(owner, DataLoaderDispatcher) and not owner.split_batches
        num_built_together = owner.state.num_processes if is_shared else 1
        first = owner.skip_batches * num_built_together
        for index in itertools.count():
            if rebuilt is not None and index == first:
                set_generators(rebuilt.before)
            if index % num_built_together == 0:
                setattr(owner, _BEFORE, get_generators(with_device=False))
            try:
                batch = next(iterator)
            except StopIteration:
                return
            if rebuilt is not None and index == first + num_built_together - 1:
                set_generators(rebuilt.after)
                rebuilt.is_done = True
            yield batch
