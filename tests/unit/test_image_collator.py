"""Batches: what is learned, that image tokens are never cut or learned, and that they are what the processor makes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL.Image", reason="needs pillow (the extra 'vision')")

from hf_fsdp.data.images import ImageLimits, ImageTextCollator, open_image  # noqa: E402
from hf_fsdp.data.images.chat import Chat, for_template  # noqa: E402
from hf_fsdp.data.images.decode import ImageCache, ImageDecoder  # noqa: E402
from hf_fsdp.data.images.encode import image_token_ids  # noqa: E402
from hf_fsdp.data.processors import load_processor  # noqa: E402
from hf_fsdp.errors import DataError  # noqa: E402
from tests.unit import image_processors as tiny  # noqa: E402
from tests.unit.image_processors import learned_text, picture, row, stored  # noqa: E402

SOURCES = Path(__file__).parents[1] / "golden" / "processors"
# Published settings and templates of families whose processors need torchvision for videos.
PUBLISHED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl", "llava_onevision")
FAMILIES = (*tiny.FAMILIES, *PUBLISHED)
CHATS = [name for name in FAMILIES if name != "paligemma"]
ENDS = {"llava": "</s>", "llava_next": "<|im_end|>", "idefics3": "<end_of_utterance>", "gemma3": "<end_of_turn>",
        "paligemma": "</s>", **dict.fromkeys(PUBLISHED, "<|im_end|>")}  # fmt: skip


@pytest.fixture(scope="module")
def processors() -> dict[str, Any]:
    loaded = {name: load_processor(str(SOURCES / name / "source")) for name in PUBLISHED}
    return {name: build() for name, build in tiny.FAMILIES.items()} | loaded


def collate(processor: Any, rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    return ImageTextCollator(processor, num_threads=1, **options)(rows)


# -- what is learned --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_and_its_end_token_are_learned_and_nothing_else(family: str, processors: dict[str, Any]) -> None:
    processor = processors[family]
    batch = collate(processor, [row("<image>What is this?", "A cat."), row("What is two?", "It is 2.")])
    learned = [[run.strip() for run in learned_text(processor, batch, index)] for index in (0, 1)]
    assert learned == [[f"A cat.{ENDS[family]}"], [f"It is 2.{ENDS[family]}"]]
    image_ids = torch.tensor(image_token_ids(processor))
    assert torch.isin(batch["input_ids"][0], image_ids).sum() > 0
    assert not torch.isin(batch["labels"], image_ids).any()
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert torch.equal(batch["labels"][batch["labels"] >= 0], batch["input_ids"][batch["labels"] >= 0])


@pytest.mark.parametrize("family", CHATS)
def test_every_answer_of_several_turns_is_learned_past_any_number_of_images(
    family: str, processors: dict[str, Any]
) -> None:
    processor = processors[family]
    turns = ("<image>What <image>is this?", "A cat.", "And <image> that?", "A dog.", "Two?", "2")
    batch = collate(processor, [row(*turns)])
    learned = [run.strip().removesuffix(ENDS[family]) for run in learned_text(processor, batch)]
    assert learned == ["A cat.", "A dog.", "2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_without_assistant_only_every_token_but_those_of_images_is_learned(
    family: str, processors: dict[str, Any]
) -> None:
    processor = processors[family]
    batch = collate(processor, [row("<image>What is this?", "A cat.")], assistant_only=False)
    left_out = batch["input_ids"][0][batch["labels"][0] == -100]
    allowed = {*image_token_ids(processor), *processor.tokenizer.get_added_vocab().values()}
    text = processor.tokenizer.decode([token for token in left_out.tolist() if token not in allowed])
    # Between the tiles of an image these write the names of rows and columns.
    assert text.strip() == "" or family in ("idefics3", "smolvlm")
    assert "What is this?" in "".join(learned_text(processor, batch))


def test_an_end_token_is_added_where_the_template_has_none(processors: dict[str, Any]) -> None:
    collator = ImageTextCollator(processors["llava"], num_threads=1)
    tokenizer = processors["llava"].tokenizer
    ids = collator([row("<image>What?", "A cat.")])["input_ids"][0].tolist()
    assert tokenizer.decode(ids).endswith("ASSISTANT: A cat.</s>")
    assert collator.stop_token_id == tokenizer.eos_token_id
    assert ids[:2] != [tokenizer.bos_token_id] * 2 and ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("family", CHATS)
def test_the_token_that_ends_an_answer_is_named_for_generation(family: str, processors: dict[str, Any]) -> None:
    collator = ImageTextCollator(processors[family])
    assert collator.stop_token_id == processors[family].tokenizer.convert_tokens_to_ids(ENDS[family])


TRAINING = {"qwen2_5_vl": "<|image_pad|>", "llava_next": "<image>", "gemma3": "<start_of_image>",
            "idefics3": "<image>", "smolvlm": "<image>", "qwen3_vl": "<|image_pad|>"}  # fmt: skip


@pytest.mark.parametrize("name", TRAINING)
def test_answers_found_without_marks_are_those_of_templates_with_marks(name: str) -> None:
    """The published templates, of which TRL has copies, against TRL's twins with generation marks."""
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"

    class Processor:
        chat_template = None
        image_token = TRAINING[name]
        tokenizer = tiny.tokenizer(
            image_token, "<|im_start|>", "<|im_end|>", "<end_of_utterance>", "<start_of_turn>", "<end_of_turn>"
        )

    published = Chat(Processor(), (folder / f"{name}.jinja").read_text())
    marked = Chat(Processor(), (folder / f"{name}_training.jinja").read_text())
    assert marked.has_marks and not published.has_marks
    messages = row("<image>What is this?", "A cat.", "And <image> that?", "A dog.")["messages"]
    text = published.render(messages)
    assert text == marked.render(messages)
    spans = published.answer_spans(messages, text)
    assert [text[start:end] for start, end in spans] == [text[s:e] for s, e in marked.answer_spans(messages, text)]
    assert [text[start:end].strip().split("<")[0] for start, end in spans] == ["A cat.", "A dog."]
    assert published.stop_token() == marked.stop_token() is not None


