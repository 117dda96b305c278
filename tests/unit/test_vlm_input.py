"""What a careless person gives the vision-language recipe: one clear error each, before any weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from hf_fsdp import data
from hf_fsdp.data.image_checks import check_images
from hf_fsdp.data.images import ImageLimits, ImageTextCollator, open_image, read_image_examples
from hf_fsdp.data.images.columns import reader_version
from hf_fsdp.errors import ConfigError, DataError, ModelAccessError
from tests.unit import image_processors as make

EXAMPLE = "language"


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, "1", " 1 ", 0, "all", "ALL", 10**9])
def test_a_number_of_samples_to_check_may_be_a_number_or_text(value: Any) -> None:
    rows = Dataset.from_list([make.row("<image>What?", "A cat.")] * 2)
    kept = check_images(rows, ImageTextCollator(make.llava()), value, what="training")
    assert len(kept) == 2


@pytest.mark.parametrize("value", [-1, "-1", "some", "", "1.5", 2.5, True, False, None, [1], "²"])
def test_other_values_of_check_data_are_refused(value: Any) -> None:
    rows = Dataset.from_list([make.row("<image>What?", "A cat.")])
    with pytest.raises(DataError, match="neither a number of samples nor all\n  fix   check_data: all"):
        check_images(rows, ImageTextCollator(make.llava()), value, what="training")


@pytest.mark.parametrize(
    "value",
    ["language,projector", "[language, projector]", "language projector", ["language", "projector"],
     ["[language,", "projector]"], ["language", "projector", "language"], "['language', 'projector']"],
)  # fmt: skip
def test_names_are_read_however_they_are_typed(value: Any) -> None:
    assert data.read_names(value, "trainable", example=EXAMPLE) == ["language", "projector"]
    assert data.read_names(None, "trainable", example=EXAMPLE) is None


@pytest.mark.parametrize("value", [True, False, 3, [1], {"language": True, "vision": False}, [None], [["language"]]])
def test_what_is_no_list_of_names_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainable=.* is not a list of names\n  fix   trainable: \[language\]"):
        data.read_names(value, "trainable", example=EXAMPLE)


@pytest.mark.parametrize("value", [[], "", "[]", [" "]])
def test_no_name_at_all_is_not_taken_for_the_default(value: Any) -> None:
    with pytest.raises(ConfigError, match="names nothing"):
        data.read_names(value, "trainable", example=EXAMPLE)


def test_parts_for_adapters_need_adapters_and_all_mistakes_are_told_at_once() -> None:
    assert data.choose_parts(None, None, use_peft=True) == (None, ["language"])
    assert data.choose_parts("projector", "vision,language", use_peft=True) == (["projector"], ["vision", "language"])
    with pytest.raises(ConfigError) as caught:
        data.choose_parts([], ["language"], use_peft=False)
    assert [problem.fix for problem in caught.value.problems] == [
        "trainable: [language, projector]   or   remove trainable",
        "use_peft: true   or   remove lora_parts",
    ]


def test_chosen_parts_mean_the_same_when_they_are_read_again() -> None:
    for use_peft in (False, True):
        chosen = data.choose_parts(None, None, use_peft=use_peft)
        assert data.choose_parts(*chosen, use_peft=use_peft) == chosen


# -- the model --------------------------------------------------------------------------------------------------------


def _write_config(folder: Path, **values: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "supervlm", "architectures": ["SuperVLM"]}, "supervlm"),
        ({"architectures": ["SuperVLM"]}, "cannot be read"),
        ({"model_type": "clip", "architectures": ["CLIPModel"]}, r"is CLIPModel \(model_type clip\), which does not"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "which does not answer in words about pict"),
    ],
)
def test_a_model_that_is_no_vision_language_model_is_named(tmp_path: Path, config: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelAccessError, match=what):
        data.read_vision_config(_write_config(tmp_path / "model", **config))


def test_a_config_that_is_cut_off_is_named(tmp_path: Path) -> None:
    name = _write_config(tmp_path / "model", model_type="llava")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "lla', encoding="utf-8")
    with pytest.raises(ModelAccessError, match="its config cannot be read"):
        data.read_vision_config(name)


def test_an_outline_has_the_modules_of_a_model_and_no_weights(tmp_path: Path) -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=8, patch_size=4), text_config=LlamaConfig(**sizes)
    ).save_pretrained(tmp_path)
    config = data.read_vision_config(str(tmp_path))
    before = config.to_dict()
    outline = data.build_outline(config)
    assert {parameter.device.type for parameter in outline.parameters()} == {"meta"}
    assert config.to_dict() == before


# -- rows -------------------------------------------------------------------------------------------------------------


def _row(image: Any, **others: Any) -> dict[str, Any]:
    return {"image": image, "question": "Which?", "answer": "two", **others}


def _problem(rows: list[dict[str, Any]], folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_image_examples(Dataset.from_list(rows), source="rows.json", image_folder=folder)
    assert len(caught.value.problems) == 1
    return str(caught.value)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    make.picture(20, 20).save(tmp_path / "ok.png")
    (tmp_path / "folder.png").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "column", [{"video": "a.mp4"}, {"videos": ["a.mp4"]}, {"audio": {"path": "a.wav", "bytes": None}}]
)
def test_a_video_or_a_sound_is_not_left_out_without_a_word(pictures: Path, column: dict[str, Any]) -> None:
    name = next(iter(column))
    text = _problem([_row("ok.png", **{name: None}), _row("ok.png", **column)], pictures)
    assert f"1 of 2 rows have a video or a sound; first: row 2: column '{name}'" in text
    assert "only pictures are trained on" in text


def test_columns_for_videos_that_are_empty_are_fine(pictures: Path) -> None:
    rows = [_row("ok.png", videos=[], audio=None), _row("ok.png", videos=[], audio=None)]
    assert read_image_examples(Dataset.from_list(rows), source="rows.json", image_folder=pictures).num_images == 2


def test_stored_pictures_beside_a_video_are_refused_too(pictures: Path) -> None:
    stored = make.stored(make.picture(8, 8))
    text = _problem([_row(stored, video=None), _row(stored, video="a.mp4")], pictures)
    assert "row 2: column 'video'" in text


def test_a_folder_is_not_called_missing(pictures: Path) -> None:
    text = _problem([_row("ok.png"), _row("folder.png"), _row("ok.png")], pictures)
    assert "1 of 2 image paths are folders; first: row 2" in text and "do not exist" not in text


def test_base64_without_its_beginning_is_said_in_a_line(pictures: Path) -> None:
    text = _problem([_row("ok.png"), _row("iVBORw0KGgo" * 100)], pictures)
    assert "row 2: a text of 1100 characters that is no path; base64 begins with data:image/png;base64," in text
    assert len(text) < 400


def test_the_key_in_the_advice_about_urls_is_the_recipes_own(pictures: Path) -> None:
    text = _problem([_row("http://127.0.0.1:9/x.png")], pictures)
    assert "allow_image_urls: true" in text
    with pytest.raises(DataError, match="allow_image_urls: true"):
        open_image("http://127.0.0.1:9/x.png")
    with pytest.raises(DataError, match="could not be downloaded"):
        open_image("http://127.0.0.1:9/x.png", ImageLimits(allow_urls=True))


def test_rows_that_older_code_read_are_read_again(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` keeps what a function returned under the function's name, whatever is in it now."""
    from hf_fsdp.data.images import examples

    rows = pictures / "rows.json"
    rows.write_text(json.dumps([_row("ok.png")]), encoding="utf-8")
    read = [data.load_splits(str(rows))["train"] for _ in range(2)]
    first = read_image_examples(read[0], source=str(rows))
    assert read_image_examples(read[1], source=str(rows)).dataset._fingerprint == first.dataset._fingerprint
    monkeypatch.setattr(examples, "reader_version", lambda: "another")
    assert read_image_examples(read[1], source=str(rows)).dataset._fingerprint != first.dataset._fingerprint
    assert len(reader_version()) == 16


