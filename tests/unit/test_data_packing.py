"""A model is asked itself whether packed samples see each other; arguments that make them are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from hf_fsdp.data import check_packing, packs_samples, prove_packing
from hf_fsdp.errors import DataError
from hf_fsdp.policies.packed_rows import holds_packed_rows, keep_packed_rows_apart
from tests.distributed.tiny_models import _LLAMA_LIKE, VOCABULARY, build_model

PROVEN = ("llama", "mistral", "qwen3", "gemma3", "phi3", "gpt2")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", PROVEN)
def test_families_that_follow_positions_are_proven(family: str, attention: str) -> None:
    model = build_model(family, tied=True, dropout=0.1)
    model.set_attn_implementation(attention)
    model.train()
    state = torch.get_rng_state()
    assert prove_packing(model) <= 1e-5
    assert model.training and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "config",
    "Cohere Falcon GPTNeo GPTNeoX Gemma Granite Lfm2 Mixtral Olmo2 Phi Qwen2 StableLm Starcoder2".split(),
)
def test_more_families_that_the_guide_names_are_proven(config: str) -> None:
    assert prove_packing(_build_from(config)) <= 1e-5


@pytest.mark.parametrize("config", "Bloom BioGpt Jamba Mamba Mpt OPT RecurrentGemma Rwkv XGLM".split())
def test_families_that_do_not_follow_positions_are_refused(config: str) -> None:
    with pytest.raises(DataError, match="does not keep the samples of a row apart") as caught:
        prove_packing(_build_from(config))
    assert caught.value.problems[0].fix == "packing: false   (and padding_free: false)"


def _build_from(config: str) -> Any:
    settings = {**_LLAMA_LIKE}
    if config == "GPTNeo":
        settings["attention_types"] = [[["global", "local", "global"], 1]]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, f"{config}Config")(**settings))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_proof_holds_in_16_bits_and_still_finds_a_leak(dtype: torch.dtype) -> None:
    assert prove_packing(build_model("llama", tied=False, dtype=dtype)) < 0.1
    assert prove_packing(build_model("llama", tied=False), torch.bfloat16, autocast=True) < 0.1
    with pytest.raises(DataError, match="does not keep the samples of a row apart"):
        prove_packing(build_model("opt", tied=False, dtype=dtype), dtype)


def test_the_proof_is_asked_once_for_an_attention() -> None:
    model = build_model("llama", tied=False)
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    prove_packing(model)
    prove_packing(model)
    assert len(calls) == 3
    model.set_attn_implementation("eager")
    prove_packing(model)
    assert len(calls) == 6


def test_a_model_that_takes_no_positions_is_refused() -> None:
    class Bare(nn.Module):
        config = build_model("llama", tied=False).config

        def forward(self, input_ids: torch.Tensor) -> Any: ...

    with pytest.raises(DataError, match="Bare takes no position_ids, use_cache, cu_seq_lens_q"):
        prove_packing(Bare())


def test_a_model_that_refuses_packed_rows_itself_says_so() -> None:
    model = build_model("llama", tied=False)

    def refuse(module: nn.Module, args: Any, kwargs: Any) -> None:
        raise ValueError("no kernel keeps packed sequences apart")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    with pytest.raises(DataError, match="LlamaForCausalLM refuses packed rows: no kernel keeps packed sequences apart"):
        prove_packing(model)


@pytest.mark.parametrize(
    ("arguments", "expected", "advised"),
    [
        ({"packing": True, "packing_strategy": "wrapped"}, "cuts samples anywhere", {"packing_strategy": "bfd"}),
        ({"packing": True, "packing_strategy": "wrapped"}, "cuts samples anywhere", {"packing_strategy": "bfd_split"}),
        ({"packing": False, "eval_packing": True}, "eval_packing=True without packing=True", {"eval_packing": False}),
        ({"packing": False, "eval_packing": True}, "eval_packing=True without packing=True", {"packing": True}),
    ],
)
def test_arguments_that_leak_are_refused_and_the_advice_works(
    arguments: dict[str, Any], expected: str, advised: dict[str, Any]
) -> None:
    (problem,) = check_packing(SimpleNamespace(**arguments))
    assert expected in problem.message
    assert all(str(value).lower() in problem.fix for value in advised.values())
    assert not check_packing(SimpleNamespace(**{**arguments, **advised}))


def test_arguments_without_packing_pack_nothing() -> None:
    assert not packs_samples(SimpleNamespace()) and not check_packing(SimpleNamespace())
    assert packs_samples(SimpleNamespace(padding_free=True))


def test_the_cache_is_off_over_packed_rows_and_only_there() -> None:
    """In evaluation a forward makes a cache by default, and with one the samples of a row see each other."""
    model = build_model("llama", tied=False).eval()
    ids = torch.randint(3, VOCABULARY, (1, 10), generator=torch.Generator().manual_seed(0))
    restarting = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        alone = model(input_ids=ids[:, 4:], use_cache=False).logits
        leaky = model(input_ids=ids, position_ids=restarting).logits[:, 4:]
        keep_packed_rows_apart(model)
        keep_packed_rows_apart(model)
        packed = model(input_ids=ids, position_ids=restarting)
        plain = model(input_ids=ids, position_ids=torch.arange(10)[None])
        masked = model(input_ids=ids, position_ids=restarting, attention_mask=torch.ones_like(ids))
    assert (leaky - alone).abs().max() > 0.01
    assert (packed.logits[:, 4:] - alone).abs().max() <= 1e-6 and packed.past_key_values is None
    assert plain.past_key_values is not None and masked.past_key_values is not None
    assert len(model._forward_pre_hooks) == 1


def test_positions_that_restart_are_packed_rows() -> None:
    assert holds_packed_rows(torch.tensor([[0, 1, 2], [0, 1, 0]]))
    assert not holds_packed_rows(torch.tensor([[5, 6, 7]]))
    assert not holds_packed_rows(None) and not holds_packed_rows(torch.zeros(3, 1, 4, dtype=torch.long))
