"""The vision-language recipe from its command line, on the demo's tiny LLaVA and real digits: few launches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from make_digits import write_digits, write_model
from safetensors.torch import load_file

from tests.recipes.launching import REPOSITORY, launch, losses, metrics, run_recipe

RECIPE = REPOSITORY / "recipes" / "vlm" / "train.py"
NUM_STEPS = 4


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vlm_recipe")
    train_file, test_file = write_digits(folder / "data")
    write_model(folder / "model")
    rows = json.loads(train_file.read_text())
    # A global batch of 8 in this order: some have pictures on one rank only.
    text = [row for row in rows if "image" not in row][:12]
    pictures = [row for row in rows if "image" in row][:20]
    _write(train_file, [row for pair in zip(text, pictures, strict=False) for row in pair] + pictures[12:])
    _write(test_file, json.loads(test_file.read_text())[:9])
    run: dict[str, Any] = {
        "model_name_or_path": "model",
        "dataset_name": "data/train.json",
        "eval_file": "data/test.json",
        "check_data": "all",
        "max_length": 64,
        "max_steps": NUM_STEPS,
        "learning_rate": 1.0e-2,
        "global_batch_size": 8,
        "per_device_train_batch_size": 4,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": NUM_STEPS,
        "save_strategy": "steps",
        "save_steps": 2,
        "answers": 9,
        "answer_tokens": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "fsdp": {"precision": "fp32", "activation_checkpointing": "full"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows))


def _answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def sharded(work: Path) -> str:
    """Two processes, a frozen tower; its standard output."""
    return run_recipe(RECIPE, work, "run.yaml", "--output_dir", "sharded", "--require_sharding", processes=2)


def test_two_sharded_processes_give_the_losses_and_answers_of_one(work: Path, sharded: str) -> None:
    run_recipe(RECIPE, work, "run.yaml", "--output_dir", "single")
    assert len(losses(work / "sharded")) == NUM_STEPS
    assert losses(work / "sharded") == pytest.approx(losses(work / "single"), rel=1e-5)
    kept = ("step", "id", "images", "prompt", "answer", "references", "scores")
    lines = [
        [
            {key: json.loads(line)[key] for key in kept}
            for line in (work / run / "answers.jsonl").read_text().splitlines()
        ]
        for run in ("sharded", "single")
    ]
    assert len(lines[0]) == 9 and lines[0] == lines[1]
    scores = [line["eval_exact_match"] for line in metrics(work / "sharded") if "eval_exact_match" in line]
    assert scores == [sum(line["scores"]["exact_match"] for line in lines[0]) / 9]


def test_the_audit_shows_the_parts_and_what_training_changed(work: Path, sharded: str) -> None:
    assert "part         vision     292.4K, frozen, stored fp32" in sharded
    assert "language: 21 of 21 trained tensors moved" in sharded
    assert "vision: 39 of 39 frozen tensors are bit for bit what they were" in sharded
    audit = json.loads((work / "sharded" / "audit.json").read_text())
    assert [part["num_frozen_changed"] for part in audit["after_training"]["parts"]] == [0, 0, 0]
    before, after = load_file(work / "model" / "model.safetensors"), load_file(work / "sharded/final/model.safetensors")
    tower = [name for name in before if "vision_tower" in name]
    assert len(tower) == 39 and all(before[name].equal(after[name]) for name in tower)
    assert not any(before[name].equal(after[name]) for name in before if "projector" in name)


def test_the_data_and_its_check_are_told_before_weights_load(sharded: str) -> None:
    lines = sharded.splitlines()
    (data,) = (index for index, line in enumerate(lines) if line.startswith("data: 32 training examples, 9 held out"))
    (check,) = (index for index, line in enumerate(lines) if line.startswith("training images: 20 in 32 samples"))
    (audit,) = (index for index, line in enumerate(lines) if line.startswith("FSDP audit: LlavaForCond"))
    assert data < check < audit
    assert "12 samples without" in lines[check] and "17 image + 10 text = 27 tokens" in lines[check]


def test_every_folder_loads_with_its_processor_and_shows_its_answers(work: Path, sharded: str) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    for folder in ("final", "checkpoint-2", "checkpoint-4"):
        assert AutoProcessor.from_pretrained(work / "sharded" / folder).image_token == "<image>"
    AutoModelForImageTextToText.from_pretrained(work / "sharded" / "final")
    (grid,) = (work / "sharded" / "answers_grid").glob("*.png")
    assert grid.stat().st_size > 1000


def test_lora_beside_a_projector_in_full_resumes_on_one_process(work: Path) -> None:
    flags = (
        "run.yaml", "--output_dir", "lora", "--use_peft", "--lora_r", "4", "--lora_dropout", "0",
        "--trainable", "projector",
        "--part_learning_rate", "{projector: 1.0e-3}", "--lr_scheduler_type", "constant",
    )  # fmt: skip
    printed = run_recipe(RECIPE, work, *flags, processes=2)
    assert "LoRA on 14 layers of the language; trained in full: model.multi_modal_projector" in printed
    assert "part         projector  " in printed and "33.0K trained at 0.001, stored fp32" in printed
    whole = losses(work / "lora")
    resumed = run_recipe(RECIPE, work, *flags, "--resume_from_checkpoint", "lora/checkpoint-2")
    assert "resume: optimizer state of 32 tensors restored" in resumed
    assert losses(work / "lora") == pytest.approx(whole, rel=1e-5)
    saved = load_file(work / "lora" / "final" / "adapter_model.safetensors")
    assert any("multi_modal_projector" in name for name in saved) and not any("vision_tower" in name for name in saved)


def test_qlora_packs_the_language_model_only(work: Path) -> None:
    printed = run_recipe(
        RECIPE, work, "run.yaml", "--output_dir", "qlora", "--use_peft", "--load_in_4bit", "--lora_r", "4",
        "--trainable", "projector", "--max_steps", "2", "--fsdp.precision", "bf16-mixed", processes=2,
    )  # fmt: skip
    assert "LoRA on 14 layers of the language; trained in full: model.multi_modal_projector" in printed
    parts = {row["name"]: row for row in json.loads((work / "qlora" / "audit.json").read_text())["parts"]}
    assert parts["vision"]["num_parameters"] == 292_352  # packed, two weights would be one byte
    assert parts["language"]["num_parameters"] < 335_000
    assert parts["projector"]["num_trained"] == 33_024
    frozen = json.loads((work / "qlora" / "audit.json").read_text())["after_training"]["parts"]
    assert [part["num_frozen_changed"] for part in frozen] == [0] * len(frozen)


def test_a_mistake_is_one_error_without_a_traceback(work: Path) -> None:
    rows = json.loads((work / "data" / "test.json").read_text())
    rows[3]["image"] = "images/gone.png"
    _write(work / "data" / "broken.json", rows)
    done = launch(RECIPE, work, "run.yaml", "--output_dir", "refused", "--dataset_name", "data/broken.json")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "images/gone.png" in done.stderr and rows[3]["id"] in done.stderr
    done = launch(RECIPE, work, "run.yaml", "--output_dir", "refused", "--freeze_vision_tower", "false")
    assert done.returncode == 1 and "trainable: [language, vision]" in done.stderr
