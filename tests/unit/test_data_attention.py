"""`auto` takes the attention that installation, GPU, dtype and model allow; a typed name is checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, BloomConfig, LlamaConfig

from hf_fsdp.data import choose_attention, compute_dtype
from hf_fsdp.errors import ConfigError

BF16, FP32 = torch.bfloat16, torch.float32


def _pretend(monkeypatch: pytest.MonkeyPatch, *installed: str, capability: tuple[int, int] | None) -> None:
    """A machine with this GPU (or none) and these packages."""
    import transformers.utils as utils

    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for version in ("2", "3"):
        has = f"flash_attention_{version}" in installed
        monkeypatch.setattr(utils, f"is_flash_attn_{version}_available", lambda has=has: has)


BOTH = ("flash_attention_2", "flash_attention_3")


@pytest.mark.parametrize(
    ("capability", "installed", "compute", "expected", "why"),
    [
        ((9, 0), BOTH, BF16, "flash_attention_3", "auto: installed, bfloat16, and the GPU fits"),
        ((9, 0), BOTH[:1], BF16, "flash_attention_2", "auto: installed, bfloat16, and the GPU fits"),
        ((8, 0), BOTH, BF16, "flash_attention_2", "auto: installed, bfloat16, and the GPU fits"),
        ((8, 0), BOTH, torch.float16, "flash_attention_2", "auto: installed, float16, and the GPU fits"),
        ((7, 5), BOTH, torch.float16, "sdpa", "flash_attention_3 needs a Hopper GPU; the GPU is older than Ampere"),
        ((9, 0), (), BF16, "sdpa", "flash_attention_3 is not installed; flash_attention_2 is not installed"),
        ((9, 0), BOTH, FP32, "sdpa", "auto: no flash attention: the run computes in fp32"),
        (None, BOTH, BF16, "sdpa", "auto: no flash attention: there is no CUDA GPU"),
    ],
)
@pytest.mark.parametrize("asked", [None, "auto"])
def test_auto_takes_the_best_that_fits_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
    asked: str | None,
    capability: tuple[int, int] | None,
    installed: tuple[str, ...],
    compute: torch.dtype,
    expected: str,
    why: str,
) -> None:
    _pretend(monkeypatch, *installed, capability=capability)
    chosen = choose_attention(asked, LlamaConfig(), compute=compute)
    assert chosen.implementation == expected
    assert why in str(chosen) and str(chosen).startswith(f"attention: {expected} (auto: ")


def test_auto_takes_eager_for_a_model_that_has_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, *BOTH, capability=(9, 0))
    chosen = choose_attention("auto", BloomConfig(), compute=BF16)
    assert chosen.implementation == "eager" and "bloom does not support it" in chosen.reason
    assert "the model has no sdpa" in chosen.reason


def test_a_typed_name_is_kept() -> None:
    assert str(choose_attention("eager", LlamaConfig(), compute=FP32)) == "attention: eager (as typed)"
    assert choose_attention("kernels-community/flash-attn2", LlamaConfig(), compute=BF16).reason == "as typed"


@pytest.mark.parametrize(
    ("asked", "compute", "config", "expected"),
    [
        ("spda", FP32, LlamaConfig, "attn_implementation='spda' is not one of: auto, eager"),
        ("flash_attention_2", FP32, LlamaConfig, "computes in 16 bits only, and this run computes in fp32"),
        ("kernels-community/flash-attn2", FP32, LlamaConfig, "computes in 16 bits only"),
        ("flash_attention_2", BF16, LlamaConfig, "cannot run here: there is no CUDA GPU"),
        ("sdpa", FP32, BloomConfig, "attn_implementation='sdpa': bloom has no such attention"),
    ],
)
def test_a_typed_name_that_cannot_work_is_refused_and_the_advice_works(
    monkeypatch: pytest.MonkeyPatch, asked: str, compute: torch.dtype, config: Any, expected: str
) -> None:
    _pretend(monkeypatch, capability=None)
    with pytest.raises(ConfigError, match=expected) as caught:
        choose_attention(asked, config(), compute=compute, source="run.yaml:3")
    assert caught.value.problems[0].source == "run.yaml:3"
    advised = caught.value.problems[0].fix.removeprefix("attn_implementation: ").split()[0]
    assert choose_attention(advised, config(), compute=compute).implementation in ("sdpa", "eager")


def test_flash_attention_that_is_not_installed_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, capability=(9, 0))
    with pytest.raises(ConfigError, match="cannot run here: flash_attention_3 is not installed"):
        choose_attention("flash_attention_3", LlamaConfig(), compute=BF16)


def test_an_attention_without_masks_is_refused_for_packing_and_the_advice_works() -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("maskless_for_a_test", sdpa_attention_forward)
    try:
        choose_attention("maskless_for_a_test", LlamaConfig(), compute=FP32)
        with pytest.raises(ConfigError, match="gets no mask from transformers, so packed samples would see") as caught:
            choose_attention("maskless_for_a_test", LlamaConfig(), compute=FP32, packed=True)
    finally:
        del AttentionInterface._global_mapping["maskless_for_a_test"]
    assert caught.value.problems[0].fix == "attn_implementation: auto   or   packing: false"
    assert choose_attention("auto", LlamaConfig(), compute=FP32, packed=True).implementation == "sdpa"


def test_the_compute_dtype_is_the_presets_and_under_auto_trainers() -> None:
    assert compute_dtype("fp32", bf16=True) is FP32
    assert compute_dtype("bf16-mixed", bf16=False) is compute_dtype("bf16-true", bf16=False) is BF16
    assert compute_dtype("fp16-mixed", bf16=False) is torch.float16
    assert compute_dtype("auto", bf16=True) is BF16
    assert compute_dtype("auto", bf16=False) is FP32
    assert compute_dtype("auto", bf16=False, fp16=True) is torch.float16
