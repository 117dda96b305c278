"""What the first step shows in one process: values not finite, no gradient, parameters left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_fsdp.errors import NumericsError
from hf_fsdp.monitor.first_step import FirstStepReport, StepMonitor
from tests.unit.small_models import tiny_llama

IDS = torch.tensor([[5, 9, 11, 2, 7]])


def backward(model: Any, monitor: StepMonitor | None = None) -> None:
    loss = model(input_ids=IDS, labels=IDS).loss
    if monitor is not None:
        monitor.observe_loss(loss)
    loss.backward()


def first_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> FirstStepReport:
    monitor = StepMonitor()
    monitor.before_step(model)
    optimizer.step()
    return monitor.after_step(model, optimizer)


def test_a_healthy_step_says_nothing() -> None:
    model = tiny_llama(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = StepMonitor()
    backward(model, monitor)
    monitor.check_finite(model, 1)
    report = first_step(model, optimizer)
    assert report.lines() == []
    assert set(report.optimizer_state_dtypes) == {name for name, _ in model.named_parameters()}
    assert set(report.optimizer_state_dtypes.values()) == {"float32"}


# -- gradients and movement -------------------------------------------------------------------------------------------


def test_a_trained_parameter_outside_the_loss_is_named_and_freezing_it_ends_the_warning() -> None:
    model = tiny_llama(2)
    model.unused = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    report = first_step(model, optimizer)
    assert report.without_gradient == ["unused.weight"]
    assert report.not_moved == []
    assert report.lines() == [
        "1 trained parameters got no gradient in the first step (unused.weight): "
        "freeze them with requires_grad_(False) or use them in the loss"
    ]
    model.unused.requires_grad_(False)
    backward(model)
    assert first_step(model, optimizer).lines() == []


def test_a_parameter_that_the_optimizer_does_not_hold_is_named() -> None:
    model = tiny_llama(2)
    held = [parameter for name, parameter in model.named_parameters() if "layers.1.mlp" not in name]
    backward(model)
    report = first_step(model, torch.optim.SGD(held, lr=0.1))
    assert report.without_gradient == []
    assert report.not_moved == [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    assert "have a gradient and did not move" in report.lines()[0]


def test_a_step_lost_in_rounding_is_named() -> None:
    model = tiny_llama(1).to(torch.bfloat16)
    backward(model)
    report = first_step(model, torch.optim.SGD(model.parameters(), lr=1e-12))
    assert "model.norm.weight" in report.not_moved


def test_a_gradient_of_exact_zeros_moves_nothing_and_is_no_fault() -> None:
    """LoRA's A while its B is zero."""
    second = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(second.weight)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), second)
    model(torch.ones(1, 4)).sum().backward()
    report = first_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert report.lines() == []


def test_frozen_parameters_are_not_expected_to_do_anything() -> None:
    model = tiny_llama(2)
    model.model.requires_grad_(False)
    backward(model)
    assert first_step(model, torch.optim.SGD(model.lm_head.parameters(), lr=0.1)).lines() == []


def test_a_change_of_one_value_is_movement() -> None:
    model = nn.Linear(50, 40, bias=False)
    model.weight.grad = torch.zeros_like(model.weight)
    model.weight.grad[17, 31] = 1e-3
    assert first_step(model, torch.optim.SGD(model.parameters(), lr=1e-2)).not_moved == []


def test_a_permutation_of_values_is_movement() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
    model.weight.grad = torch.tensor([[-1.0, 1.0]])
    assert first_step(model, torch.optim.SGD(model.parameters(), lr=1.0)).not_moved == []
    assert model.weight.tolist() == [[2.0, 1.0]]


def test_many_names_are_cut_short() -> None:
    lines = FirstStepReport(without_gradient=[f"p{i}" for i in range(9)]).lines()
    assert lines[0].startswith("9 trained parameters got no gradient in the first step (p0, p1, p2, …)")


# -- values that are not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused_before_the_step(value: float) -> None:
    model = tiny_llama(1)
    before = model.lm_head.weight.detach().clone()
    monitor = StepMonitor()
    monitor.observe_loss(torch.tensor(1.0))
    monitor.observe_loss(torch.tensor(value))
    monitor.observe_loss(torch.tensor(2.0))
    with pytest.raises(NumericsError, match="step 7: the loss is not finite on rank 0. The step was not taken"):
        monitor.check_finite(model, 7)
    assert torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_refused_and_named(value: float) -> None:
    model = tiny_llama(1)
    backward(model)
    model.model.layers[0].mlp.up_proj.weight.grad[3, 4] = value
    with pytest.raises(
        NumericsError, match=r"1 gradients are not finite on rank 0 \(model.layers.0.mlp.up_proj.weight\)"
    ):
        StepMonitor().check_finite(model, 1)


def test_a_loss_over_masked_labels_only_is_caught_and_unmasking_helps() -> None:
    model = tiny_llama(1)
    monitor = StepMonitor()
    loss = model(input_ids=IDS, labels=torch.full_like(IDS, -100)).loss
    monitor.observe_loss(loss)
    loss.backward()
    with pytest.raises(NumericsError, match="the loss is not finite") as caught:
        monitor.check_finite(model, 1)
    assert "all labels masked?" in caught.value.problems[0].fix
    model.zero_grad()
    backward(model, monitor)
    monitor.check_finite(model, 2)


def test_a_bad_loss_is_reported_once_and_not_again_for_the_next_step() -> None:
    model, monitor = tiny_llama(1), StepMonitor()
    monitor.observe_loss(torch.tensor(float("nan")))
    with pytest.raises(NumericsError, match="step 1: the loss is not finite"):
        monitor.check_finite(model, 1)
    monitor.check_finite(model, 2)


def test_signatures_of_large_weights_take_little_memory() -> None:
    """An embedding of 128,256 x 8,192 in 8 shards would take 3 GB in float64, beside the optimizer's state."""
    from hf_fsdp.monitor.first_step import _signature
    from hf_fsdp.monitor.memory import MemoryMeter

    weight = torch.nn.Parameter(torch.rand(8_000_003))
    before = _signature(weight)
    meter = MemoryMeter("count")
    meter.start(torch.nn.Module())
    meter.begin_step()
    _signature(weight)
    meter.end_step()
    meter.stop()
    assert meter.steps[0].peak_bytes < 2 * weight.nbytes + 4 * 8 * 97 * 2**14  # one piece in float64, not all
    with torch.no_grad():
        weight[-1] += 1e-3
    assert not torch.equal(before, _signature(weight))
