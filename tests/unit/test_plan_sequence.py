"""How long a sequence a model takes, and how much of it a picture is, held against transformers' own processors."""

from __future__ import annotations

from typing import Any

import pytest

from hf_fsdp.data.processors.token_counts import image_token_counts
from hf_fsdp.plan.job import ModelSpec
from hf_fsdp.plan.models.image_tokens import image_tokens
from hf_fsdp.plan.models.positions import check_sequence_length, max_positions
from hf_fsdp.plan.models.resolve import resolve_model
from tests.unit import image_processors as tiny

SIZES = [(40, 40), (53, 171), (420, 130), (333, 1000), (800, 700), (1000, 20)]


def spec(model_type: str, **config: Any) -> ModelSpec:
    return ModelSpec(name="mine", config={"model_type": model_type, **config})


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("llama-2-7b", 4096),
        ("llama-3.1-8b", 131072),
        ("gpt2", 1024),
        ("gemma-3-4b", 131072),  # a table of scalings by kind of layer; the stretched length is stated
        ("qwen2.5-7b", 131072),
        ("qwen2.5-7b-instruct", 32768),
        ("qwen2.5-vl-7b", 128000),
        ("llava-1.5-7b", 4096),
        ("smolvlm", 16384),
        ("llama-3.2-11b-vision", 131072),
    ],
)
def test_positions_of_published_models(name: str, most: int) -> None:
    assert max_positions(resolve_model(name)) == most


@pytest.mark.parametrize(
    ("scaling", "most"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"type": "dynamic", "factor": 2.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            2048,
        ),
        (None, 2048),
    ],
)
def test_rotary_scaling_stretches_where_the_number_does_not_say_so_already(scaling: Any, most: int) -> None:
    assert max_positions(spec("llama", max_position_embeddings=2048, rope_scaling=scaling)) == most


def test_a_model_without_positions_has_no_limit() -> None:
    assert max_positions(spec("mamba")) is None
    assert check_sequence_length(spec("mamba"), 10**6) is None


def test_too_long_a_sequence_is_refused_and_the_advice_holds() -> None:
    gpt2 = resolve_model("gpt2")
    problem = check_sequence_length(gpt2, 2048)
    assert problem is not None and problem.fix == "--max-length 1024" and "index error" in problem.message
    assert check_sequence_length(gpt2, 1024) is None
    llama = resolve_model("llama-2-7b")
    problem = check_sequence_length(llama, 8192)
    assert problem is not None and problem.fix.startswith("--max-length 4096") and "rope_scaling" in problem.fix
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
    assert check_sequence_length(ModelSpec(name="x", config={**llama.config, "rope_scaling": scaling}), 8192) is None


@pytest.mark.parametrize(
    ("name", "size", "num_tokens", "num_features"),
    [
        ("llava-1.5-7b", None, 576, 576),
        ("gemma-3-4b", None, 260, 256),
        ("paligemma-3b", None, 256, 256),
        ("paligemma-3b-448", None, 1024, 1024),
        ("qwen2.5-vl-7b", (448, 672), 16 * 24, 16 * 24),
        ("qwen2.5-vl-7b", (30, 30), 4, 4),
        ("smolvlm", (500, 500), 84 + 4 * (4 * 83 + 1), 17 * 81),
        ("idefics3-8b", (364, 728), 172 + 2 * (4 * 171 + 1), 9 * 169),
        ("smolvlm-256m", (500, 500), 67 + 4 * (4 * 66 + 1), 17 * 64),
        ("llama-3.2-11b-vision", (500, 500), 1, 0),
    ],
)
def test_tokens_of_a_picture(name: str, size: Any, num_tokens: int, num_features: int) -> None:
    found = image_tokens(resolve_model(name), size)
    assert (found.num_tokens, found.num_features) == (num_tokens, num_features)
    assert found.reason


@pytest.mark.parametrize(
    ("name", "words"),
    [("qwen2.5-vl-7b", "--image-size"), ("smolvlm", "tiles of 384"), ("internvl3-8b", "256"), ("llama-2-7b", "llama")],
)
def test_an_unknown_number_of_tokens_has_a_reason(name: str, words: str) -> None:
    found = image_tokens(resolve_model(name))
    assert found.num_tokens is None and words in found.reason


@pytest.mark.parametrize("size", SIZES)
def test_tiles_are_counted_as_the_processor_writes_them(size: tuple[int, int]) -> None:
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    marks = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 32}),
        # Blank lines are one token in the tokenizers of this family.
        tokenizer=tiny.tokenizer("<fake_token_around_image>", "<image>", "<global-img>", "\n\n", *marks),
        image_seq_len=4,
    )
    model = spec("idefics3", vision_config={"image_size": 32, "patch_size": 8}, scale_factor=2)
    assert image_token_counts(processor, [size]) == [image_tokens(model, size).num_tokens]


def test_fixed_counts_are_those_of_the_processors() -> None:
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor

    made = tiny.tokenizer("<boi>", "<eoi>", "<img>", "\n\n")
    for name, token in (("boi_token", "<boi>"), ("eoi_token", "<eoi>"), ("image_token", "<img>")):
        setattr(made, name, token)
        setattr(made, f"{name}_id", made.convert_tokens_to_ids(token))
    gemma = Gemma3Processor(image_processor=Gemma3ImageProcessorPil(size=tiny.SIZE), tokenizer=made, image_seq_length=4)
    vision = {"image_size": 32, "patch_size": 8}
    pairs = [
        (gemma, spec("gemma3", mm_tokens_per_image=4, vision_config=vision)),
        (tiny.paligemma(), spec("paligemma", vision_config=vision)),
        (tiny.llava(), spec("llava", vision_config=vision, vision_feature_select_strategy="full")),
    ]
    for processor, model in pairs:
        assert image_token_counts(processor, [(100, 60)]) == [image_tokens(model, (100, 60)).num_tokens]


@pytest.mark.parametrize("size", [*SIZES, (28, 28), (14, 14), (3000, 4000), (7000, 9000)])
@pytest.mark.parametrize("name", ["qwen2-vl-7b", "qwen2.5-vl-7b"])
def test_native_sizes_are_rounded_as_the_processor_does(name: str, size: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    height, width = smart_resize(*size, factor=28, min_pixels=56 * 56, max_pixels=16384 * 28 * 28)
    found = image_tokens(resolve_model(name), size)
    assert found.size == (height, width)
    assert found.num_tokens == (height // 28) * (width // 28)
    assert image_tokens(resolve_model(name), found.size) == found  # as handed over, it stays
