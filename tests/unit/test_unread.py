"""Parameters that are still in files: what asks for no values leaves them there, all else gets the right ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hf_fsdp.sharding.origins import Cast, InFile, Joined, Origin, are_equal, cut, join, stack
from hf_fsdp.sharding.unread import UnreadParameter, UnreadView, make_placeholder, read_all, read_now
from hf_fsdp.storage.tensor_source import TensorInfo


class Source:
    """Tensors in memory; counts what is read."""

    def __init__(self, **tensors: torch.Tensor):
        self.values = tensors
        self.num_read = 0

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in self.values.items()}

    def read(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        self.num_read += out.numel()
        values = self.values[name]
        for dim, (offset, size) in enumerate(zip(offsets, out.shape, strict=True)):
            values = values.narrow(dim, offset, size)
        out.copy_(values)

    def close(self) -> None: ...


@pytest.fixture
def source() -> Source:
    torch.manual_seed(0)
    return Source(weight=torch.randn(4, 3), bias=torch.randn(4))


def linear(source: Source) -> nn.Linear:
    layer = nn.Linear(3, 4, device="meta")
    layer.weight = UnreadParameter(InFile(source, "weight"))
    layer.bias = UnreadParameter(InFile(source, "bias"))
    return layer


def is_unread(*parameters: Any) -> bool:
    return all(isinstance(parameter, UnreadParameter | UnreadView) for parameter in parameters)


def box(tensor: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


# -- what needs no values ---------------------------------------------------------------------------------------------


def test_shape_dtype_and_device_are_answered_from_the_header(source: Source) -> None:
    layer = linear(source)
    assert layer.weight.shape == (4, 3) and layer.weight.numel() == 12 and layer.bias.dim() == 1
    assert layer.weight.dtype is torch.float32 and layer.weight.is_floating_point() and layer.weight.is_contiguous()
    assert layer.weight.device == torch.device("cpu") and not layer.weight.is_meta and layer.weight.is_cpu
    assert isinstance(layer.weight, nn.Parameter) and layer.weight.grad is None and layer.weight.is_leaf
    assert repr(layer.weight) == "UnreadParameter(weight, [4, 3], torch.float32)" and len(layer.weight) == 4
    assert {name for name, _ in layer.named_parameters()} == {"weight", "bias"}
    assert is_unread(layer.weight, layer.bias) and source.num_read == 0


def test_what_moves_copies_and_marks_models_leaves_them_in_their_files(source: Source) -> None:
    layer = linear(source)
    layer.weight.__dict__["mark"] = True
    layer.requires_grad_(False).cpu().to("cpu").to(torch.float32).float().eval()
    copied = copy.deepcopy(layer)
    copied.weight.requires_grad_()
    torch.optim.SGD(copied.parameters(), lr=0.1)
    assert torch.zeros_like(layer.weight).shape == (4, 3) and layer.weight.new_zeros(2).device.type == "cpu"
    assert is_unread(*layer.parameters(), *copied.parameters(), *layer.state_dict().values())
    assert not layer.weight.requires_grad and copied.weight.requires_grad and not copied.bias.requires_grad
    assert vars(copied.weight)["mark"] and source.num_read == 0


def test_another_dtype_is_noted_and_rounds_when_read(source: Source) -> None:
    layer = linear(source).to(torch.bfloat16)
    assert is_unread(layer.weight) and layer.weight.dtype is torch.bfloat16 and layer.weight.requires_grad
    layer = layer.to(torch.float32)
    assert source.num_read == 0
    read_all(layer.parameters())
    assert layer.weight.equal(source.values["weight"].bfloat16().float()) and not is_unread(layer.weight)


# -- what needs values ------------------------------------------------------------------------------------------------


def test_an_operation_reads_the_weight_in_place_for_all_who_hold_it(source: Source) -> None:
    layer = linear(source)
    weight, tied = layer.weight, nn.Linear(3, 4, device="meta")
    tied.weight = weight
    weight.__dict__["mark"] = True
    expected = source.values["weight"].sum()
    assert weight.sum().item() == expected.item()
    assert weight is layer.weight is tied.weight and type(weight) is nn.Parameter and vars(weight)["mark"]
    assert is_unread(layer.bias) and source.num_read == 12


def test_gradients_arrive(source: Source) -> None:
    layer = linear(source)
    ordinary = nn.Linear(3, 4)
    ordinary.load_state_dict(source.values)
    inputs = torch.randn(2, 3)
    for each in (layer, ordinary):
        each(inputs).square().sum().backward()
    assert layer.weight.grad is not None and ordinary.weight.grad is not None
    assert layer.weight.grad.equal(ordinary.weight.grad)
    weight = UnreadParameter(InFile(source, "weight"))
    (weight.to(torch.float64) * 2).sum().backward()  # a cast in a forward is part of its graph
    assert weight.grad is not None and weight.grad.equal(torch.full((4, 3), 2.0))


def test_writing_is_never_lost(source: Source) -> None:
    weights = [UnreadParameter(InFile(source, "weight")) for _ in range(6)]
    expected = source.values["weight"].clone()
    expected[0] = 5
    with torch.no_grad():
        weights[0][0] = 5
        weights[1].data[0] = 5
        weights[2].detach()[0].fill_(5)
        weights[3].copy_(expected)
        view = weights[4].data
        view[0] = 5
        nn.init.constant_(weights[5][0], 5)
    for weight in weights:
        assert not is_unread(weight) and weight.detach().equal(expected)
    assert view.equal(expected)


def test_data_can_be_replaced(source: Source) -> None:
    weight, other = UnreadParameter(InFile(source, "weight")), UnreadParameter(InFile(source, "weight"))
    weight.data = weight.data.to(torch.bfloat16)
    assert is_unread(weight) and weight.dtype is torch.bfloat16 and weight.requires_grad
    other.data = torch.ones(4, 3)
    assert not is_unread(other) and other.detach().equal(torch.ones(4, 3)) and other.requires_grad


def test_state_dicts_load_into_and_out_of_them(source: Source) -> None:
    ordinary, layer = nn.Linear(3, 4), linear(source)
    ordinary.load_state_dict(layer.state_dict())
    assert ordinary.weight.equal(source.values["weight"]) and ordinary.bias.equal(source.values["bias"])
    fresh = nn.Linear(3, 4)
    layer = linear(source)
    layer.load_state_dict(fresh.state_dict())
    assert layer.weight.equal(fresh.weight) and layer.bias.equal(fresh.bias)


def test_pickles_hold_values(source: Source) -> None:
    weight = UnreadParameter(InFile(source, "weight"))
    assert pickle.loads(pickle.dumps(weight)).equal(source.values["weight"])


def test_a_placeholder_is_an_ordinary_parameter_without_values(source: Source) -> None:
    weight = UnreadParameter(InFile(source, "weight"), requires_grad=False)
    origin = make_placeholder(weight)
    assert type(weight) is nn.Parameter and weight.is_meta and not weight.requires_grad
    assert origin == InFile(source, "weight") and source.num_read == 0


# -- joined and cut ---------------------------------------------------------------------------------------------------


def test_joining_and_cutting_reads_only_what_is_asked_for() -> None:
    torch.manual_seed(0)
    source = Source(**{name: torch.randn(6, 4) for name in "abcd"})

    def made(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        experts = torch.cat([torch.stack([tensors["a"], tensors["b"]]), torch.stack([tensors["c"], tensors["d"]])], 1)
        first, second = torch.chunk(tensors["a"], 2)
        _, last = torch.split(torch.cat([tensors["a"], tensors["b"]], dim=-1), [5, 3], dim=1)
        return {
            "experts": experts,
            "columns": torch.stack([tensors["a"], tensors["b"]], dim=2),
            "second": second.contiguous(),
            "again": torch.cat([second, first]),
            "last": last,
            "cast": experts.to(torch.float16),
        }

    unread = {name: UnreadParameter(InFile(source, name), requires_grad=False) for name in source.values}
    found, expected = made(unread), made(source.values)
    assert source.num_read == 0
    for name, tensor in found.items():
        assert isinstance(tensor, UnreadParameter) and (tensor.shape, tensor.dtype) == (
            expected[name].shape,
            expected[name].dtype,
        )
        shape = [max(1, size // 2) for size in tensor.shape]
        offsets = [size // 3 for size in tensor.shape]
        out = torch.empty(shape, dtype=tensor.dtype)
        source.num_read = 0
        tensor.origin.read(offsets, out)
        assert out.equal(box(expected[name], offsets, shape)) and source.num_read == out.numel(), name
        assert list(tensor.origin.sources())[0] is source and tensor.origin.name
        read_now(tensor)
        assert tensor.detach().equal(expected[name])


def test_operations_that_are_not_known_are_done_on_values() -> None:
    torch.manual_seed(0)
    source = Source(a=torch.randn(6, 4), b=torch.randn(6, 4).double())
    a, b = (UnreadParameter(InFile(source, name), requires_grad=False) for name in "ab")
    assert torch.cat([a, b]).dtype is torch.float64  # promoted, as torch does
    with pytest.raises(RuntimeError, match="must match"):
        torch.cat([UnreadParameter(InFile(source, "a")), torch.zeros(1, 2)])
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        torch.split(UnreadParameter(InFile(source, "a")), [1, 2])
    assert a.t().equal(source.values["a"].t())


def test_equal_tensors_are_found_without_holding_them() -> None:
    one = torch.randn(9, 4)
    other = one.clone()
    other[8, 3] += 1
    source = Source(one=one, same=one.clone(), other=other, scalar=torch.tensor(1.0), wide=torch.randn(9, 5))
    origin: dict[str, Origin] = {name: InFile(source, name) for name in source.values}
    assert are_equal(origin["one"], origin["same"], piece_elements=8)
    assert not are_equal(origin["one"], origin["other"], piece_elements=8)
    assert are_equal(origin["scalar"], origin["scalar"]) and not are_equal(origin["one"], origin["wide"])
    assert not are_equal(origin["one"], Cast(origin["one"], torch.float16))
    unread = [UnreadParameter(origin[name]) for name in ("one", "same")]
    assert torch.equal(*unread) and is_unread(*unread)


def test_origins_refuse_what_torch_would_refuse_or_promote() -> None:
    source = Source(a=torch.zeros(6, 4), b=torch.zeros(6, 5), c=torch.zeros(6, 4).half())
    a, b, c = (InFile(source, name) for name in "abc")
    assert isinstance(join([a, b], 1), Joined) and join([a, b], 0) is None and join([a, c], 0) is None
    assert stack([a, b], 0) is None and stack([a, c], 0) is None and cut(a, [1, 2], 0) is None
