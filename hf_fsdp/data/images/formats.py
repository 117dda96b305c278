"""The shapes of rows with images that are known: by which columns each is recognised, and how it becomes turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hf_fsdp.data.images.turns import MARK
from hf_fsdp.errors import DataError, Problem, nearest_names

IMAGE_COLUMNS = ("images", "image", "file_names", "file_name")
_ANSWER_COLUMNS = ("answer", "answers", "multiple_choice_answer", "label", "labels")
_ID_COLUMNS = ("id", "question_id", "questionId", "sample_id")
_TEXT_COLUMNS = ("text", "caption", "label")
_LIKELY = {
    "messages": ("conversation", "dialog", "dialogue", "chat", "turns"),
    "images": ("img", "imgs", "picture", "pictures", "photo", "image_path", "image_paths", "path", "jpg", "png"),
    "question": ("query", "instruction", "problem", "input"),
    "answer": ("response", "output", "target", "solution", "gt"),
}

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """A known shape of rows.

    Args:
        required: columns it must have; of a group, one.
        reading: how its rows are read, for a person.
        turns: a row's turns, as `read_turns` takes them.
        answers: every accepted answer of a row, where it lists them.
    """

    required: tuple[tuple[str, ...], ...]
    reading: str
    turns: Callable[[Row, str | None], Any]
    answers: Callable[[Row], list[str]] | None = None


def _messages(row: Row, question: str | None) -> Any:
    return row["messages"]


def _llava(row: Row, question: str | None) -> Any:
    turns = row["conversations"]
    system = row.get("system")
    return [{"role": "system", "content": system}, *turns] if system and isinstance(turns, list) else turns


def _texts(row: Row, question: str | None) -> Any:
    pairs = row["texts"] or []
    return [
        turn
        for pair in pairs
        for turn in (
            {"role": "user", "content": pair.get("user")},
            {"role": "assistant", "content": pair.get("assistant")},
        )
    ]


def _prompt_completion(row: Row, question: str | None) -> Any:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return [*prompt, *completion] if isinstance(prompt, list) and isinstance(completion, list) else None


def _question(row: Row, question: str | None) -> Any:
    answers = _all_answers(row)
    asked = row["question"]
    if not isinstance(asked, str) or not answers:
        return [{"role": "user", "content": asked if isinstance(asked, str) else ""}]
    best = next((str(row[c]) for c in ("answer", "multiple_choice_answer") if isinstance(row.get(c), str | int)), None)
    # Of several people's answers the one that most gave, the first of them where it is a draw.
    best = best if best is not None else Counter(answers).most_common(1)[0][0]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": best}]


def _all_answers(row: Row) -> list[str]:
    for column in ("answers", "answer", "multiple_choice_answer", "labels", "label"):
        value = row.get(column)
        if value is None or value == []:
            continue
        values = value if isinstance(value, list) else [value]
        texts = [item.get("answer") if isinstance(item, dict) else item for item in values]
        return [str(text) for text in texts if text not in (None, "")]
    return []


def _captioned(row: Row, question: str | None) -> Any:
    text = next((row[column] for column in _TEXT_COLUMNS if row.get(column) not in (None, "")), None)
    asked = MARK + (question or "") if MARK not in (question or "") else question
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": "" if text is None else str(text)}]


def _captions(row: Row) -> list[str]:
    text = next((row[column] for column in _TEXT_COLUMNS if row.get(column) not in (None, "")), None)
    return [] if text is None else [str(text)]


# In order: the first whose columns are there is taken, and a row that also has others is read in this one.
FORMATS: dict[str, ImageFormat] = {
    "messages": ImageFormat(required=(("messages",),), reading="conversations", turns=_messages),
    "llava": ImageFormat(
        required=(("conversations",),), reading="conversations, human -> user and gpt -> assistant", turns=_llava
    ),
    "texts": ImageFormat(
        required=(("texts",), IMAGE_COLUMNS), reading="conversations of user and assistant pairs", turns=_texts
    ),
    "prompt_completion": ImageFormat(
        required=(("prompt",), ("completion",)), reading="a question and an answer", turns=_prompt_completion
    ),
    "question_answer": ImageFormat(
        required=(("question",), _ANSWER_COLUMNS),
        reading="a question about the images and its answer",
        turns=_question,
        answers=_all_answers,
    ),
    "image_text": ImageFormat(
        required=(IMAGE_COLUMNS, _TEXT_COLUMNS),
        reading="one question about every image, answered with its text",
        turns=_captioned,
        answers=_captions,
    ),
}


def recognise(columns: Collection[str], source: str, question: str | None, *, with_answers: bool = True) -> str:
    """Return the name of the format that the columns fit; without answers, a column of questions is enough.

    Raises:
        DataError: none fits, or images with a text and no question to ask about them.
    """
    for name, known in FORMATS.items():
        if all(any(column in columns for column in group) for group in known.required):
            if name == "image_text" and not question:
                text = next(column for column in _TEXT_COLUMNS if column in columns)
                raise DataError(
                    f"the dataset has images and {text!r}, and no question that {text!r} would answer",
                    fix="question: What is in this picture?   (asked about every image)   or   give the rows "
                    "messages, or a column 'question'",
                    source=source,
                )
            return name
    if not with_answers and "question" in columns:
        return "question_answer"
    raise DataError(_unknown(columns, source))


def _unknown(columns: Collection[str], source: str) -> Problem:
    shown = ", ".join(columns)
    known = "; ".join(
        f"{name}: {' + '.join('/'.join(group) for group in item.required)}" for name, item in FORMATS.items()
    )
    message = f"the dataset has the columns {shown}, which is no known format of images and text ({known})"
    renames = [f"{column}={new}" for new, names in _LIKELY.items() for column in columns if column in names]
    if "messages" not in columns and any(rename.endswith("=messages") for rename in renames):
        renames = [rename for rename in renames if rename.endswith(("=messages", "=images"))]
    fix = f"rename_columns: [{', '.join(renames)}]" if renames else "rename_columns: [YOUR_COLUMN=messages]"
    near = [name for column in columns for name in nearest_names(column, ("messages", "conversations", "question"))]
    return Problem(message=message, fix=fix, near=", ".join(dict.fromkeys(near)) or None, source=source)


def find_image_column(columns: Collection[str], source: str) -> str | None:
    """Return the column of images, None where there is none (text only, or images inside the turns).

    Raises:
        DataError: there are several.
    """
    found = [column for column in IMAGE_COLUMNS if column in columns]
    if len(found) > 1:
        raise DataError(
            f"the dataset has {len(found)} columns of images: {', '.join(found)}; a row's images are read from one",
            fix=f"remove one of them, e.g. rename_columns: [{found[1]}=unused]",
            source=source,
        )
    return found[0] if found else None


def find_id_column(columns: Collection[str]) -> str | None:
    """Return the column by which people name a row, None where there is none."""
    return next((column for column in _ID_COLUMNS if column in columns), None)
