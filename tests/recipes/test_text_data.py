"""The text recipe's data half from its command line: formats, the preview, packing, attention."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.recipes import tiny
from tests.recipes.launching import losses
from tests.recipes.test_text_recipe import _launch, _load_recipe, _train

ALPACA = [
    {"instruction": f"Add {i}.", "input": f"{i} and {i}" if i % 2 else "", "output": f"It is {2 * i}."}
    for i in range(12)
]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": f"What is {i}?"}, {"from": "gpt", "value": f"It is {i}."}]}
    for i in range(6)
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text_data")
    tiny.save_tiny_llama(folder / "model", tiny.smollm2_tokenizer())
    tiny.save_tiny_llama(folder / "base", tiny.smollm2_tokenizer(None))
    rows = {
        "alpaca": ALPACA,
        "sharegpt": SHAREGPT,
        "chat": tiny.conversations(20),
        "pairs": tiny.completions(12),
        "text": [{"text": f"It is {i}, as a rule."} for i in range(12)],
        "both": [{**row, "text": "It is."} for row in ALPACA],
    }
    for name, items in rows.items():
        tiny.write_jsonl(folder / f"{name}.jsonl", items)
    run = {
        "model_name_or_path": "model",
        "dataset_name": "alpaca.jsonl",
        "max_steps": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "max_length": 128,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "fsdp": {"precision": "fp32"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder


def _main(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.chdir(folder)
    _load_recipe().main(["run.yaml", "--output_dir", "in_process", *arguments])


# TRL sets by its old name what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")


def test_a_preview_prints_the_samples_as_trained_and_leaves_without_weights(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a preview loads no weights")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    _main(work, monkeypatch, "--preview", "2")
    output = capsys.readouterr().out
    assert "alpaca columns (instruction, output, input) read as conversations" in output
    assert [line.split(":")[0] for line in output.splitlines() if line.startswith("training example")] == [
        "training example 1",
        "training example 2",
    ]
    assert output.count("  loss | It is ") == 2 and "  loss | It is 0.<|im_end|>\n  -    | \\n\n" in output
    assert not (work / "in_process" / "final").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--dataset_name", "sharegpt.jsonl"], "  loss | It is 0.<|im_end|>\n  -    | \\n"),
        (["--dataset_name", "pairs.jsonl"], "  -    | What is 0 and 0?\n  loss |  It is 0.<|im_end|>"),
        # Every token but the first, which nothing predicts, and the end token that TRL appends.
        (
            ["--dataset_name", "text.jsonl", "--model_name_or_path", "base"],
            "  -    | It\n  loss |  is 0, as a rule.<|im_end|>",
        ),
        (["--dataset_name", "both.jsonl", "--dataset_format", "alpaca"], "left out: text"),
        (["--model_name_or_path", "base", "--chat_template", "chatml"], "  loss | It is 0.<|im_end|>"),
    ],
)
def test_each_format_is_previewed_with_its_loss_tokens(
    work: Path,
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _main(work, monkeypatch, "--preview", "1", *arguments)
    assert expected in capsys.readouterr().out


def test_a_preview_of_packed_rows_shows_where_each_sample_begins(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _main(work, monkeypatch, "--preview", "3", "--packing", "--dataset_name", "text.jsonl", "--max_length", "64")
    output = capsys.readouterr().out
    counts = [int(count) for count in re.findall(r"tokens in (\d+) packed samples", output)]
    assert counts and output.count("which sees no other:") == sum(counts) == len(output.split("as a rule.<|im")) - 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--dataset_name", "both.jsonl"], "fit 2 formats: alpaca, text"),
        (["--eval_file", "text.jsonl"], "the held-out examples are text"),
        (["--model_name_or_path", "base"], "has no chat template (a base model)"),
        (["--dataset_name", "text.jsonl", "--assistant_only_loss"], "assistant_only_loss=True needs conversations"),
        (["--attn_implementation", "flash_attention_2"], "computes in 16 bits only, and this run computes in fp32"),
        (["--attn_implementation", "spda"], "attn_implementation='spda' is not one of"),
        (["--packing", "--packing_strategy", "wrapped"], "packing_strategy='wrapped' cuts samples anywhere"),
        (["--eval_packing", "true"], "eval_packing=True without packing=True"),
        (["--use_liger_kernel"], "use_liger_kernel is not proven on sharded weights"),
        (["--activation_offloading"], "activation_offloading is not proven on sharded weights"),
        (["--preview", "-1"], "preview=-1 is below 0"),
    ],
)
def test_mistakes_of_the_data_half_end_in_one_clear_error(
    work: Path, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_fsdp.errors import HfFsdpError

    with pytest.raises(HfFsdpError, match=re.escape(expected)):
        _main(work, monkeypatch, *arguments)


def test_packing_trains_on_two_processes_as_on_one_with_held_out_rows_of_another_format(work: Path) -> None:
    common = (
        "run.yaml",
        "--packing",
        "--max_length",
        "192",
        "--eval_file",
        "sharegpt.jsonl",
        "--global_batch_size",
        "2",
    )
    single = _train(work, *common, "--output_dir", "one")
    sharded = _train(
        work, *common, "--output_dir", "two", "--per_device_train_batch_size", "1", "--require_sharding", processes=2
    )
    assert "attention: sdpa (auto: no flash attention: the run computes in fp32)" in single
    assert "(messages); alpaca columns" in single
    assert "packing: a packed sample gets the logits it gets alone" in sharded
    assert losses(work / "two") == pytest.approx(losses(work / "one"), rel=1e-5)


def test_a_preview_leaves_two_processes_cleanly(work: Path) -> None:
    done = _launch(work, "run.yaml", "--output_dir", "previewed", "--preview", "1", processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("training example 1:") == 1
    assert not (work / "previewed" / "final").exists()