# -- templates --------------------------------------------------------------------------------------------------------


def test_a_template_that_is_no_jinja_is_named_with_its_line() -> None:
    with pytest.raises(DataError, match=r"is not valid Jinja: line 2: .*\n  fix   repair it, or give another file"):
        ImageTextCollator(make.llava(template="{% for m in messages %}\n{{ m.role }"))


def test_images_of_an_answer_that_the_template_leaves_out_are_named_by_their_turn() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}"
        "{% elif m.role == 'user' %}<image>{% endif %}{% endfor %}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    collator = ImageTextCollator(make.llava(template=template))
    with pytest.raises(DataError, match="shows 0 of its 1 images, which are in turns of assistant"):
        collator([make.row("Draw a cat.", "<image>A cat.")])


def test_a_tokenizer_without_a_pad_token_takes_one_of_its_own_that_ends_nothing() -> None:
    processor = make.llava()
    processor.tokenizer.pad_token = None
    collator = ImageTextCollator(processor)
    assert processor.tokenizer.pad_token == "<pad>" and collator.pad_id == processor.tokenizer.pad_token_id


# -- while training ---------------------------------------------------------------------------------------------------


def test_what_a_loaders_worker_finds_is_one_problem_without_its_traceback() -> None:
    from torch.utils.data import DataLoader

    broken = {"path": None, "bytes": b"<html>"}
    rows = [make.row("<image>What?", "A cat.", images=[broken], row_id="0042")]
    collator = ImageTextCollator(make.llava(), max_length=4)
    batches: Any = iter(DataLoader(rows, collate_fn=collator, num_workers=1))  # type: ignore[arg-type]
    try:
        with pytest.raises(DataError) as caught:
            next(batches)
    finally:
        batches._shutdown_workers()
    assert str(caught.value).startswith("sample 0042: an image of 6 bytes is a web page that was saved in its place")
    assert "Traceback" not in str(caught.value) and "\n  fix   give one of: JPEG" in str(caught.value)


