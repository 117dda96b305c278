"""Show which tokens of a sample count in the loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

    from hf_fsdp.data.examples import Examples

IGNORED = -100
_MAX_CHARS = 600
_MANY_EQUAL = 9
# Samples that lose their whole answer to the cut are dropped; so many stand by for one that is shown.
_SPARE = 20


def format_training_examples(trainer: Any, count: int) -> str:
    """Return the first samples that `trainer` trains on, as its collator hands them to the model.

    Args:
        trainer: an `SFTTrainer` that was built; its model is not touched.
        count: how many.
    """
    return format_collated_examples(trainer.train_dataset, trainer.data_collator, trainer.processing_class, count)


def format_collated_examples(dataset: Dataset, collator: Any, tokenizer: Any, count: int) -> str:
    """Return the first samples of `dataset` as `collator` hands them to a model.

    Args:
        dataset: the training rows.
        collator: makes a batch of rows.
        tokenizer: decodes the tokens.
        count: how many.
    """
    rows = dataset.select(range(min(count, len(dataset))))
    shown = [{**_collated(collator([row])), "name": _name(row)} for row in rows]
    text = format_examples(shown, tokenizer)
    return text if len(shown) == count else f"{text}\n(there are no more than {len(shown)} training examples to show)"


def format_examples(examples: Iterable[dict[str, Any]], tokenizer: Any) -> str:
    """Return samples as text, each run of tokens marked `loss` or `-`.

    Args:
        examples: rows with ``input_ids``, ``labels`` (−100 where a token does not count) and, of several samples
            packed into one row, ``starts``, the positions where they begin.
        tokenizer: decodes the tokens.
    """
    return "\n".join(_format_example(number, row, tokenizer) for number, row in enumerate(examples, start=1))


def preview_training(make_trainer: Any, args: Any, examples: Examples, tokenizer: Any, count: int) -> str:
    """Return the first samples as they would be trained, prepared by the trainer itself and without any weights.

    Args:
        make_trainer: TRL's `SFTTrainer`; it is built beside a model of no size.
        args: the arguments of the run.
        examples: the training examples.
        tokenizer: with the template to train with.
        count: how many samples (rows, when packing).
    """
    rows = examples.dataset
    if not (args.packing or args.shuffle_dataset):  # neither reorders the samples: the first ones will do
        rows = rows.select(range(min(len(rows), count * _SPARE)))
    trainer = make_trainer(
        model=_smallest_model(tokenizer),
        args=args,
        train_dataset=rows,
        eval_dataset=rows.select(range(1)),
        processing_class=tokenizer,
    )
    text = format_training_examples(trainer, count)
    trainer.accelerator.end_training()  # closes the process group, if there is one
    return text


def _smallest_model(tokenizer: Any) -> Any:
    """TRL prepares data only beside a model; this one has the vocabulary and nothing else."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=2,
            intermediate_size=2,
            num_hidden_layers=1,
            num_attention_heads=1,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _name(row: dict[str, Any]) -> str:
    """Return what tells a row with pictures from others: its id, and the pictures that were read."""
    if "images" not in row:
        return ""
    pictures = [image.get("path") or "bytes" for image in row["images"] or ()]
    return f" ({', '.join([str(row.get('id')), *pictures])})"


def _collated(batch: dict[str, Any]) -> dict[str, Any]:
    labels = batch["labels"][0].tolist()
    starts = [0]
    if "position_ids" in batch:
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    labels[0] = IGNORED  # nothing comes before the first token, so nothing predicts it
    return {"input_ids": batch["input_ids"][0].tolist(), "labels": labels, "starts": starts}


def _format_example(number: int, row: dict[str, Any], tokenizer: Any) -> str:
    ids: Sequence[int] = row["input_ids"]
    labels: Sequence[int] = row.get("labels", ids)
    starts: Sequence[int] = row.get("starts") or [0]
    num_learned = sum(label != IGNORED for label in labels)
    packed = f" in {len(starts)} packed samples" if len(starts) > 1 else ""
    name = row.get("name") or ""
    lines = [f"training example {number}{name}: {len(ids)} tokens{packed}, {num_learned} count in the loss"]
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], len(ids)], strict=True), start=1):
        if packed:
            lines.append(f"  sample {index}, which sees no other:")
        lines += _format_runs(ids[start:end], labels[start:end], tokenizer)
    return "\n".join(lines)


def _format_runs(ids: Sequence[int], labels: Sequence[int], tokenizer: Any) -> list[str]:
    lines = []
    for learned, run in groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] != IGNORED):
        text = _shorten(_decode([token for token, _ in run], tokenizer))
        # A newline is shown by its sign too: whether the one after an answer counts is what people get wrong.
        body = text.replace("\n", "\\n\n")
        for index, line in enumerate(body.removesuffix("\n").split("\n")):
            lines.append(f"  {('loss' if learned else '-') if index == 0 else '':<5}| {line}")
    return lines


def _decode(ids: Sequence[int], tokenizer: Any) -> str:
    """Return the text of some tokens; of many equal ones in a row, a picture's, one and their number."""
    parts: list[str] = []
    waiting: list[int] = []
    for token, same in ((token, len(list(group))) for token, group in groupby(ids)):
        if same < _MANY_EQUAL:
            waiting += [token] * same
            continue
        parts += [tokenizer.decode(waiting, skip_special_tokens=False)] if waiting else []
        parts.append(f"{tokenizer.decode([token], skip_special_tokens=False)} x {same}")
        waiting = []
    parts += [tokenizer.decode(waiting, skip_special_tokens=False)] if waiting else []
    return " ".join(parts)


def _shorten(text: str) -> str:
    if len(text) <= _MAX_CHARS:
        return text
    half = _MAX_CHARS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
