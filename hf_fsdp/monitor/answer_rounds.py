"""Answers to rows with images, under sharding as in one process: which rank answers what, in rounds that all share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import nn

from hf_fsdp.errors import DataError, HfFsdpError, IntegrationError, Problem
from hf_fsdp.monitor.answer_rows import Row, has_images, row_id
from hf_fsdp.monitor.generate import can_generate, config_of, evaluation_mode, generate_batch
from hf_fsdp.monitor.random_state import preserved_random_state
from hf_fsdp.policies.blocks import class_name
from hf_fsdp.sharding.mesh import agree_all, rank, world_size

Result = TypeVar("Result")


class PromptCollator(Protocol):
    """What turns rows into prompts: `hf_fsdp.data.ImageTextCollator`, or anything that has these two."""

    @property
    def processor(self) -> Any:
        """A transformers processor, or a tokenizer; answers are decoded by its tokenizer."""

    def encode_prompts(self, rows: Any) -> Any:
        """Return ``input_ids`` padded on the left, ``attention_mask`` and the images of these rows."""


@dataclass(frozen=True)
class Share:
    """What one rank answers in one round.

    Args:
        rows: positions of the rows, at least one.
        counts: whether the answers are kept; a rank that has nothing left answers a row of the round once more,
            because every rank has to run the same forwards.
    """

    rows: tuple[int, ...]
    counts: bool = True


def plan_rounds(with_images: Sequence[bool], num_ranks: int, batch_size: int) -> list[list[Share]]:
    """Return a list of rounds, each with one share a rank.

    Rows with images come first and never share a round with rows without: a rank without images would not gather the
    vision tower's parameters, and the others would wait for it.

    Example:
        >>> plan_rounds([True, False, True], num_ranks=2, batch_size=4)
        [[Share(rows=(0,), counts=True), Share(rows=(2,), counts=True)], \
[Share(rows=(1,), counts=True), Share(rows=(1,), counts=False)]]
    """
    rounds = []
    for kind in (True, False):
        group = [index for index, has in enumerate(with_images) if has is kind]
        for start in range(0, len(group), num_ranks * batch_size):
            part = group[start : start + num_ranks * batch_size]
            dealt = (tuple(part[index::num_ranks]) for index in range(num_ranks))
            rounds.append([Share(rows) if rows else Share((part[0],), counts=False) for rows in dealt])
    return rounds


def generate_answers(
    model: nn.Module,
    rows: Sequence[Row],
    collator: PromptCollator,
    *,
    max_new_tokens: int = 32,
    batch_size: int = 8,
) -> list[str]:
    """Return the model's greedy answer to every row, in the order of the rows, on every rank; collective.

    The answers are those of a single process, however many ranks share the rows. The model may be sharded, quantized
    or carry adapters; modules get their mode back, and the random state is left as it was.

    Args:
        model: with a language-model head.
        rows: the same on every rank, `messages` and `images` each; each rank answers its part of them.
        collator: makes prompts of rows, without their last assistant turn.
        max_new_tokens: the longest answer, in tokens. Prompts are never cut: near the end of the model's positions
            the answer is shortened.
        batch_size: rows at once, on one rank.

    Raises:
        DataError: on all ranks alike, when a row cannot be read or its prompt fills the model's positions.
        IntegrationError: the model cannot generate.

    Example:
        >>> answers = generate_answers(trainer.model, rows[:20], collator, max_new_tokens=16)  # doctest: +SKIP
    """
    check_numbers(max_new_tokens=max_new_tokens, batch_size=batch_size)
    check_generates(model)
    tokenizer = tokenizer_of(collator)
    flags = together("look at the rows", lambda: [has_images(row) for row in rows])
    found: dict[int, str] = {}
    with preserved_random_state(), evaluation_mode(model):
        for shares in plan_rounds(flags, world_size(), batch_size):
            found.update(_answer_round(model, rows, collator, tokenizer, shares[rank()], max_new_tokens))
    everywhere = {index: answer for part in agree_all(found) for index, answer in part.items()}
    return [everywhere[index] for index in range(len(rows))]


def _answer_round(
    model: nn.Module, rows: Sequence[Row], collator: PromptCollator, tokenizer: Any, share: Share, max_new_tokens: int
) -> Iterator[tuple[int, str]]:
    part = [rows[index] for index in share.rows]

    def encode() -> tuple[Mapping[str, Any], int]:
        ids = [row_id(row, share.rows[at]) for at, row in enumerate(part)]
        batch = _encode(collator, part, ids)
        return batch, _room(model, batch, ids)

    batch, room = together("read the prompts", encode)
    answers = generate_batch(
        model,
        batch,
        pad_token_id=_pad_token_id(tokenizer),
        max_new_tokens=min(max_new_tokens, room),
        synced=world_size() > 1,
        stop_token_ids=_stop_token_ids(collator, tokenizer),
    )
    texts = [str(tokenizer.decode(answer, skip_special_tokens=True)).strip() for answer in answers]
    return iter(zip(share.rows, texts, strict=True) if share.counts else ())


def _encode(collator: PromptCollator, rows: Sequence[Row], ids: Sequence[str]) -> Mapping[str, Any]:
    try:
        return collator.encode_prompts(rows)
    except HfFsdpError:
        raise  # says which row it is
    except Exception:
        problems = []
        for row, name in zip(rows, ids, strict=True):
            try:
                collator.encode_prompts([row])
            except Exception as error:
                message = f"row {name} cannot be made into a prompt: {type(error).__name__}: {error}"
                problems.append(Problem(message=message, fix="mend its images or messages, or leave the row out"))
        if problems:
            raise DataError(problems) from None
        raise


def _room(model: nn.Module, batch: Mapping[str, Any], ids: Sequence[str]) -> int:
    """Return how many tokens fit behind the longest prompt."""
    config = config_of(model)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    width = int(batch["input_ids"].shape[1])
    if positions is None or getattr(config, "is_encoder_decoder", False):
        return width + 2**20
    if width >= positions:
        lengths = [int(length) for length in batch["attention_mask"].sum(1)]
        longest = max(range(len(ids)), key=lambda at: lengths[at])
        raise DataError(
            f"row {ids[longest]}: its prompt has {lengths[longest]} tokens with its images, and the model has "
            f"{positions} positions: no answer fits behind it",
            fix="load the processor with a smaller max_pixels, or leave the row out",
        )
    return positions - width


def together(action: str, do: Callable[[], Result]) -> Result:
    """Run `do` on every rank; what fails on one is the same `DataError` on all. Collective.

    Without it the ranks that could read their rows would wait in the first forward.
    """
    problems: list[Problem] = []
    cause: Exception | None = None
    result: Any = None
    try:
        result = do()
    except HfFsdpError as error:
        problems, cause = list(error.problems), error
    except Exception as error:
        fix = "see that rank's traceback; rows are checked by check_image_data before a run"
        problems, cause = [Problem(message=f"could not {action}: {type(error).__name__}: {error}", fix=fix)], error
    everyone = list(dict.fromkeys(problem for theirs in agree_all(problems) for problem in theirs))
    if everyone:
        raise DataError(everyone) from cause
    return result


def tokenizer_of(collator: Any) -> Any:
    """Return what decodes the answers.

    Raises:
        DataError: the collator cannot make prompts, or has nothing to decode with.
    """
    processor = getattr(collator, "processor", None)
    tokenizer = getattr(processor, "tokenizer", processor)
    missing = [
        name
        for name, is_there in (
            ("encode_prompts(rows)", callable(getattr(collator, "encode_prompts", None))),
            ("a processor with a tokenizer", hasattr(tokenizer, "decode")),
        )
        if not is_there
    ]
    if missing:
        raise DataError(
            f"collator: {type(collator).__name__} has no {' and no '.join(missing)}, so no row can be asked",
            fix="collator=ImageTextCollator(processor)",
        )
    return tokenizer


def check_generates(model: nn.Module) -> None:
    """Raise IntegrationError for a model without a head that generates."""
    if not can_generate(model):
        raise IntegrationError(
            f"{class_name(model)} cannot generate text, so it has no answers",
            fix="load it with a language-model head (AutoModelForImageTextToText), or leave its answers out",
        )


def check_numbers(**numbers: int | None) -> None:
    """Raise DataError for every number below 1; None is left alone."""
    problems = [
        Problem(message=f"{name}={value}: must be at least 1", fix=f"{name}=1")
        for name, value in numbers.items()
        if value is not None and value < 1
    ]
    if problems:
        raise DataError(problems)


def _stop_token_ids(collator: Any, tokenizer: Any) -> list[int]:
    """What ends an answer: the template's token where the collator knows it, and the tokenizer's own."""
    known = (getattr(collator, "stop_token_id", None), getattr(tokenizer, "eos_token_id", None))
    return [int(token) for token in known if token is not None]


def _pad_token_id(tokenizer: Any) -> int:
    for name in ("pad_token_id", "eos_token_id"):
        if (token := getattr(tokenizer, name, None)) is not None:
            return int(token)
    return 0