def test_dropping_is_not_proposed_to_those_who_drop() -> None:
    rows = Dataset.from_list([make.row("<image>What?", "A cat.")])
    for choice, is_said in (("refuse", True), ("drop", False)):
        collator = ImageTextCollator(make.llava(), max_length=4, on_too_long=choice)
        with pytest.raises(DataError, match="max_length=4 does not hold 1 of 1 samples") as caught:
            check_images(rows, collator, "all", what="training")
        assert ("on_too_long: drop" in str(caught.value)) == is_said


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("group_by_length: true", "train_sampling_strategy: group_by_length"),
        ("cutoff_len: 2048", "max_length: 2048"),
        ("max_seq_length: 2048", "max_length: 2048"),
    ],
)
def test_old_names_of_settings_are_answered_with_those_of_today(tmp_path: Path, typed: str, meant: str) -> None:
    known = {"train_sampling_strategy", "max_length", "max_steps", "length_column_name"}
    (tmp_path / "run.yaml").write_text(typed + "\n")
    with pytest.raises(ConfigError) as caught:
        data.read_run_config([str(tmp_path / "run.yaml")], known)
    assert caught.value.problems[0].fix == meant
    name, _, value = typed.partition(": ")
    with pytest.raises(ConfigError) as caught:
        data.read_run_config([f"--{name}", value], known)
    assert caught.value.problems[0].fix == "--" + meant.replace(": ", " ")


def test_a_wrong_held_out_file_is_told_by_its_own_key(tmp_path: Path) -> None:
    splits = {"train": Dataset.from_list([{"question": "a"}])}
    (tmp_path / "test.txt").write_text("x")
    for name in ("test.txt", "none.json"):
        with pytest.raises(DataError) as caught:
            data.select_eval_examples(splits, "train", None, eval_file=str(tmp_path / name))
        assert "eval_file=" in str(caught.value) and "dataset_name" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's own, of its defaults and of what is refused here
def test_settings_that_pictures_cannot_have_are_refused_together() -> None:
    from trl import SFTConfig

    given = {"padding_free": True, "truncation_mode": "keep_end", "eos_token": "<nope>", "pad_token": "<nope>"}
    config = {"dispatch_batches": True, "split_batches": True}
    training = SFTConfig(output_dir="unused", use_cpu=True, bf16=False, **given, accelerator_config=config)
    tokenizer = make.llava().tokenizer
    with pytest.raises(ConfigError) as caught:
        data.check_image_settings(training, tokenizer)
    told = [problem.message for problem in caught.value.problems]
    assert len(told) == 6 and all(any(key in text for text in told) for key in (*given, *config))
    data.check_image_settings(SFTConfig(output_dir="unused", use_cpu=True, bf16=False), tokenizer)


def test_a_chat_template_that_is_no_file_gets_no_text_models_template_proposed() -> None:
    with pytest.raises(DataError, match="there is no such file") as caught:
        ImageTextCollator(make.llava(), chat_template="/nowhere/a.jinja")
    assert "llama2" not in str(caught.value)


def test_one_column_to_rename_may_be_a_text(pictures: Path) -> None:
    rows = Dataset.from_list([{"img": "ok.png", "question": "Which?", "answer": "two"}])
    read = read_image_examples(rows, source="rows.json", image_folder=pictures, renames="img=image")
    assert read.num_images == 1
