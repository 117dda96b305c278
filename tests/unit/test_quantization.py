"""Which quantized bases are refused, by name and with advice that works; what 4-bit layers get before training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.utils.quantization_config import QuantizationMethod

from hf_fsdp.config.schema import PrecisionConfig
from hf_fsdp.errors import ConfigError, ShardingError
from hf_fsdp.policies import packed_weights, quantization
from hf_fsdp.policies.precision import resolve_precision
from tests.distributed import qlora_models

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {"fp32": FP32, "bf16-mixed": BF16, "bf16-true": BF16, "fp16-mixed": FP16}


def table(preset: str) -> Any:
    return resolve_precision(PrecisionConfig(preset=preset))


def messages(model: nn.Module, preset: str = "bf16-mixed") -> list[str]:
    return [problem.message for problem in quantization.check_quantization(model, table(preset))]


class _Block(nn.Module):
    """A 4-bit layer beside plain ones, small enough to be built for each test."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = layer, nn.LayerNorm(64)
        self.requires_grad_(False)


def four_bit(storage: torch.dtype, compute: torch.dtype | None = None, **changes: Any) -> _Block:
    """One quantized layer stored in `storage`."""
    settings = {"quant_type": "nf4", "quant_storage": storage, "compute_dtype": compute or storage, **changes}
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, **settings)
    layer.weight = bitsandbytes.nn.Params4bit(
        torch.randn(64, 64), quant_type="nf4", quant_storage=storage, module=layer
    ).to("cpu")
    return _Block(layer)


def advised(fix: str) -> Any:
    """The BitsAndBytesConfig that a fix spells out."""
    text = fix[fix.index("BitsAndBytesConfig(") :]
    return eval(text[: text.index(")") + 1], {"BitsAndBytesConfig": BitsAndBytesConfig, "torch": torch})


# -- storage and compute ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", DTYPES)
@pytest.mark.parametrize("stored", [FP32, BF16, FP16])
def test_storage_has_to_be_the_dtype_that_the_preset_computes_in(preset: str, stored: torch.dtype) -> None:
    found = messages(four_bit(stored, DTYPES[preset]), preset)
    if stored is DTYPES[preset]:
        assert found == []
    else:
        assert len(found) == 1 and "gathering would cast packed bits as if they were numbers" in found[0]
        assert f"bnb_4bit_quant_storage={str(stored)[6:]} under precision.preset='{preset}'" in found[0]


@pytest.mark.parametrize("preset", DTYPES)
def test_bytes_are_refused_and_the_advised_storage_passes(preset: str) -> None:
    (problem,) = quantization.check_quantization(four_bit(torch.uint8, DTYPES[preset]), table(preset))
    assert problem.message.startswith(f"bnb_4bit_quant_storage=uint8 under precision.preset={preset!r}")
    config = advised(problem.fix)
    assert config.load_in_4bit and config.bnb_4bit_quant_type == "nf4"
    assert messages(four_bit(config.bnb_4bit_quant_storage, config.bnb_4bit_compute_dtype), preset) == []


def test_a_layer_that_computes_in_another_dtype_is_refused_and_one_that_takes_its_inputs_is_not() -> None:
    (found,) = messages(four_bit(BF16, FP32))
    assert found.startswith("bnb_4bit_compute_dtype=float32 under precision.preset='bf16-mixed'")
    undecided = four_bit(BF16)
    undecided.layer.compute_dtype, undecided.layer.compute_type_is_set = None, False
    assert messages(undecided) == []


def test_all_that_is_wrong_is_said_at_once_and_the_other_preset_is_advised() -> None:
    problems = quantization.check_quantization(four_bit(FP32), table("bf16-mixed"))
    assert [problem.message.partition("=")[0] for problem in problems] == [
        "bnb_4bit_quant_storage",
        "bnb_4bit_compute_dtype",
    ]
    for problem in problems:
        preset = problem.fix.rpartition("or precision: ")[2]
        assert preset == "fp32" and messages(four_bit(FP32), preset) == []


