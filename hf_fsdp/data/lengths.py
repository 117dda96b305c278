"""How many samples does `max_length` cut, and does an answer survive? Measured before the model loads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from hf_fsdp.data.chat_template import has_generation_marks
from hf_fsdp.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

MAX_ROWS_MEASURED = 10_000
WARN_ABOVE = 0.05
_BATCH = 256
# A template leaves all of them out or none, whatever they say.
_MAX_SYSTEM_MESSAGES = 20


@dataclass(frozen=True, kw_only=True)
class LengthReport:
    """Token counts of a dataset against `max_length`.

    Args:
        num_rows: samples in the dataset.
        num_measured: samples that were tokenized (up to 10,000, evenly spread).
        num_cut: measured samples longer than `max_length`.
        num_lost: measured samples of which no token that counts in the loss is left.
        longest_tokens: length of the longest measured sample.
        fitting_tokens: the length that all but 5 % of the measured samples fit in.
        max_length: tokens per sample, or None for no limit.
    """

    num_rows: int
    num_measured: int
    num_cut: int
    num_lost: int
    longest_tokens: int
    fitting_tokens: int
    max_length: int | None

    @property
    def cut_share(self) -> float:
        """Share of the measured samples that are longer than `max_length`."""
        return self.num_cut / self.num_measured

    def __str__(self) -> str:
        measured = "" if self.num_measured == self.num_rows else f" ({self.num_measured} of {self.num_rows} measured)"
        limit = "no limit" if self.max_length is None else f"max_length {self.max_length}"
        text = (
            f"lengths: {self.num_cut} of {self.num_measured} samples ({self.cut_share:.1%}) are cut, longest "
            f"{self.longest_tokens} tokens, {limit}{measured}"
        )
        if self.num_lost:
            text += f"; {self.num_lost} lose their whole answer and teach nothing"
        if self.cut_share > WARN_ABOVE:
            text = (
                f"warning: {text}\n  fix   max_length: {self.fitting_tokens}   (then at most {WARN_ABOVE:.0%} are cut)"
            )
        return text


def measure_lengths(
    dataset: Dataset,
    tokenizer: Any,
    *,
    max_length: int | None,
    chat_template: str | None = None,
    text_field: str = "text",
) -> LengthReport:
    """Tokenize up to 10,000 samples as TRL will and compare them with `max_length`.

    Args:
        dataset: checked examples: ``messages``, ``prompt``/``completion``, or a text column.
        tokenizer: a fast tokenizer.
        max_length: tokens that a sample is cut to; None cuts nothing.
        chat_template: the template used in training; with generation marks, a sample whose answers lie wholly
            behind the cut is counted as lost.
        text_field: the text column, where there are neither conversations nor completions.

    Raises:
        DataError: a row that the template refuses, such as two user turns in a row under Llama 2's, or a template
            that leaves system messages out.
    """
    step = max(1, -(-len(dataset) // MAX_ROWS_MEASURED))
    picked = dataset if step == 1 else dataset.select(range(0, len(dataset), step))
    if text_field not in dataset.column_names:
        text_field = ""
    measured: list[tuple[int, int]] = []
    for start in range(0, len(picked), _BATCH):
        rows = picked[start : start + _BATCH]
        try:
            measured.extend(_measure(rows, tokenizer, chat_template, text_field))
        except TemplateError as error:
            raise _unrenderable(rows, tokenizer, chat_template, start, step, error) from error
    if "messages" in dataset.column_names:
        _refuse_dropped_system_messages(picked, tokenizer, chat_template, step)
    lengths = [length for length, _ in measured]
    first_learned = [first for _, first in measured]
    limit = max(lengths) if max_length is None else max_length
    ordered = sorted(lengths)
    return LengthReport(
        num_rows=len(dataset),
        num_measured=len(lengths),
        num_cut=sum(length > limit for length in lengths),
        num_lost=sum(first >= limit for first in first_learned),
        longest_tokens=ordered[-1],
        fitting_tokens=ordered[-1 - int(len(ordered) * WARN_ABOVE)],
        max_length=max_length,
    )


def check_lengths(report: LengthReport) -> None:
    """Refuse a `max_length` that leaves nothing to learn.

    Raises:
        DataError: every measured sample loses its whole answer.
    """
    if report.num_lost == report.num_measured:
        raise DataError(
            f"max_length={report.max_length} cuts off the whole answer of every sample ({report.num_measured} "
            "measured), so there is nothing to learn from",
            fix=f"max_length: {report.longest_tokens}   (fits all; {report.fitting_tokens} fits all but 5 %)",
        )


def _measure(
    rows: dict[str, list[Any]], tokenizer: Any, chat_template: str | None, text_field: str = ""
) -> list[tuple[int, int]]:
    """Return (tokens, position of the first token that counts) of each row of a batch."""
    if text_field and "messages" not in rows and "prompt" not in rows:
        return [(length, 0) for length in _count_with_end_token(rows[text_field], tokenizer)]
    if "messages" not in rows:
        return _measure_completions(rows["prompt"], rows["completion"], tokenizer, chat_template)
    if "tools" in rows:  # tools are rendered into the text, and differ from row to row
        pairs = zip(rows["messages"], rows["tools"], strict=True)
        return [_measure_messages([turns], tokenizer, chat_template, tools)[0] for turns, tools in pairs]
    return _measure_messages(rows["messages"], tokenizer, chat_template, None)


def _count_with_end_token(texts: list[str], tokenizer: Any) -> list[int]:
    """Return token counts, with the end token that TRL appends where a text has none."""
    ids = tokenizer(texts)["input_ids"]
    return [len(row) + (not text.endswith(tokenizer.eos_token)) for row, text in zip(ids, texts, strict=True)]


def _refuse_dropped_system_messages(dataset: Dataset, tokenizer: Any, chat_template: str | None, step: int) -> None:
    """Raise where a template renders a conversation without its system message, as Mistral v0.3's does."""
    num_looked_at = 0
    for index, row in enumerate(dataset):
        turns = row["messages"]
        system = turns[0]["content"].strip() if turns[0]["role"] == "system" and turns[0]["content"] else ""
        if not system:
            continue
        text = tokenizer.apply_chat_template(turns, chat_template=chat_template, tokenize=False)
        if system not in text:
            raise DataError(
                f"the chat template leaves the system message of row {index * step + 1} out, so nothing would be "
                "learned under it",
                fix="put its text in front of the first user message, or set chat_template to one that renders it",
            )
        num_looked_at += 1
        if num_looked_at == _MAX_SYSTEM_MESSAGES:
            return


