"""The shipped run configs of the vision-language recipe parse as for 8 processes, and every value has a source."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from trl import TrlParser

from hf_fsdp import data
from hf_fsdp.data import recipe_arguments
from tests.recipes.launching import REPOSITORY

RECIPE = REPOSITORY / "recipes" / "vlm" / "train.py"
FOLDER = REPOSITORY / "configs" / "train"
SHIPPED = sorted(path for name in ("llava1_5", "qwen2_5_vl", "smolvlm", "gemma3") for path in FOLDER.glob(f"{name}*"))


@pytest.fixture(scope="module")
def recipe() -> Any:
    spec = importlib.util.spec_from_file_location("vlm_recipe", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["vlm_recipe"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _read(recipe: Any, *argv: str) -> data.RecipeRun:
    return data.read_recipe_arguments(
        [*argv, "--report_to", "none"],
        TrlParser(recipe.ARGUMENT_CLASSES),
        script="recipes/vlm/train.py",
        output_dir="runs/vlm",
        refused=recipe.REFUSED,
    )


def test_every_family_of_the_issue_ships_a_config() -> None:
    names = {path.stem for path in SHIPPED}
    assert names >= {f"llava1_5_7b_{method}" for method in ("full", "lora", "qlora")}
    assert names >= {"qwen2_5_vl_7b_full", "qwen2_5_vl_7b_lora", "smolvlm_full", "smolvlm_lora"}
    assert names >= {"gemma3_4b_full", "gemma3_4b_lora"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_run_configs_parse_on_eight_processes(
    recipe: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_arguments, "launched_processes", lambda: 8)
    fsdp, own, script, training, model = _read(recipe, str(path))
    assert training.gradient_accumulation_steps * training.per_device_train_batch_size * 8 == own.global_batch_size
    assert fsdp.precision.preset == "bf16-mixed" and training.bf16
    assert not training.gradient_checkpointing and fsdp.activation_checkpointing.mode == "full"
    assert model.use_peft == path.stem.endswith("lora") and model.load_in_4bit == path.stem.endswith("qlora")
    assert script.dataset_name and training.eval_strategy != "no" and own.answers
    assert training.max_length and own.on_too_long == "drop"  # what does not fit is left out, never cut
    trainable, adapted = data.choose_parts(own.trainable, own.lora_parts, use_peft=model.use_peft)
    assert (adapted is None) != model.use_peft
    rates = data.read_mapping(own.part_learning_rate, "part_learning_rate")
    assert all(isinstance(rate, float) and rate > 0 for rate in rates.values())
    trained = {*(trainable or []), *(adapted or [])}
    assert set(rates) <= ({"language", "projector", "vision"} if trained == {"all"} else trained)
    # Precision is said once, so one override is enough.
    fsdp, _, _, training, _ = _read(recipe, str(path), "--fsdp.precision", "fp32")
    assert fsdp.precision.preset == "fp32" and not training.bf16


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_value_of_a_shipped_run_config_says_where_it_comes_from(path: Path) -> None:
    lines = path.read_text().splitlines()
    values = [line for line in lines if line.strip() and not line.lstrip().startswith("#") and line != "fsdp:"]
    assert values and not [line for line in values if "# " not in line]


def test_the_recipe_stays_readable() -> None:
    assert len(RECIPE.read_text().splitlines()) <= 250
