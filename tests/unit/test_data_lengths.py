"""How many samples `max_length` cuts is counted as TRL cuts, and the loss mask is shown as it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from hf_fsdp.data import check_lengths, find_training_template, format_examples, measure_lengths
from hf_fsdp.data.preview import _smallest_model
from hf_fsdp.errors import DataError
from tests.recipes import tiny


def _long_conversations(lengths: list[int]) -> Dataset:
    return Dataset.from_list(
        [
            {"messages": [{"role": "user", "content": "Hi " * n}, {"role": "assistant", "content": "Hello!"}]}
            for n in lengths
        ]
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = tiny.smollm2_tokenizer()
    tokenizer.chat_template = find_training_template(tokenizer)
    return tokenizer


def test_the_share_of_cut_samples_is_exact_and_warned_above_five_percent(tokenizer: Any) -> None:
    dataset = _long_conversations([1] * 18 + [40, 200])
    lengths = [len(ids) for ids in tokenizer.apply_chat_template(dataset["messages"][:], return_dict=True)["input_ids"]]
    whole = measure_lengths(dataset, tokenizer, max_length=max(lengths))
    assert (whole.num_cut, whole.num_lost, whole.longest_tokens) == (0, 0, max(lengths))
    assert not str(whole).startswith("warning")

    cut = measure_lengths(dataset, tokenizer, max_length=sorted(lengths)[-2] - 1)
    assert (cut.num_cut, cut.num_lost) == (2, 1)  # of the shorter one, only the end is cut
    assert str(cut).startswith("warning: lengths: 2 of 20 samples (10.0%) are cut")
    assert "1 lose their whole answer and teach nothing" in str(cut)
    advised = int(str(cut).partition("max_length: ")[2].split()[0])
    assert measure_lengths(dataset, tokenizer, max_length=advised).cut_share <= 0.05


def test_a_limit_that_leaves_no_answer_is_refused_and_the_advice_works(tokenizer: Any) -> None:
    dataset = _long_conversations([20, 30])
    with pytest.raises(DataError, match="max_length=16 cuts off the whole answer of every sample") as caught:
        check_lengths(measure_lengths(dataset, tokenizer, max_length=16))
    advised = int(caught.value.problems[0].fix.removeprefix("max_length: ").split()[0])
    report = measure_lengths(dataset, tokenizer, max_length=advised)
    check_lengths(report)
    assert report.num_cut == 0


def test_no_limit_cuts_nothing(tokenizer: Any) -> None:
    report = measure_lengths(_long_conversations([5, 50]), tokenizer, max_length=None)
    assert report.num_cut == 0 and "no limit" in str(report)
    check_lengths(report)


def test_completions_count_the_end_token_that_trl_adds(tokenizer: Any) -> None:
    rows = [{"prompt": "Hi ", "completion": "Hello!"}]
    num_tokens = len(tokenizer("Hi Hello!<|im_end|>")["input_ids"])
    dataset = Dataset.from_list(rows)
    assert measure_lengths(dataset, tokenizer, max_length=None).longest_tokens == num_tokens
    assert measure_lengths(dataset, tokenizer, max_length=num_tokens - 1).num_cut == 1
    prompt_tokens = len(tokenizer("Hi ")["input_ids"])
    assert measure_lengths(dataset, tokenizer, max_length=prompt_tokens).num_lost == 1


def test_conversational_completions_are_measured_as_one_text(tokenizer: Any) -> None:
    turns = tiny.conversations(1)[0]["messages"]
    whole = measure_lengths(Dataset.from_list([{"messages": turns}]), tokenizer, max_length=None)
    split = Dataset.from_list([{"prompt": turns[:1], "completion": turns[1:]}])
    assert measure_lengths(split, tokenizer, max_length=None).longest_tokens == whole.longest_tokens


def test_texts_count_the_end_token_that_trl_adds_and_lose_nothing_whole(tokenizer: Any) -> None:
    dataset = Dataset.from_list([{"body": "Hello! " * 3}, {"body": "Hello!<|im_end|>"}])
    report = measure_lengths(dataset, tokenizer, max_length=4, text_field="body")
    assert report.longest_tokens == len(tokenizer("Hello! " * 3 + "<|im_end|>")["input_ids"])
    assert (report.num_cut, report.num_lost) == (1, 0)
    short = measure_lengths(dataset.select([1]), tokenizer, max_length=None, text_field="body")
    assert short.longest_tokens == len(tokenizer("Hello!<|im_end|>")["input_ids"])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["messages", "prompt_completion", "turns", "text"])
def test_the_longest_sample_has_the_tokens_that_trl_makes_of_it(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    conversations = tiny.conversations(3)
    rows: dict[str, list[dict[str, Any]]] = {
        "messages": conversations,
        "prompt_completion": tiny.completions(3),
        "turns": [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in conversations],
        "text": [{"text": "Hello! " * count} for count in (1, 2, 3)],
    }
    dataset = Dataset.from_list(rows[kind])
    arguments = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_length=None)
    trainer = SFTTrainer(
        model=_smallest_model(tokenizer), args=arguments, train_dataset=dataset, processing_class=tokenizer
    )
    trained = max(len(row["input_ids"]) for row in trainer.train_dataset)
    assert measure_lengths(dataset, tokenizer, max_length=None).longest_tokens == trained


def test_many_rows_are_sampled_evenly(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_fsdp.data import lengths

    monkeypatch.setattr(lengths, "MAX_ROWS_MEASURED", 10)
    report = measure_lengths(_long_conversations([1, 1, 60] * 10), tokenizer, max_length=50)
    assert (report.num_rows, report.num_measured) == (30, 10)
    assert "(10 of 30 measured)" in str(report)


def test_a_row_that_the_template_refuses_is_named() -> None:
    from hf_fsdp.data import resolve_chat_template

    llama2 = tiny.llama2_tokenizer(resolve_chat_template("llama2"))
    rows = tiny.conversations(3)
    rows[1]["messages"].insert(0, {"role": "user", "content": "Hi"})
    with pytest.raises(DataError, match="row 2 cannot be rendered by the chat template: Llama 2 conversations alter"):
        measure_lengths(Dataset.from_list(rows), llama2, max_length=None)
    del rows[1]  # the advice
    measure_lengths(Dataset.from_list(rows), llama2, max_length=None)


def test_tools_are_part_of_the_length(tokenizer: Any) -> None:
    from trl.chat_template_utils import qwen2_5_training_chat_template

    tool = {"type": "function", "function": {"name": "f", "description": "Return the sum", "parameters": {}}}
    rows = [{"messages": tiny.conversations(1)[0]["messages"], "tools": "null"}]
    options: dict[str, Any] = {"max_length": None, "chat_template": qwen2_5_training_chat_template}
    without = measure_lengths(Dataset.from_list(rows), tokenizer, **options)
    import json

    rows[0]["tools"] = json.dumps([tool])
    with_tool = measure_lengths(Dataset.from_list(rows), tokenizer, **options)
    assert with_tool.longest_tokens > without.longest_tokens + 20


def test_the_preview_shows_which_tokens_count(tokenizer: Any) -> None:
    ids = tokenizer("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n")["input_ids"]
    first = ids.index(tokenizer("Hello!")["input_ids"][0], len(ids) // 2)
    labels = [token if index in range(first, len(ids) - 1) else -100 for index, token in enumerate(ids)]
    text = format_examples([{"input_ids": ids, "labels": labels}], tokenizer)
    lines = text.splitlines()
    assert lines[0] == f"training example 1: {len(ids)} tokens, {len(ids) - 1 - first} count in the loss"
    assert "  loss | Hello!<|im_end|>" in lines
    assert lines[-1] == "  -    | \\n"  # the newline after the answer is visible, and does not count
    assert sum("loss |" in line for line in lines) == 1


def test_long_runs_are_shortened_in_the_preview(tokenizer: Any) -> None:
    ids = tokenizer("Hello! " * 400)["input_ids"]
    text = format_examples([{"input_ids": ids, "labels": ids}], tokenizer)
    assert len(text) < 900 and "characters ...]" in text
