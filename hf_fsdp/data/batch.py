"""The global batch is what a config fixes; the number of processes changes accumulation, not the batch."""

from __future__ import annotations

from hf_fsdp.errors import ConfigError


def resolve_accumulation_steps(
    global_batch_size: int, per_device_batch_size: int, world_size: int, *, typed: int | None = None
) -> int:
    """Return the gradient accumulation that gives `global_batch_size` samples a step on `world_size` processes.

    Args:
        global_batch_size: samples per optimizer step over all processes.
        per_device_batch_size: samples per process and forward pass.
        world_size: number of processes.
        typed: the accumulation that somebody wrote down, to be held against it.

    Raises:
        ConfigError: the sizes do not divide, with the nearest values that do, or `typed` contradicts them.
    """
    for key, size in (("global_batch_size", global_batch_size), ("per_device_train_batch_size", per_device_batch_size)):
        if size < 1:
            raise ConfigError(f"{key}={size} must be at least 1", fix=f"{key}: 1")
    samples_per_pass = per_device_batch_size * world_size
    if global_batch_size % samples_per_pass == 0:
        steps = global_batch_size // samples_per_pass
        if typed not in (None, steps):
            raise ConfigError(
                f"gradient_accumulation_steps={typed} contradicts global_batch_size={global_batch_size}, which is "
                f"{steps} x {per_device_batch_size} samples on {world_size} processes",
                fix="remove gradient_accumulation_steps: it follows from global_batch_size",
            )
        return steps
    below = global_batch_size // samples_per_pass * samples_per_pass
    near_global = [size for size in (below, below + samples_per_pass) if size]
    fixes = ["global_batch_size: " + " or ".join(str(size) for size in near_global)]
    if global_batch_size % world_size == 0:
        share = global_batch_size // world_size
        fitting = [size for size in range(1, per_device_batch_size) if share % size == 0]
        if fitting:
            fixes.insert(0, f"per_device_train_batch_size: {fitting[-1]}")
    raise ConfigError(
        f"global_batch_size={global_batch_size} is not a multiple of per_device_train_batch_size="
        f"{per_device_batch_size} x {world_size} processes = {samples_per_pass} samples a forward pass",
        fix="   or   ".join(fixes),
    )
