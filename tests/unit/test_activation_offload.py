"""Saved tensors go to host memory and come back as they were; gathered weights stay where FSDP has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_fsdp import FSDPConfig
from hf_fsdp.errors import ConfigError
from hf_fsdp.policies.activation import plan_activations
from hf_fsdp.policies.blocks import find_blocks
from hf_fsdp.policies.offload import MIN_BYTES, ActivationStore
from tests.unit.small_models import tiny_llama
from tests.unit.test_activation import IDS, differing, gradients
from tests.unit.test_selective import apply

INPUT_BYTES = IDS.numel() * 32 * 4  # one block's input in fp32


class Mlp(nn.Module):
    """Saves inputs and outputs of its operators; `seen` are weak references to the storages of what it computed."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.seen: list[StorageWeakRef] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)  # saved by sin
        self.seen.append(StorageWeakRef(hidden.untyped_storage()))
        return self.down(hidden.sin().exp())


def gradient_of(block: nn.Module) -> dict[str, torch.Tensor]:
    block.zero_grad()
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    block(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}


# -- the mechanism ----------------------------------------------------------------------------------------------------


def test_what_was_moved_is_dropped_from_the_device_and_the_gradients_are_the_same_to_the_bit() -> None:
    torch.manual_seed(0)
    block = Mlp()
    plain = gradient_of(block)
    block.seen.clear()
    store = ActivationStore(pin_memory=True)
    store.attach(block)
    loss = block(torch.randn(8, 32)).sum()
    assert block.seen[0].expired(), "the hidden layer is saved for backward and must be in host memory only"
    assert store.bytes_held == store.bytes_moved > 0 and store.bytes_returned == 0
    loss.backward()
    assert store.bytes_returned >= store.bytes_moved
    assert store.bytes_held == 0, "host memory is free after backward"
    assert differing(plain, gradient_of(block)) == []


def test_without_the_store_the_device_keeps_it() -> None:
    """The control of the test above."""
    block = Mlp()
    loss = block(torch.randn(8, 32)).sum()
    assert not block.seen[0].expired()
    loss.backward()


def test_weights_are_never_copied() -> None:
    torch.manual_seed(0)
    block = Mlp(width=64)
    store = ActivationStore(pin_memory=False)
    store.attach(block)
    block(torch.randn(8, 64, requires_grad=True)).sum().backward()
    # Input, argument of sin, argument (or result) of exp, input of the second layer; a weight alone is 64 KiB.
    activations = 8 * 64 * 4 + 3 * 8 * 256 * 4
    assert 0 < store.bytes_moved <= activations < 64 * 256 * 4


def test_a_tensor_saved_by_three_operators_is_copied_once() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) + self.k(x) + self.v(x)

    block = Attention()
    store = ActivationStore(pin_memory=False)
    store.attach(block)
    block(torch.randn(16, 32)).sum().backward()
    assert store.bytes_moved == 16 * 32 * 4
    assert store.bytes_returned == 3 * store.bytes_moved


def test_a_tensor_that_is_written_to_between_two_operators_is_two_copies() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, 512))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            buffer = x.clone()
            first = buffer * self.scale
            buffer.mul_(3)  # autograd itself would refuse this; the copy is of what was there
            return first + buffer * self.scale

    block = InPlace()
    store = ActivationStore(pin_memory=False)
    store.attach(block)
    x = torch.randn(2, 512)
    block(x).sum().backward()
    assert torch.allclose(block.scale.grad, 4 * x.sum(0, keepdim=True))  # type: ignore[arg-type]
    assert store.bytes_moved == 2 * x.nbytes


