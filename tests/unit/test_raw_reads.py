"""A weight that is read past its module's own forward is noticed, however the read is written."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trl.trainer import utils as trl_utilities

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.policies.precision import find_norms, resolve_precision
from hf_fsdp.policies.raw_reads import RawRead, find_raw_reads, is_read_from_outside
from hf_fsdp.policies.wrap import build_wrap_plan
from hf_fsdp.policies.wrap_plan import WrapPlan, unit_parameters
from tests.unit.small_models import tiny_llama


class _Head(nn.Module):
    """A model with a body and a head; the subclasses differ in how they use the head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 8)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head


class _Calls(_Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(x))


class _ReadsMetadata(_Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.lm_head.weight.dtype).to(self.lm_head.weight.device)
        return self.lm_head(x)[..., : self.lm_head.weight.shape[0]]


class _ReadsDirectly(_Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.lm_head.weight)


class _ReadsBias(_Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(x) - self.lm_head.bias


class _ReadsAnAlias(_Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head = self.lm_head
        same = head
        return F.linear(x, same.weight)


class _ReadsANamedPart(_Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head: nn.Linear = self.lm_head
        if (projection := head) is not None:
            return F.linear(x, projection.weight)
        return x


class _ReadsThroughAGetter(_Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.get_output_embeddings().weight)


class _ReadsInAMethod(_Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute_logits(x)

    def compute_logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.lm_head.weight)


def project(hidden: torch.Tensor, head: Any) -> torch.Tensor:
    return F.linear(hidden, head.weight)


def project_by_model(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    return project(hidden, head=model.lm_head)


class _ReadsInAFunction(_Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return project_by_model(self, x)


class _HandsOutToAnUnknownName(_Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lm_head: Any = dict(self.named_children())["lm_head"]
        return F.linear(x, lm_head.weight)


HEAD_READ = {RawRead("", "lm_head")}


@pytest.mark.parametrize("model_class", [_Calls, _ReadsMetadata])
def test_a_call_and_a_look_at_metadata_are_no_reads(model_class: type[nn.Module]) -> None:
    assert find_raw_reads(model_class()) == frozenset()


@pytest.mark.parametrize(
    "model_class",
    [
        _ReadsDirectly,
        _ReadsBias,
        _ReadsAnAlias,
        _ReadsANamedPart,
        _ReadsThroughAGetter,
        _ReadsInAMethod,
        _ReadsInAFunction,
    ],
)
def test_a_read_is_found_on_every_way_to_it(model_class: type[nn.Module]) -> None:
    assert find_raw_reads(model_class()) == HEAD_READ


def test_a_name_that_cannot_be_followed_counts_for_every_module_of_that_name() -> None:
    assert find_raw_reads(_HandsOutToAnUnknownName()) == {RawRead("", "lm_head", certain=False)}


def test_a_module_that_reads_its_own_weight_is_no_raw_read() -> None:
    assert find_raw_reads(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Embedding(2, 2))) == frozenset()


def test_a_read_inside_torch_is_found_too() -> None:
    """`nn.MultiheadAttention` hands its projection's weight to a function."""
    assert RawRead("", "out_proj") in find_raw_reads(nn.MultiheadAttention(8, 2))


def test_a_chain_of_wrapped_forwards_is_read_to_its_end() -> None:
    def wrapper(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    class Plain(_Head):
        pass

    plain = Plain()
    plain.forward = types.MethodType(wrapper(wrapper(_ReadsDirectly.forward)), plain)
    assert find_raw_reads(plain) == HEAD_READ


def test_a_partial_over_the_model_is_followed() -> None:
    class Plain(_Head):
        pass

    model = Plain()
    original: Any = _ReadsDirectly.forward
    model.forward = functools.partial(original, model)
    assert find_raw_reads(model) == HEAD_READ


def test_a_forward_that_closes_over_the_model_is_followed() -> None:
    class Plain(_Head):
        pass

    model = Plain()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, model.lm_head.weight)

    model.forward = forward
    assert find_raw_reads(model) == HEAD_READ


def test_a_forward_without_source_is_no_crash() -> None:
    scope: dict[str, Any] = {}
    exec("def forward(self, x):\n    return x @ self.lm_head.weight.T", scope)

    class Plain(_Head):
        forward = scope["forward"]

    assert find_raw_reads(Plain()) == frozenset()


def test_a_builtin_forward_is_no_crash() -> None:
    model: Any = _Calls()
    model.forward = len
    assert find_raw_reads(model) == frozenset()


def test_functions_that_call_each_other_end() -> None:
    class Loops(_Head):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a: Any = None
            b = a
            a = b
            return self.other(x) + F.linear(x, a.weight)

        def other(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward(x) + F.linear(x, self.lm_head.weight)

    assert RawRead("", "lm_head") in find_raw_reads(Loops())


def test_reading_from_inside_and_from_outside_are_told_apart() -> None:
    reads = frozenset({RawRead("tower.layer", "tower.layer.norm")})
    assert is_read_from_outside("tower.layer.norm", reads)
    assert not is_read_from_outside("tower.layer", reads)
    assert not is_read_from_outside("tower.layer.norm_two", reads)


# -- what the wrap policy makes of it ---------------------------------------------------------------------------------


def plan_of(model: nn.Module) -> WrapPlan:
    return build_wrap_plan(model, FSDPConfig().wrap, resolve_precision(FSDPConfig().precision))


def held_by(plan: WrapPlan, kind: str) -> set[str]:
    return {name for unit, parameters in unit_parameters(plan) if unit.kind == kind for name in parameters}


def test_the_head_of_a_model_with_trls_fused_head_is_in_the_root() -> None:
    add_fused_lm_head = getattr(trl_utilities, "add_fused_lm_head", None)
    if add_fused_lm_head is None:
        pytest.skip("this TRL calls the head as a module")
    model = tiny_llama(2)
    assert "lm_head.weight" in held_by(plan_of(model), "head")
    add_fused_lm_head(model)
    plan = plan_of(model)
    assert "lm_head.weight" in held_by(plan, "root")
    assert plan.notes == ("lm_head stays in the root unit: its weight is read outside its own forward",)


def fused_loss_forward(self: Any, input_ids: torch.Tensor, labels: Any = None, **kwargs: Any) -> Any:
    """In the manner of kernels that replace the forward: the head goes through two functions before it is read."""
    hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
    return _maybe_trainable_head(self, hidden, labels)


def _maybe_trainable_head(self: Any, hidden: torch.Tensor, labels: Any) -> Any:
    lm_head = self.lm_head
    if isinstance(lm_head, nn.Sequential):
        lm_head = lm_head[0]
    return _fused_linear_cross_entropy(lm_head=self.lm_head, hidden=hidden, labels=labels)


def _fused_linear_cross_entropy(lm_head: Any, hidden: torch.Tensor, labels: Any) -> Any:
    return F.cross_entropy(F.linear(hidden, lm_head.weight).flatten(0, 1), labels.flatten())


def test_the_head_of_a_model_with_a_fused_loss_on_the_instance_is_in_the_root() -> None:
    model = tiny_llama(2)
    model.forward = types.MethodType(fused_loss_forward, model)
    assert "lm_head.weight" in held_by(plan_of(model), "root")


def test_a_block_with_a_weight_that_the_model_reads_is_left_to_the_root() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4))
            self.tower: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.tower.gate = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tower(x) * self.tower.gate.weight.sum()

    model = Reader()
    wrap = FSDPConfig(wrap=lambda model: [*model.layers, model.tower]).wrap
    plan = build_wrap_plan(model, wrap, resolve_precision(FSDPConfig().precision))
    assert held_by(plan, "root") == {name for name, _ in model.named_parameters() if name.startswith("tower.")}
    assert plan.notes == ("tower stays in the root unit: tower.gate is read outside its forward",)


def test_a_norm_that_a_kernel_reads_past_its_forward_is_no_unit() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.other_norm = nn.LayerNorm(4), nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other_norm(F.layer_norm(x, (4,), self.norm.weight, self.norm.bias))

    assert [name for name, _ in find_norms(Mixer())] == ["other_norm"]
