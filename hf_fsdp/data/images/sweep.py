"""All rows of a dataset passed through a function, in order, by several processes, with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")

_ROWS_A_TASK = 16


def default_num_workers() -> int:
    """Return how many processes read at a time unless somebody says so: every core but one, at most 16."""
    return max(
        0, min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) - 1
    )


def sweep(
    dataset: Any,
    positions: Sequence[int],
    work: Callable[[list[dict[str, Any]]], list[Result]],
    *,
    num_workers: int | None,
    desc: str,
    show_progress: bool = True,
) -> list[Result]:
    """Return what `work` makes of the rows at `positions`, one result a row.

    Args:
        dataset: gives rows by position.
        positions: which ones.
        work: called with some rows in a worker process; it is pickled where processes are spawned.
        num_workers: processes; 0 works here, None takes `default_num_workers`.
        desc: what the bar says.
        show_progress: whether there is a bar; ranks other than 0 have none.
    """
    from torch.utils.data import DataLoader
    from transformers.utils import logging

    num_workers = default_num_workers() if num_workers is None else num_workers
    tasks = _Tasks(dataset, positions, work)
    num_workers = min(num_workers, len(tasks))
    loader: Any = DataLoader(tasks, batch_size=None, num_workers=num_workers, collate_fn=_as_is)  # type: ignore[arg-type]
    results: list[Result] = []
    with logging.tqdm(total=len(positions), desc=desc, unit=" samples", disable=not show_progress) as bar:
        for made in loader:
            results += made
            bar.update(len(made))
    return results


class _Tasks:
    """Rows by the handful: a message between processes for each one would cost more than the work."""

    def __init__(self, dataset: Any, positions: Sequence[int], work: Callable[[list[dict[str, Any]]], list[Any]]):
        self.dataset, self.positions, self.work = dataset, positions, work

    def __len__(self) -> int:
        return -(-len(self.positions) // _ROWS_A_TASK)

    def __getitem__(self, index: int) -> list[Any]:
        if index >= len(self):
            raise IndexError(index)
        chosen = self.positions[index * _ROWS_A_TASK : (index + 1) * _ROWS_A_TASK]
        return self.work([self.dataset[position] for position in chosen])


def _as_is(item: Any) -> Any:
    return item
