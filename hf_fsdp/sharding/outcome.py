"""Something that every rank does, and whose failure on one rank is the same error on all of them.

Without it a rank that meets a full disk raises, and the others wait for it in the next collective until a timeout of
half an hour.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hf_fsdp.errors import CheckpointError, HfFsdpError, Problem
from hf_fsdp.sharding.mesh import agree_all, agreement_group, rank, world_size

Result = TypeVar("Result")
# How long a rank that saves waits for the others to come too, before it says that they did not.
ENTRY_TIMEOUT = timedelta(seconds=60)
_ARRIVED, _GO_ON = 7001, 7002  # tags of messages on the agreement group


class OtherRankFailed(Exception):
    """Raised by what a rank does in `agreed` when it learns that another rank has failed, which says why itself."""


def agreed(action: str, do: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Run `do` on every rank and return this rank's result once all have succeeded; collective.

    Args:
        action: what is done, for the error: ``write checkpoint-10``.
        do: what this rank does; it may not contain collectives that another rank could miss.
        group: where to agree; by default the agreement group.

    Raises:
        CheckpointError: on all ranks alike, when any of them failed.
    """
    problems: list[Problem] = []
    result: Any = None
    try:
        result = do()
    except HfFsdpError as error:
        problems = list(error.problems)
        cause: BaseException | None = error
    except OtherRankFailed as error:
        cause = error
    except Exception as error:
        problems = [explain(error)]
        cause = error
    else:
        cause = None
    raise_agreed(action, problems, group, cause)
    if cause is not None:
        raise cause
    return result


def raise_agreed(
    action: str,
    problems: list[Problem],
    group: dist.ProcessGroup | None = None,
    cause: BaseException | None = None,
) -> None:
    """Raise on all ranks what any of them found; nothing when none found anything. Collective."""
    with rank_ends_explained(action):
        everyone = agree_all(problems, group)
    found: dict[tuple[str, str], tuple[Problem, list[int]]] = {}
    for index, theirs in enumerate(everyone):
        for problem in theirs:
            found.setdefault((problem.message, problem.fix), (problem, []))[1].append(index)
    if not found:
        return
    raise CheckpointError([_with_ranks(action, problem, ranks) for problem, ranks in found.values()]) from cause


@contextlib.contextmanager
def rank_ends_explained(action: str) -> Iterator[None]:
    """Say what it means when a collective fails: its own error names a socket, and not what was going on."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CheckpointError(
            f"could not {action}: another rank ended in the middle of it",
            fix="look at that rank's output; resume takes the newest committed checkpoint",
        ) from error


def _with_ranks(action: str, problem: Problem, ranks: list[int]) -> Problem:
    where = "" if world_size() == 1 or len(ranks) == world_size() else f" on rank {', '.join(map(str, ranks))}"
    return Problem(
        message=f"could not {action}{where}: {problem.message}",
        fix=problem.fix,
        near=problem.near,
        source=problem.source,
    )


def explain(error: Exception) -> Problem:
    """Return an unexpected error as a problem with a way out."""
    code = getattr(error, "errno", None)
    file = getattr(error, "filename", None)
    name = f" {file}" if file else ""
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Problem(
            message=f"the disk is full or the quota is used up ({error.strerror}){name}"
            if isinstance(error, OSError)
            else "the disk is full",
            fix="free space there, keep fewer checkpoints (save_total_limit=2), or choose another output_dir",
        )
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        assert isinstance(error, OSError)
        return Problem(
            message=f"the folder cannot be written to ({error.strerror}){name}",
            fix="choose an output_dir that every process may write to",
        )
    if code == errno.EIO:
        return Problem(
            message=f"the disk failed ({getattr(error, 'strerror', error)}){name}",
            fix="check the disk; earlier checkpoints are untouched",
        )
    return Problem(
        message=f"{type(error).__name__}: {error}",
        fix="see that rank's traceback; earlier checkpoints are untouched",
    )


def wait_for_all_ranks(action: str) -> None:
    """Wait until every rank is here; collective.

    Raises:
        CheckpointError: the others did not come within a minute: `action` was called on some ranks only; or one has
            ended, which is seen at once.
    """
    if world_size() == 1:
        return
    deadline = time.monotonic() + ENTRY_TIMEOUT.total_seconds()
    try:
        _meet(deadline)
    except RuntimeError as error:
        if time.monotonic() < deadline:
            raise CheckpointError(
                f"could not {action}: another rank has ended",
                fix="look at that rank's output; resume takes the newest committed checkpoint",
            ) from error
        raise CheckpointError(
            f"{action} was called on rank {rank()} and not on all ranks, which each hold a part",
            fix="call it on every rank, not under `if trainer.is_world_process_zero()`; only rank 0 writes",
        ) from error


def _meet(deadline: float) -> None:
    """Report to rank 0 and wait for its word, by messages and not by a collective: a rank that comes here alone must
    not be matched with what the others agree on meanwhile. (`monitored_barrier` bounds the wait of rank 0 only.)"""
    group, token = agreement_group(), torch.zeros(1, dtype=torch.uint8)

    def wait(work: dist.Work | None) -> None:  # a send too: gloo's lasts until the other side receives
        assert work is not None
        work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    if rank() == 0:
        for other in range(1, world_size()):
            wait(dist.irecv(token, src=other, group=group, tag=_ARRIVED))
        for other in range(1, world_size()):
            wait(dist.isend(token, dst=other, group=group, tag=_GO_ON))
    else:
        wait(dist.isend(token, dst=0, group=group, tag=_ARRIVED))
        wait(dist.irecv(token, src=0, group=group, tag=_GO_ON))
