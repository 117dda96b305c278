"""The parts of evaluation that need no second process."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments
from trl import DPOTrainer, SFTTrainer

from hf_fsdp import FSDPCallback, SamplesCallback
from hf_fsdp.errors import DataError, IntegrationError
from hf_fsdp.integrations.eval_batches import unrepeated_samples
from hf_fsdp.integrations.evaluation import MARK, install_evaluation_seams, whose_loss
from hf_fsdp.monitor.eval_loss import (
    WeightedMean,
    count_rows,
    count_targets,
    mask_rows,
    num_real_rows,
    perplexity,
    take_rows,
)
from hf_fsdp.monitor.eval_memory import count_bytes, estimate_kept_logits, find_memory_problem, free_bytes
from hf_fsdp.monitor.random_state import preserved_random_state
from hf_fsdp.monitor.samples import Prompt, Sample, cut_at, render_samples, split_row
from hf_fsdp.units import GIB
from tests.distributed.samples_cases import build_chat_tokenizer
from tests.distributed.tiny_models import build_model
from tests.distributed.training import QUIET_ARGUMENTS, build_dataset

# -- the mean ---------------------------------------------------------------------------------------------------------


def test_batches_weigh_as_much_as_their_targets_and_empty_ones_nothing() -> None:
    mean = WeightedMean()
    assert mean.over_all_ranks() is None
    for loss, count in ((1.0, 30), (4.0, 10), (float("nan"), 0)):
        mean.add(torch.tensor(loss), torch.tensor(count))
    assert mean.over_all_ranks() == pytest.approx(1.75)


def test_a_loss_that_is_not_finite_is_not_hidden() -> None:
    mean = WeightedMean()
    mean.add(torch.tensor(1.0), torch.tensor(3))
    mean.add(torch.tensor(float("nan")), torch.tensor(1))
    result = mean.over_all_ranks()
    assert result is not None and math.isnan(result)


def test_perplexity_is_exp_and_never_overflows() -> None:
    assert perplexity(1.0) == pytest.approx(math.e)
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(float("nan")))


@pytest.mark.parametrize(
    ("batch", "is_shifted", "expected"),
    [
        ({"labels": torch.tensor([[5, -100, 6], [7, 8, -100]])}, True, 2),
        ({"labels": torch.tensor([[5, -100, 6], [7, 8, -100]])}, False, 4),
        ({"labels": torch.tensor([[5, 6]]), "shift_labels": torch.tensor([[6, -100]])}, True, 1),
        ({"labels": torch.tensor([0, 2, -100])}, True, 2),
        ({"labels": torch.tensor([[0.5, 1.0], [0.0, -100.0]])}, False, 4),
        ({"start_positions": torch.tensor([1])}, False, None),
    ],
)
def test_targets_are_counted_as_the_loss_counts_them(
    batch: dict[str, Any], is_shifted: bool, expected: int | None
) -> None:
    count = count_targets(batch, is_shifted=is_shifted)
    assert (None if count is None else int(count)) == expected


def test_rows_are_masked_or_taken_without_changing_the_batch() -> None:
    batch = {"input_ids": torch.ones(3, 2), "labels": torch.tensor([[1, 2], [3, 4], [5, 6]])}
    assert count_rows(batch) == 3 and count_rows(None) == 0
    assert mask_rows(batch, 1)["labels"].tolist() == [[1, 2], [-100, -100], [-100, -100]]
    assert take_rows(batch, 2)["input_ids"].shape == (2, 2)
    assert batch["labels"].tolist() == [[1, 2], [3, 4], [5, 6]]


# -- batches ----------------------------------------------------------------------------------------------------------


def shards(num_rows: int, batch: int, world_size: int, split: bool = False) -> list[DataLoader[Any]]:
    """What Accelerate makes of a dataset for each rank."""
    return [
        DataLoader(
            list(range(num_rows)),  # type: ignore[arg-type]
            batch_sampler=BatchSamplerShard(
                BatchSampler(SequentialSampler(range(num_rows)), batch, drop_last=False), world_size, rank, split
            ),
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_sample_comes_once_and_the_sampler_is_as_before(world_size: int) -> None:
    for num_rows in range(0, 20):
        for batch, split in ((1, False), (2, False), (3, False), (world_size * 2, True)):
            seen = []
            for loader in shards(num_rows, batch, world_size, split):
                with unrepeated_samples(loader, keeps_outputs=False):
                    seen += [index for part in loader for index in part.tolist()]
                assert loader.batch_sampler.even_batches  # type: ignore[union-attr]
            assert sorted(seen) == list(range(num_rows)), (num_rows, batch, split)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_real_rows_of_an_evened_out_last_batch_are_the_ones_before_the_repetitions(world_size: int) -> None:
    for num_rows in range(1, 20):
        for batch in (1, 2, 3):
            seen = []
            for rank, loader in enumerate(shards(num_rows, batch, world_size)):
                with unrepeated_samples(loader, keeps_outputs=True):
                    parts = [part.tolist() for part in loader]
                last = num_real_rows(num_rows % (batch * world_size), rank, len(parts[-1]))
                seen += [index for part in [*parts[:-1], parts[-1][:last]] for index in part]
            assert sorted(seen) == list(range(num_rows)), (num_rows, batch)


class Numbers(IterableDataset[int]):
    def __init__(self, count: int):
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


@pytest.mark.parametrize("split", [False, True])
def test_a_stream_ends_where_it_ends_on_every_rank(split: bool) -> None:
    for count in range(0, 15):
        seen = []
        for rank in range(2):
            shard = IterableDatasetShard(Numbers(count), 4, False, 2, rank, split_batches=split)
            loader: DataLoader[Any] = DataLoader(shard, batch_size=2 if split else 4)
            with unrepeated_samples(loader, keeps_outputs=True):
                seen += [index for part in loader for index in part.tolist()]
            assert type(shard) is IterableDatasetShard
        assert sorted(seen) == list(range(count))


# -- memory -----------------------------------------------------------------------------------------------------------


def test_logits_of_a_7b_evaluation_are_refused_with_their_size() -> None:
    kept = estimate_kept_logits(2000, 1024, 32000)
    assert kept.num_bytes == 2000 * 1024 * 32000 * 4
    problem = find_memory_problem(kept, 64 * GIB, on_device=True)
    assert problem is not None
    assert "244.1 GiB (estimated: 2000 samples x 1024 tokens x 32000 words x 4 bytes)" in problem.message
    assert "the limit is 32.0 GiB, half of the accelerator's free memory" in problem.message
    assert "eval_accumulation_steps=1" in problem.fix
    host = find_memory_problem(kept, 64 * GIB, on_device=False)
    assert host is not None and "eval_accumulation_steps" not in host.fix, "on the host it would change nothing"
    assert find_memory_problem(kept, 600 * GIB, on_device=False) is None


def test_the_free_memory_of_a_machine_is_shared_by_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = free_bytes(on_device=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_bytes(on_device=False) == pytest.approx(whole / 4, rel=0.3)


def test_the_bytes_of_nested_outputs_are_those_of_all_tensors() -> None:
    assert count_bytes((torch.zeros(2, 3), {"hidden": [torch.zeros(4, dtype=torch.bfloat16)]}, "text", None)) == 32


# -- random state -----------------------------------------------------------------------------------------------------


def test_the_random_state_is_put_back_also_after_an_error() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    before = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    expected = draw()
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])
    with contextlib.suppress(ZeroDivisionError), preserved_random_state():
        assert draw() == expected
        raise ZeroDivisionError
    assert draw() == expected


# -- which losses -----------------------------------------------------------------------------------------------------


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class OwnStep(SFTTrainer):
    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().prediction_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Trainer, None),
        (Seq2SeqTrainer, None),
        (SFTTrainer, None),
        (type("Subclass", (SFTTrainer,), {}), None),
        (OwnLoss, "OwnLoss.compute_loss()"),
        (OwnStep, "OwnStep.prediction_step()"),
        (DPOTrainer, "DPOTrainer.compute_loss()"),
    ],
)
def test_a_loss_is_known_by_who_computes_it(cls: Any, expected: str | None, tmp_path: Path) -> None:
    trainer = cls.__new__(cls)
    trainer.compute_loss_func = None
    trainer.args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    assert (whose_loss(trainer) or "").rpartition(".<locals>.")[2] == (expected or "")
    trainer.compute_loss_func = print
    assert whose_loss(trainer) == "compute_loss_func"


def make_trainer(tmp_path: Path, *callbacks: Any, **options: Any) -> Trainer:
    arguments = TrainingArguments(output_dir=str(tmp_path), **QUIET_ARGUMENTS, per_device_eval_batch_size=2)
    return Trainer(
        model=build_model("llama", tied=False),
        args=arguments,
        eval_dataset=build_dataset(5),
        callbacks=list(callbacks),
        **options,
    )


def test_a_trainer_without_the_callback_evaluates_as_ever(tmp_path: Path) -> None:
    install_evaluation_seams()
    assert hasattr(FSDPCallback, MARK)
    stock = make_trainer(tmp_path).evaluate()
    ours = make_trainer(tmp_path, FSDPCallback()).evaluate()
    assert "eval_perplexity" not in stock and "eval_perplexity" in ours
    assert abs(stock["eval_loss"] - ours["eval_loss"]) > 1e-5, "the mean of batch means is another number"


def test_the_trainer_is_left_as_it_was(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, FSDPCallback())
    before = set(vars(trainer))
    trainer.evaluate()
    assert "prediction_step" not in vars(trainer) and "_get_num_items_in_batch" not in vars(trainer)
    assert set(vars(trainer)) - before <= {"_hf_fsdp_said_of_evaluation", "model_preparation_time"}


# -- samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}, Prompt(tokens=(5, 6), reference=(7, 8))),
        ({"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 0, 1]}, Prompt(tokens=(5, 6, 7), reference=(8,))),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}, Prompt(tokens=(5,), reference=(6,))),
        ({"input_ids": [5, 6, 7, 8]}, Prompt(tokens=(5, 6), reference=(7, 8))),
        ({"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [2, 3]}, Prompt(tokens=(5,), reference=(6,))),
        ({"input_ids": [5, 6], "labels": [-100, -100]}, Prompt(tokens=(5, 6))),
        ({"input_ids": [5]}, None),
        ({"text": "no tokens"}, None),
    ],
)
def test_the_prompt_of_a_row_is_what_stands_before_its_first_answer(
    row: dict[str, Any], expected: Prompt | None
) -> None:
    assert split_row(row) == expected


def test_the_whole_input_is_the_prompt_of_an_encoder_decoder() -> None:
    row = {"input_ids": [5, 6], "labels": [7, 8, -100]}
    assert split_row(row, is_encoder_decoder=True) == Prompt(tokens=(5, 6), reference=(7, 8))


def test_answers_end_at_their_end_and_long_texts_are_cut_in_the_middle() -> None:
    assert cut_at([5, 6, 2, 7], [2]) == [5, 6]
    shown = render_samples([Sample(prompt="a\nb", answer="word " * 100, reference=""), Sample(
        prompt="c", answer="", reference="d")], step=7)  # fmt: skip
    lines = shown.splitlines()
    assert lines[0] == "hf-fsdp: samples at step 7"
    assert lines[1] == "   1 prompt     a b"
    assert " ... " in lines[2] and len(lines[2]) < 220
    assert lines[4:] == ["     answer     (ends at once)", "     reference  d"]


def test_samples_need_a_tokenizer_and_the_advice_works(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"SamplesCallback needs a tokenizer[\s\S]*processing_class=tokenizer"):
        make_trainer(tmp_path, SamplesCallback())
    trainer = make_trainer(tmp_path, SamplesCallback(max_new_tokens=2), processing_class=build_chat_tokenizer())
    trainer.evaluate()
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 4


def test_rows_without_tokens_are_refused_and_given_prompts_work(tmp_path: Path) -> None:
    rows = [{"inputs_embeds": [[0.1] * 32] * 3, "labels": [1, 2, 3]}] * 2
    tokenizer = build_chat_tokenizer()
    trainer = make_trainer(tmp_path, SamplesCallback(), processing_class=tokenizer)
    trainer.data_collator = lambda examples: {
        name: torch.tensor([example[name] for example in examples]) for name in ("inputs_embeds", "labels")
    }
    with pytest.raises(DataError, match=r"found no prompt[\s\S]*SamplesCallback\(prompts="):
        trainer.evaluate(rows)
    given = SamplesCallback(prompts=["the quick brown"], max_new_tokens=2)
    make_trainer(tmp_path, given, processing_class=tokenizer).evaluate()
    assert "the quick brown" in (tmp_path / "samples.jsonl").read_text()


def test_models_that_cannot_generate_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification(build_model("llama", tied=False).config)
    arguments = TrainingArguments(output_dir=str(tmp_path), **QUIET_ARGUMENTS)
    with pytest.raises(IntegrationError, match="LlamaForSequenceClassification cannot generate"):
        Trainer(model=model, args=arguments, callbacks=[SamplesCallback()], processing_class=build_chat_tokenizer())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, r"num_samples=0: must be at least 1"),
        ({"max_new_tokens": 0}, r"max_new_tokens=0"),
        ({"prompts": []}, r"prompts=\[\] is not a list of prompts"),
        ({"prompts": "one text"}, r"is not a list of prompts"),
    ],
)
def test_arguments_that_ask_nothing_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        SamplesCallback(**arguments)


def test_a_conversation_without_a_template_is_refused(tmp_path: Path) -> None:
    tokenizer = build_chat_tokenizer()
    tokenizer.chat_template = None
    prompts = [[{"role": "user", "content": "fox"}]]
    trainer = make_trainer(tmp_path, SamplesCallback(prompts=prompts), processing_class=tokenizer)
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        trainer.evaluate()


def test_prompts_that_leave_no_room_lose_their_beginning(tmp_path: Path) -> None:
    prompts = [" ".join(["fox", "dog"] * 60)]  # 120 tokens for a model of 64 positions
    callback = SamplesCallback(prompts=prompts, max_new_tokens=1000)
    make_trainer(tmp_path, callback, processing_class=build_chat_tokenizer()).evaluate()
    assert (tmp_path / "samples.jsonl").is_file()
