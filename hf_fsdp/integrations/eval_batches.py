"""The batches of an evaluation: every sample once, and the same number of steps on every rank.

Accelerate evens batches out by repeating samples, which then count twice in a mean; where it does not (sharded
streams, `even_batches=False`), ranks run different numbers of forwards, and under sharding the others wait for ever.
Here a rank that has run out goes on with a batch in which nothing counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard
from torch.utils.data import IterableDataset

from hf_fsdp.errors import IntegrationError
from hf_fsdp.monitor.eval_loss import count_rows, mask_rows, num_real_rows
from hf_fsdp.sharding.mesh import agree_all


class InStepBatches:
    """Iterates a prepared dataloader so that all ranks take equally many steps; everything else is the dataloader's.

    Args:
        dataloader: what Trainer prepared.
        rank: of this process.
        world_size: processes that must stay in step.
        keeps_outputs: outputs are gathered row by row, so ranks cannot have different numbers of rows.

    Raises:
        IntegrationError: on all ranks alike, when outputs are kept and a rank has fewer rows than another.
    """

    def __init__(self, dataloader: Any, *, rank: int, world_size: int, keeps_outputs: bool):
        self._dataloader = dataloader
        self._rank = rank
        self._world_size = world_size
        self._keeps_outputs = keeps_outputs
        self.is_replay = False
        """The batch that was yielded last stands in for none: nothing in it counts."""

    def __getattr__(self, name: str) -> Any:
        if name == "_dataloader":  # of a copy that is still being made
            raise AttributeError(name)
        return getattr(self._dataloader, name)

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        if self._world_size <= 1:
            yield from self._dataloader
            return
        num_steps = self._known_steps()
        iterator = iter(self._dataloader)
        standby: Any = None
        step = 0
        while num_steps is None or step < num_steps:
            batch = next(iterator, None)
            if count_rows(batch) == 0 and isinstance(batch, Mapping):
                batch = None  # a dispatcher leaves a rank an empty slice when there are fewer samples than ranks
            if num_steps is None:
                rows = agree_all(None if batch is None else count_rows(batch))
                if all(count is None for count in rows):
                    return
                self._refuse_uneven_rows(rows, step)
            if batch is not None:
                standby = batch
            if step == 0:
                standby = self._borrow(standby)
            if standby is None:  # sized, and empty on every rank
                return
            self.is_replay = batch is None
            yield mask_rows(standby, 0) if batch is None and isinstance(standby, Mapping) else standby
            step += 1
        for _ in iterator:  # lets the dataloader end its own bookkeeping
            break

    def num_real_rows(self, num_rows: int) -> int:
        """Return how many of the rows of the batch in hand are no repetition of earlier samples."""
        if self.is_replay:
            return 0
        loader = self._dataloader
        if not _repeats_samples(loader) or not getattr(loader, "end_of_dataloader", False):
            return num_rows
        return num_real_rows(int(getattr(loader, "remainder", -1)), self._rank, num_rows)

    def has_repetitions(self, num_rows: int) -> bool:
        """Return whether any rank's batch of this step repeats samples; the same answer on every rank."""
        loader = self._dataloader
        if not _repeats_samples(loader) or not getattr(loader, "end_of_dataloader", False):
            return False
        return 0 < int(getattr(loader, "remainder", -1)) < num_rows * self._world_size

    def _known_steps(self) -> int | None:
        """Return the steps of the rank with most; None when a length cannot be relied on, so every step is agreed."""
        loader = self._dataloader
        is_sized = isinstance(loader, Sized) and not isinstance(getattr(loader, "dataset", None), IterableDataset)
        length: int | None = None
        if is_sized and not self._keeps_outputs:
            with contextlib.suppress(TypeError):
                length = len(loader)
        lengths = agree_all(length)
        return None if None in lengths else max(lengths)

    def _refuse_uneven_rows(self, rows: list[int | None], step: int) -> None:
        if not self._keeps_outputs or len(set(rows)) == 1:
            return
        raise IntegrationError(
            f"evaluation step {step + 1} has {', '.join(str(count or 0) for count in rows)} samples on the ranks in "
            "order, and outputs that are gathered for compute_metrics or predict() need equally many",
            fix='accelerator_config={"dispatch_batches": True, "even_batches": True}, '
            "or prediction_loss_only=True when the loss is enough; a stream needs as many samples as processes",
            source="TrainingArguments(...)",
        )

    def _borrow(self, standby: Any) -> Any:
        """Give ranks without any batch a copy of another rank's first one. Collective."""
        has = agree_all(standby is not None)
        if all(has) or not any(has):
            return standby
        donor = has.index(True)
        offers = agree_all(_on_cpu(standby) if donor == self._rank else None)
        return standby if standby is not None else offers[donor]


@contextlib.contextmanager
def unrepeated_samples(dataloader: Any, *, keeps_outputs: bool) -> Iterator[None]:
    """Stop a prepared dataloader from repeating samples to even batches out, until the block ends.

    Args:
        dataloader: what Trainer prepared.
        keeps_outputs: outputs are gathered row by row: batches of known datasets stay evened out, and Trainer drops
            the repetitions from what it gathered.
    """
    samplers = [getattr(dataloader, name, None) for name in ("batch_sampler", "sampler")]
    evened = [item for item in samplers if isinstance(item, BatchSamplerShard) and item.even_batches]
    dataset = getattr(dataloader, "dataset", None)
    is_stream = type(dataset) is IterableDatasetShard
    if keeps_outputs:
        evened = []
    try:
        for sampler in evened:
            sampler.even_batches = False
        if is_stream:
            dataset.__class__ = _UnfilledShard
        yield
    finally:
        for sampler in evened:
            sampler.even_batches = True
        if is_stream:
            dataset.__class__ = IterableDatasetShard


class _UnfilledShard(IterableDatasetShard):
    """A shard of a stream that ends where the stream ends: the last batch is not filled up from the first."""

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.epoch)
        whole = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        part = whole // self.num_processes
        for index, element in enumerate(self.dataset):
            if index % whole // part == self.process_index:
                yield element


def _repeats_samples(dataloader: Any) -> bool:
    """Whether the last step may hold samples of the first: Accelerate's dispatcher, and its evened-out batches."""
    if isinstance(dataloader, DataLoaderDispatcher):
        return True
    samplers = (getattr(dataloader, name, None) for name in ("batch_sampler", "sampler"))
    return any(isinstance(item, BatchSamplerShard) and item.even_batches for item in samplers)


def _on_cpu(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.cpu()
    if isinstance(batch, Mapping):
        return {name: _on_cpu(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_on_cpu(value) for value in batch)
    return batch
