"""Examples with images, as the collator trains on them: recognised, converted, checked, and told in one line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp.data.columns import rename_columns
from hf_fsdp.data.images.columns import (
    count_images,
    holds_bytes,
    image_features,
    list_paths,
    list_stored_images,
    reader_version,
    row_features,
    split_urls,
    undecoded,
)
from hf_fsdp.data.images.formats import FORMATS, find_id_column, find_image_column, recognise
from hf_fsdp.data.images.references import as_list, folder_of
from hf_fsdp.data.images.turns import FIXES, read_turns
from hf_fsdp.errors import DataError, Problem, nearest_names

if TYPE_CHECKING:
    from datasets import Dataset

MAX_SHOWN = 5
# Left out without a word, these would leave questions about something that nobody shows.
_OTHER_MEDIA = ("video", "videos", "audio", "audios")


@dataclass(frozen=True, kw_only=True)
class ImageExamples:
    """Checked examples in the columns that `ImageTextCollator` takes.

    Args:
        dataset: ``messages`` (typed parts), ``images`` (``{path, bytes}``, one for each image part), ``id`` (the data's
            own, or ``row 1``, ``row 2`` ...), and
            ``answers`` (all accepted ones) where the rows list them.
        format: the name under which the columns were recognised.
        num_text_only: rows without an image.
        num_images: images of all rows.
        line: what was recognised and how it is read, for a person.
    """

    dataset: Dataset
    format: str
    num_text_only: int
    num_images: int
    line: str

    @property
    def kind(self) -> str:
        """What the rows are after reading: always conversations."""
        return "messages"


def read_image_examples(
    dataset: Dataset,
    *,
    source: str,
    image_folder: str | Path | None = None,
    renames: Sequence[str] = (),
    allow_urls: bool = False,
    question: str | None = None,
    with_answers: bool = True,
) -> ImageExamples:
    """Recognise the format of `dataset`, convert it to conversations with images, and check every row.

    Known: ``messages`` with ``images`` or ``image`` (content as text with ``<image>`` marks, as typed parts with or
    without an image inside, or as plain text, before which the images are put), LLaVA's ``conversations``, ``texts``
    of user and assistant pairs, ``prompt``/``completion``, ``question``/``answer(s)``, and image folders. No picture
    is decoded: `check_image_data` does that.

    Args:
        dataset: one split, as loaded.
        source: file, folder or hub id it came from: named in errors, and where relative image paths begin.
        image_folder: where relative image paths begin instead.
        renames: ``OLD=NEW`` for columns to rename first.
        allow_urls: whether a path may be a URL. Off by default: training would wait for, and depend on, other
            people's servers, and a data file could make this machine ask for any address.
        question: asked about each image of a dataset that has only images and their text or label.
        with_answers: whether rows without an answer are a problem; for predictions they are not.

    Raises:
        DataError: columns of no format, rows that cannot be trained on, missing files, URLs; all problems found.

    Example:
        >>> from datasets import Dataset
        >>> rows = Dataset.from_list([{"question": "Which?", "answer": "two", "image": b"\\x89PNG..."}])
        >>> read_image_examples(rows, source="rows").dataset[0]["messages"][0]["content"][0]["type"]
        'image'
    """
    dataset = undecoded(rename_columns(dataset, [renames] if isinstance(renames, str) else renames))
    columns = dataset.column_names
    name = recognise(columns, source, question, with_answers=with_answers)
    image_column, id_column = find_image_column(columns, source), find_id_column(columns)
    folder = folder_of(source, image_folder)
    read = _read(dataset, name, image_column, id_column, folder, question, with_answers)
    problems = _row_problems(read, source) + _file_problems(read, folder, source, allow_urls)
    if problems:
        raise DataError(problems)
    read = read.remove_columns(["problem", "detail"])
    return describe_examples(read, name, _line(name, dataset, image_column, id_column, count_images(read)))


def describe_examples(read: Dataset, name: str, line: str) -> ImageExamples:
    """Return read rows with what is counted about them."""
    counts = count_images(read)
    return ImageExamples(dataset=read, format=name, num_text_only=counts.count(0), num_images=sum(counts), line=line)


def _read(
    dataset: Dataset,
    name: str,
    image_column: str | None,
    id_column: str | None,
    folder: Path,
    question: str | None,
    with_answers: bool,
) -> Dataset:
    """Return messages, images, id, problem and detail of every row."""
    from datasets import ClassLabel, concatenate_datasets

    labels = {column: feature.names for column, feature in dataset.features.items() if isinstance(feature, ClassLabel)}
    settings: dict[str, Any] = {"name": name, "id_column": id_column, "folder": str(folder), "question": question}
    settings |= {"with_answers": with_answers, "reader": reader_version()}
    features = row_features(with_answers=FORMATS[name].answers is not None)
    if image_column is None or not holds_bytes(dataset, image_column):
        features["images"] = image_features()
        settings |= {"image_column": image_column, "labels": labels, "counts": None}
        return _map(dataset, settings, features)
    # Pictures that are stored in the dataset are not passed through Python: two datasets, side by side.
    images = list_stored_images(dataset, image_column, folder)
    settings |= {"image_column": None, "labels": labels, "counts": count_images(images)}
    rest = dataset.remove_columns([image_column])
    if not rest.column_names:  # nothing is left to count rows by
        rest = rest.add_column("row", list(range(len(dataset))))
    return concatenate_datasets([_map(rest, settings, features), images], axis=1)


def _map(dataset: Dataset, settings: dict[str, Any], features: Any) -> Dataset:
    return dataset.map(
        _convert_row,
        with_indices=True,
        fn_kwargs=settings,
        remove_columns=dataset.column_names,
        features=features,
        desc=f"Reading {settings['name']}",
    )


def _convert_row(
    row: dict[str, Any],
    index: int,
    *,
    name: str,
    image_column: str | None,
    id_column: str | None,
    folder: str,
    question: str | None,
    with_answers: bool,
    labels: dict[str, list[str]],
    counts: list[int] | None,
    reader: str,
) -> dict[str, Any]:
    row = {**row, **{column: names[row[column]] for column, names in labels.items() if row.get(column) is not None}}
    known = FORMATS[name]
    images = as_list(row[image_column]) if image_column else []
    turns = known.turns(row, question)
    asked = turns[0].get("content") if name == "question_answer" else "?"
    num_images = None if counts is None else counts[index]
    read = read_turns(turns, images, Path(folder), num_images=num_images, with_answers=with_answers)
    if isinstance(asked, str) and not asked.strip():
        read.problem, read.detail = "no question", ""
    if others := [column for column in _OTHER_MEDIA if row.get(column) not in (None, "", [], {})]:
        read.problem, read.detail = "a video or a sound", f"column {others[0]!r}"
    answers = {} if known.answers is None else {"answers": known.answers(row)}
    stored = {} if counts is not None else {"images": [] if read.problem else read.images}
    return {
        "messages": [] if read.problem else read.messages,
        "id": str(row[id_column]) if id_column and row[id_column] is not None else _position(index),
        "problem": read.problem,
        "detail": read.detail,
        **answers,
        **stored,
    }


def _row_problems(dataset: Dataset, source: str) -> list[Problem]:
    """Return one problem for each rule that rows break, with the first rows."""
    found: dict[str, list[str]] = {}
    columns = dataset.select_columns(["problem", "detail", "id"])
    for index, row in enumerate(columns):
        if row["problem"]:
            detail = f": {row['detail']}" if row["detail"] else ""
            found.setdefault(row["problem"], []).append(f"{name_row(index, row['id'])}{detail}")
    return [
        Problem(
            message=f"{len(rows)} of {len(dataset)} rows have {problem}; {_first(rows)}",
            fix=FIXES[problem],
            source=source,
        )
        for problem, rows in found.items()
    ]


def name_row(index: int, row_id: str) -> str:
    """Return how a row is named to a person: its position from 1, and its own id where it has one."""
    return row_id if row_id == _position(index) else f"{_position(index)} (id {row_id})"


def _position(index: int) -> str:
    return f"row {index + 1}"


def _first(rows: list[str]) -> str:
    more = f"; and {len(rows) - MAX_SHOWN} more" if len(rows) > MAX_SHOWN else ""
    return f"first: {'; '.join(rows[:MAX_SHOWN])}{more}"


def _file_problems(dataset: Dataset, folder: Path, source: str, allow_urls: bool) -> list[Problem]:
    files, urls = split_urls(list_paths(dataset))
    ids = dataset.select_columns(["id"])
    problems = []
    if urls and not allow_urls:
        rows = [f"{name_row(index, ids[index]['id'])}: {url}" for url, index in list(urls.items())[: MAX_SHOWN + 1]]
        problems.append(
            Problem(
                message=f"{len(urls)} images are URLs, which are not opened unless you say so; "
                f"first: {'; '.join(rows[:MAX_SHOWN])}",
                fix="download them and give their paths   or   allow_image_urls: true   (in a script: allow_urls=True)",
                source=source,
            )
        )
    with ThreadPoolExecutor(16) as pool:  # on a network file system one by one would take minutes
        there = list(pool.map(os.path.isfile, files))
    missing = {path: index for (path, index), is_there in zip(files.items(), there, strict=True) if not is_there}
    folders = {path: index for path, index in missing.items() if os.path.isdir(path)}
    if folders:
        rows = [f"{name_row(index, ids[index]['id'])}: {path}" for path, index in folders.items()]
        problems.append(
            Problem(
                message=f"{len(folders)} of {len(files)} image paths are folders; {_first(rows)}",
                fix="give the picture's own path",
                source=source,
            )
        )
    missing = {path: index for path, index in missing.items() if path not in folders}
    if missing:
        problems.append(_missing(missing, len(files), ids, folder, source))
    return problems


def _missing(missing: dict[str, int], num_files: int, ids: Dataset, folder: Path, source: str) -> Problem:
    rows = [f"{name_row(index, ids[index]['id'])}: {path}" for path, index in missing.items()]
    first = Path(next(iter(missing)))
    if first.parent.is_dir():
        near = nearest_names(first.name, (entry.name for entry in first.parent.iterdir()))
        fix = "put the files there, or remove these rows"
    else:
        near = []
        fix = f"image_folder: the folder that the paths begin in (now {folder})"
    return Problem(
        message=f"{len(missing)} of {num_files} image files do not exist; {_first(rows)}",
        near=", ".join(str(first.parent / name) for name in near) or None,
        fix=fix,
        source=source,
    )


def _line(name: str, dataset: Dataset, image_column: str | None, id_column: str | None, counts: list[int]) -> str:
    used = {column for group in FORMATS[name].required for column in group} | {image_column, id_column, "system"}
    used |= {"answers", "answer", "multiple_choice_answer"} if name == "question_answer" else set()
    found = [column for column in dataset.column_names if column in used]
    left_out = [column for column in dataset.column_names if column not in used]
    line = (
        f"{name} columns ({', '.join(found)}) read as {FORMATS[name].reading}: {len(counts)} samples, "
        f"{sum(counts)} images (at most {max(counts, default=0)} a sample), {counts.count(0)} samples without an image"
    )
    return line + (f"; left out: {', '.join(left_out)}" if left_out else "")
