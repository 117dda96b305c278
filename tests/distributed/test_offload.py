"""`offload: parameters`: shards in host memory, and to the bit the numbers of a run without."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.harness import Outcome, run_cases
from tests.distributed.offload_cases import CASES, RUNS


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases("tests.distributed.offload_cases", list(CASES), world_size=2)


@pytest.mark.parametrize("name", RUNS)
def test_offloaded_training_equals_training_on_the_device_to_the_bit(name: str, outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[name].get():
        host, device = rank["host"], rank["device"]
        assert rank["in_host_memory"] and all(rank["in_host_memory"])
        assert all(host["is_sharded"].values()) and host["num_local"] == device["num_local"]
        assert host["num_local"] < host["num_parameters"]
        assert host["losses"] == device["losses"] and host["norms"] == device["norms"]
        for what in ("gradients", "weights"):
            assert host[what].keys() == device[what].keys() and host[what]
            assert all(torch.equal(host[what][key], device[what][key]) for key in device[what]), what


def test_the_audit_says_what_is_in_host_memory_and_fails_where_it_is_not(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["audit"].get():
        assert "host memory  shards of parameters, gradients and optimizer" in rank["text"]
        assert (
            "model.layers.0 LlamaDecoderLayer is in host memory, which offload.parameters does not say" in rank["error"]
        )


def test_pinned_memory_is_refused_where_nothing_could_copy_it(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["pinning"].get():
        assert "offload.pin_memory=true needs an accelerator" in rank["error"]
        assert rank["untouched"] and rank["followed"]


def test_a_group_that_cannot_reduce_on_the_cpu_is_refused_before_clipping_fails(outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes["backend"].get():
        assert "(nccl) cannot reduce there" in rank["nccl"]
        assert "(cuda:nccl) cannot reduce there" in rank["cuda:nccl"]
        assert rank["cpu:gloo,cuda:nccl"] == "pinned"  # what the advice names


@pytest.mark.parametrize("format", ["full", "sharded"])
def test_an_offloaded_run_resumes_and_its_folder_loads(format: str, outcomes: dict[str, Outcome]) -> None:
    for rank in outcomes[f"resume_{format}"].get():
        assert rank == {"resumed_equal": True, "loaded_equal": True, "num": 29}
