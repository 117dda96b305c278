"""Running statistics of batch norms: a recompute counts no batch twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hf_fsdp.sharding.running_stats import install_running_stats
from hf_fsdp.torch_private import checkpoint_block, is_in_backward


def test_code_knows_whether_it_runs_inside_a_backward() -> None:
    """The private name of torch that this needs."""
    seen: list[bool] = []
    value = torch.ones(1, requires_grad=True)
    result = value * 2
    result.register_hook(lambda gradient: seen.append(is_in_backward()))
    seen.append(is_in_backward())
    result.backward()
    seen.append(is_in_backward())
    assert seen == [False, True, False]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_recomputed_batch_norm_counts_a_batch_once(momentum: float | None) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=momentum), nn.ReLU(), nn.Linear(6, 2))
    recomputed, unaware = copy.deepcopy(plain), copy.deepcopy(plain)
    for model in (recomputed, unaware):
        checkpoint_block(model)
    install_running_stats(recomputed)
    for _ in range(3):
        batch = torch.randn(8, 4)
        for model in (plain, recomputed, unaware):
            model(batch).square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), recomputed.buffers(), strict=True))
    # What would happen without: twice the batches.
    assert (int(plain[1].num_batches_tracked), int(unaware[1].num_batches_tracked)) == (3, 6)
    for expected, actual in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert expected.grad is not None and actual.grad is not None
        assert torch.equal(expected.grad, actual.grad)


def test_a_model_without_running_statistics_gets_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False))
    install_running_stats(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
