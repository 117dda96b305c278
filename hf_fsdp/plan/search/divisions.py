"""How a global batch is divided: over processes, then into micro-batches."""

from __future__ import annotations

from hf_fsdp.errors import Problem


def check_division(global_batch_size: int, num_gpus: int) -> Problem | None:
    """Return what is wrong with a global batch on so many GPUs, with the nearest right ones; None if nothing is."""
    if global_batch_size % num_gpus == 0 and global_batch_size > 0:
        return None
    below = global_batch_size // num_gpus * num_gpus
    near = [below] if below > 0 else []
    near.append(max(below, 0) + num_gpus)
    fewest = min(num_gpus, max(global_batch_size, 0))  # more GPUs than rows never divide
    fitting = [count for count in range(fewest, 0, -1) if global_batch_size % count == 0]
    fewer = f"; or {fitting[0]} GPU{'s' if fitting[0] > 1 else ''}" if fitting else ""
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
    return [(size, per_gpu // size) for size in range(1, per_gpu + 1) if per_gpu % size == 0]
