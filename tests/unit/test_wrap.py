"""Units are found from the model itself, in every family, and each parameter belongs to exactly one of them."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import peft
import pytest
import torch
import transformers
import yaml
from torch import nn

from hf_fsdp.config.schema import FSDPConfig
from hf_fsdp.errors import WrapPolicyError
from hf_fsdp.policies.blocks import MAX_UNIT_SHARE, find_blocks
from hf_fsdp.policies.coverage import BESIDE_LARGEST_SHARE
from hf_fsdp.policies.precision import resolve_precision
from hf_fsdp.policies.wrap import build_wrap_plan
from hf_fsdp.policies.wrap_plan import WrapPlan, shared_owners, unit_parameters
from tests.unit.small_models import (
    IMAGE_TOKEN,
    TEXT,
    VISION,
    auto_model_classes,
    build_default,
    on_meta,
    text_models,
    tiny_llama,
    vision_language_models,
)


def plan_of(model: nn.Module, wrap: Any = None, *, norms: bool = False) -> WrapPlan:
    config = FSDPConfig(wrap=wrap, precision={"preset": "bf16-mixed", "keep_norms_fp32": norms})
    return build_wrap_plan(model, config.wrap, resolve_precision(config.precision))


def names_of(plan: WrapPlan, kind: str) -> list[str]:
    return [name for unit in plan.units if unit.kind == kind for name in unit.names]


def block_classes(plan: WrapPlan) -> dict[str, int]:
    return dict(Counter(type(block).__name__ for block in plan.blocks))


def held_by(plan: WrapPlan, kind: str) -> set[str]:
    return {name for unit, parameters in unit_parameters(plan) if unit.kind == kind for name in parameters}


def follow(error: WrapPolicyError) -> Any:
    """The value of `wrap` that the advice says, read as the YAML a person would paste."""
    text = re.match(r"wrap: (\{.*?\}|\w+)", error.problems[0].fix)
    assert text, error.problems[0].fix
    return yaml.safe_load(text[1])


def check_every_parameter_is_in_one_unit(model: nn.Module, plan: WrapPlan) -> None:
    names = [name for _, parameters in unit_parameters(plan) for name in parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def check_root_is_small(model: nn.Module, plan: WrapPlan) -> None:
    total = sum(parameter.numel() for parameter in model.parameters())
    largest = max(parameter.numel() for parameter in model.parameters())
    root = sum(parameter.numel() for parameter in unit_parameters(plan)[-1][1].values())
    assert root <= max(MAX_UNIT_SHARE * total, largest + BESIDE_LARGEST_SHARE * total)


# -- families ---------------------------------------------------------------------------------------------------------

TEXT_BLOCKS = {
    "llama": {"LlamaDecoderLayer": 4},
    "llama tied": {"LlamaDecoderLayer": 4},
    "mistral": {"MistralDecoderLayer": 4},
    "qwen2": {"Qwen2DecoderLayer": 4},
    "qwen3": {"Qwen3DecoderLayer": 4},
    "gemma3": {"Gemma3DecoderLayer": 4},
    "gpt2": {"GPT2Block": 4},
    "opt": {"OPTDecoderLayer": 4},
    "phi3": {"Phi3DecoderLayer": 4},
    "t5": {"T5Block": 6},
    "bert": {"BertLayer": 4},
    "mixtral": {"MixtralDecoderLayer": 4},
    "jamba": {"JambaMambaDecoderLayer": 2, "JambaAttentionDecoderLayer": 2},
}
VISION_BLOCKS = {
    "llava": {"CLIPEncoderLayer": 3, "LlamaDecoderLayer": 4},
    "llava-onevision": {"SiglipEncoderLayer": 3, "Qwen2DecoderLayer": 4},
    "paligemma": {"SiglipEncoderLayer": 3, "GemmaDecoderLayer": 4},
    "idefics3": {"Idefics3EncoderLayer": 3, "LlamaDecoderLayer": 4},
    "smolvlm": {"SmolVLMEncoderLayer": 3, "LlamaDecoderLayer": 4},
    "qwen2.5-vl": {"Qwen2_5_VLVisionBlock": 3, "Qwen2_5_VLDecoderLayer": 4},
    "gemma3": {"SiglipEncoderLayer": 3, "Gemma3DecoderLayer": 4},
    "mllama": {
        "MllamaVisionEncoderLayer": 5,
        "MllamaSelfAttentionDecoderLayer": 3,
        "MllamaCrossAttentionDecoderLayer": 1,
    },
}


@pytest.mark.parametrize("family", TEXT_BLOCKS)
def test_every_layer_of_a_text_model_is_a_unit(family: str) -> None:
    model = on_meta(text_models()[family])
    plan = plan_of(model)
    assert block_classes(plan) == TEXT_BLOCKS[family]
    assert all(len(unit.modules) == 1 for unit in plan.units)
    check_every_parameter_is_in_one_unit(model, plan)
    check_root_is_small(model, plan)


@pytest.mark.parametrize("family", VISION_BLOCKS)
def test_the_layers_of_every_tower_are_units(family: str) -> None:
    model = on_meta(vision_language_models()[family])
    plan = plan_of(model)
    assert block_classes(plan) == VISION_BLOCKS[family]
    check_every_parameter_is_in_one_unit(model, plan)
    check_root_is_small(model, plan)


def test_a_class_that_the_model_names_but_does_not_hold_is_a_note_and_not_an_error() -> None:
    model = on_meta(vision_language_models()["llava"])
    assert "CLIPTextEmbeddings" in {
        name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()
    }
    assert plan_of(model).notes == ("the model names CLIPTextEmbeddings as layers but holds none; left out",)


@pytest.mark.parametrize("family", [*TEXT_BLOCKS])
def test_every_unit_of_a_text_model_is_entered_by_its_own_forward(family: str) -> None:
    """A unit whose parts are called one by one from outside would never be gathered."""
    torch.manual_seed(0)
    model = text_models()[family]()
    ids = torch.randint(4, 60, (2, 8))
    inputs = {"input_ids": ids, "decoder_input_ids": ids} if family == "t5" else {"input_ids": ids}
    assert modules_not_entered(model, plan_of(model), inputs) == []


def test_every_unit_of_an_image_and_text_model_is_entered_by_its_own_forward() -> None:
    torch.manual_seed(0)
    model = vision_language_models()["llava"]()
    ids = torch.tensor([[1, *[IMAGE_TOKEN] * 4, 9, 10]])
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, VISION["image_size"], VISION["image_size"])}
    # LLaVA takes its features from the last but one vision layer, but runs all of them.
    assert modules_not_entered(model, plan_of(model), inputs) == []


def modules_not_entered(model: nn.Module, plan: WrapPlan, inputs: dict[str, Any]) -> list[str]:
    entered: set[int] = set()
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: entered.add(id(module)))
    with torch.no_grad():
        model(**inputs)
    return [unit.label for unit in plan.units for module in unit.modules if id(module) not in entered]


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_few_layers_is_not_refused(num_layers: int, tied: bool) -> None:
    model = tiny_llama(num_layers, tie_word_embeddings=tied)
    plan = plan_of(model)
    assert len(plan.blocks) == num_layers
    assert plan.warnings == ()


def test_layers_are_found_beside_a_vocabulary_that_dwarfs_them() -> None:
    model = on_meta(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, "vocab_size": 150_000})))
    assert len(plan_of(model).blocks) == 4


def test_a_vision_tower_is_found_beside_a_language_model_that_dwarfs_it() -> None:
    text = transformers.LlamaConfig(
        **{**TEXT, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 60}
    )
    vision = transformers.CLIPVisionConfig(
        **{**VISION, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    model = on_meta(lambda: transformers.LlavaForConditionalGeneration(config))
    tower = sum(p.numel() for p in model.model.vision_tower.parameters())
    assert tower < 0.01 * sum(p.numel() for p in model.parameters())
    assert block_classes(plan_of(model)) == {"CLIPEncoderLayer": 12, "LlamaDecoderLayer": 60}


# -- all auto classes -------------------------------------------------------------------------------------------------


def test_every_image_text_and_causal_class_of_transformers_gets_a_plan() -> None:
    refused, large, judged = {}, {}, 0
    for class_name, model_type in auto_model_classes().items():
        model = build_default(class_name, model_type)
        if model is None:
            continue  # its default config describes no model
        judged += 1
        try:
            plan = plan_of(model)
        except WrapPolicyError as error:
            refused[class_name] = str(error)
            continue
        if warnings := [warning for warning in plan.warnings if "(root)" in warning]:
            large[class_name] = warnings
        assert not any(isinstance(block, nn.ModuleList) for block in plan.blocks), class_name
    assert judged > 200
    assert refused == {}
    assert large == {}


# -- class names ------------------------------------------------------------------------------------------------------


def test_a_class_name_makes_exactly_its_modules_units() -> None:
    plan = plan_of(on_meta(vision_language_models()["llava"]), ["LlamaDecoderLayer", "CLIPEncoderLayer"])
    assert block_classes(plan) == {"CLIPEncoderLayer": 3, "LlamaDecoderLayer": 4}


def test_a_misspelt_class_name_is_refused_with_near_names_and_advice_that_works() -> None:
    model = on_meta(text_models()["llama"])
    with pytest.raises(
        WrapPolicyError, match=r"wrap.layer_classes=\['LLaMADecoderLayers'\] matches no module"
    ) as caught:
        plan_of(model, ["LLaMADecoderLayers"])
    assert "so the whole model would be one group" in str(caught.value)
    assert "LlamaDecoderLayer (4)" in str(caught.value.problems[0].near)
    assert block_classes(plan_of(model, follow(caught.value))) == {"LlamaDecoderLayer": 4}


def test_a_class_name_that_resembles_nothing_is_sent_to_the_policy_that_finds_layers() -> None:
    model = on_meta(text_models()["llama"])
    with pytest.raises(WrapPolicyError, match=r"\['Xyzzy'\] matches no module of LlamaForCausalLM") as caught:
        plan_of(model, ["Xyzzy"])
    assert "LlamaDecoderLayer (4)" in str(caught.value.problems[0].near)
    assert block_classes(plan_of(model, follow(caught.value))) == {"LlamaDecoderLayer": 4}


def test_one_absent_class_among_right_ones_is_named_alone_and_the_advice_keeps_the_others() -> None:
    model = on_meta(vision_language_models()["llava"])
    wanted = ["CLIPEncoderLayer", "LlamaDecoderLayer", "Xyzzy"]
    with pytest.raises(WrapPolicyError, match=r"\['Xyzzy'\] matches no module") as caught:
        plan_of(model, wanted)
    assert "one group" not in str(caught.value)
    assert block_classes(plan_of(model, follow(caught.value))) == {"CLIPEncoderLayer": 3, "LlamaDecoderLayer": 4}


def test_a_container_named_as_a_layer_is_refused() -> None:
    model = on_meta(text_models()["llama"])
    with pytest.raises(WrapPolicyError, match="ModuleList.* names a container, which is never called") as caught:
        plan_of(model, ["ModuleList"])
    assert block_classes(plan_of(model, follow(caught.value))) == {"LlamaDecoderLayer": 4}


def test_named_classes_inside_each_other_are_both_units_and_the_inner_comes_first() -> None:
    plan = plan_of(on_meta(text_models()["llama"]), ["LlamaDecoderLayer", "LlamaMLP"])
    labels = [unit.label for unit in plan.units]
    assert labels.index("model.layers.0.mlp LlamaMLP") < labels.index("model.layers.0 LlamaDecoderLayer")
    held = {unit.label: set(parameters) for unit, parameters in unit_parameters(plan)}
    assert all(".mlp." in name for name in held["model.layers.0.mlp LlamaMLP"])
    assert not any(".mlp." in name for name in held["model.layers.0 LlamaDecoderLayer"])
    # Checkpointing both would recompute the inner one twice.
    assert block_classes(plan) == {"LlamaDecoderLayer": 4}


def test_classes_that_leave_repeated_layers_in_the_root_are_refused_with_advice_that_works() -> None:
    text = transformers.LlamaConfig(**TEXT)
    vision = transformers.CLIPVisionConfig(**{**VISION, "num_hidden_layers": 6})
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    model = on_meta(lambda: transformers.LlavaForConditionalGeneration(config))
    with pytest.raises(
        WrapPolicyError, match=r"the root unit would hold \d+% .*repeated blocks stay unwrapped"
    ) as caught:
        plan_of(model, ["LlamaDecoderLayer"])
    assert "vision_tower.encoder.layers (6 x CLIPEncoderLayer)" in str(caught.value)
    classes = re.findall(r"layer_classes: \[(.*?)\]", caught.value.problems[0].fix)[0].split(", ")
    assert block_classes(plan_of(model, classes)) == {"CLIPEncoderLayer": 6, "LlamaDecoderLayer": 4}
    assert block_classes(plan_of(model, follow(caught.value))) == {"CLIPEncoderLayer": 6, "LlamaDecoderLayer": 4}


# -- callable ---------------------------------------------------------------------------------------------------------


def test_a_callable_chooses_the_units() -> None:
    model = on_meta(text_models()["llama"])
    plan = plan_of(model, lambda model: [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)])
    assert names_of(plan, "block") == [f"model.layers.{i}.{part}" for i in range(4) for part in ("self_attn", "mlp")]


def test_a_callable_that_leaves_most_of_the_layers_in_the_root_is_refused() -> None:
    model = on_meta(text_models()["llama"])
    with pytest.raises(
        WrapPolicyError, match=r"repeated blocks stay unwrapped: model.layers \(4 x LlamaDecoderLayer\)"
    ):
        plan_of(model, lambda model: [layer.self_attn.q_proj for layer in model.model.layers])


@pytest.mark.parametrize(
    ("choose", "received"),
    [
        (lambda model: [], "returned no module"),
        (lambda model: None, "returned no module"),
        (lambda model: [nn.Linear(2, 2)], "returned 1 objects that are not modules inside the model"),
        (lambda model: ["model.layers.0"], "returned 1 objects that are not modules inside the model"),
        (lambda model: [model], "returned 1 objects that are not modules inside the model"),
        (lambda model: [model.model.layers], "returned a ModuleList, which is never called"),
    ],
    ids=["empty", "none", "stranger", "name", "model", "container"],
)
def test_a_callable_that_chooses_nothing_usable_is_refused_with_advice_that_works(choose: Any, received: str) -> None:
    model = on_meta(text_models()["llama"])
    with pytest.raises(WrapPolicyError, match=received) as caught:
        plan_of(model, choose)
    advice = re.search(r"FSDPConfig\(wrap=(lambda .*)\)$", caught.value.problems[0].fix)
    assert advice
    assert block_classes(plan_of(model, eval(advice[1]))) == {"LlamaDecoderLayer": 4}


# -- models of other shapes -------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class _OtherBlock(_Block):
    pass


class _Stage(nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(_Block() for _ in range(4))


def test_a_sequential_stack_is_found() -> None:
    assert names_of(plan_of(nn.Sequential(*(_Block() for _ in range(5)))), "block") == list("01234")
    stack = nn.Sequential()
    stack.body = nn.Sequential(*(_Block() for _ in range(5)))
    assert names_of(plan_of(stack), "block") == [f"body.{index}" for index in range(5)]


def test_a_stage_too_large_for_a_unit_is_opened_and_small_stages_stay_whole() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList([_Stage(2), _Stage(2), _Stage(12), _Stage(2)])
    blocks = names_of(plan_of(model), "block")
    assert blocks == ["stages.0", "stages.1", *(f"stages.2.blocks.{index}" for index in range(12)), "stages.3"]


def test_a_list_of_lists_gives_what_is_called_and_not_the_inner_lists() -> None:
    model = nn.Module()
    model.levels = nn.ModuleList(nn.ModuleList(_Block() for _ in range(depth)) for depth in (1, 3))
    assert names_of(plan_of(model), "block") == ["levels.0.0", "levels.1.0", "levels.1.1", "levels.1.2"]


def test_layers_of_two_undeclared_classes_are_layers() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([_Block(), _OtherBlock()])
    assert names_of(plan_of(model), "block") == ["layers.0", "layers.1"]


def test_experts_are_never_units_of_their_own() -> None:
    """Which experts run depends on the data of each rank, so their gathers would not pair up."""
    model = nn.Module()
    model.layers = nn.ModuleList(_Experts() for _ in range(2))
    for layer in model.layers:
        layer.forward = lambda x: x
    assert names_of(plan_of(model), "block") == ["layers.0", "layers.1"]


def test_a_model_in_which_nothing_repeats_is_refused_and_a_callable_helps() -> None:
    model = nn.Module()
    model.first, model.second = _Block(), _Block()
    with pytest.raises(
        WrapPolicyError, match="finds no repeated blocks in Module, so the whole model would be"
    ) as caught:
        plan_of(model)
    assert block_classes(plan_of(model, follow(caught.value))) == {"_Block": 2}
    assert block_classes(plan_of(model, lambda model: [model.first, model.second])) == {"_Block": 2}


def test_a_large_unit_that_nothing_can_be_done_about_is_a_warning() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(_Block() for _ in range(5))
    model.layers[2] = _Block(64)
    model.layers[3] = _Block(32)
    model.projector = nn.ModuleDict({str(i): nn.Linear(48, 48) for i in range(3)})
    plan = plan_of(model)
    assert any(re.match(r"unit \(root\) Module holds \d+% of the parameters", warning) for warning in plan.warnings)


def test_a_declared_single_module_such_as_embeddings_is_no_block() -> None:
    model = on_meta(lambda: transformers.BertForMaskedLM(transformers.BertConfig()))
    assert "BertEmbeddings" in model._no_split_modules
    assert block_classes(plan_of(model)) == {"BertLayer": 12}


# -- embeddings, head, shared tensors ---------------------------------------------------------------------------------


def test_untied_embedding_and_head_are_units_of_their_own() -> None:
    plan = plan_of(on_meta(text_models()["llama"]))
    assert names_of(plan, "embedding") == ["model.embed_tokens"]
    assert names_of(plan, "head") == ["lm_head"]
    assert held_by(plan, "root") == {"model.norm.weight"}


def test_a_tied_embedding_is_held_by_the_root_alone_without_a_warning() -> None:
    plan = plan_of(on_meta(text_models()["llama tied"]))
    assert names_of(plan, "embedding") == names_of(plan, "head") == []
    assert held_by(plan, "root") == {"model.embed_tokens.weight", "model.norm.weight"}
    assert plan.warnings == ()


def test_a_tied_embedding_larger_than_a_quarter_of_the_model_is_no_warning() -> None:
    """It cannot be split, and the final norm that comes with it does not change that."""
    model = tiny_llama(4, vocab_size=2000, tie_word_embeddings=True)
    plan = plan_of(model)
    assert "model.norm.weight" in held_by(plan, "root")
    assert model.model.embed_tokens.weight.numel() > MAX_UNIT_SHARE * sum(p.numel() for p in model.parameters())
    assert plan.warnings == ()


def test_an_embedding_shared_by_encoder_and_decoder_is_in_one_unit() -> None:
    model = on_meta(text_models()["t5"])
    assert shared_owners(model)["shared.weight"][:3] == (
        "shared.weight",
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
    )
    plan = plan_of(model)
    assert "shared.weight" in held_by(plan, "root")
    check_every_parameter_is_in_one_unit(model, plan)


def test_blocks_that_share_a_tensor_only_among_themselves_are_one_unit() -> None:
    model = tiny_llama(4)
    model.model.layers[3].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight
    plan = plan_of(model)
    groups = [unit.names for unit in plan.units if unit.kind == "block"]
    assert groups == [("model.layers.0",), ("model.layers.1", "model.layers.3"), ("model.layers.2",)]
    assert plan.root_owned == frozenset()
    assert [plan.blocks.index(layer) for layer in model.model.layers] == [0, 1, 2, 3]
    check_every_parameter_is_in_one_unit(model, plan)


def test_chains_of_sharing_end_in_one_unit_whatever_the_order() -> None:
    model = tiny_llama(4)
    layers = model.model.layers
    layers[3].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    layers[3].mlp.gate_proj.weight = layers[2].mlp.gate_proj.weight
    groups = [unit.names for unit in plan_of(model).units if unit.kind == "block"]
    assert groups == [("model.layers.0", "model.layers.2", "model.layers.3"), ("model.layers.1",)]


def test_a_tensor_shared_between_a_block_and_the_rest_is_held_by_the_root() -> None:
    model = tiny_llama(3)
    model.adapter = nn.Linear(32, 48, bias=False)
    model.adapter.weight = model.model.layers[1].mlp.up_proj.weight
    plan = plan_of(model)
    assert plan.root_owned == {"model.layers.1.mlp.up_proj.weight"}
    assert "model.layers.1.mlp.up_proj.weight" in held_by(plan, "root")
    assert "model.layers.1.mlp.up_proj.weight" not in held_by(plan, "block")
    check_every_parameter_is_in_one_unit(model, plan)


def test_a_hybrid_model_with_shared_layers_gets_every_parameter_in_one_unit() -> None:
    config = transformers.Zamba2Config(
        **{**TEXT, "num_key_value_heads": 4, "num_hidden_layers": 8},
        layers_block_type=["mamba", "hybrid"] * 4,
        hybrid_layer_ids=[1, 3, 5, 7],
        num_mem_blocks=1,
        mamba_headdim=8,
        mamba_d_state=8,
        n_mamba_heads=8,
    )
    model = on_meta(lambda: transformers.Zamba2ForCausalLM(config))
    assert any(len(names) == 4 for names in shared_owners(model).values())
    plan = plan_of(model)
    assert any(len(unit.modules) == 4 for unit in plan.units if unit.kind == "block")
    check_every_parameter_is_in_one_unit(model, plan)


def test_a_large_table_beside_the_token_embedding_is_a_unit() -> None:
    """Gemma's embeddings for each layer are half of the model."""
    model = tiny_llama(2)
    model.embed_tokens_per_layer = nn.Embedding(64, 512)
    assert "embed_tokens_per_layer" in names_of(plan_of(model), "embedding")