def _unrenderable(
    rows: dict[str, list[Any]], tokenizer: Any, chat_template: str | None, start: int, step: int, error: Exception
) -> DataError:
    """Find the first row of a batch that the template refuses."""
    index = 0
    for index in range(len(next(iter(rows.values())))):
        try:
            _measure({key: [values[index]] for key, values in rows.items()}, tokenizer, chat_template)
        except TemplateError as found:
            error = found
            break
    return DataError(
        f"row {(start + index) * step + 1} cannot be rendered by the chat template: {error}",
        fix="repair or remove such rows, or set chat_template to one that accepts them",
    )


def _measure_messages(
    conversations: list[Any], tokenizer: Any, chat_template: str | None, tools: Any
) -> list[tuple[int, int]]:
    marked = has_generation_marks(chat_template or tokenizer.get_chat_template())
    encoded = tokenizer.apply_chat_template(
        conversations,
        chat_template=chat_template,
        tools=json.loads(tools) if isinstance(tools, str) else tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=marked,
    )
    if not marked:
        return [(len(ids), 0) for ids in encoded["input_ids"]]
    return [(len(mask), mask.index(1) if 1 in mask else len(mask)) for mask in encoded["assistant_masks"]]


def _measure_completions(
    prompts: list[Any], completions: list[Any], tokenizer: Any, chat_template: str | None
) -> list[tuple[int, int]]:
    if isinstance(prompts[0], str):
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        lengths, heads = _count_with_end_token(texts, tokenizer), tokenizer(prompts)["input_ids"]
        return [(length, len(head)) for length, head in zip(lengths, heads, strict=True)]
    turns = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    render = {"chat_template": chat_template, "tokenize": True, "return_dict": True}
    whole = tokenizer.apply_chat_template(turns, **render)["input_ids"]
    heads = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, **render)["input_ids"]
    return [(len(w), len(h)) for w, h in zip(whole, heads, strict=True)]
