"""Every error reads the same way, and names that are nearly right are found."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from hf_fsdp import errors
from hf_fsdp.errors import ConfigError, HfFsdpError, Problem, nearest_names


def test_a_problem_shows_its_parts_one_below_the_other() -> None:
    problem = Problem(message="wrap.x=1 is wrong", near="y (2)", fix="wrap: y", source="run.yaml:9")
    assert str(problem) == "wrap.x=1 is wrong\n  near  y (2)\n  fix   wrap: y\n  from  run.yaml:9"


def test_parts_that_are_not_there_leave_no_line() -> None:
    assert str(Problem(message="a", fix="b")) == "a\n  fix   b"


def test_longer_parts_stay_aligned() -> None:
    problem = Problem(message="first\nsecond", fix="one\ntwo")
    assert str(problem).splitlines() == ["first", "  second", "  fix   one", "        two"]


def test_an_error_of_one_message_takes_the_other_parts_beside_it() -> None:
    error = ConfigError("a", fix="b", near="c", source="d")
    assert error.problems == (Problem(message="a", fix="b", near="c", source="d"),)
    assert str(error) == str(error.problems[0])


def test_an_error_of_several_problems_counts_and_shows_them_all() -> None:
    error = ConfigError([Problem(message="a", fix="b"), Problem(message="c", fix="d")])
    assert str(error).splitlines() == ["2 problems", "a", "  fix   b", "c", "  fix   d"]


def test_one_problem_in_a_list_is_not_counted() -> None:
    assert str(ConfigError([Problem(message="a", fix="b")])) == "a\n  fix   b"


def test_every_error_can_be_caught_by_its_base() -> None:
    classes: list[Any] = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)]
    assert len(classes) > 5
    for cls in classes:
        with pytest.raises(HfFsdpError, match="^a\n  fix   b$"):
            raise cls("a", fix="b")


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("LLaMADecoderLayer", "LlamaDecoderLayer"),
        ("llamadecoderlayer", "LlamaDecoderLayer"),
        ("LlamaDecoder", "LlamaDecoderLayer"),
        ("LlamaMlp", "LlamaMLP"),
    ],
)
def test_a_name_that_is_nearly_right_finds_the_right_one_first(typed: str, found: str) -> None:
    assert nearest_names(typed, ["LlamaMLP", "LlamaDecoderLayer", "CLIPEncoderLayer"])[0] == found


def test_a_name_that_resembles_nothing_finds_nothing_and_the_limit_holds() -> None:
    assert nearest_names("xyzzy", ["LlamaMLP", "LlamaDecoderLayer"]) == []
    assert len(nearest_names("layer", [f"layer{i}" for i in range(9)], limit=2)) == 2
