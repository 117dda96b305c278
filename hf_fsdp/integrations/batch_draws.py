"""What building a batch draws at random, such as a collator's masks or a dataset's augmentation.

Accelerate's loader has built one batch more than it gave, so when a step is saved its successor's batch exists, from
random numbers that were drawn before that step. To build it again, a resumed run needs the generators as they were
then. The loader's workers, if any, draw for themselves and are not reached from here.

Pinned by `tests/unit/test_checkpoint_seams.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from accelerate.data_loader import DataLoaderShard, SkipBatchSampler
from transformers import Trainer

from hf_fsdp.checkpoint.random_state import RandomState, get_generators, set_generators
from hf_fsdp.integrations.accelerate import active_backend, replace_method

_BEFORE = "_hf_fsdp_before_last_batch"


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


def install_batch_draws_seam() -> None:
    """Put the seam in place; calling it again changes nothing."""
    replace_method(DataLoaderShard, "__iter__", _iterate)


def generators_before_next_batch(trainer: Trainer) -> RandomState | None:
    """Return the generators as they were before the batch was built that training takes next; None: it is not built."""
    trained = trainer.callback_handler.train_dataloader
    for loader in trainer.accelerator.gradient_state.dataloader_references:
        if loader is not None and trained is not None and loader.dataset is trained.dataset:
            return getattr(loader, _BEFORE, None)
    return None


def await_batch(batch: BatchToRebuild | None) -> None:
    """Let the next loader that leaves out batches of before rebuild `batch`; None takes that back."""
    global _awaited
    _awaited = batch


def _iterate(original: Callable[[], Iterator[Any]], loader: DataLoaderShard) -> Iterator[Any]:
    if active_backend() is None:
        yield from original()
        return
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

    def __init__(self, loader: Any, owner: DataLoaderShard):
        self._loader, self._owner = loader, owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        global _awaited
        rebuilt, iterator = None, iter(self._loader)
        if self._owner.skip_batches or isinstance(self._loader.batch_sampler, SkipBatchSampler):
            rebuilt, _awaited = _awaited, None
        for index in itertools.count():
            is_the_one = rebuilt is not None and index == self._owner.skip_batches
            if rebuilt is not None and is_the_one:
                set_generators(rebuilt.before)
            setattr(self._owner, _BEFORE, get_generators(with_device=False))
            try:
                batch = next(iterator)
            except StopIteration:
                return
            if rebuilt is not None and is_the_one:
                set_generators(rebuilt.after)
                rebuilt.is_done = True
            yield batch
