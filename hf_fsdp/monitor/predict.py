"""All answers of a model to a dataset, in a file that is written while they come."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from hf_fsdp.errors import DataError
from hf_fsdp.monitor.answer_file import AnswersFile, ImageStore, answer_record
from hf_fsdp.monitor.answer_rounds import (
    PromptCollator,
    check_generates,
    check_numbers,
    generate_answers,
    together,
    tokenizer_of,
)
from hf_fsdp.monitor.answer_rows import Row, check_references, references_of, row_id
from hf_fsdp.monitor.answers import Metric, resolve_metrics, score_answer
from hf_fsdp.sharding.mesh import agree_all, rank, world_size

_ROUNDS_AT_ONCE = 4  # rows of so many rounds are in memory, and are dealt so that ranks have pictures together


@dataclass
class _Sums:
    """What is known of the answers so far, without keeping them."""

    num_rows: int = 0
    totals: dict[str, float] = field(default_factory=dict)

    def add(self, scores: Mapping[str, float]) -> None:
        self.num_rows += 1
        for name, score in scores.items():
            self.totals[name] = self.totals.get(name, 0.0) + score

    def means(self) -> dict[str, float]:
        return {name: total / self.num_rows for name, total in self.totals.items()}


def predict_answers(
    model: nn.Module,
    rows: Sequence[Row],
    collator: PromptCollator,
    path: str | Path = "predictions.jsonl",
    *,
    metrics: Sequence[str | Metric] = (),
    max_new_tokens: int = 32,
    batch_size: int = 8,
    resume: bool = False,
) -> dict[str, float]:
    """Write the model's answer to every row, one JSON line each, in the order of the rows; collective.

    Lines are appended to ``path`` + ``.partial`` while they come, and the file gets its name when it is whole: what
    is at `path` is always complete. Memory holds a few batches, however many rows there are.

    Args:
        model: sharded or not.
        rows: the same on every rank; anything with a length and positions (a list, a `datasets.Dataset`).
        collator: makes prompts of rows, without their last assistant turn.
        path: written by rank 0. Pictures that are no files are written once into ``<name>_images/`` beside it.
        metrics: names of `hf_fsdp.monitor.answers.METRICS`, or functions; rows then need references.
        max_new_tokens: the longest answer, in tokens.
        batch_size: rows at once, on one rank.
        resume: go on behind the lines that an interrupted call has left, and do nothing when they are all there. The
            rows have to be the same, and so has the model: the file cannot know its weights.

    Returns:
        The mean of every metric, on every rank; empty without metrics.

    Raises:
        DataError: on all ranks alike: unknown metrics, rows without reference, unreadable images, lines of other rows.
        IntegrationError: the model cannot generate.

    Example::

        means = predict_answers(trainer.model, rows, collator, metrics=("anls",))
    """
    chosen = resolve_metrics(metrics, source="predict_answers(metrics=...)")
    check_numbers(max_new_tokens=max_new_tokens, batch_size=batch_size)
    check_generates(model)
    tokenizer_of(collator)
    path = Path(path)
    draft = path.with_name(path.name + ".partial")
    store = ImageStore(path.with_name(path.stem + "_images"))
    file = AnswersFile(draft)
    sums = together("begin the file of predictions", lambda: _begin(file, path, rows, list(chosen), resume))
    begin = int(agree_all(sums.num_rows)[0])
    size = world_size() * batch_size * _ROUNDS_AT_ONCE
    for start in range(begin, len(rows), size):
        part = together("read the rows", lambda start=start: _read(rows, start, size, list(chosen)))  # type: ignore[misc]
        answers = generate_answers(model, part, collator, max_new_tokens=max_new_tokens, batch_size=batch_size)

        def write(start: int = start, part: list[Row] = part, answers: list[str] = answers) -> None:
            if rank() == 0:
                file.append(_score(part, answers, start, chosen, store, sums))

        together(f"write {draft}", write)
    together(f"write {path}", lambda: os.replace(draft, path) if rank() == 0 and draft.exists() else None)
    return dict(agree_all(sums.means())[0])


def _begin(file: AnswersFile, path: Path, rows: Sequence[Row], metrics: list[str], resume: bool) -> _Sums:
    """Leave the draft with whole lines of these rows only, and return what they say."""
    sums = _Sums()
    if rank() != 0:
        return sums
    before = next((place for place in (file.path, path) if resume and place.is_file()), None)
    kept = []
    for line in before.read_text(encoding="utf-8").splitlines() if before else ():
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            break  # the last line of a process that was killed while it wrote
        index = sums.num_rows
        expected = row_id(rows[index], index) if index < len(rows) else None
        if (record.get("index"), record.get("id")) != (index, expected) or list(record["scores"]) != metrics:
            raise DataError(
                f"{before} cannot be gone on with: its line {index + 1} is of row {record.get('id')!r} with the scores "
                f"{list(record.get('scores', ()))}, and this call has row {expected!r} there with {metrics}",
                fix="give the rows and metrics of the interrupted call, or begin anew: resume=False",
            )
        sums.add(record["scores"])
        kept.append(line)
    file.start()
    if kept:
        file.path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    return sums


def _read(rows: Sequence[Row], start: int, size: int, metrics: list[str]) -> list[Row]:
    part = [rows[index] for index in range(start, min(start + size, len(rows)))]
    if problems := check_references(part, metrics, first_index=start):
        raise DataError(problems)
    return part


def _score(
    part: Sequence[Row],
    answers: Sequence[str],
    start: int,
    metrics: Mapping[str, Metric],
    store: ImageStore,
    sums: _Sums,
) -> list[dict[str, Any]]:
    records = []
    for index, (row, answer) in enumerate(zip(part, answers, strict=True), start=start):
        scores = score_answer(metrics, answer, references_of(row)) if metrics else {}
        sums.add(scores)
        records.append(answer_record(row, index, answer, scores, store))
    return records
