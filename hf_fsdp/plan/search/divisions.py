"""How a global batch is divided: over processes, then into micro-batches."""

from __future__ import annotations

import functools
import math

from hf_fsdp.errors import Problem

# More rows are a slip of the hand, and their divisors would be looked for all day.
_MOST_ROWS = 10**9


def check_division(global_batch_size: int, num_gpus: int) -> Problem | None:
    """Return what is wrong with a global batch on so many GPUs, with the nearest right ones; None if nothing is."""
    if global_batch_size > _MOST_ROWS:
        return Problem(
            message=f"--global-batch-size {global_batch_size} is more rows than any step has",
            fix=f"--global-batch-size {num_gpus * max(1, 64 // num_gpus)}",
        )
    if global_batch_size % num_gpus == 0 and global_batch_size > 0:
        return None
    below = global_batch_size // num_gpus * num_gpus
    near = [below] if below > 0 else []
    near.append(max(below, 0) + num_gpus)
    fewest = min(num_gpus, max(global_batch_size, 0))  # more GPUs than rows never divide
    fitting = max((count for count in _divisors(global_batch_size) if count <= fewest), default=0)
    fewer = f"; or {fitting} GPU{'s' if fitting > 1 else ''}" if fitting else ""
    return Problem(
        message=f"--global-batch-size {global_batch_size} cannot be spread over {num_gpus} GPUs in equal parts",
        fix=" or ".join(f"--global-batch-size {value}" for value in near) + fewer,
    )


def list_divisions(global_batch_size: int, num_gpus: int) -> list[tuple[int, int]]:
    """Return (micro-batch size, micro-batches a step) in rising order of the size.

    Args:
        global_batch_size: rows of one step; a multiple of `num_gpus`.
        num_gpus: processes.

    Example:
        >>> list_divisions(32, 8)
        [(1, 4), (2, 2), (4, 1)]
    """
    per_gpu = global_batch_size // num_gpus
    return [(size, per_gpu // size) for size in _divisors(per_gpu)]


@functools.cache  # a search asks some hundred times
def _divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number in rising order; of none from 0 down."""
    small = [size for size in range(1, math.isqrt(max(0, number)) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))