def test_norms_are_one_unit_that_comes_first_when_asked_for() -> None:
    model = on_meta(text_models()["llama"])
    plan = plan_of(model, norms=True)
    assert plan.units[0].kind == "norms"
    assert len(plan.units[0].modules) == 9
    assert held_by(plan, "norms") == {name for name, _ in model.named_parameters() if "norm" in name}
    check_every_parameter_is_in_one_unit(model, plan)


# -- PEFT and frozen parts --------------------------------------------------------------------------------------------


# PEFT 0.21 asks transformers by a name that transformers 5.24 deprecates.
peft_warnings = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def lora(model: Any, **changes: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **{"target_modules": "all-linear", **changes}))


@peft_warnings
def test_lora_leaves_the_units_as_they_are() -> None:
    plain = plan_of(tiny_llama(3))
    adapted = plan_of(lora(tiny_llama(3)))
    assert names_of(adapted, "block") == [f"base_model.model.{name}" for name in names_of(plain, "block")]
    assert names_of(adapted, "head") == ["base_model.model.lm_head"]
    assert not any("lora_" in name for name in held_by(adapted, "root"))
    assert all(block.get_submodule("mlp.up_proj.lora_A.default") for block in adapted.blocks)


@peft_warnings
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_a_head_saved_with_the_adapter_beside_a_tied_embedding_is_one_unit_with_it() -> None:
    model = lora(tiny_llama(3, tie_word_embeddings=True), modules_to_save=["lm_head"])
    plan = plan_of(model)
    root = held_by(plan, "root")
    for names in shared_owners(model).values():
        assert names[0] in root
    assert any("lm_head.modules_to_save" in name for name in root)
    check_every_parameter_is_in_one_unit(model, plan)