# -- equal to the processor's own -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CHATS)
def test_ids_and_pixels_are_the_processors_own(family: str, processors: dict[str, Any]) -> None:
    processor = processors[family]
    rows = [row("<image>What is this?", "A cat.", images=[stored(picture(70, 50, 1))]),
            row("Which <image> is it <image> now?", "The left.",
                images=[stored(picture(31, 64, 2)), stored(picture(64, 64, 3))])]  # fmt: skip
    batch = collate(processor, rows)
    texts = [ImageTextCollator(processor).encoder.chat.render(r["messages"]) for r in rows]
    images = [[open_image(image) for image in r["images"]] for r in rows]
    bos = texts[0].startswith(processor.tokenizer.bos_token or "<none>")
    settings = {"padding": True, "padding_side": "right", "return_tensors": "pt", "add_special_tokens": not bos}
    official = processor(text=texts, images=images, **settings)
    assert torch.equal(batch["input_ids"], official["input_ids"])
    assert torch.equal(batch["attention_mask"], official["attention_mask"])
    assert set(batch) - {"labels"} == set(official)
    for key in set(official) - {"input_ids", "attention_mask"}:
        assert torch.equal(batch[key], torch.as_tensor(official[key])), key


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_paligemma_is_what_its_processor_makes(processors: dict[str, Any]) -> None:
    processor = processors["paligemma"]
    rows = [row("<image>What is this?", "A cat."), row("<image><image>Same?", "No, it is a longer answer.")]
    batch = collate(processor, rows)
    official = processor(
        text=["<image>What is this?", "<image><image>Same?"],
        suffix=["A cat.", "No, it is a longer answer."],
        images=[[open_image(image) for image in r["images"]] for r in rows],
        padding=True,
        return_tensors="pt",
    )
    for key in ("input_ids", "attention_mask", "token_type_ids", "pixel_values"):
        assert torch.equal(batch[key], official[key]), key
    shown = official["attention_mask"] == 1
    assert torch.equal(batch["labels"][shown], official["labels"][shown])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_is_the_same_alone_and_beside_others(family: str, processors: dict[str, Any]) -> None:
    processor = processors[family]
    rows = [row("What is two?", "2"), row("<image>What is this?", "A cat."), row("And now?", "Nothing at all.")]
    together = collate(processor, rows)
    for index, single in enumerate(rows):
        alone = collate(processor, [single])
        length = alone["input_ids"].shape[1]
        for key in ("input_ids", "labels", "attention_mask"):
            assert torch.equal(together[key][index, :length], alone[key][0])
    assert torch.equal(together["pixel_values"], collate(processor, rows[1:2])["pixel_values"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_without_images_has_no_pixels(family: str, processors: dict[str, Any]) -> None:
    batch = collate(processors[family], [row("What is two?", "2"), row("Why?", "So it is.")])
    per_token = {"input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids"}
    assert set(batch) <= per_token
    assert all(value.shape == batch["input_ids"].shape for value in batch.values())


def test_the_length_is_padded_to_a_multiple(processors: dict[str, Any]) -> None:
    batch = collate(processors["gemma3"], [row("<image>What?", "A cat.")], pad_to_multiple_of=64)
    assert {value.shape[1] for key, value in batch.items() if key != "pixel_values"} == {64}


# -- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_the_beginning_of_what_is_trained_on(family: str, processors: dict[str, Any]) -> None:
    processor = processors[family]
    collator = ImageTextCollator(processor, num_threads=1)
    rows = [row("<image>What is this thing here?", "A cat."), row("Two?", "2")]
    batch, prompts = collator(rows), collator.encode_prompts(rows)
    assert "labels" not in prompts and torch.equal(prompts["pixel_values"], batch["pixel_values"])
    for index in (0, 1):
        prompt = prompts["input_ids"][index][prompts["attention_mask"][index] == 1]
        first_learned = int((batch["labels"][index] >= 0).nonzero()[0])
        assert torch.equal(prompt, batch["input_ids"][index][:first_learned])
    assert prompts["attention_mask"][1].tolist() == sorted(prompts["attention_mask"][1].tolist())  # filled on the left


def test_only_the_last_answer_and_the_images_after_it_are_taken_off(processors: dict[str, Any]) -> None:
    collator = ImageTextCollator(processors["llava"], num_threads=1)
    prompts = collator.encode_prompts([row("<image>What?", "A cat.", "And <image>?", "A dog.")])
    text = processors["llava"].tokenizer.decode(prompts["input_ids"][0])
    assert "A cat." in text and "A dog." not in text and text.endswith("ASSISTANT:")
    assert len(prompts["pixel_values"]) == 2


# -- never cut --------------------------------------------------------------------------------------------------------


def test_a_sample_that_does_not_fit_is_refused_with_the_arithmetic(processors: dict[str, Any]) -> None:
    sample = row("<image>What is this?", "A cat.", row_id="0042")
    length = collate(processors["llava"], [sample])["input_ids"].shape[1]
    message = (
        rf"sample 0042: max_length=30 does not hold it: 17 image tokens \+ {length - 17} text tokens = {length} > 30"
    )
    with pytest.raises(DataError, match=message) as caught:
        collate(processors["llava"], [row("Two?", "2"), sample], max_length=30)
    assert f"max_length: {length}" in caught.value.problems[0].fix
    assert collate(processors["llava"], [sample], max_length=length)["input_ids"].shape[1] == length


def test_a_sample_that_does_not_fit_is_dropped_and_counted_where_asked(
    processors: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    collator = ImageTextCollator(processors["llava"], num_threads=1, max_length=30, on_too_long="drop")
    short = row("Two?", "2")
    batch = collator([row("<image>What is this?", "A cat."), short])
    assert torch.equal(batch["input_ids"], collator([short])["input_ids"]) and "pixel_values" not in batch
    assert collator.num_dropped == 1 and "longer than max_length=30" in caplog.text
    nothing = collator([row("<image>What is this?", "A cat.")] * 2)
    assert collator.num_dropped == 3
    assert (nothing["labels"] == -100).all() and nothing["attention_mask"].any()


# -- bad input --------------------------------------------------------------------------------------------------------


def test_a_text_tokenizer_is_no_processor() -> None:
    with pytest.raises(DataError, match="is not a processor of images and text: it has no image processor"):
        ImageTextCollator(tiny.tokenizer())


def test_a_template_that_shows_no_images_is_refused_before_training() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(DataError, match="renders 0 times <image> for a conversation with 1 images") as caught:
        ImageTextCollator(tiny.llava(plain))
    assert "set chat_template" in caught.value.problems[0].fix
    ImageTextCollator(tiny.llava(plain), chat_template=tiny.LLAVA)


def test_a_processor_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="LlavaProcessor has no chat template"):
        ImageTextCollator(tiny.llava(None))
    (tmp_path / "llava.jinja").write_text(tiny.LLAVA)
    ImageTextCollator(tiny.llava(None), chat_template=str(tmp_path / "llava.jinja"))


def test_a_template_whose_answers_cannot_be_told_is_refused() -> None:
    counting = "{{ messages | length }} turns\n" + tiny.CHATML.replace("IMAGE", "<image>")
    collator = ImageTextCollator(tiny.llava(counting), num_threads=1)
    with pytest.raises(DataError, match=r"renders the conversation up to turn 2 otherwise than"):
        collator([row("<image>What?", "A cat.")])
    whole = ImageTextCollator(tiny.llava(counting), num_threads=1, assistant_only=False)
    assert (whole([row("<image>What?", "A cat.")])["labels"] >= 0).any()


def test_what_a_template_refuses_or_leaves_out_is_named(processors: dict[str, Any]) -> None:
    messages = row("<image>What?", "A cat.")["messages"]
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    twice = {"messages": [messages[0], *messages], "images": row("<image><image>")["images"], "id": "7"}
    with pytest.raises(DataError, match=r"sample 7: .* cannot render it: Conversation roles must alternate"):
        collate(processors["gemma3"], [twice])
    silent = tiny.LLAVA.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}", 1)
    with pytest.raises(DataError, match="row 1: .* leaves out what the system says: 'Be brief.'"):
        collate(tiny.llava(silent), [{**row("<image>What?", "A cat."), "messages": [system, *messages]}])
    with pytest.raises(
        DataError, match="takes one question and one answer, and it has the turns user, assistant, user"
    ):
        collate(processors["paligemma"], [row("<image>What?", "A cat.", "Sure?", "Yes.")])


def test_an_image_token_written_by_hand_is_refused(processors: dict[str, Any]) -> None:
    sample = row("What?", "A cat.")
    sample["messages"][0]["content"][0]["text"] = "Say <image> twice"
    for family in ("llava", "paligemma", "idefics3"):
        with pytest.raises(DataError, match="row 1: .*<image>"):
            collate(processors[family], [sample])


def test_all_broken_images_of_a_batch_are_named_at_once(processors: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "page.png").write_text("<html>")
    rows = [
        row("<image>?", "x", images=[{"path": str(tmp_path / "gone.png"), "bytes": None}], row_id="row 1"),
        row("<image>?", "x"),
        row("<image>?", "x", images=[{"path": str(tmp_path / "page.png"), "bytes": None}], row_id="b"),
        row("<image>?", "x", images=[], row_id="c"),
    ]
    with pytest.raises(DataError) as caught:
        collate(processors["llava"], rows)
    messages = [problem.message for problem in caught.value.problems]
    assert messages[0] == f"row 1: {tmp_path}/gone.png does not exist"
    assert messages[1].startswith(f"sample b: {tmp_path}/page.png is a web page that was saved in its place")
    assert messages[2] == "sample c: it has 1 image parts and 0 images"
    assert len(messages) == 3


def test_a_choice_that_does_not_exist_is_refused(processors: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="on_too_long='cut' is not one of: refuse, drop"):
        ImageTextCollator(processors["llava"], on_too_long="cut")


# -- threads, cache, workers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_make_the_same_batches_however_they_are_started(method: str, processors: dict[str, Any]) -> None:
    from torch.utils.data import DataLoader

    rows = [row("<image>What is this?", f"Number {index}.") for index in range(6)]
    collator = ImageTextCollator(processors["llava"], num_threads=2)
    here = [collator(rows[start : start + 2]) for start in (0, 2, 4)]  # the pool of threads exists before the fork
    loader: Any = DataLoader(rows, 2, num_workers=1, collate_fn=collator, multiprocessing_context=method)  # type: ignore[arg-type]
    for ours, theirs in zip(here, loader, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    collator.decoder.close()


def test_a_pickled_collator_makes_the_same_batch(processors: dict[str, Any]) -> None:
    collator = ImageTextCollator(processors["idefics3"], max_length=500, num_threads=2, max_pixels=900)
    rows = [row("<image>What?", "A cat."), row("<image>What?", "A dog.")]
    before = collator(rows)
    copied = pickle.loads(pickle.dumps(collator))
    after = copied(rows)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert len(copied.decoder.cache) == 1 and copied.limits.max_pixels == 900  # both rows show the same picture
    collator.decoder.close(), copied.decoder.close()


def test_the_cache_keeps_to_its_bytes_and_gives_up_what_was_not_used_for_longest() -> None:
    images = [picture(10, 10, seed) for seed in range(4)]
    cache = ImageCache(max_bytes=3 * 300)
    for index in range(3):
        cache.put(index, images[index])
    assert cache.get(0) is images[0]
    cache.put(3, images[3])
    assert (cache.get(1), cache.get(0), cache.num_bytes, len(cache)) == (None, images[0], 900, 3)
    cache.put("large", picture(100, 100))
    assert cache.get("large") is None and cache.num_bytes == 900


def test_a_picture_shown_again_is_not_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(stored(picture(9, 9))["bytes"])
    decoder = ImageDecoder(ImageLimits(), num_threads=3, cache_bytes=1 << 20)
    reference = {"path": str(path), "bytes": None}
    first = decoder.open_all([reference])[0]
    path.unlink()
    again = decoder.open_all([reference, reference])
    assert all(image is first for image in again)
    without = ImageDecoder(ImageLimits(), num_threads=1, cache_bytes=0)
    assert isinstance(without.open_all([reference])[0], DataError)
    decoder.close()


def test_many_threads_open_pictures_in_their_order() -> None:
    references = [stored(picture(10 + index, 9, index)) for index in range(40)]
    decoder = ImageDecoder(ImageLimits(), num_threads=8, cache_bytes=20 * 300)
    for _ in range(3):
        opened = decoder.open_all(references)
        assert [image.width for image in opened] == [10 + index for index in range(40)]  # type: ignore[union-attr]
        assert np.array_equal(np.asarray(opened[7]), np.asarray(picture(17, 9, 7)))
    decoder.close()


def test_parts_lose_the_empty_fields_that_arrow_adds() -> None:
    messages = [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "x"}]}]
    assert for_template(messages)[0]["content"] == [{"type": "image"}, {"type": "text", "text": "x"}]
