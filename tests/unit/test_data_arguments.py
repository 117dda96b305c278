"""Training arguments: the parser's mistakes and numbers that cannot be trained with, told in one error."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import HfArgumentParser

from hf_fsdp.data import parse_arguments, read_run_config
from hf_fsdp.errors import ConfigError


@dataclass
class Arguments:
    learning_rate: float = 1e-5
    seed: int = 42
    per_device_train_batch_size: int = 8
    global_batch_size: int | None = None
    max_length: int | None = 1024
    use_peft: bool = False
    fp16: bool = False
    dataset_name: str | None = "data.jsonl"

    def __post_init__(self) -> None:
        if self.seed == 7:
            raise ValueError("seed 7 does not go with that")


KNOWN = set(Arguments.__dataclass_fields__)
REFUSED = {"fp16": ("arrives in a later release", "leave fp16 out")}


def parse(*argv: str) -> Arguments:
    asked = read_run_config(argv, KNOWN)
    parser = HfArgumentParser(Arguments)  # type: ignore[arg-type]
    parser.set_defaults(**asked.values)
    (arguments,) = parse_arguments(parser, asked, refused=REFUSED, required=("dataset_name",))
    return arguments


def test_values_come_from_the_file_with_the_flags_over_them(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("seed: 3\nlearning_rate: 2e-4\n")
    arguments = parse(str(tmp_path / "run.yaml"), "--seed", "5", "--use_peft")
    assert (arguments.seed, arguments.learning_rate, arguments.use_peft) == (5, 2e-4, True)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("learning_rate", "nan", "learning_rate=nan is not a finite number"),
        ("learning_rate", "inf", "learning_rate=inf is not a finite number"),
        ("learning_rate", "-1", "learning_rate=-1.0 is below 0"),
        ("seed", "-1", "seed=-1 is below 0"),
        ("seed", "4294967296", "seed=4294967296 is above 4294967295"),
        ("per_device_train_batch_size", "0", "per_device_train_batch_size=0 is below 1"),
        ("global_batch_size", "0", "global_batch_size=0 is below 1"),
    ],
)
def test_a_number_that_cannot_be_trained_with_is_refused_and_the_advice_works(key: str, value: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        parse(f"--{key}", value)
    (problem,) = caught.value.problems
    assert problem.source == f"--{key}"
    name, _, good = problem.fix.partition(": ")
    assert str(getattr(parse(f"--{name}", good), key)) == str(float(good) if key == "learning_rate" else good)


def test_all_problems_of_a_file_come_at_once_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("fp16: 'true'\nseed: 1.5\nmax_length: [1]\ndataset_name: ''\n")
    with pytest.raises(ConfigError, match="^4 problems") as caught:
        parse(str(path))
    assert [problem.message for problem in caught.value.problems] == [
        "fp16 arrives in a later release",
        "dataset_name is missing",
        "max_length=[1] is not a finite number",
        "seed: 1.5 is not a whole number".replace(": ", "="),
    ]
    assert [problem.source for problem in caught.value.problems] == [f"{path}:1", str(path), f"{path}:3", f"{path}:2"]


def test_a_value_of_the_wrong_kind_says_where_it_was_typed_and_the_advice_works(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("use_peft: false\nlearning_rate: fast\n")
    with pytest.raises(ConfigError, match="learning_rate: invalid float value: 'fast'") as caught:
        parse(str(path))
    assert caught.value.problems[0].source == f"{path}:2"
    assert parse(*shlex.split(caught.value.problems[0].fix)).learning_rate == 2e-5
    with pytest.raises(ConfigError, match="use_peft: Truthy value expected: got maybe") as caught:
        parse("--use_peft", "maybe")
    assert parse(*shlex.split(caught.value.problems[0].fix)).use_peft is True


def test_a_wrong_choice_names_the_nearest() -> None:
    parser = HfArgumentParser(Arguments)  # type: ignore[arg-type]
    parser.add_argument("--optim", choices=["adamw_torch", "sgd"])
    with pytest.raises(ConfigError, match="optim: invalid choice: 'adamw_trch'") as caught:
        parse_arguments(parser, read_run_config(["--optim", "adamw_trch"], {"optim"}), refused={})
    assert caught.value.problems[0].fix == "--optim adamw_torch"


def test_a_word_without_a_flag_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'extra' belongs to no flag"):
        parse("--seed", "1", "extra")
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 0.5\n")
    with pytest.raises(ConfigError, match="belongs to no flag") as caught:
        parse("--seed", "1", str(path))
    advice = caught.value.problems[0].fix.removeprefix("put the run config first: ")
    assert parse(*shlex.split(advice)).learning_rate == 0.5


def test_what_the_library_itself_refuses_is_one_error_too() -> None:
    with pytest.raises(ConfigError, match="these settings do not fit together: seed 7 does not go with that"):
        parse("--seed", "7")


def test_words_in_a_file_beside_the_script_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.args").write_text("--seed 9")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "train.py")])
    assert parse().seed == 42