@peft_warnings
def test_an_untied_head_saved_with_the_adapter_is_a_unit_with_its_copy() -> None:
    plan = plan_of(lora(tiny_llama(3), modules_to_save=["lm_head"]))
    assert held_by(plan, "head") == {
        "base_model.model.lm_head.original_module.weight",
        "base_model.model.lm_head.modules_to_save.default.weight",
    }


@peft_warnings
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("tied", [False, True])
def test_lora_on_the_embedding_keeps_base_and_adapter_in_one_unit(tied: bool) -> None:
    model = lora(tiny_llama(3, tie_word_embeddings=tied), target_modules=["embed_tokens", "q_proj"])
    plan = plan_of(model)
    kind = "root" if tied else "embedding"
    held = held_by(plan, kind)
    assert any("embed_tokens.base_layer" in name for name in held)
    assert any("embed_tokens.lora_embedding_A" in name for name in held)
    check_every_parameter_is_in_one_unit(model, plan)


def test_a_frozen_tower_is_wrapped_like_any_other() -> None:
    model = on_meta(vision_language_models()["llava"])
    model.model.vision_tower.requires_grad_(False)
    assert block_classes(plan_of(model)) == VISION_BLOCKS["llava"]


def test_finding_blocks_does_not_change_the_model() -> None:
    model = tiny_llama(2)
    before = {name: parameter for name, parameter in model.named_parameters()}
    find_blocks(model)
    plan_of(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)