# -- what is trained --------------------------------------------------------------------------------------------------


def test_a_trained_packed_weight_is_refused() -> None:
    model = four_bit(BF16)
    model.layer.weight.requires_grad_(True)
    assert messages(model) == ["layer: packed 4-bit weights have no gradient and cannot be trained"]
    model.requires_grad_(False)
    assert messages(model) == []


def test_full_training_of_a_four_bit_base_is_refused_and_each_advice_works() -> None:
    base = qlora_models.load_base(BF16)
    (problem,) = quantization.check_quantization(base, table("bf16-mixed"))
    assert "the base is in 4 bits and has no adapters, yet model.embed_tokens.weight" in problem.message
    assert "get_peft_model" in problem.fix and "model.requires_grad_(False)" in problem.fix
    assert messages(qlora_models.add_lora(base)) == []
    assert messages(qlora_models.load_base(BF16).requires_grad_(False)) == []


def test_a_layer_without_scales_is_refused_and_so_is_one_rewritten_in_eval_mode() -> None:
    empty = _Block(bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=BF16, quant_storage=BF16, device="meta"))
    assert "layer: built in 4 bits and not quantized yet" in messages(empty)[0]
    rewritten = four_bit(BF16)
    rewritten.layer.quant_state.packing_format_for_cpu = True
    assert "layer: a forward in eval mode has rewritten the packed weight" in messages(rewritten)[0]


# -- other quantizers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in QuantizationMethod if m is not QuantizationMethod.BITS_AND_BYTES])
def test_every_other_quantizer_is_refused_by_name(method: QuantizationMethod) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method=method))
    assert messages(nn.Sequential(model)) == [
        f"the model's base is quantized by {method.value}; of the quantized bases, this release shards bitsandbytes' "
        "4-bit layers only"
    ]
    model.hf_quantizer.quantization_config.dequantize = True  # loaded as plain weights
    assert messages(model) == []


def test_eight_bits_are_refused_and_the_advised_four_bits_pass() -> None:
    config = BitsAndBytesConfig(load_in_8bit=True)
    by_quantizer, by_flag = nn.Linear(4, 4), nn.Linear(4, 4)
    by_quantizer.hf_quantizer = SimpleNamespace(quantization_config=config)
    by_flag.is_loaded_in_8bit = True
    by_parameter = _Block(bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False))
    for model in (by_quantizer, by_flag, by_parameter):
        (problem,) = quantization.check_quantization(model, table("bf16-mixed"))
        assert "the model's base is loaded in 8 bits (load_in_8bit)" in problem.message
        advice = advised(problem.fix)
        assert messages(four_bit(advice.bnb_4bit_quant_storage, advice.bnb_4bit_compute_dtype)) == []


def test_four_bit_weights_outside_a_linear_layer_are_refused() -> None:
    model = nn.Module()
    model.weight = four_bit(BF16).layer.weight
    assert "is quantized by bitsandbytes outside its Linear4bit (weight)" in messages(model)[0]


def test_a_model_in_plain_weights_has_no_problem() -> None:
    assert messages(nn.Linear(4, 4)) == []
    assert packed_weights.describe_quantization(nn.Linear(4, 4)) == []
    assert packed_weights.packed_state(nn.Linear(4, 4)) == {}


def test_apply_fsdp_refuses_before_anything_is_changed() -> None:
    from hf_fsdp import FSDPConfig, apply_fsdp

    model = four_bit(torch.uint8, BF16)
    with pytest.raises(ShardingError, match="bnb_4bit_quant_storage=uint8"):
        apply_fsdp(model, FSDPConfig(precision="bf16-mixed"))
    assert isinstance(model.layer.weight, bitsandbytes.nn.Params4bit)


# -- made ready -------------------------------------------------------------------------------------------------------


