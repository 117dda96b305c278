"""Which block is gathered before its own turn: asked of torch, on a group of two ranks that exchanges nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_fsdp import FSDPConfig, apply_fsdp
from hf_fsdp.sharding import mesh
from tests.unit.small_models import tiny_llama


@pytest.fixture
def two_fake_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    monkeypatch.setattr(dist, "new_group", lambda backend: dist.group.WORLD)
    monkeypatch.setattr(dist, "all_gather_object", _agree_with_oneself)
    try:
        yield
    finally:
        dist.destroy_process_group()
        mesh._agreement_groups.clear()


def _agree_with_oneself(gathered: list[Any], value: Any, group: Any = None) -> None:
    gathered[:] = [value] * len(gathered)


def most_gathered_early(prefetch: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many blocks at most were gathered at one time whose own backward had not begun."""
    model = tiny_llama(num_layers=4)
    apply_fsdp(model, FSDPConfig(precision="fp32", sharding={"backward_prefetch": prefetch}), device_type="cpu")
    loss = model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum()
    unshard, pre_backward = FSDPParamGroup.unshard, FSDPParamGroup.pre_backward
    begun: set[str] = set()
    waiting: set[str] = set()
    most = 0

    def watched_unshard(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        if self._module_fqn not in begun and "layers." in self._module_fqn:
            waiting.add(self._module_fqn)
            most = max(most, len(waiting))
        return unshard(self, *args, **kwargs)

    def watched_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun.add(self._module_fqn)
        waiting.discard(self._module_fqn)
        return pre_backward(self, *args, **kwargs)

    monkeypatch.setattr(FSDPParamGroup, "unshard", watched_unshard)
    monkeypatch.setattr(FSDPParamGroup, "pre_backward", watched_backward)
    loss.backward()
    assert len(begun) >= 4
    return most


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_backward_gathers_as_many_blocks_early_as_it_is_told(
    prefetch: int, two_fake_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert most_gathered_early(prefetch, monkeypatch) == prefetch
