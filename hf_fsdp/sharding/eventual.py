"""A flag that any rank may raise, and that all ranks see at the same step, without a wait in the step.

An all-reduce of one integer is started at one step and read at the next, on the gloo group that nothing on the device
waits for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hf_fsdp.sharding.mesh import agreement_group, world_size


class EventualFlag:
    """Ask with `launch` at one point that all ranks pass, and `read` the answer at the next one."""

    def __init__(self) -> None:
        self._in_flight: tuple[torch.Tensor, dist.Work | None] | None = None

    @property
    def is_in_flight(self) -> bool:
        return self._in_flight is not None

    def launch(self, value: int) -> None:
        """Start to agree on the largest `value` of all ranks; collective, and nothing waits."""
        flag = torch.tensor([value], dtype=torch.int32)
        work = None
        if world_size() > 1:
            work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=agreement_group(), async_op=True)
        self._in_flight = (flag, work)

    def read(self) -> int:
        """Return the largest value of all ranks as of the last `launch`; 0 when there was none."""
        if self._in_flight is None:
            return 0
        flag, work = self._in_flight
        self._in_flight = None
        if work is not None:
            work.wait()
        return int(flag.item())
