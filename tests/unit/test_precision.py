"""What each preset stores, computes, reduces and returns, unit by unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_fsdp.config.schema import PrecisionConfig
from hf_fsdp.errors import PrecisionError
from hf_fsdp.policies.precision import check_storable, find_norms, resolve_precision
from tests.unit.small_models import on_meta, text_models, tiny_llama, vision_language_models

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KINDS = ("block", "embedding", "head", "norms", "root")


def table(preset: str, **changes: Any) -> Any:
    return resolve_precision(PrecisionConfig(preset=preset, **changes))


def parameter(dtype: torch.dtype, *, trained: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=trained)


@pytest.mark.parametrize(
    ("preset", "storage", "compute"),
    [("fp32", FP32, FP32), ("bf16-mixed", FP32, BF16), ("bf16-true", BF16, BF16), ("fp16-mixed", FP32, FP16)],
)
def test_a_preset_is_its_row_of_the_table(preset: str, storage: torch.dtype, compute: torch.dtype) -> None:
    row = table(preset)
    assert (row.preset, row.storage, row.compute, row.reduce, row.output) == (preset, storage, compute, FP32, FP32)


def test_auto_is_bf16_mixed_when_nobody_said_otherwise() -> None:
    assert table("auto") == table("bf16-mixed")


@pytest.mark.parametrize("preset", ["fp8-mixed", "int8"])
def test_a_preset_that_this_release_does_not_run_is_refused_with_advice_that_works(preset: str) -> None:
    with pytest.raises(
        PrecisionError, match=f"precision.preset='{preset}' is not a precision this release runs"
    ) as caught:
        table(preset)
    assert caught.value.problems[0].near == "fp32, bf16-mixed, bf16-true, fp16-mixed"
    assert table(caught.value.problems[0].fix.removeprefix("precision: ")).compute is BF16


# -- policies by kind of unit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["fp32", "bf16-mixed", "bf16-true", "fp16-mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_reduced_in_float32_in_every_unit(preset: str, kind: str) -> None:
    assert table(preset).policy(kind).reduce_dtype is FP32


def test_gradients_are_reduced_in_bfloat16_only_on_request() -> None:
    assert {table("bf16-mixed", reduce_dtype="bfloat16").policy(kind).reduce_dtype for kind in KINDS} == {BF16}


@pytest.mark.parametrize("kind", ["block", "embedding", "head"])
def test_inner_units_compute_in_the_compute_dtype_and_pass_it_on(kind: str) -> None:
    policy = table("bf16-mixed").policy(kind)
    assert (policy.param_dtype, policy.output_dtype, policy.cast_forward_inputs) == (BF16, None, True)


def test_the_root_returns_float32_so_that_a_loss_outside_starts_from_it() -> None:
    assert table("bf16-true").policy("root").output_dtype is FP32


def test_norms_keep_float32_weights_and_hand_on_the_compute_dtype() -> None:
    policy = table("bf16-mixed", keep_norms_fp32=True).policy("norms")
    assert (policy.param_dtype, policy.output_dtype, policy.cast_forward_inputs) == (FP32, BF16, False)


def test_keeping_norms_in_float32_means_nothing_where_all_is_float32() -> None:
    assert table("fp32", keep_norms_fp32=True) == table("fp32")


# -- storage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "loaded", "trained", "stored"),
    [
        ("fp32", BF16, True, FP32),
        ("fp32", BF16, False, BF16),
        ("bf16-mixed", BF16, True, FP32),
        ("bf16-mixed", FP16, True, FP32),
        ("bf16-mixed", BF16, False, BF16),
        ("bf16-mixed", FP32, False, FP32),
        ("bf16-true", FP32, True, BF16),
        ("bf16-true", FP32, False, BF16),
        ("bf16-true", FP16, False, BF16),
    ],
)
def test_what_a_weight_is_stored_in(preset: str, loaded: torch.dtype, trained: bool, stored: torch.dtype) -> None:
    assert table(preset).storage_dtype(parameter(loaded, trained=trained), is_norm=False) is stored


@pytest.mark.parametrize("trained", [True, False])
def test_kept_norms_are_stored_in_float32_under_every_preset(trained: bool) -> None:
    for preset in ("bf16-mixed", "bf16-true"):
        kept = table(preset, keep_norms_fp32=True)
        assert kept.storage_dtype(parameter(BF16, trained=trained), is_norm=True) is FP32
        assert kept.storage_dtype(parameter(BF16, trained=True), is_norm=False) is kept.storage


def test_norms_follow_the_preset_when_they_are_not_kept() -> None:
    assert table("bf16-true").storage_dtype(parameter(FP32), is_norm=True) is BF16


def test_weights_that_are_no_floats_are_left_alone() -> None:
    packed = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    assert table("bf16-true").storage_dtype(packed, is_norm=False) is torch.uint8


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_trained_weight_that_storage_would_change_unasked_is_refused(dtype: torch.dtype) -> None:
    model = tiny_llama(1)
    model.extra = parameter(dtype)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        PrecisionError, match=rf"1 of them are of a dtype .* without being asked: extra \({name}\)"
    ) as caught:
        check_storable(model.named_parameters(), table("bf16-mixed"))
    assert "stores trained weights in float32" in str(caught.value)


def test_the_advice_for_float64_works_either_way() -> None:
    model = tiny_llama(1).double()
    with pytest.raises(
        PrecisionError, match=r"model.float\(\), or freeze these parameters with requires_grad_\(False\)"
    ):
        check_storable(model.named_parameters(), table("bf16-mixed"))
    check_storable(model.float().named_parameters(), table("bf16-mixed"))
    check_storable(model.double().requires_grad_(False).named_parameters(), table("bf16-mixed"))


def test_a_mixture_of_float_dtypes_is_storable() -> None:
    named = [("a", parameter(FP32)), ("b", parameter(BF16)), ("c", parameter(FP16))]
    check_storable(named, table("bf16-mixed"))


# -- norms ------------------------------------------------------------------------------------------------------------

NUM_NORMS = {"llama": 9, "qwen3": 17, "gemma3": 25, "gpt2": 9, "opt": 9, "phi3": 9, "t5": 17, "bert": 9, "mixtral": 9}


@pytest.mark.parametrize("family", NUM_NORMS)
def test_every_norm_of_a_family_is_found_and_nothing_else(family: str) -> None:
    model = on_meta(text_models()[family])
    norms = find_norms(model)
    assert len(norms) == NUM_NORMS[family]
    vectors = {name for name, _ in model.named_parameters() if "norm" in name.lower() or ".ln_" in name}
    assert {f"{name}.{own}" for name, module in norms for own, _ in module.named_parameters()} == vectors


def test_norms_of_both_towers_are_found() -> None:
    names = [name for name, _ in find_norms(on_meta(vision_language_models()["llava"]))]
    assert any("vision_tower" in name for name in names) and any("language_model" in name for name in names)


def test_norms_are_known_by_class_and_by_name_but_containers_are_none() -> None:
    class MambaRMSNormGated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    class NormAndProject(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.projection = nn.LayerNorm(4), nn.Linear(4, 4)

    model = nn.ModuleDict(
        {
            "gated": MambaRMSNormGated(),
            "both": NormAndProject(),
            "batch": nn.BatchNorm1d(4),
            "group": nn.GroupNorm(2, 4),
            "bare": nn.LayerNorm(4, elementwise_affine=False),
        }
    )
    assert [name for name, _ in find_norms(model)] == ["gated", "both.inner", "batch", "group"]
