"""`AnswersCallback`: how many questions a model answers right, at every evaluation, sharded or not."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_fsdp.errors import DataError, Problem
from hf_fsdp.integrations.answers_seam import install_answer_seams
from hf_fsdp.integrations.wandb import log_answer_grid
from hf_fsdp.monitor.answer_file import AnswersFile, ImageStore, answer_record
from hf_fsdp.monitor.answer_grid import check_pillow, choose_rows, draw_answer_grid
from hf_fsdp.monitor.answer_rounds import (
    PromptCollator,
    check_generates,
    check_numbers,
    generate_answers,
    together,
    tokenizer_of,
)
from hf_fsdp.monitor.answer_rows import Row, check_references, references_of
from hf_fsdp.monitor.answers import Metric, mean_scores, resolve_metrics, score_answer
from hf_fsdp.monitor.generate import evaluation_mode
from hf_fsdp.sharding.mesh import agree_all

GRID_FOLDER = "answers_grid"
_CHECKED_AT_START = 1000  # rows; the others are looked at when they are asked


class AnswersCallback(TrainerCallback):
    """Lets the model answer a dataset at every evaluation and counts what is right: ``eval_exact_match`` and others.

    The scores are part of Trainer's evaluation: they go wherever its loss goes (terminal, metrics file, W&B), and
    ``metric_for_best_model="exact_match"`` with ``load_best_model_at_end`` works. Every answer becomes a line of
    ``answers.jsonl``, and a picture of pictures shows right and wrong ones. Answers are greedy, in evaluation mode;
    all ranks generate together and share the rows; training is the same to the bit with and without it.

    Args:
        dataset: rows with ``messages`` and ``images``, the same on all ranks; with a length and positions. What counts
            as right is a row's ``answers``, else its last assistant turn.
        collator: makes prompts of rows: `ImageTextCollator(processor)`.
        metrics: names of `hf_fsdp.monitor.answers.METRICS` (exact_match, vqa_accuracy, anls, token_f1,
            relaxed_accuracy), or functions of (answer, references). The first decides what the picture marks as
            right. ``()`` writes answers without scores.
        num_rows: how many rows are asked, the first ones; all when None. Generating is slow: a few hundred do.
        max_new_tokens: the longest answer, in tokens.
        batch_size: rows that one process answers at once.
        every: answer at these steps instead of at evaluations, also in runs without any.
        output: the file of answers, in ``output_dir``; a resumed run keeps its lines up to the checkpoint.
        grid: how many answers the picture shows (``output_dir/answers_grid/step-N.png``); 0 draws none.
        columns: pictures side by side.

    Raises:
        DataError: from this constructor and from Trainer's, all problems at once: unknown metrics, rows without
            anything to compare with, nothing to ask, a collator that cannot make prompts.
        IntegrationError: from Trainer's constructor, for a model that cannot generate.

    Example::

        callback = AnswersCallback(test_rows, collator, metrics=("exact_match", "anls"))
    """

    hf_fsdp_answers = True  # answers_seam.MARK: its seams act on Trainers that have this callback

    def __init__(
        self,
        dataset: Sequence[Row],
        collator: PromptCollator,
        metrics: Sequence[str | Metric] = ("exact_match",),
        *,
        num_rows: int | None = None,
        max_new_tokens: int = 32,
        batch_size: int = 8,
        every: int | None = None,
        output: str = "answers.jsonl",
        grid: int = 24,
        columns: int = 6,
    ):
        numbers = {"num_rows": num_rows, "max_new_tokens": max_new_tokens, "batch_size": batch_size}
        check_numbers(**numbers, every=every, columns=columns)
        self.metrics = resolve_metrics(metrics, source="AnswersCallback(metrics=...)")
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or not len(dataset):
            raise DataError(
                f"AnswersCallback: dataset is {_described(dataset)}, so there is nothing to ask",
                fix="give a list of rows or a datasets.Dataset with at least one row",
            )
        tokenizer_of(collator)
        if grid:
            check_pillow()
        self._dataset, self._collator = dataset, collator
        self._num_rows = min(num_rows or len(dataset), len(dataset))
        self._max_new_tokens, self._batch_size = max_new_tokens, batch_size
        self.every = every
        self._output, self._grid, self._columns = output, grid, columns
        self._file: AnswersFile | None = None
        self._trainer: weakref.ref[Trainer] | None = None
        self._evaluated: set[str] = set()
        self._written_at: int | None = None
        if problems := check_references(self._first_rows(_CHECKED_AT_START), list(self.metrics)):
            raise DataError(problems)
        install_answer_seams()

    # -- Trainer's events ---------------------------------------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse what could only fail at the first evaluation."""
        if (model := kwargs.get("model")) is not None:
            check_generates(model)
        best = str(args.metric_for_best_model or "").removeprefix("eval_")
        if self.every is not None and best in self.metrics:
            raise DataError(
                Problem(
                    message=f"AnswersCallback(every={self.every}) answers apart from evaluations, and "
                    f"metric_for_best_model={args.metric_for_best_model!r} has to be known at each of them",
                    fix="leave `every` out: then every evaluation has it",
                    source="TrainingArguments",
                )
            )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Cut the file to the step that training resumes from."""
        self._evaluated.clear()
        self._written_at = None
        if state.is_world_process_zero and (self._file is None or state.global_step):
            self._open(args).start(resume_step=state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Answer where `every` says so; forget which sets were evaluated at earlier weights."""
        self._evaluated.clear()
        if self.every is None or state.global_step % self.every or self._trainer is None:
            return
        if (trainer := self._trainer()) is None:
            return
        should_log = control.should_log
        means = self.answer(trainer.model, args, state, "eval")
        with evaluation_mode(trainer.model):  # TRL's Trainers would add their training averages, and begin new ones
            trainer.log(means)
        control.should_log = should_log  # taken back by logging; the loss of this step is still to be logged

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The best weights may have been loaded: what is evaluated next is another model."""
        self._evaluated.clear()

    # -- what is asked ------------------------------------------------------------------------------------------------

    def is_due(self, prefix: str) -> bool:
        """Return whether the evaluation under `prefix` is to have answers.

        Of several evaluation sets (``eval_a``, ``eval_b``) the first one has: the rows that are asked are always the
        same. When that set comes round again, so do the answers.
        """
        if self.every is not None:
            return False
        if self._evaluated and prefix not in self._evaluated:
            self._evaluated.add(prefix)
            return False
        self._evaluated = {prefix}
        return True

    def answer(
        self, model: nn.Module | None, args: TrainingArguments, state: TrainerState, prefix: str
    ) -> dict[str, float]:
        """Generate, score, write and draw; return the means as Trainer logs them, equal on all ranks. Collective."""
        assert model is not None
        rows = together("read the rows that are asked", lambda: self._first_rows(self._num_rows))
        if problems := check_references(rows, list(self.metrics)):
            raise DataError(problems)
        answers = generate_answers(
            model, rows, self._collator, max_new_tokens=self._max_new_tokens, batch_size=self._batch_size
        )
        is_writer = state.is_world_process_zero

        def keep() -> dict[str, float]:
            return self._keep(rows, answers, args, state) if is_writer else {}

        means = agree_all(together("write the answers", keep))[0]
        return {f"{prefix}_{name}": float(value) for name, value in means.items()}

    def _keep(
        self, rows: Sequence[Row], answers: Sequence[str], args: TrainingArguments, state: TrainerState
    ) -> dict[str, float]:
        scores = [
            score_answer(self.metrics, answer, references_of(row)) if self.metrics else {}
            for row, answer in zip(rows, answers, strict=True)
        ]
        means = mean_scores(scores)
        if self._written_at == state.global_step:  # evaluated once more at this step: the file has its lines
            return means
        self._written_at = state.global_step
        file = self._open(args)
        store = ImageStore(file.path.with_name(file.path.stem + "_images"))
        where = {"step": state.global_step, "epoch": state.epoch}
        file.append(
            [
                {**where, **answer_record(row, index, answer, score, store)}
                for index, (row, answer, score) in enumerate(zip(rows, answers, scores, strict=True))
            ]
        )
        if self._grid:
            self._draw(rows, answers, scores, means, args, state)
        return means

    def _draw(
        self,
        rows: Sequence[Row],
        answers: Sequence[str],
        scores: Sequence[dict[str, float]],
        means: dict[str, float],
        args: TrainingArguments,
        state: TrainerState,
    ) -> None:
        title, marks = f"step {state.global_step}", None
        shown = list(range(min(self._grid, len(rows))))
        if means:
            name = next(iter(means))
            marks = [score[name] for score in scores]
            shown = choose_rows(marks, self._grid)
            num_wrong = sum(mark < 0.5 for mark in marks)
            drawn = sum(marks[index] < 0.5 for index in shown)
            title += f"    {name} {100 * means[name]:.1f} % of {len(rows)}    {num_wrong} wrong, {drawn} of them here"
        path = Path(args.output_dir or ".", GRID_FOLDER, f"step-{state.global_step:06d}.png")
        draw_answer_grid(
            [rows[index] for index in shown],
            [answers[index] for index in shown],
            path,
            columns=self._columns,
            scores=None if marks is None else [marks[index] for index in shown],
            title=title,
        )
        log_answer_grid(path, title)

    def _first_rows(self, num: int) -> list[Row]:
        return [self._dataset[index] for index in islice(range(self._num_rows), num)]

    def _open(self, args: TrainingArguments) -> AnswersFile:
        if self._file is None:
            self._file = AnswersFile(Path(args.output_dir or ".") / self._output)
        return self._file

    def follow(self, trainer: Trainer) -> None:
        """Remember whose steps these are: Trainer's events do not say it."""
        self._trainer = weakref.ref(trainer)


def _described(dataset: Any) -> str:
    if dataset is None:
        return "None"
    return "empty" if hasattr(dataset, "__len__") else f"a {type(dataset).__name__} without length and positions"
