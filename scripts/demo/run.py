"""The demo: fine-tune a small real language model under real FSDP on this machine's CPU, and check the claims.

    python scripts/demo/run.py [--full]

Everything printed is measured in this run. It ends with a non-zero exit code when a claim does not hold.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import fetch_model
from launch_training import RECIPE, Record, TrainingRun, run_training, tail, training_environment
from make_dataset import make_dataset
from rich.console import Console
from show_results import Results, samples_markdown, show_results

OUTPUT = Path("runs/demo")
DATA = OUTPUT / "data"
LOGS = OUTPUT / "logs"
LAUNCH_FILE = Path("configs/demo/fsdp_2cpu.yaml")
CONFIG = Path("configs/demo/smollm2_lora.yaml")
PACKAGES = ("hf-fsdp", "torch", "transformers", "accelerate", "peft", "trl", "datasets", "wandb")
NUM_TRAINING_ROWS, NUM_HELD_OUT_ROWS = 320, 32
NUM_STEPS = 16
NUM_COMPARED_STEPS = 6
FULL_OVERRIDES = {"use_peft": "false", "learning_rate": "5.0e-5"}

console = Console(highlight=False)
began = time.monotonic()


def stage(title: str) -> None:
    """Print the heading of the next part, with the time since the start."""
    console.print(f"\n[bold]== {title}[/bold]  [dim]({time.monotonic() - began:.0f} s)[/dim]", soft_wrap=True)


def show_versions() -> None:
    """Print what this runs on."""
    stage("versions")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    console.print(
        f"Python {platform.python_version()} on {platform.system()}, {os.cpu_count()} CPU cores\n{versions}",
        soft_wrap=True,
    )


def run_step(script: str, arguments: Sequence[str], num_processes: int = 1) -> None:
    """Run another file of this folder in processes of its own, its output in a log.

    Raises:
        SystemExit: it failed; the end of its log is shown.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    command = [sys.executable, *(launcher if num_processes > 1 else []), str(Path(__file__).with_name(script))]
    log = LOGS / f"{Path(script).stem}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as stream:
        finished = subprocess.run(
            [*command, *arguments], stdout=stream, stderr=stream, env=training_environment(num_processes)
        )
    if finished.returncode != 0:
        raise SystemExit(f"{tail(log)}\nerror: {script} failed (exit {finished.returncode}); all of it: {log}")


def train_sharded(model: Path, full: bool) -> list[Record]:
    """Train with two sharded processes, showing what the recipe shows."""
    overrides = {"model_name_or_path": str(model), "max_steps": str(NUM_STEPS), **(FULL_OVERRIDES if full else {})}
    run = TrainingRun(
        num_processes=2,
        launch_file=LAUNCH_FILE,
        config=CONFIG,
        overrides=overrides,
        output_dir=OUTPUT,
        num_steps=NUM_STEPS,
        log=LOGS / "sharded.log",
    )
    return run_training(run, show_output=True)


def train_in_one_process(model: Path, full: bool) -> list[Record]:
    """Train the first steps of the same run in one process, without evaluating and without W&B."""
    overrides = {
        "model_name_or_path": str(model),
        "max_steps": str(NUM_COMPARED_STEPS),
        "eval_on_start": "false",
        "eval_file": "",
        "report_to": "none",
        "print_examples": "0",
        **(FULL_OVERRIDES if full else {}),
    }
    run = TrainingRun(
        num_processes=1,
        launch_file=LAUNCH_FILE,
        config=CONFIG,
        overrides=overrides,
        output_dir=OUTPUT / "one_process",
        num_steps=NUM_COMPARED_STEPS,
        log=LOGS / "one_process.log",
    )
    return run_training(run, show_output=False)


def show_next_commands(model: Path) -> None:
    """Print what the run left and what to type next: with your own data here, then on GPUs."""
    stage("what is there now, and what to do next")
    offline_runs = sorted((OUTPUT / "wandb").glob("offline-run-*"))
    lines = [
        f"{OUTPUT}/resolved_config.yaml, audit.json, metrics.jsonl, samples.md, results.json",
        f"{OUTPUT}/model loads by itself: AutoModelForCausalLM.from_pretrained('{OUTPUT}/model')",
        f"wandb sync {offline_runs[-1]}" if offline_runs else "(no W&B run was recorded)",
        f"source {os.path.relpath(sys.prefix)}/bin/activate      # then:",
        f"accelerate launch --config_file {LAUNCH_FILE} {RECIPE} {CONFIG} \\\n"
        f"      --model_name_or_path {model} --dataset_name YOUR.jsonl --eval_file '' --eval_fraction 0.1 \\\n"
        "      --output_dir runs/mine",
        "# with GPUs:",
        "hf-fsdp config llama-2-7b --gpus 8 --method lora -o fsdp.yaml",
        "accelerate launch --config_file fsdp.yaml recipes/text/train.py configs/train/llama2_7b_lora.yaml",
        "bash scripts/demo.sh --full      # the same with all weights trained",
    ]
    for line in lines:
        print(f"  {line}")


def read_results(single: list[Record], sharded: list[Record]) -> Results:
    """Return all results, from the files that the parts wrote."""

    def read(name: str) -> Record:
        return json.loads((OUTPUT / name).read_text(encoding="utf-8"))

    return Results(
        single=single,
        sharded=sharded,
        audit=read("audit.json"),
        stock=read("compare_stock.json"),
        samples=json.loads((OUTPUT / "samples.json").read_text(encoding="utf-8")),
    )


def main() -> None:
    """Run all parts in order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--full", action="store_true", help="train all weights instead of LoRA")
    full = parser.parse_args().full

    show_versions()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    model = fetch_model.fetch(fetch_model.cache_folder())
    train_file, held_out_file = make_dataset(DATA, NUM_TRAINING_ROWS, NUM_HELD_OUT_ROWS)

    stage(f"{'all weights' if full else 'LoRA'}, two sharded processes: examples with their loss mask, audit, training")
    sharded = train_sharded(model, full)
    stage(f"the same run's first {NUM_COMPARED_STEPS} steps in one process, not sharded")
    single = train_in_one_process(model, full)
    stage("Accelerate alone on the same model")
    files = {"model": model, "data": train_file, "output": OUTPUT / "compare_stock.json"}
    run_step("compare_stock.py", _flags(files), num_processes=2)
    stage("samples from the base model and from the trained folder")
    files = {"base": model, "trained": OUTPUT / "final", "model": OUTPUT / "model"}
    run_step("generate_samples.py", _flags({**files, "data": held_out_file, "output": OUTPUT / "samples.json"}))

    stage("results")
    results = read_results(single, sharded)
    show_results(results, console)
    (OUTPUT / "samples.md").write_text(samples_markdown(results), encoding="utf-8")
    (OUTPUT / "results.json").write_text(json.dumps(results.to_mapping(), indent=2) + "\n", encoding="utf-8")
    show_next_commands(model)
    unmet = results.unmet_claims()
    console.print(f"\n{time.monotonic() - began:.0f} s in all")
    if unmet:
        raise SystemExit("error: the demo did not show what it says: " + "; ".join(unmet))


def _flags(values: dict[str, Path]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


if __name__ == "__main__":
    main()