def test_views_come_back_with_their_strides() -> None:
    class Strided(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = x.chunk(2, dim=-1)
            return left.transpose(0, 1) * right.transpose(0, 1) * x[:1, :1].expand(16, 32).transpose(0, 1)

    block = Strided()
    x = torch.randn(16, 64)
    plain = x.clone().requires_grad_()
    block(plain).sum().backward()
    store = ActivationStore(pin_memory=False)
    store.attach(block)
    moved = x.clone().requires_grad_()
    block(moved).sum().backward()
    assert store.bytes_moved > 0
    assert torch.equal(plain.grad, moved.grad)  # type: ignore[arg-type]


def test_small_tensors_stay_and_nothing_is_moved_without_gradients() -> None:
    block = nn.Linear(4, 4)
    store = ActivationStore(pin_memory=False)
    store.attach(block)
    block(torch.randn(MIN_BYTES // 16 - 1, 4)).sum().backward()
    with torch.no_grad():
        block(torch.randn(MIN_BYTES, 4))
    assert store.bytes_moved == 0


def test_a_forward_that_raises_leaves_no_hooks_behind() -> None:
    block = Mlp()
    store = ActivationStore(pin_memory=False)
    store.attach(block)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        block(torch.randn(8, 33))
    moved = store.bytes_moved
    torch.randn(64, 64, requires_grad=True).sin().sum().backward()
    assert store.bytes_moved == moved


# -- blocks of a model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", ["full", {"selective": ["matmul"]}])
def test_of_checkpointed_blocks_the_inputs_are_moved_and_nothing_else(checkpointing: Any) -> None:
    model, plain = tiny_llama(3, attention_dropout=0.3), tiny_llama(3, attention_dropout=0.3)
    plan = apply(model, activation_checkpointing=checkpointing, offload={"activations": "block_inputs"})
    assert differing(gradients(plain), gradients(model)) == []
    assert plan.store is not None
    assert plan.store.bytes_moved == plan.store.bytes_returned == 3 * INPUT_BYTES
    assert "inputs of 3 blocks in host memory" in plan.describe()


def test_of_other_blocks_all_that_they_save_is_moved() -> None:
    model, plain = tiny_llama(3, attention_dropout=0.3), tiny_llama(3, attention_dropout=0.3)
    plan = apply(model, offload={"activations": "saved_tensors"})
    assert differing(gradients(plain), gradients(model)) == []
    assert plan.store is not None and plan.store.bytes_moved > 10 * 3 * INPUT_BYTES
    assert "all that 3 blocks save for backward in host memory" in plan.describe()


def test_auto_moves_inputs_where_blocks_are_checkpointed_and_saved_tensors_elsewhere() -> None:
    model, plain = tiny_llama(4), tiny_llama(4)
    plan = apply(model, activation_checkpointing={"every": 2}, offload="activations")
    assert differing(gradients(plain), gradients(model)) == []
    assert "inputs of 2 blocks in host memory" in plan.describe()
    assert "all that 2 blocks save for backward in host memory" in plan.describe()


@pytest.mark.parametrize(
    ("sections", "message", "fixed"),
    [
        (
            {"offload": {"activations": "block_inputs"}},
            "block_inputs and no block is checkpointed",
            {"offload": {"activations": "block_inputs"}, "activation_checkpointing": "full"},
        ),
        (
            {"offload": {"activations": "saved_tensors"}, "activation_checkpointing": "full"},
            "saved_tensors and every block is checkpointed",
            {"offload": {"activations": "block_inputs"}, "activation_checkpointing": "full"},
        ),
    ],
)
def test_a_kind_with_nothing_to_move_is_refused(sections: dict[str, Any], message: str, fixed: dict[str, Any]) -> None:
    model = tiny_llama(2)
    with pytest.raises(ConfigError, match=message) as caught:
        apply(model, **sections)
    assert (
        str(fixed["offload"]["activations"]) in caught.value.problems[0].fix or "full" in caught.value.problems[0].fix
    )
    assert len(apply(model, **fixed).offloaded) == 2


def test_pinning_follows_the_config_and_never_touches_cpu_tensors() -> None:
    model = tiny_llama(1)
    blocks = list(find_blocks(model).blocks.values())
    for value, pinned in (("auto", True), (True, True), (False, False)):
        plan = plan_activations(model, FSDPConfig(offload={"activations": "auto", "pin_memory": value}), blocks)
        assert plan.store is not None and plan.store._pin_memory is pinned
