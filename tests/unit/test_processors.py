"""Processors: loaded without torchvision, limited in pixels, asked for tokens, saved with every checkpoint."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.processing_utils import ProcessorMixin
from transformers.utils import is_torchvision_available

from hf_fsdp.data.processors import image_token_counts, load_processor
from hf_fsdp.errors import ConfigError, DataError, ModelAccessError
from tests.golden.processors import cases
from tests.unit import image_processors

without_torchvision = pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed here")
SIZES = [(1, 1), (8, 8), (17, 90), (90, 17), (33, 47), (64, 64), (200, 150), (31, 300), (700, 500)]
SMALL = {
    "llava": image_processors.llava,
    "llava_next": image_processors.llava_next,
    "idefics3": image_processors.idefics3,
    "gemma3": image_processors.gemma3,
    "paligemma": image_processors.paligemma,
}


def source_of(family: str) -> str:
    return str(cases.HERE / family / "source")


def blank(height: int, width: int) -> Image.Image:
    return Image.new("RGB", (width, height), (200, 90, 30))


# -- loading ----------------------------------------------------------------------------------------------------------


@without_torchvision
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_without_torchvision_the_official_class_is_loaded(family: str) -> None:
    with pytest.raises(ImportError):
        transformers.AutoProcessor.from_pretrained(source_of(family))
    processor = load_processor(source_of(family))
    assert type(processor).__module__.startswith(f"transformers.models.{family}.")
    assert processor.tokenizer is not None and processor.image_processor is not None


@without_torchvision
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_a_video_is_refused_by_the_name_of_what_is_missing(family: str) -> None:
    processor = load_processor(source_of(family))
    video = np.zeros((4, 32, 32, 3), dtype=np.uint8)
    with pytest.raises(DataError, match="torchvision.*is not installed"):
        processor(videos=[video], text=[f"{processor.video_token} what?"], return_tensors="pt")
    talk = [{"role": "user", "content": [{"type": "video", "video": video}, {"type": "text", "text": "what?"}]}]
    template = "{% for m in messages %}{% for c in m.content %}" + processor.video_token + "{% endfor %}{% endfor %}"
    talk[0]["content"] = talk[0]["content"][:1]
    with pytest.raises(DataError, match="pip install torchvision"):
        processor.apply_chat_template(talk, chat_template=template, tokenize=True, return_dict=True)


def test_nothing_of_transformers_is_changed_after_loading(tmp_path: Path) -> None:
    names = ("auto.video_processing_auto", "auto.image_processing_auto", "smolvlm.processing_smolvlm")
    videos, images, smolvlm = (importlib.import_module(f"transformers.models.{name}") for name in names)

    def read() -> list[Any]:
        return [
            videos.AutoVideoProcessor,
            images.get_image_processor_class_from_name,
            ProcessorMixin.check_argument_for_proper_class,
            smolvlm.num2words,
        ]

    before = read()
    load_processor(source_of("smolvlm"))
    with pytest.raises(ModelAccessError):
        load_processor(str(tmp_path))
    assert all(now is then for now, then in zip(read(), before, strict=True))


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_a_loaded_processor_is_copied_and_pickled(family: str) -> None:
    processor = load_processor(source_of(family))
    expected = cases.mixed(family, processor)
    for other in (copy.deepcopy(processor), pickle.loads(pickle.dumps(processor))):
        batch = cases.mixed(family, other)
        assert torch.equal(batch["input_ids"], expected["input_ids"])
        assert other.video_processor.to_dict() == processor.video_processor.to_dict()


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_a_folder_of_an_older_transformers_keeps_its_settings(family: str, tmp_path: Path) -> None:
    """One file for pictures and videos, pixel limits as two names, the template in JSON."""
    cases.write_old_layout(Path(source_of(family)), tmp_path / family / "old")
    processor = load_processor(str(tmp_path / family / "old"))
    new = load_processor(source_of(family))
    assert processor.image_processor.to_dict() == new.image_processor.to_dict()
    assert processor.chat_template == new.chat_template
    processor.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "processor_config.json").read_text())["video_processor"]
    # The official guess in such a folder goes by the image processor, which Qwen3-VL shares with Qwen2-VL.
    type_in_new = new.video_processor.to_dict()["video_processor_type"].replace("Qwen3VL", "Qwen2VL")
    assert saved["video_processor_type"] == type_in_new


# -- bad input --------------------------------------------------------------------------------------------------------


def save_text_model(folder: Path) -> Path:
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=400
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    image_processors.tokenizer().save_pretrained(folder)
    return folder


def test_a_text_model_is_refused_with_the_recipe_it_belongs_to(tmp_path: Path) -> None:
    folder = save_text_model(tmp_path / "text")
    with pytest.raises(ModelAccessError, match="(?s)no image processor: a text model.*recipes/text/train.py") as error:
        load_processor(str(folder))
    assert "load_processor(BASE_MODEL).save_pretrained" in str(error.value)


def test_a_model_folder_without_processor_files_is_repaired_as_the_error_says(tmp_path: Path) -> None:
    """What a trainer leaves that was given the tokenizer only."""
    folder = tmp_path / "model"
    load_processor(source_of("qwen2_5_vl")).tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}), encoding="utf-8")
    with pytest.raises(ModelAccessError, match="the processor of .* cannot be loaded") as error:
        load_processor(str(folder))
    assert f"load_processor(BASE_MODEL).save_pretrained({str(folder)!r})" in str(error.value)
    load_processor(source_of("qwen2_5_vl")).save_pretrained(folder)
    assert load_processor(str(folder)).image_processor.merge_size == 2


def test_an_image_processor_alone_is_refused(tmp_path: Path) -> None:
    transformers.CLIPImageProcessorPil().save_pretrained(tmp_path)
    with pytest.raises(ModelAccessError, match="cannot read pictures and text together|cannot be loaded"):
        load_processor(str(tmp_path))


def test_a_model_that_is_nowhere_is_refused() -> None:
    with pytest.raises(ModelAccessError, match="the processor of 'no-such/model' cannot be loaded"):
        load_processor("no-such/model")


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    shutil.copytree(source_of("qwen2_vl"), tmp_path / "model")
    (tmp_path / "model" / "processor_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelAccessError, match="cannot be loaded: .*valid JSON"):
        load_processor(str(tmp_path / "model"))


# -- pixel limits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", cases.LIMITS)
@pytest.mark.parametrize(
    "limits", [{"max_pixels": 900}, {"min_pixels": 2000}, {"min_pixels": 1000, "max_pixels": 1900}]
)
def test_limits_bound_the_grid_of_every_picture_and_stay_when_saved(
    family: str, limits: dict[str, int], tmp_path: Path
) -> None:
    processor = load_processor(source_of(family), **limits)
    processor.save_pretrained(tmp_path)
    for made in (processor, load_processor(str(tmp_path))):
        pictures = [blank(*size) for size in [(5, 5), (20, 31), (64, 64), (200, 90), (400, 300)]]
        grids = made.image_processor(images=pictures, return_tensors="pt")["image_grid_thw"]
        pixels = grids.prod(-1) * made.image_processor.patch_size**2
        assert pixels.max() <= limits.get("max_pixels", 10**9)
        assert pixels.min() >= limits.get("min_pixels", 0)
    own = load_processor(source_of(family)).image_processor.size
    kept = dict(load_processor(str(tmp_path)).image_processor.size)
    assert kept["shortest_edge"] == limits.get("min_pixels", own["shortest_edge"])
    assert kept["longest_edge"] == limits.get("max_pixels", own["longest_edge"])


@pytest.mark.parametrize("family", ["internvl", "smolvlm", "llava_onevision"])
def test_a_family_without_limits_refuses_them_by_name(family: str) -> None:
    with pytest.raises(
        ConfigError, match="min_pixels=10: .*Processor has no such limit; its pictures are sized by size="
    ) as error:
        load_processor(source_of(family), min_pixels=10, max_pixels=20)
    assert [problem.fix for problem in error.value.problems] == ["leave min_pixels out", "leave max_pixels out"]


def test_llava_with_its_fixed_size_refuses_limits(tmp_path: Path) -> None:
    image_processors.llava().save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"max_pixels=9: LlavaProcessor .*size=\{'shortest_edge': 32\}, crop_size=\{'height': 32, 'width': 32\}",
    ):
        load_processor(str(tmp_path), max_pixels=9)


@pytest.mark.parametrize(
    ("limits", "message", "repaired"),
    [
        (
            {"min_pixels": 1900, "max_pixels": 900},
            "the least is above the most",
            {"min_pixels": 1900, "max_pixels": 1900},
        ),
        ({"min_pixels": 9999}, r"max_pixels=3840 \(the model's own\)", {"min_pixels": 9999, "max_pixels": 9999}),
        ({"max_pixels": 100}, r"min_pixels=128 \(the model's own\)", {"min_pixels": 100, "max_pixels": 100}),
        ({"max_pixels": 10}, "at least 64", {"min_pixels": 64, "max_pixels": 64}),
        ({"max_pixels": -1}, "at least 64", {"min_pixels": 64, "max_pixels": 64}),
        ({"max_pixels": 900.5}, "at least 64", {"max_pixels": 900}),
    ],
)
def test_limits_that_cannot_be_are_refused_and_the_advice_works(
    limits: dict[str, Any], message: str, repaired: dict[str, int]
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_processor(source_of("qwen2_vl"), **limits)
    load_processor(source_of("qwen2_vl"), **repaired)


# -- tokens of a picture ----------------------------------------------------------------------------------------------


def real_count(processor: Any, sizes: list[tuple[int, int]]) -> int:
    """Count the tokens of pictures in a text, against the same text without them."""
    text = "x".join([processor.image_token] * len(sizes))
    batch = processor(images=[[blank(*size) for size in sizes]], text=[text])
    around = len(batch["input_ids"][0]) - len(processor.tokenizer("x" * (len(sizes) - 1), add_special_tokens=False)[0])
    if type(processor).__name__ == "PaliGemmaProcessor":  # puts a first token and a line end around the prompt
        return around - 2
    return around - len(processor.tokenizer("")["input_ids"])


def make_processor(family: str) -> Any:
    return SMALL[family]() if family in SMALL else load_processor(source_of(family))


@pytest.mark.parametrize("family", [*cases.FAMILIES, *SMALL])
def test_counts_are_those_of_real_pictures(family: str) -> None:
    processor = make_processor(family)
    for size in SIZES:
        assert image_token_counts(processor, [size]) == [real_count(processor, [size])], size


@pytest.mark.parametrize("family", [*cases.FAMILIES, "llava", "idefics3"])
def test_counts_of_several_pictures_in_a_sample_are_the_real_ones(family: str) -> None:
    processor = make_processor(family)
    sizes = [(40, 70), (64, 64), (90, 31)]
    assert sum(image_token_counts(processor, sizes)) == real_count(processor, sizes)


def test_a_formula_is_used_where_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = load_processor(source_of("qwen2_5_vl"))
    image_token_counts(processor, [(20, 20)])
    monkeypatch.setattr(type(processor.image_processor), "preprocess", None)  # no pixels from here on
    assert image_token_counts(processor, [(64, 64)]) == [49]


def test_a_formula_that_is_wrong_for_some_shapes_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = load_processor(source_of("qwen2_5_vl"))
    official = type(processor)._get_num_multimodal_tokens

    def wrong(self: Any, image_sizes: Any, **kwargs: Any) -> Any:
        counts = official(self, image_sizes=image_sizes, **kwargs)
        counts.num_image_tokens = [
            n + (height > 300) for n, (height, _) in zip(counts.num_image_tokens, image_sizes, strict=True)
        ]
        return counts

    monkeypatch.setattr(type(processor), "_get_num_multimodal_tokens", wrong)
    for size in SIZES:
        assert image_token_counts(processor, [size]) == [real_count(processor, [size])]


@pytest.mark.parametrize("size", [(0, 10), (10, -1), (10,), (10, 10, 3)])
def test_a_size_that_is_none_is_refused(size: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"\(height, width\) in pixels"):
        image_token_counts(load_processor(source_of("qwen2_vl")), [size])


def test_a_picture_that_the_processor_refuses_is_named() -> None:
    with pytest.raises(DataError, match="Qwen2VLProcessor refuses a picture of 1000 x 2 pixels"):
        image_token_counts(load_processor(source_of("qwen2_vl")), [(1000, 2)])


def test_a_processor_is_not_kept_alive_by_what_is_known_of_it() -> None:
    import gc
    import weakref

    processor = load_processor(source_of("smolvlm"))
    image_token_counts(processor, [(20, 20)])
    gone = weakref.ref(processor)
    del processor
    gc.collect()
    assert gone() is None
