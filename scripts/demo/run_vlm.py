"""The vision demo: teach a tiny LLaVA to read handwritten digits under real FSDP on this machine's CPU.

    python scripts/demo/run_vlm.py

Everything printed is measured in this run. It ends with a non-zero exit code when a claim does not hold.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from launch_training import Record, TrainingRun, run_training, show_everything, show_resume
from make_digits import write_digits, write_model
from safetensors.torch import load_file
from stages import end, run_command, run_step, show, show_versions, stage

OUTPUT = Path("runs/demo_vlm")
DATA, LOGS = OUTPUT / "data", OUTPUT / "logs"
RECIPE = "recipes/vlm/train.py"
CONFIG = Path("configs/demo/digits_llava.yaml")
LAUNCH_FILE = Path("configs/demo/fsdp_2cpu.yaml")
NUM_STEPS = 390
TWO_PARTS_STEPS, TWO_PARTS_SAVED = 200, 100
LEAST_ACCURACY, MOST_SECONDS = 0.95, 180.0
# At a constant learning rate, so that the resumed run is the same run, the last steps go up and down by two percent.
LEAST_WITH_A_FROZEN_TOWER = 0.90
MINUTES = 4


def digits_run(model: Path) -> TrainingRun:
    """Return the run that trains everything, from random weights, with two sharded processes."""
    return TrainingRun(
        num_processes=2,
        launch_file=LAUNCH_FILE,
        config=CONFIG,
        overrides={"model_name_or_path": str(model)},
        output_dir=OUTPUT / "run",
        num_steps=NUM_STEPS,
        log=LOGS / "digits.log",
        recipe=RECIPE,
    )


def two_parts_run(model: Path) -> TrainingRun:
    """Return the run that trains language and projector beside a tower that can see already, up to its checkpoint."""
    overrides = {
        "model_name_or_path": str(model),
        "max_steps": str(TWO_PARTS_SAVED),
        "eval_steps": str(TWO_PARTS_SAVED),
        "save_steps": str(TWO_PARTS_SAVED),
        "lr_scheduler_type": "constant_with_warmup",  # a schedule that does not depend on max_steps
        "report_to": "none",
    }
    run = digits_run(model)
    flags = {**overrides, "trainable": "language,projector"}
    return dataclasses.replace(
        run, overrides=flags, output_dir=OUTPUT / "two_parts", num_steps=TWO_PARTS_SAVED, log=LOGS / "two_parts.log"
    )


def accuracies(records: list[Record]) -> dict[int, float]:
    """Return step -> share of test digits read right, as the run measured it."""
    return {record["step"]: record["eval_exact_match"] for record in records if "eval_exact_match" in record}


def training_seconds(records: list[Record]) -> float:
    """Return how long a run trained, its evaluations included."""
    return float(records[-1]["seconds"] - records[0]["seconds"])


def tower_is_unchanged(tower: Path, model: Path) -> bool:
    """Tell whether the model's vision tower has the bits of the tower that it began with."""
    before, after = load_file(tower / "model.safetensors"), load_file(model / "model.safetensors")
    found = 0
    for name, value in before.items():
        (key,) = [key for key in after if "vision_tower" in key and key.endswith(name.removeprefix("vision_model."))]
        found += bool((after[key] == value).all())
    return found == len(before)


def train_in_two_parts(results: dict[str, Any]) -> None:
    """Tower alone, then language and projector, with a resume on another number of processes between."""
    stage("the vision tower alone, as a classifier, two sharded processes")
    tower = OUTPUT / "tower"
    run_step("train_tower.py", {"data": DATA, "output": tower}, LOGS, num_processes=2)
    results["tower_accuracy"] = json.loads((tower / "accuracy.json").read_text(encoding="utf-8"))
    show(f"the classifier reads {results['tower_accuracy']:.1%} of the test digits")

    stage(f"a new LLaVA with that tower, frozen: language and projector, {TWO_PARTS_SAVED} steps on two processes")
    model = write_model(OUTPUT / "model_with_tower", tower / "tower")
    run = two_parts_run(model)
    show(f"$ {run.command_line()}")
    before = accuracies(run_training(run, lambda line: line.startswith("hf-fsdp: trained")))
    stage(f"the same run resumed in one process, not sharded, to step {TWO_PARTS_STEPS}")
    flags = {**run.overrides, "max_steps": str(TWO_PARTS_STEPS), "eval_on_start": "true"}
    resumed = dataclasses.replace(
        run, num_processes=1, resumes=True, overrides=flags, num_steps=TWO_PARTS_STEPS, log=LOGS / "two_parts_one.log"
    )
    after = accuracies(run_training(resumed, show_resume))
    results["two_parts"] = {
        "saved": before[TWO_PARTS_SAVED],
        "resumed": after[TWO_PARTS_SAVED],
        "end": after[TWO_PARTS_STEPS],
        "tower_unchanged": tower_is_unchanged(tower / "tower", run.output_dir / "final"),
    }


