"""`bf16-mixed` and `bf16-true` are what their tables say, held against a reference written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.harness import Outcome, run_cases
from tests.distributed.precision_cases import CASES, REFERENCED


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases("tests.distributed.precision_cases", list(CASES), world_size=2)


@pytest.mark.parametrize("name", REFERENCED)
def test_preset_equals_the_written_reference(name: str, outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[name].get():
        assert rank["sharded"]["outputs_fp32"]
        for what in ("gradients", "weights"):
            actual, expected = rank["sharded"][what], rank["reference"][what]
            assert {n: t.dtype for n, t in actual.items()} == {n: t.dtype for n, t in expected.items()}
            assert distance(actual, expected) <= 1e-6, what
        # The comparison can fail: the same reference with other storage and reduce dtypes is far away.
        assert distance(rank["wrong"]["weights"], rank["reference"]["weights"]) > 1e-4


def test_buffers_are_never_cast(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["buffers"].get():
        assert rank and all(rank.values())


def test_weights_are_upcast_shard_by_shard_and_never_whole(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["upcast"].get():
        assert rank["all_fp32"]
        assert 0 < rank["largest_fp32"] <= rank["largest_parameter"] // 2 + 64


def test_norms_in_float32_are_refused_where_torch_cannot_do_it(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["norms_on_old_torch"].get():
        assert "precision.keep_norms_fp32 needs torch 2.13 or newer" in rank["error"]
        assert rank["followed"] > 1


def distance(actual: dict[str, torch.Tensor], expected: dict[str, Any]) -> float:
    """Distance over all tensors, relative to the reference's norm."""
    difference = torch.stack([(actual[name].double() - expected[name].double()).norm() for name in expected]).norm()
    return (difference / torch.stack([tensor.double().norm() for tensor in expected.values()]).norm()).item()
