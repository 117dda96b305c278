"""What the planner takes from torch, transformers and TRL under private or unpromised names; fails when one moves."""

from __future__ import annotations

import inspect
import subprocess
import sys

import torch

from hf_fsdp import torch_private


def test_a_device_registered_from_python_trains_fake_tensors() -> None:
    """In a process of its own: the registration cannot be taken back."""
    script = """
import torch
from hf_fsdp.plan.simulator.device import GPU, install_device, simulated_ranks
from hf_fsdp.torch_private import fake_values
from hf_fsdp.config.schema import ShardingConfig
install_device()
install_device()  # once is enough, twice does no harm
with simulated_ranks(4, ShardingConfig(), GPU) as mesh, fake_values():
    assert mesh.size() == 4
    weight = torch.nn.Parameter(torch.empty(8, 8, device=GPU))
    (torch.empty(2, 8, device=GPU) @ weight).sum().backward()
    assert weight.grad.device.type == GPU and weight.grad.shape == (8, 8)
    torch.optim.AdamW([weight], fused=True).step()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "done", done.stderr[-2000:]


def test_fake_tensors_keep_storages_that_can_be_told_apart_and_freed() -> None:
    import weakref

    with torch_private.fake_values():
        tensor = torch.empty(10)
        view = tensor[2:]
        assert torch_private.storage_address(tensor) == torch_private.storage_address(view)
        assert torch_private.storage_address(tensor) != torch_private.storage_address(torch.empty(10))
        (_, name), (_, same) = torch_private.storage_key(tensor), torch_private.storage_key(view)
        assert name == same
        freed: list[int] = []
        weakref.finalize(tensor.untyped_storage(), freed.append, 1)
        del tensor, view
        assert freed == [1], "the tracker would never see a storage go"


def test_fake_tensors_can_be_made_past_the_dispatch() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    with torch_private.fake_values() as mode:
        made = torch_private.make_fake(mode, (2, 3), (3, 1), torch.bfloat16, torch.device("cpu"))
        view = torch_private.view_fake(made, (2,), (3,), 1)
        assert torch_private.fake_device(made) == made.device == view.device == torch.device("cpu")
        assert (made.shape, made.stride(), made.dtype) == ((2, 3), (3, 1), torch.bfloat16)
        assert (view.shape, view.stride(), view.storage_offset()) == ((2,), (3,), 1)
        assert torch_private.storage_address(made) == torch_private.storage_address(view)
        assert (made + view[:1]).shape == (2, 3)
    assert TorchDispatchMode._should_skip_dynamo(), "repeats.Repeats and tracker.Tracker switch it off"


def test_fully_shard_cuts_by_a_function_that_the_planner_replaces() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    original = _fsdp_param._chunk_with_empty
    try:
        torch_private.cut_for_first_rank_only()
        for rows, ranks in ((8, 4), (10, 8), (3, 8), (1, 2), (7, 1)):
            whole = torch.empty(rows, 2)
            mine, theirs = _fsdp_param._chunk_with_empty(whole, ranks, 0)[0], original(whole, ranks, dim=0)[0]
            assert mine.shape == theirs.shape and mine.data_ptr() == theirs.data_ptr(), (rows, ranks)
    finally:
        _fsdp_param._chunk_with_empty = original
    source = inspect.getsource(_fsdp_param.FSDPParam)
    assert source.count("_chunk_with_empty(") == 3, "each takes the chunk of its own rank, and the first"


def test_values_of_small_constants_can_be_read_within_a_limit() -> None:
    with torch_private.fake_values(), torch_private.known_values(100):
        assert (torch.tensor([3, 4]) * 2).tolist() == [6, 8]


def test_the_count_leaves_out_shapes_that_dtensor_asks_for() -> None:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    original = ShardingPropagator._propagate_tensor_meta_non_cached
    with torch_private.watch_shape_propagation(lambda: None, lambda: None):
        assert ShardingPropagator._propagate_tensor_meta_non_cached is not original
    assert ShardingPropagator._propagate_tensor_meta_non_cached is original


def test_fsdp_names_its_buffers_by_operators() -> None:
    import torch.distributed.fsdp  # noqa: F401  registers them

    for name in ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat"):
        assert hasattr(torch.ops.fsdp, name), f"plan.tracker reads what fsdp::{name} is given"


def test_kernels_of_gpus_have_shapes_without_one() -> None:
    with torch_private.fake_values():
        query = torch.empty(1, 2, 8, 16, dtype=torch.bfloat16)
        flash = torch.ops.aten._scaled_dot_product_flash_attention(query, query, query, 0.0, True, False)
        assert flash[0].shape == query.shape and flash[1].dtype is torch.float32
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention(query, query, query, None, True)
        assert efficient[0].shape == query.shape


def test_transformers_asks_values_of_positions_in_one_function() -> None:
    from transformers import masking_utils

    source = inspect.getsource(masking_utils)
    assert "find_packed_sequence_indices(position_ids)" in source, "plan.attention.rows_are_packed replaces it"
    assert callable(masking_utils.find_packed_sequence_indices)


def test_trl_folds_its_tiles_by_functions_that_the_planner_replaces() -> None:
    from trl.kernels import chunked_logprob
    from trl.trainer.utils import add_fused_lm_head

    source = inspect.getsource(chunked_logprob.ChunkedLogProbFunction)
    for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
        assert name in source and callable(getattr(chunked_logprob, name))
    assert "outputs" in inspect.signature(add_fused_lm_head).parameters


def test_a_real_tensor_can_be_made_beside_fake_ones() -> None:
    with torch_private.fake_values(), torch_private.real_values():
        assert torch.arange(3).tolist() == [0, 1, 2] and torch.arange(3).data_ptr()