def test_the_rewriting_for_avx512_is_switched_off_whatever_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    model = four_bit(BF16)
    assert model.layer.support_avx512bf16_for_cpu
    before = qlora_models.bits(model.layer.weight)
    packed_weights.keep_layout(model)
    with torch.no_grad():
        model.eval().layer(torch.ones(2, 64, dtype=BF16))
    assert torch.equal(qlora_models.bits(model.layer.weight), before)
    assert not getattr(model.layer.quant_state, "packing_format_for_cpu", False)


@pytest.mark.parametrize(("preset", "dtype"), [("bf16-mixed", FP32), ("auto", FP32), ("bf16-true", BF16)])
def test_adapters_in_bfloat16_are_given_float32_back_unless_bf16_true_is_asked(preset: str, dtype: torch.dtype) -> None:
    model = four_bit(BF16).to(BF16)
    model.norm.weight.requires_grad_(True)
    lines = packed_weights.ready_for_training(model, preset)
    assert model.norm.weight.dtype is dtype and model.norm.bias.dtype is BF16  # the frozen one stays
    assert lines == (
        []
        if preset == "bf16-true"
        else ["1 adapter weights beside 4-bit layers were in bfloat16 and are stored in float32"]
    )
    plain = nn.Linear(4, 4, dtype=BF16)
    assert packed_weights.ready_for_training(plain, preset) == [] and plain.weight.dtype is BF16


@pytest.mark.parametrize("nested", [False, True])
def test_scales_and_codes_follow_the_gathered_weights(nested: bool) -> None:
    model = four_bit(BF16)
    layer = model.layer
    layer.weight = bitsandbytes.nn.Params4bit(
        torch.randn(64, 64), quant_type="nf4", quant_storage=BF16, compress_statistics=nested, module=layer
    ).to("cpu")
    found = packed_weights.quantization_tensors("layer", layer)
    assert len(found) == (5 if nested else 2)
    assert {name for name, _ in packed_weights.quantization_structure(model)} == {"layer.weight.quant_state", *found}
    packed_weights.move_quantization_state(model, "meta")
    assert all(getattr(holder, attribute).is_meta for holder, attribute in found.values())


# -- the recipe's dtypes ----------------------------------------------------------------------------------------------


def arguments(**changes: Any) -> Any:
    from trl import ModelConfig

    return ModelConfig(**{"load_in_4bit": True, "use_peft": True, **changes})


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_recipes_storage_compute_and_weights_follow_from_the_precision(dtype: torch.dtype) -> None:
    from trl import get_quantization_config

    from hf_fsdp.data import settle_four_bits

    args = arguments(use_bnb_nested_quant=True)
    settle_four_bits(args, dtype, typed=())
    config = get_quantization_config(args)
    assert (config.bnb_4bit_compute_dtype, config.bnb_4bit_quant_storage) == (dtype, dtype)
    assert args.dtype == str(dtype)[6:] and config.bnb_4bit_use_double_quant
    plain = arguments(load_in_4bit=False)
    settle_four_bits(plain, dtype, typed=())
    assert plain.bnb_4bit_quant_storage is None and get_quantization_config(plain) is None


def test_a_recipes_contradictions_are_refused_together_and_the_fixes_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_fsdp.data import four_bits, settle_four_bits

    wrong = {"use_peft": False, "dtype": "float16", "bnb_4bit_quant_storage": "uint8"}
    with monkeypatch.context() as patched:
        patched.setattr(four_bits, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="load_in_4bit needs bitsandbytes") as caught:
            settle_four_bits(arguments(**wrong), BF16, typed=wrong)
    problems = caught.value.problems
    assert len(problems) == 4 and problems[0].fix == "pip install bitsandbytes"
    repaired = {}
    for problem in problems[1:]:
        key, _, value = problem.fix.partition(",")[0].partition("   #")[0].partition(": ")
        repaired[key] = value == "true" or value
    settle_four_bits(arguments(**repaired), BF16, typed=repaired)
