"""A few of all causal language model classes: units, a step, saving and loading, against one process.

The whole is `python -m benchmarks.causal_lm_classes`, with its table in docs/results.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.causal_lm_classes import is_right, render
from tests.distributed.class_sweep_cases import CASES
from tests.distributed.harness import Outcome, run_cases

MODULE = "tests.distributed.class_sweep_cases"
# One of each kind: dense, tied, experts, latent attention, state space, hybrids, shared blocks, encoder-decoder
# families, byte patches, renamed weights in the file, a bias that is handed out, an in-place sum of both halves.
CLASSES = (
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "FalconForCausalLM",
    "MixtralForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV4ForCausalLM",
    "LongcatFlashForCausalLM",
    "Gemma3nForCausalLM",
    "MambaForCausalLM",
    "Zamba2ForCausalLM",
    "Qwen3NextForCausalLM",
    "RwkvForCausalLM",
    "BartForCausalLM",
    "GPTNeoXJapaneseForCausalLM",
)
# Blocks of one piece, and those whose model rescales weights inside both halves.
FUSED = {"MambaForCausalLM", "RwkvForCausalLM"}


@pytest.fixture(scope="module")
def two() -> dict[str, Outcome]:
    return run_cases(MODULE, CLASSES, world_size=2)


@pytest.mark.parametrize("name", CLASSES)
def test_the_step_is_that_of_one_process(name: str, two: dict[str, Outcome]) -> None:
    ranks: list[dict[str, Any]] = two[name].get()
    assert sum(rank["layer"]["num_local"] for rank in ranks) == ranks[0]["num_parameters"]
    for rank in ranks:
        assert is_right(rank["layer"]), rank["layer"]
        assert rank["layer"]["num_blocks"] == 4


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_saved_is_loaded_under_the_names_of_one_process(name: str, two: dict[str, Outcome]) -> None:
    for rank in two[name].get():
        assert rank["layer"]["differs_after_load"] == []
        assert rank["layer"]["other_names"] == []


@pytest.mark.parametrize("name", CLASSES)
def test_the_step_by_half_blocks_is_that_of_one_process(name: str, two: dict[str, Outcome]) -> None:
    for rank in two[name].get():
        halves = rank["attention_and_mlp"]
        if name in FUSED:
            assert "has attention and MLP as modules that can be gathered apart" in halves["refused"]
            continue
        assert is_right(halves), halves
        assert halves["units"]["block"] > rank["layer"]["units"]["block"]


def test_the_table_counts_what_was_seen(two: dict[str, Outcome]) -> None:
    rows = {name: {"ranks": outcome.get()} for name, outcome in two.items()}
    rows["Broken"] = {"ranks": [{"class": "Broken", "upstream": "ValueError: no"}] * 2}
    rows["Wrong"] = {"ranks": [{"class": "Wrong", "layer": {**_LAYER, "loss_error": 1.0}, "attention_and_mlp": _LAYER}]}
    table = render(rows)
    number = len(CLASSES)
    assert f"Of {number + 2} classes {number + 1} build small" in table
    assert f"{number} take the step, {number + 1} save and load; {number - len(FUSED) + 1} take the step" in table
    assert "| Broken |  |  |  |  |  | cannot be trained in one process either: ValueError: no |" in table
    assert "loss off by 1.0e+00" in table


_LAYER: dict[str, Any] = {
    "units": {"block": 4, "root": 1},
    "unsharded": [],
    "loss_error": 0.0,
    "gradient_error": 0.0,
    "weight_error": 0.0,
    "differs_after_load": [],
}


def test_every_class_has_a_case() -> None:
    assert len(CASES) > 150
    assert set(CLASSES) <= CASES.keys()
