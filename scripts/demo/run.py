"""The demo: fine-tune a small real language model under real FSDP on this machine's CPU, and check the claims.

    python scripts/demo/run.py [--full]

Everything printed is measured in this run. It ends with a non-zero exit code when a claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import fetch_model
from killed_save import Resume
from launch_training import RECIPE, Record, run_training, show_resume
from make_dataset import make_dataset
from show_results import Results, samples_markdown, show_results
from stages import console, end, run_command, run_step, show, show_versions, stage
from training_runs import (
    CONFIG,
    DATA,
    KILLED_STEP,
    KILLER,
    LAUNCH_FILE,
    LOGS,
    NUM_COMPARED_STEPS,
    NUM_STEPS,
    OUTPUT,
    resumed_run,
    sharded_run,
    train_in_one_process,
    train_until_killed,
)

NUM_TRAINING_ROWS, NUM_HELD_OUT_ROWS = 320, 32
# Not measured idle: docs/results/2026-11-30-demo.md has 5 min 10 s idle without the kill and the resume, and 13 minutes
# of processor time over both cores with them.
MINUTES = 5


def export_checkpoint(full: bool) -> None:
    """Write the last checkpoint as one whole model, LoRA weights merged in."""
    flags = () if full else ("--merge-lora",)
    words = ["checkpoint", "export", str(OUTPUT / f"checkpoint-{NUM_STEPS}"), "-o", str(OUTPUT / "model"), *flags]
    run_command(words, LOGS)


def show_next_commands(model: Path) -> None:
    """Print what the run left and what to type next: with your own data here, then on GPUs."""
    stage("what is there now, and what to do next")
    offline_runs = list((OUTPUT / "wandb").glob("offline-run-*"))
    lines = [
        f"{OUTPUT}/resolved_config.yaml, audit.json, metrics.jsonl, metrics_killed.jsonl, samples.md, results.json",
        f"{OUTPUT}/model loads by itself: AutoModelForCausalLM.from_pretrained('{OUTPUT}/model')",
        f"{OUTPUT}/final is what the recipe saved at its end; data, logs and one_process are the demo's own",
        f"source {os.path.relpath(sys.prefix)}/bin/activate      # then:",
        f"wandb sync {OUTPUT}/wandb/offline-run-*      # two runs: the killed launch, and the one that went on"
        if offline_runs
        else "(no W&B run was recorded)",
        f"hf-fsdp checkpoint inspect {OUTPUT}",
        f"accelerate launch --config_file {LAUNCH_FILE} {RECIPE} {CONFIG} \\\n"
        f"      --model_name_or_path {model} --dataset_name YOUR.jsonl --eval_file '' --eval_fraction 0.1 \\\n"
        "      --output_dir runs/mine",
        "hf-fsdp checkpoint export runs/mine -o runs/mine/model --merge-lora      # the newest committed checkpoint",
        "# with GPUs:",
        "hf-fsdp config llama-2-7b --gpus 8 --method lora -o fsdp.yaml",
        "accelerate launch --config_file fsdp.yaml recipes/text/train.py configs/train/llama2_7b_lora.yaml",
        "bash scripts/demo.sh --full      # the same with all weights trained",
    ]
    for line in lines:
        print(f"  {line}")


def read_results(single: list[Record], resume: Resume) -> Results:
    """Return all results, from the files that the parts wrote."""

    def read(name: str) -> Record:
        return json.loads((OUTPUT / name).read_text(encoding="utf-8"))

    return Results(
        single=single,
        sharded=resume.resumed,
        resume=resume,
        audit=read("audit.json"),
        stock=read("compare_stock.json"),
        samples=json.loads((OUTPUT / "samples.json").read_text(encoding="utf-8")),
    )


def main() -> None:
    """Run all parts in order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--full", action="store_true", help="train all weights instead of LoRA")
    full = parser.parse_args().full

    show(f"This takes about {MINUTES} minutes on two idle cores, longer beside other jobs.")
    show_versions()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    model = fetch_model.fetch(fetch_model.cache_folder())
    train_file, held_out_file = make_dataset(DATA, NUM_TRAINING_ROWS, NUM_HELD_OUT_ROWS)

    what = "all weights" if full else "LoRA"
    stage(f"{what}, two sharded processes: examples with their loss mask, audit, training, and a kill in a save")
    run = sharded_run(model, full)
    show(f"$ {run.command_line()}")
    show(f"(here it runs through {KILLER[0]}, which kills it in the save of step {KILLED_STEP})")
    show("Loading, and the evaluation before the first step, print nothing for a while.\n")
    left, killed = train_until_killed(run)
    run_command(["checkpoint", "list", str(OUTPUT)], LOGS)
    stage("the same command with --resume_from_checkpoint true --eval_on_start false")
    show(f"$ {resumed_run(run).command_line()}")
    show(f"Steps {left.resumable_step + 1} to {KILLED_STEP} are computed again. Shown are steps and checkpoints.\n")
    resumed = run_training(resumed_run(run), show_resume)
    resume = Resume(killed=killed, resumed=resumed, resumed_from=left.resumable_step, killed_at=KILLED_STEP)
    stage(f"the same run's first {NUM_COMPARED_STEPS} steps in one process, not sharded")
    single = train_in_one_process(model, full)
    stage("Accelerate alone on the same model")
    show("Running, without output until the results: one training step under TrainingArguments(fsdp=True), then the")
    show("gradients of one step with and without activation checkpointing, by Accelerate's way and by ours.")
    files = {"model": model, "data": train_file, "output": OUTPUT / "compare_stock.json"}
    run_step("compare_stock.py", files, LOGS, num_processes=2)
    stage("the last checkpoint as a folder for from_pretrained, and samples from it and from the base model")
    run_command(["checkpoint", "verify", str(OUTPUT)], LOGS)
    export_checkpoint(full)
    show("Running, without output until the results: the base model and the exported one answer held-out questions.")
    files = {"base": model, "model": OUTPUT / "model"}
    run_step("generate_samples.py", {**files, "data": held_out_file, "output": OUTPUT / "samples.json"}, LOGS)

    stage("results")
    results = read_results(single, resume)
    show_results(results, console)
    (OUTPUT / "samples.md").write_text(samples_markdown(results), encoding="utf-8")
    (OUTPUT / "results.json").write_text(json.dumps(results.to_mapping(), indent=2) + "\n", encoding="utf-8")
    show_next_commands(model)
    end(results.unmet_claims())


if __name__ == "__main__":
    main()
