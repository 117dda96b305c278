"""What planning costs: CPU seconds and memory of one candidate at every depth, and the time of whole searches.

    python benchmarks/plan_speed.py -o docs/results/DATE-plan-speed.md
    python benchmarks/plan_speed.py --no-searches

The bars: a candidate in 5 CPU seconds after imports at any depth, a worker within 1.5 GiB, a search in 60 s on 2 cores.
Each candidate is the first of its model in its worker; the other jobs of a search are faster.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import psutil

from hf_fsdp import FSDPConfig
from hf_fsdp.plan.job import Batch, Job, Method
from hf_fsdp.plan.models.resolve import resolve_model
from hf_fsdp.plan.service import Service

CANDIDATES = [
    ("smollm2-135m", "full", 0),
    ("llama-2-7b", "full", 0),
    ("llama-2-7b", "lora", 0),
    ("llama-2-7b", "qlora", 0),
    ("llama-3.1-70b", "full", 0),
    ("llama-3.1-70b", "lora", 0),
    ("qwen3-30b-a3b", "full", 0),
    ("gemma-3-1b", "full", 0),
    ("gemma-3-4b", "full", 1),
    ("llava-1.5-7b", "full", 1),
    ("qwen2.5-vl-7b", "lora", 1),
]
SEARCHES = [
    "llama-2-7b --gpus 8xA100-80G --max-length 4096",
    "llama-3.1-8b --method lora --gpus 4xRTX4090",
    "llama-3.1-70b --gpus 4x8xH100 --max-length 4096",
    "llava-1.5-7b --gpus 8xA100-80G",
]


def candidate_row(name: str, method: str, num_images: int) -> str:
    """Simulate one job in a new worker and return its line of the table."""
    size = (448, 448) if name.startswith("qwen2.5-vl") else None
    job = Job(
        model=resolve_model(name),
        fsdp=FSDPConfig(activation_checkpointing="full"),
        world_size=8,
        method=Method(name=method, lora_parts=("language",) if num_images and method != "full" else ()),
        batch=Batch(num_tokens=2048, num_images=num_images, image_size=size),
        loss="chunked",
    )
    with Service(1) as service:
        simulation = service.simulate([job])[0]
        peak = psutil.Process(service._idle[0]._process.pid).memory_info().rss
    layers = ", ".join(f"{tower} {few} of {all_}" for tower, (few, all_) in simulation.simulated_layers.items())
    met = "yes" if simulation.cpu_seconds <= 5 else "no"
    return f"| {name} | {method} | {layers} | {simulation.cpu_seconds:.1f} | {peak / 2**30:.2f} | {met} |"


def search_row(arguments: str) -> str:
    """Run a whole search as a person does and return its line of the table."""
    command = [sys.executable, "-m", "hf_fsdp", "plan", *shlex.split(arguments)]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"| `hf-fsdp plan {arguments}` | {wall:.0f} | {cpu:.0f} | {'yes' if wall <= 60 else 'no'} |"


def main() -> None:
    """Print the tables, and write them with -o."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--no-searches", action="store_true")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    lines = [
        "# What planning costs",
        "",
        f"Measured {date.today()}: torch {version('torch')}, transformers {version('transformers')}, "
        f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} when it began. Written by "
        "`python benchmarks/plan_speed.py`.",
        "",
        "One candidate, the first in its worker, after imports (checkpointing, world size 8, 2048 tokens):",
        "",
        "| model | method | layers simulated | CPU s | worker, GiB | within 5 s |",
        "|---|---|---|---:|---:|---|",
    ]
    for item in CANDIDATES:
        lines.append(candidate_row(*item))
        print(lines[-1], flush=True)
    if not options.no_searches:
        lines += ["", "Whole searches, imports included:", "", "| command | wall s | CPU s | within 60 s |"]
        lines.append("|---|---:|---:|---|")
        for arguments in SEARCHES:
            lines.append(search_row(arguments))
            print(lines[-1], flush=True)
    if options.output:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
