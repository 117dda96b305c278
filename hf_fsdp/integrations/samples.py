"""`SamplesCallback`: what the model answers, at every evaluation, under sharding as in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_fsdp.errors import DataError, IntegrationError
from hf_fsdp.integrations.wandb import log_samples
from hf_fsdp.monitor.generate import can_generate, config_of, generate_greedily
from hf_fsdp.monitor.metrics import MetricsFile
from hf_fsdp.monitor.random_state import preserved_random_state
from hf_fsdp.monitor.samples import Prompt, Sample, render_samples, split_row
from hf_fsdp.sharding.mesh import agree_all

SAMPLES_FILE = "samples.jsonl"
_MAX_LOOKED_AT = 1000
Messages = Sequence[Mapping[str, Any]]


class SamplesCallback(TrainerCallback):
    """Shows what the model answers at every evaluation: printed, in ``output_dir/samples.jsonl`` and as a W&B table.

    Answers are greedy, in evaluation mode, with the cache on. All ranks generate together and share the prompts;
    training is the same to the bit with and without it.

    Args:
        num_samples: how many examples of the evaluation set are asked, its first ones: the prompt is what stands
            before the first token that is learned, the answer in the data is shown as reference.
        prompts: asked instead: texts, taken as they are, or conversations (lists of messages), put through the
            tokenizer's chat template.
        max_new_tokens: the longest answer.
        batch_size: prompts that one process answers at once.

    Raises:
        DataError: from Trainer's constructor or the first evaluation, when there is nothing to ask, no tokenizer, or a
            model that cannot generate.

    Example:
        >>> from hf_fsdp import SamplesCallback
        >>> callback = SamplesCallback(prompts=["The quick brown", [{"role": "user", "content": "Hello!"}]])
    """

    def __init__(
        self,
        num_samples: int = 4,
        prompts: Sequence[str | Messages] | None = None,
        max_new_tokens: int = 64,
        batch_size: int = 8,
    ):
        too_small = {"num_samples": num_samples, "max_new_tokens": max_new_tokens, "batch_size": batch_size}
        for name, value in too_small.items():
            if value < 1:
                raise DataError(f"{name}={value}: must be at least 1", fix=f"SamplesCallback({name}=1)")
        if isinstance(prompts, str) or (prompts is not None and not prompts):
            raise DataError(
                f"prompts={prompts!r} is not a list of prompts",
                fix='SamplesCallback(prompts=["The quick brown"])',
            )
        self._num_samples = num_samples
        self._given = list(prompts) if prompts is not None else None
        self._max_new_tokens = max_new_tokens
        self._batch_size = batch_size
        self._prompts: list[Prompt] | None = None
        self._shown_at: int | None = None
        self._file: MetricsFile | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse what could only fail at the first evaluation."""
        model, tokenizer = kwargs.get("model"), kwargs.get("processing_class")
        if tokenizer is None or not hasattr(tokenizer, "decode"):
            raise DataError(
                "SamplesCallback needs a tokenizer to read and write text, and the Trainer has none",
                fix="Trainer(..., processing_class=tokenizer)",
            )
        if model is not None and not can_generate(model):
            raise IntegrationError(
                f"SamplesCallback: {type(model).__name__} cannot generate text",
                fix="leave SamplesCallback out, or train a model with a language-model head (AutoModelForCausalLM)",
            )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Cut the file to the step that training resumes from."""
        self._shown_at = None
        if state.is_world_process_zero and (self._file is None or state.global_step):
            self._open(args).start(resume_step=state.global_step)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        processing_class: Any = None,
        eval_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Generate and show, once a step however many evaluation sets there are."""
        if model is None or self._shown_at == state.global_step:
            return
        self._shown_at = state.global_step
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        with preserved_random_state():
            if self._prompts is None:
                self._prompts = self._read_prompts(tokenizer, eval_dataloader, model, args)
            answers = generate_greedily(
                model,
                self._prompts,
                pad_token_id=_pad_token_id(tokenizer),
                max_new_tokens=self._max_new_tokens,
                batch_size=self._batch_size,
            )
        if not state.is_world_process_zero:
            return
        decode = _Decoder(tokenizer)
        samples = [
            Sample(prompt=decode(prompt.tokens), answer=decode(answer), reference=decode(prompt.reference))
            for prompt, answer in zip(self._prompts, answers, strict=True)
        ]
        print(render_samples(samples, state.global_step), flush=True)
        for index, sample in enumerate(samples):
            where = {"step": state.global_step, "epoch": state.epoch, "index": index}
            self._open(args).write({**where, **vars(sample)})
        log_samples(samples, state.global_step)

    def _open(self, args: TrainingArguments) -> MetricsFile:
        if self._file is None:
            self._file = MetricsFile(Path(args.output_dir or ".") / SAMPLES_FILE)
        return self._file

    def _read_prompts(
        self, tokenizer: Any, eval_dataloader: Any, model: nn.Module, args: TrainingArguments
    ) -> list[Prompt]:
        """Return the same prompts on every rank; rank 0 reads them. Collective."""
        mine: list[Prompt] = []
        error: str | None = None
        if args.process_index == 0:
            try:
                if self._given is not None:
                    mine = [Prompt(tokens=tuple(_tokenize(tokenizer, prompt))) for prompt in self._given]
                else:
                    is_encoder_decoder = bool(getattr(config_of(model), "is_encoder_decoder", False))
                    rows = (split_row(row, is_encoder_decoder=is_encoder_decoder) for row in _rows_of(eval_dataloader))
                    mine = list(islice((prompt for prompt in rows if prompt is not None), self._num_samples))
            except (DataError, ValueError, TypeError) as problem:
                error = f"SamplesCallback cannot read its prompts: {problem}"
            if error is None and not all(prompt.tokens for prompt in mine or [Prompt(tokens=())]):
                error = (
                    "SamplesCallback found no prompt: evaluation rows need input_ids (and labels, -100 for the prompt)"
                )
        if error := agree_all(error)[0]:
            raise DataError(error, fix='SamplesCallback(prompts=["The quick brown"])')
        return list(agree_all(mine)[0])


class _Decoder:
    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __call__(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()


def _pad_token_id(tokenizer: Any) -> int:
    for name in ("pad_token_id", "eos_token_id"):
        if (token := getattr(tokenizer, name, None)) is not None:
            return int(token)
    return 0


def _tokenize(tokenizer: Any, prompt: str | Messages) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("a conversation was given and the tokenizer has no chat template", fix="give texts as prompts")
    text = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _rows_of(eval_dataloader: Any) -> Iterator[Mapping[str, Any]]:
    dataset = getattr(eval_dataloader, "dataset", None)
    if isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    if dataset is None:
        return
    for row in islice(dataset, _MAX_LOOKED_AT):
        if not isinstance(row, Mapping):
            return
        if any("pixel_values" in str(name) or name in ("image", "images") for name in row):
            raise DataError("rows with images are not asked", fix="AnswersCallback asks them; or give texts as prompts")
        yield row
