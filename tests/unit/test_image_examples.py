"""Rows of every known shape become conversations with one image for each image part, or errors that name the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL.Image", reason="needs pillow (the extra 'vision')")

from datasets import ClassLabel, Dataset, Features, Image, List, Value  # noqa: E402

from hf_fsdp.data import load_splits  # noqa: E402
from hf_fsdp.data.images import open_image, read_image_examples  # noqa: E402
from hf_fsdp.data.images.folders import holds_pictures, load_image_folder  # noqa: E402
from hf_fsdp.errors import DataError  # noqa: E402
from tests.unit.image_processors import picture, stored  # noqa: E402

IMAGE, ANSWER = {"type": "image", "text": None}, {"role": "assistant", "content": "A cat."}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index, name in enumerate(("a.png", "b.png", "c.png")):
        picture(10 + index, 8, index).save(tmp_path / name)
    return tmp_path


def read(rows: list[dict[str, Any]], folder: Path, **options: Any) -> Dataset:
    """Write the rows as a person would, load them as a recipe does, and read them."""
    path = folder / "rows.json"
    path.write_text(json.dumps(rows))
    return read_image_examples(load_splits(str(path))["train"], source=str(path), **options).dataset


def sizes(row: dict[str, Any]) -> list[int]:
    return [open_image(image).width for image in row["images"]]


@pytest.mark.parametrize(
    "content",
    [
        "<image>\nWhat is it?",
        "What is it?",
        [{"type": "image"}, {"type": "text", "text": "What is it?"}],
        [{"type": "image"}, {"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}],
    ],
)
@pytest.mark.parametrize("column", [{"images": ["b.png"]}, {"image": "b.png"}, {"images": [{"path": "b.png"}]}])
def test_every_spelling_of_messages_gives_the_same_row(content: Any, column: dict[str, Any], folder: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": content}, ANSWER], **column}]
    made = read(rows, folder)[0]
    assert made["messages"][0] == {"role": "user", "content": [IMAGE, text("What is it?")]}
    assert made["messages"][1] == {"role": "assistant", "content": [text("A cat.")]}
    assert made["images"] == [{"path": str(folder / "b.png"), "bytes": None}]
    assert made["id"] == "row 1"


@pytest.mark.parametrize("key", ["image", "path", "url", "image_url"])
def test_images_inside_parts_are_taken_from_there(key: str, folder: Path) -> None:
    value = {"url": "c.png"} if key == "image_url" else "c.png"
    parts = [text("Look:"), {"type": "image_url" if key == "image_url" else "image", key: value}]
    made = read([{"messages": [{"role": "user", "content": parts}, ANSWER]}], folder)[0]
    assert made["messages"][0]["content"] == [text("Look:"), IMAGE]
    assert sizes(made) == [12]


def test_none_one_and_many_images_and_several_turns_mix(folder: Path) -> None:
    rows = [
        {"id": 7, "messages": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2"}]},
        {"id": 8, "messages": [{"role": "user", "content": "It <image> and <image>."}, ANSWER,
                      {"role": "user", "content": "And\n<image>\nthat?"}, {"role": "assistant", "content": "A dog."}],
         "images": ["a.png", "b.png", "c.png"]},
    ]  # fmt: skip
    made = read(rows, folder)
    assert made[0]["images"] == [] and made[0]["id"] == "7"
    assert made[1]["messages"][0]["content"] == [text("It "), IMAGE, text(" and "), IMAGE, text(".")]
    assert made[1]["messages"][2]["content"] == [text("And"), IMAGE, text("that?")]
    assert sizes(made[1]) == [10, 11, 12]


def test_llava_json_is_read_with_ids_and_images_of_mixed_types(folder: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
    two = [{"from": "human", "value": "<image>\n<image>\nWhich?"}, {"from": "gpt", "value": "The left."}]
    none = [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "2"}]
    rows = [
        {"id": "a1", "image": "a.png", "conversations": turns},
        {"id": 17, "image": ["b.png", "c.png"], "conversations": two},
        {"id": "x", "conversations": none},
    ]
    made = read(rows, folder)
    assert [row["id"] for row in made] == ["a1", "17", "x"]
    assert [sizes(row) for row in made] == [[10], [11, 12], []]
    assert [turn["role"] for turn in made[0]["messages"]] == ["user", "assistant"]
    assert made[1]["messages"][0]["content"] == [IMAGE, IMAGE, text("Which?")]


def test_paths_begin_in_the_image_folder_that_was_given(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("json")
    rows = [{"messages": [{"role": "user", "content": "<image>What?"}, ANSWER], "images": ["a.png"]}]
    assert sizes(read(rows, elsewhere, image_folder=folder)[0]) == [10]
    with pytest.raises(DataError, match=r"1 of 1 image files do not exist; first: row 1: .*a\.png") as caught:
        read(rows, elsewhere)
    # The advice, followed:
    (elsewhere / "a.png").write_bytes((folder / "a.png").read_bytes())
    assert "put the files there" in caught.value.problems[0].fix
    assert sizes(read(rows, elsewhere)[0]) == [10]


def test_stored_pictures_are_kept_byte_for_byte_and_never_decoded(folder: Path) -> None:
    content = stored(picture(20, 20), "JPEG")["bytes"]
    broken = b"no picture at all"
    features = Features({"image": Image(), "question": Value("string"), "answer": Value("string")})
    rows = [
        {"image": {"bytes": content, "path": None}, "question": "Which?", "answer": "two"},
        {"image": None, "question": "Two?", "answer": "2"},
        {"image": {"bytes": broken, "path": "x.jpg"}, "question": "Which?", "answer": "one"},
    ]
    examples = read_image_examples(Dataset.from_list(rows, features=features), source="rows")
    made = examples.dataset
    assert [[image["bytes"] for image in row["images"]] for row in made] == [[content], [], [broken]]
    assert made[0]["messages"][0]["content"] == [IMAGE, text("Which?")]
    assert made[1]["messages"][0]["content"] == [text("Two?")]
    assert made[0]["answers"] == ["two"]
    assert (examples.num_images, examples.num_text_only) == (2, 1)
    assert examples.line.startswith("question_answer columns (image, question, answer) read as a question about")


def test_lists_of_stored_pictures_survive_a_shuffle(folder: Path) -> None:
    contents = [stored(picture(10 + index, 9))["bytes"] for index in range(6)]
    features = Features({"images": List(Image()), "messages": [{"role": Value("string"), "content": Value("string")}]})
    rows = [
        {"images": [{"bytes": content, "path": None} for content in contents[:count]],
         "messages": [{"role": "user", "content": "<image>" * count + "How many?"},
                      {"role": "assistant", "content": str(count)}]}
        for count in range(6)
    ]  # fmt: skip
    dataset = Dataset.from_list(rows, features=features).shuffle(seed=3).select(range(1, 6))
    made = read_image_examples(dataset, source="rows").dataset
    for row in made:
        count = int(row["messages"][1]["content"][0]["text"])
        assert [image["bytes"] for image in row["images"]] == contents[:count]
        assert sum(part["type"] == "image" for part in row["messages"][0]["content"]) == count


def test_stored_pictures_beside_paths_are_both_found(folder: Path) -> None:
    content = stored(picture(30, 9))["bytes"]
    features = Features({"images": List({"path": Value("string"), "bytes": Value("binary")}),
                         "prompt": Value("string"), "completion": Value("string")})  # fmt: skip
    images = [{"path": "a.png", "bytes": None}, {"path": None, "bytes": content}]
    rows = [{"images": images, "prompt": "Which?", "completion": "This."}]
    made = read_image_examples(Dataset.from_list(rows, features=features), source="rows", image_folder=folder).dataset
    assert sizes(made[0]) == [10, 30]


def test_answers_of_several_people_are_all_kept_and_the_commonest_is_learned(folder: Path) -> None:
    answers = [{"answer": word, "answer_id": index} for index, word in enumerate(("cat", "dog", "cat"))]
    rows = [{"question": "What?", "image": "a.png", "answers": answers, "question_id": 42}]
    made = read(rows, folder)[0]
    assert made["messages"][1]["content"] == [text("cat")]
    assert made["answers"] == ["cat", "dog", "cat"]
    assert made["id"] == "42"


def test_questions_without_answers_are_read_where_they_are_to_be_predicted(folder: Path) -> None:
    rows = [{"question": "What?", "image": "a.png"}]
    with pytest.raises(DataError, match="which is no known format"):
        read(rows, folder)
    made = read(rows, folder, with_answers=False)[0]
    assert made["messages"] == [{"role": "user", "content": [IMAGE, text("What?")]}]
    assert made["answers"] == []


def test_user_and_assistant_pairs_are_read_as_turns(folder: Path) -> None:
    pairs = [{"user": "What?", "assistant": "A cat.", "source": "x"}, {"user": "Sure?", "assistant": "Yes."}]
    made = read([{"images": ["a.png"], "texts": pairs}], folder)[0]
    assert [turn["role"] for turn in made["messages"]] == ["user", "assistant"] * 2
    assert made["messages"][0]["content"] == [IMAGE, text("What?")]


def test_conversational_prompts_and_completions_are_joined(folder: Path) -> None:
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    made = read([{"images": ["a.png"], "prompt": prompt, "completion": [ANSWER]}], folder)[0]
    assert made["messages"] == [
        {"role": "user", "content": [IMAGE, text("What?")]},
        {"role": "assistant", "content": [text("A cat.")]},
    ]


def test_a_folder_with_metadata_is_read_by_its_file_names(folder: Path) -> None:
    lines = [{"file_name": "a.png", "text": "two"}, {"file_name": "c.png", "text": "four"}]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    dataset = load_splits(str(folder))["train"]
    with pytest.raises(DataError, match="images and 'text', and no question that 'text' would answer") as caught:
        read_image_examples(dataset, source=str(folder))
    assert caught.value.problems[0].fix.startswith("question: What is in this picture?")
    made = read_image_examples(dataset, source=str(folder), question="Which digit?").dataset
    assert made[1]["messages"][0]["content"] == [IMAGE, text("Which digit?")]
    assert (made[1]["answers"], sizes(made[1])) == (["four"], [12])


def test_a_folder_of_splits_and_classes_is_read_without_any_file_of_rows(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        for label in ("cat", "dog"):
            (tmp_path / split / label).mkdir(parents=True)
            for index in range(count):
                picture(10 + index, 8).save(tmp_path / split / label / f"{index}.png")
    assert holds_pictures(tmp_path)
    splits = load_image_folder(tmp_path)
    assert {split: len(dataset) for split, dataset in splits.items()} == {"train": 6, "test": 4}
    made = read_image_examples(splits["test"], source=str(tmp_path), question="<image>\nWhich animal?").dataset
    assert [row["answers"] for row in made] == [["cat"], ["cat"], ["dog"], ["dog"]]
    assert made[0]["messages"][0]["content"] == [IMAGE, text("Which animal?")]
    assert [sizes(row) for row in made] == [[10], [11], [10], [11]]


# `datasets` leaves the table open.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_a_table_beside_the_pictures_gives_the_questions(folder: Path) -> None:
    (folder / "metadata.csv").write_text("file_name,question,answer\na.png,What?,cat\nb.png,What?,dog\nc.png,Who?,me\n")
    made = read_image_examples(load_image_folder(folder)["train"], source=str(folder)).dataset
    assert [row["answers"] for row in made] == [["cat"], ["dog"], ["me"]]
    assert [sizes(row) for row in made] == [[10], [11], [12]]


def test_a_table_that_names_missing_pictures_or_none_is_refused(folder: Path) -> None:
    (folder / "metadata.jsonl").write_text('{"file_name": "gone.png", "question": "What?", "answer": "cat"}\n')
    with pytest.raises(DataError, match="1 of 1 image files do not exist; first: row 1: .*gone.png"):
        read_image_examples(load_image_folder(folder)["train"], source=str(folder))
    (folder / "metadata.jsonl").write_text('{"question": "What?", "answer": "cat"}\n')
    with pytest.raises(DataError, match="could not be read as a folder of pictures: .*file_name"):
        load_image_folder(folder)
    assert not holds_pictures(folder / "nothing")


def test_labels_are_answered_by_their_names(folder: Path) -> None:
    features = Features({"image": Image(), "label": ClassLabel(names=["cat", "dog"])})
    rows = [{"image": str(folder / "b.png"), "label": 1}, {"image": str(folder / "a.png"), "label": 0}]
    dataset = Dataset.from_list(rows, features=features)
    made = read_image_examples(dataset, source="rows", question="What?").dataset
    assert [row["answers"] for row in made] == [["dog"], ["cat"]]
    assert sizes(made[0]) == [11]


# -- bad input --------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "<image>What?"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [{"role": "user", "content": "<image><image>?"}, ANSWER], "images": ["a.png"]},
         "1 of 2 rows have other numbers of image marks and images; first: row 2: 2 marks, 1 image"),
        ({"messages": [USER, ANSWER], "images": []}, "first: row 2: 1 mark, 0 images"),
        ({"messages": [], "images": ["a.png"]}, "1 of 2 rows have no turns; first: row 2"),
        ({"messages": [USER], "images": ["a.png"]}, "1 of 2 rows have no answer"),
        ({"messages": [USER, {"role": "assistant", "content": " "}], "images": ["a.png"]}, "have no answer"),
        ({"messages": [ANSWER], "images": []}, "1 of 2 rows have an answer before any question"),
        ({"messages": [{"role": "narrator", "content": "x"}, ANSWER], "images": []},
         "have a role that is not system, user, assistant or tool; first: row 2: 'narrator'"),
        ({"messages": [{"role": "user", "content": None}, ANSWER], "images": []},
         "1 of 2 rows have a turn without role and content"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": "x.mp4"}]}, ANSWER], "images": []},
         "have a part of a turn that is neither text nor image; first: row 2: 'video'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}, ANSWER], "images": ["b.png"]},
         "have images both in the turns and in a column; first: row 2: 1 and 1"),
        ({"messages": [USER, ANSWER], "images": [""]}, "an image that cannot be read; first: row 2: an empty image"),
        ({"messages": [USER, ANSWER], "images": ["x/gone.png"]}, "1 of 2 image files do not exist; first: row 2"),
        ({"messages": [USER, ANSWER], "images": ["https://example.org/a.png"]},
         "1 images are URLs, which are not opened unless you say so; first: row 2: https://example.org/a.png"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_used_is_named_with_what_to_do(row: dict[str, Any], words: str, folder: Path) -> None:
    good = {"messages": [USER, ANSWER], "images": ["a.png"]}
    with pytest.raises(DataError) as caught:
        read([good, row], folder)
    assert words in str(caught.value)
    assert all(problem.fix and problem.source == str(folder / "rows.json") for problem in caught.value.problems)


def test_all_kinds_of_problems_are_told_at_once_with_five_rows_each(folder: Path) -> None:
    rows = [{"id": f"q{n}", "messages": [USER, ANSWER], "images": ["a.png"] * (n % 3)} for n in range(20)]
    rows.append({"id": "last", "messages": [USER], "images": ["a.png"]})
    with pytest.raises(DataError) as caught:
        read(rows, folder)
    assert len(caught.value.problems) == 2
    message = caught.value.problems[0].message
    assert message.startswith(
        "13 of 21 rows have other numbers of image marks and images; first: row 1 (id q0): 1 mark"
    )
    assert message.count("(id q") == 5 and message.endswith("and 8 more")
    assert "row 21 (id last)" in caught.value.problems[1].message


def test_a_missing_file_with_a_similar_name_is_pointed_at(folder: Path) -> None:
    with pytest.raises(DataError, match="do not exist") as caught:
        read([{"messages": [USER, ANSWER], "images": ["a.jpg"]}], folder)
    assert str(folder / "a.png") in str(caught.value.problems[0].near)


def test_urls_are_kept_where_they_are_allowed(folder: Path) -> None:
    url = "https://example.org/a.png"
    made = read([{"messages": [USER, ANSWER], "images": [url]}], folder, allow_urls=True)
    assert made[0]["images"] == [{"path": url, "bytes": None}]


def test_unknown_columns_are_told_with_a_rename_that_works(folder: Path) -> None:
    rows = [{"query": "What?", "response": "A cat.", "img": "a.png"}]
    with pytest.raises(DataError, match="the columns query, response, img, which is no known format") as caught:
        read(rows, folder)
    fix = caught.value.problems[0].fix
    assert fix == "rename_columns: [img=images, query=question, response=answer]"
    renames = fix.removeprefix("rename_columns: [").removesuffix("]").split(", ")
    assert sizes(read(rows, folder, renames=renames)[0]) == [10]


def test_two_columns_of_images_are_refused(folder: Path) -> None:
    rows = [{"messages": [USER, ANSWER], "images": ["a.png"], "image": "a.png"}]
    with pytest.raises(DataError, match="2 columns of images: images, image") as caught:
        read(rows, folder)
    assert "image=unused" in caught.value.problems[0].fix
    assert sizes(read(rows, folder, renames=["image=unused"])[0]) == [10]