def unmet_claims(results: dict[str, Any]) -> list[str]:
    """Return what did not come out as the demo says."""
    parts = results["two_parts"]
    claims = {
        f"{LEAST_ACCURACY:.0%} of the test digits": results["accuracy"] >= LEAST_ACCURACY,
        f"training in {MOST_SECONDS:.0f} s": results["training_seconds"] < MOST_SECONDS,
        "the export answers as the sharded run did": results["reload"]["num_equal"] == results["reload"]["num_rows"],
        "the resumed run answers as the saved one": parts["resumed"] == parts["saved"],
        f"{LEAST_WITH_A_FROZEN_TOWER:.0%} with a frozen tower": parts["end"] >= LEAST_WITH_A_FROZEN_TOWER,
        "a frozen tower keeps its bits": parts["tower_unchanged"],
    }
    return [claim for claim, holds in claims.items() if not holds]


def show_results(results: dict[str, Any]) -> None:
    """Print what was measured."""
    stage("results, measured here and now")
    reload, parts = results["reload"], results["two_parts"]
    lines = [
        f"test digits read right after {NUM_STEPS} steps     {results['accuracy']:.1%} of {reload['num_rows']}",
        f"training, evaluations included           {results['training_seconds']:.0f} s on {os.cpu_count()} cores",
        f"answers of the reloaded export           {reload['num_equal']} of {reload['num_rows']} the same",
        f"tower alone, as a classifier             {results['tower_accuracy']:.1%}",
        f"language + projector, tower frozen       {parts['saved']:.1%} saved on 2 processes, {parts['resumed']:.1%} "
        f"resumed on 1, {parts['end']:.1%} at the end",
        f"the frozen tower's bits                  {'unchanged' if parts['tower_unchanged'] else 'CHANGED'}",
    ]
    for line in lines:
        show(f"  {line}")


def show_next_commands(grid: Path) -> None:
    """Print what the run left and what to type next."""
    stage("what is there now, and what to do next")
    lines = [
        f"{grid}: test digits with the model's answers, right and wrong ones marked",
        f"{OUTPUT}/run/answers.jsonl, audit.json, metrics.jsonl; {OUTPUT}/results.json",
        f"{OUTPUT}/run/model loads by itself: AutoModelForImageTextToText.from_pretrained('{OUTPUT}/run/model')",
        f"source {os.path.relpath(sys.prefix)}/bin/activate      # then:",
        f"wandb sync {OUTPUT}/run/wandb/offline-run-*      # with the picture",
        "# with GPUs:",
        "accelerate launch --config_file configs/fsdp_llava7b.yaml recipes/vlm/train.py \\",
        "      configs/train/llava1_5_7b_lora.yaml --dataset_name YOUR.json --image_folder YOUR_PICTURES",
    ]
    for line in lines:
        show(f"  {line}")


def main() -> None:
    """Run all parts in order."""
    show(f"This takes about {MINUTES} minutes on two idle cores, longer beside other jobs.")
    show_versions()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    _, test_file = write_digits(DATA)
    model = write_model(OUTPUT / "model")
    results: dict[str, Any] = {}

    stage("a LLaVA from random weights, two sharded processes: data check, audit, training, test digits")
    run = digits_run(model)
    show(f"$ {run.command_line()}\n")
    records = run_training(run, show_everything)
    results["accuracy"] = accuracies(records)[NUM_STEPS]
    results["training_seconds"] = training_seconds(records)
    (grid,) = sorted(run.output_dir.glob("answers_grid/*.png"), key=lambda path: path.stat().st_mtime)[-1:]
    show(f"picture: {grid}")

    stage("the last checkpoint as a folder for from_pretrained, asked again in one process")
    words = ["checkpoint", "export", str(run.output_dir / f"checkpoint-{NUM_STEPS}"), "-o"]
    run_command([*words, str(run.output_dir / "model")], LOGS)
    files = {"model": run.output_dir / "model", "data": test_file, "answers": run.output_dir / "answers.jsonl"}
    run_step("reload_answers.py", {**files, "output": OUTPUT / "reload.json"}, LOGS)
    results["reload"] = json.loads((OUTPUT / "reload.json").read_text(encoding="utf-8"))
    train_in_two_parts(results)

    show_results(results)
    (OUTPUT / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    show_next_commands(grid)
    end(unmet_claims(results))


if __name__ == "__main__":
    main()
