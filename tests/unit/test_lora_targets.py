"""Where LoRA adapters go in models of several parts, and what stays in 16 bits under QLoRA."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_fsdp import load_sharded
from hf_fsdp.errors import ConfigError
from hf_fsdp.policies.four_bit_parts import four_bit_skips
from hf_fsdp.policies.lora_check import check_lora_targets, count_lora_targets
from hf_fsdp.policies.lora_targets import lora_targets, plan_lora
from hf_fsdp.policies.model_parts import find_parts
from tests.unit.small_models import on_meta, text_models, tiny_llama
from tests.unit.test_model_parts import FAMILIES

ATTENTION = ["q_proj", "k_proj", "v_proj"]


def adapted(model: nn.Module, plan: Any, **changes: Any) -> Any:
    """The model under PEFT, as the plan says."""
    config = LoraConfig(r=2, target_modules=plan.target_modules, modules_to_save=plan.modules_to_save, **changes)
    return get_peft_model(model, config)


def adapted_layers(model: nn.Module) -> set[str]:
    """The paths in the base model of the layers that PEFT has adapted."""
    return {
        name.partition("base_model.model.")[2].rpartition(".lora_A")[0]
        for name, _ in model.named_parameters()
        if ".lora_A." in name
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_adapts_every_linear_layer_of_the_language_model_and_nothing_else(family: str) -> None:
    model = on_meta(FAMILIES[family])
    names = set(find_parts(model).names["language"])
    head = model.get_output_embeddings()
    expected = {
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and f"{path}.weight" in names
    }
    plan = plan_lora(model)
    with torch.device("meta"):
        assert adapted_layers(adapted(model, plan)) == expected
    assert plan.counts == {"language": len(expected)} and plan.modules_to_save is None
    assert len(plan.target_modules) < 400  # a pattern that a person can read, not a list of every layer
    assert lora_targets(on_meta(FAMILIES[family])) == plan.target_modules


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", [["language", "vision"], ["vision"], "all"])
def test_tower_and_projector_are_adapted_by_choice_only(family: str, parts: Any) -> None:
    model = on_meta(FAMILIES[family])
    if family == "gemma3" and parts == "all":  # its projector is one bare weight
        with pytest.raises(ConfigError, match="lora_parts has projector, which has no linear layer"):
            plan_lora(model, parts)
        return
    found = find_parts(model)
    plan = plan_lora(model, parts)
    with torch.device("meta"):
        model = adapted(model, plan)
    wanted = set(found.names) if parts == "all" else set(parts)
    reached = find_parts(model)
    assert {reached.part_of(name) for name, _ in model.named_parameters() if ".lora_A." in name} == wanted
    assert len(adapted_layers(model)) == sum(plan.counts.values())
    assert all(not re.search(r"lm_head|embed_tokens", path) for path in adapted_layers(model))


def test_a_bare_list_of_names_is_kept_to_the_chosen_parts_and_the_rest_is_said() -> None:
    model = on_meta(FAMILIES["llava"])
    plan = plan_lora(model, kinds=ATTENTION)
    assert plan.counts == {"language": 12}
    assert any("also the names of 9 layers of the vision" in line for line in plan.lines())
    with torch.device("meta"):
        layers = adapted_layers(adapted(model, plan))
    assert len(layers) == 12 and all(path.startswith("model.language_model.") for path in layers)
    assert plan_lora(on_meta(FAMILIES["llava"]), kinds="q_proj").counts == {"language": 4}  # TRL: a list of one


def test_one_pattern_is_kept_to_the_chosen_parts() -> None:
    model = on_meta(FAMILIES["llava"])
    plan = plan_lora(model, kinds=r".*\.layers\.[13]\..*q_proj")
    with torch.device("meta"):
        layers = adapted_layers(adapted(model, plan))
    assert layers == {f"model.language_model.layers.{i}.self_attn.q_proj" for i in (1, 3)}


def test_a_persons_own_config_that_hits_the_tower_is_refused_with_advice_that_works() -> None:
    model = on_meta(FAMILIES["paligemma"])
    config = LoraConfig(r=2, target_modules=ATTENTION)
    assert count_lora_targets(model, config) == {"language": 12, "vision": 9}
    (problem,) = check_lora_targets(model, config, source="train.py")
    assert "12 in the language, 9 in the vision" in problem.message and problem.source == "train.py"
    assert "lora_parts: [language, vision]" in problem.fix
    assert check_lora_targets(model, config, ["language", "vision"]) == []
    # The other advice: `LoraConfig(target_modules=lora_targets(model, ['language'], [...]))`.
    call = re.search(r"lora_targets\(.*\]\)", problem.fix)
    assert call is not None
    fixed = LoraConfig(r=2, target_modules=eval(call.group(), {"lora_targets": lora_targets, "model": model}))
    assert check_lora_targets(model, fixed) == [] and count_lora_targets(model, fixed) == {"language": 12}


@pytest.mark.parametrize("family", ["llava", "qwen2.5-vl", "idefics3"])
def test_targets_are_counted_as_peft_puts_them(family: str) -> None:
    for targets in ("all-linear", ATTENTION, r".*fc1", ["qkv", "gate_proj"]):
        model = on_meta(FAMILIES[family])
        config = LoraConfig(r=2, target_modules=targets)
        counts = count_lora_targets(model, config)
        if not counts:
            continue
        with torch.device("meta"):
            model = get_peft_model(model, config)
        found = find_parts(model)
        reached = [found.part_of(name) for name, _ in model.named_parameters() if ".lora_A." in name]
        assert counts == {part: reached.count(part) for part in found.names if part in reached}


def test_peft_defaults_of_a_family_are_counted() -> None:
    model = on_meta(lambda: tiny_llama())
    assert count_lora_targets(model, LoraConfig(r=2)) == {"language": 4}  # q_proj and v_proj of two layers


@pytest.mark.parametrize("family", text_models())
def test_a_text_model_needs_no_parts(family: str) -> None:
    if family == "bert":  # its classifier is no head that PEFT or transformers would name
        return
    model = on_meta(text_models()[family])
    plan = plan_lora(model)
    with torch.device("meta"):
        model = adapted(model, plan, fan_in_fan_out=family == "gpt2")
    assert len(adapted_layers(model)) == plan.counts["language"] > 0


def test_fused_experts_and_attention_that_reads_weights_are_left_out_and_said() -> None:
    plan = plan_lora(on_meta(text_models()["mixtral"]))
    assert any("fused experts" in line and "target_parameters" in line for line in plan.notes)
    siglip = on_meta(FAMILIES["paligemma"])
    heads = [name for name, module in siglip.named_modules() if isinstance(module, nn.MultiheadAttention)]
    plan = plan_lora(siglip, "vision")
    assert bool(heads) == any("MultiheadAttention" in line for line in plan.notes)


@pytest.mark.parametrize(
    ("arguments", "message", "fix"),
    [
        ({"parts": ["visoin"]}, "lora_parts=visoin is no part", "lora_parts: [language, projector, vision]"),
        ({"parts": ["audio"]}, "has no audio tower", "lora_parts: [language"),
        ({"kinds": ["q_porj"]}, "lora_target_modules=q_porj names no linear layer of the language", "q_proj"),
        ({"kinds": ["fc1"]}, r"names no linear layer of the language (but vision has it)", "lora_target_modules: ["),
        ({"kinds": []}, "adapts nothing", "all-linear"),
        ({"train_in_full": "language"}, "gets adapters or is trained in full", "leave language out of trainable"),
    ],
)
def test_targets_that_are_none_are_errors(arguments: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_lora(on_meta(FAMILIES["llava"]), **arguments)
    assert message in str(caught.value) and fix in caught.value.problems[0].fix


def test_a_text_model_has_no_tower_to_adapt() -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no vision tower: it is a model of text alone"):
        plan_lora(tiny_llama(), ["language", "vision"])


# -- a projector in full beside adapters ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_projector_is_trained_in_full_beside_adapters(family: str) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family]()
    found = find_parts(model)
    plan = plan_lora(model, train_in_full="projector")
    loose = [name for name in found.names["projector"] if "image_newline" in name]
    assert [line for line in plan.notes if "stays frozen" in line] == [
        line for line in plan.notes if loose and line.startswith(loose[0])
    ]
    model = adapted(model, plan)
    after = find_parts(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {after.part_of(name) for name in trained} == {"language", "projector"}
    full = {name for name in trained if "lora_" not in name}
    assert all(".modules_to_save." in name for name in full)
    assert len(full) == len(found.names["projector"]) - len(loose)
    assert not any("lora_" in name and after.part_of(name) == "projector" for name in trained)


def test_targets_are_found_on_weights_that_are_still_in_their_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    FAMILIES["llava"]().save_pretrained(tmp_path)
    model = load_sharded(t.LlavaForConditionalGeneration, tmp_path)
    assert plan_lora(model).target_modules == plan_lora(on_meta(FAMILIES["llava"])).target_modules


# -- 4 bits -----------------------------------------------------------------------------------------------------------


def load_in_4_bits(folder: Path, skips: list[str] | None) -> Any:
    config = t.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
        llm_int8_skip_modules=skips,
    )
    return t.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)


def packed_parts(model: Any) -> set[str]:
    import bitsandbytes

    found = find_parts(model)
    return {
        found.part_of(f"{path}.weight")
        for path, module in model.named_modules()
        if isinstance(module, bitsandbytes.nn.Linear4bit)
    }


@pytest.mark.parametrize("family", ["llava", "qwen2.5-vl", "idefics3"])
def test_only_the_language_model_is_packed_and_its_head_is_not(family: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    import bitsandbytes

    torch.manual_seed(0)
    FAMILIES[family]().bfloat16().save_pretrained(tmp_path)
    assert packed_parts(load_in_4_bits(tmp_path, None)) == {"language", "projector", "vision"}  # what happens else
    skips = four_bit_skips(t.AutoConfig.from_pretrained(tmp_path))
    assert skips == four_bit_skips(on_meta(FAMILIES[family]))
    model = load_in_4_bits(tmp_path, skips)
    assert packed_parts(model) == {"language"}
    assert not isinstance(model.get_output_embeddings(), bitsandbytes.nn.Linear4bit)
    linears = {path for path, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)}
    assert len(linears) == plan_lora(model).counts["language"]
    everything = load_in_4_bits(tmp_path, four_bit_skips(model, "all"))
    assert packed_parts(everything) == {"language", "projector", "vision"}


def test_a_text_model_keeps_its_head() -> None:
    assert four_bit_skips(tiny_llama()) == ["lm_head"]
    with pytest.raises(ConfigError, match="parts_in_4_bits=visoin is no part"):
        four_bit_skips(on_meta(FAMILIES["llava"]), ["visoin"])
