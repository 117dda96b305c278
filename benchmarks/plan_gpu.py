"""The planner against one real CUDA card: predicted and measured memory, speed, and what no allocator counts.

    python benchmarks/plan_gpu.py -o runs/plan_gpu             # or: scripts/gpu_check.sh
    python benchmarks/plan_gpu.py --device cpu -o runs/check   # a tiny model, to see that it works

One card plays process 0 of 8 (torch's fake process group: collectives allocate and move nothing). Four cases of
Llama-2 7B, each at the largest batch that the planner says will fit here; a smaller model where not one row does.
Written: `plan_gpu.json` and `plan_gpu.md`. About four minutes on a fast card; `--seconds` ends it between cases.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch
import torch.distributed as dist

from benchmarks.plan_gpu_cases import CASES, WORLD_SIZE, GpuCase, choose_job
from benchmarks.plan_gpu_run import free_memory, measure_case, measure_workspaces
from hf_fsdp.config.hardware import Gpu, parse_gpus, unknown_gpu
from hf_fsdp.errors import ConfigError
from hf_fsdp.plan.speed.reserve import estimate_reserve
from hf_fsdp.plan.speed.utilization import peak_flops, utilization_of
from hf_fsdp.torch_private import start_fake_group

GIB = 2**30
# Of what is left beside the reserve: a prediction that is a little low shall not end a case.
USED_SHARE = 0.94
NUM_TIMED = 3


def find_gpu() -> Gpu:
    """Return the card here by torch's name for it, or one of which only the memory is known."""
    try:
        gpu = parse_gpus(torch.cuda.get_device_name()).gpu
    except ConfigError:
        gpu = None
    return gpu or unknown_gpu(torch.cuda.get_device_properties(0).total_memory)


def room_for_tensors(device: str, gpu: Gpu | None) -> int:
    """Return the bytes that a case may be predicted to need."""
    if device == "cpu" or gpu is None:
        return psutil.virtual_memory().available // 2
    free, _ = torch.cuda.mem_get_info()
    # One process without NCCL; its context is there already.
    parts = estimate_reserve(gpu, world_size=1).parts
    kept = sum(part.num_bytes for part in parts if part.name != "CUDA context")
    return int((free - kept) * USED_SHARE)


def run_case(case: GpuCase, device: str, names: list[str], gpu: Gpu | None, workspaces: int) -> dict[str, Any]:
    """Return the row of a case: predicted, measured, speed; or why there is none."""
    free_memory(device)
    chosen = choose_job(case, device, names, room_for_tensors(device, gpu), psutil.virtual_memory().available // 2)
    if isinstance(chosen, str):
        return {"case": case.name, "failure": f"does not fit: {chosen}"}
    job, simulation = chosen
    row: dict[str, Any] = {
        "case": case.name,
        "model": job.model.name,
        "micro_batch_size": job.batch.micro_batch_size,
        "num_tokens": job.batch.num_tokens,
        "predicted_bytes": simulation.peak.num_bytes,
        "predicted_phase": simulation.peak.name,
        "predicted_categories": dict(simulation.peak.categories),
        "notes": list(simulation.notes),
    }
    try:
        row |= measure_case(job, device, NUM_TIMED if device == "cuda" else 1)
    except torch.OutOfMemoryError as error:
        row["failure"] = f"out of memory: {str(error).splitlines()[0]}"
        return row
    counted = row["measured_bytes"] - workspaces  # cuBLAS' workspaces are in the allocator's count, and in the reserve
    row |= {"workspace_bytes": workspaces, "error": simulation.peak.num_bytes / counted - 1}
    seconds = row["step_seconds"]
    row["tokens_per_second"] = simulation.work.num_tokens / seconds
    peak = peak_flops(gpu, "bf16-mixed") if gpu is not None else None
    if peak:
        row["mfu"] = simulation.work.useful_flops / seconds / peak
        row["share_of_peak"] = simulation.work.flops / seconds / peak
    return row


def describe(device: str, gpu: Gpu | None) -> dict[str, Any]:
    """Return what ran this."""
    found = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "world_size": WORLD_SIZE,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
    }
    if gpu is not None:
        span = utilization_of(gpu, "bf16-mixed").span
        parts = estimate_reserve(gpu, world_size=1, allocated_bytes=0).parts
        found |= {
            "gpu": gpu.name,
            "total_bytes": torch.cuda.get_device_properties(0).total_memory,
            "usable_bytes_assumed": gpu.usable_bytes,
            "utilization_assumed": [span.low, span.high],
            "reserve_estimated": {part.name: part.num_bytes for part in parts},
        }
    return found


def render(document: dict[str, Any]) -> str:
    """Return the table, in Markdown."""
    about = document["about"]
    lines = [
        f"# The planner against {about['device']}, {about['date']}",
        "",
        f"Process 0 of {about['world_size']} under torch's fake process group. Predicted: simulated. Measured: "
        f"{'torch.cuda.max_memory_allocated' if 'gpu' in about else 'allocator count'} of the second and third step, "
        "cuBLAS' workspaces taken off. Speed: measured, without communication.",
        "",
        "| case | model, batch | predicted GiB | measured GiB | error | tokens/s | MFU | all operations |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in document["cases"]:
        if "failure" in row:
            lines.append(f"| {row['case']} | {row['failure']} | | | | | | |")
            continue
        shares = [f"{row[name]:.0%}" if name in row else "" for name in ("mfu", "share_of_peak")]
        lines.append(
            f"| {row['case']} | {row['model']}, {row['micro_batch_size']} x {row['num_tokens']} "
            f"| {row['predicted_bytes'] / GIB:.3f} | {(row['measured_bytes'] - row['workspace_bytes']) / GIB:.3f} "
            f"| {row['error']:+.1%} | {row['tokens_per_second']:.0f} | {' | '.join(shares)} |"
        )
    if "gpu" in about:
        lines += ["", *_render_reserve(document)]
    return "\n".join(lines) + "\n"


def _render_reserve(document: dict[str, Any]) -> list[str]:
    about, rows = document["about"], [row for row in document["cases"] if "reserved_bytes" in row]
    estimated = {name: f"{num_bytes / 2**20:.0f} MiB" for name, num_bytes in about["reserve_estimated"].items()}
    low, high = about["utilization_assumed"]
    lines = [
        f"{about['gpu']}: torch sees {about['total_bytes'] / GIB:.2f} GiB, and "
        f"{about['usable_bytes_assumed'] / GIB:.2f} are assumed. Of the peak, kernels are assumed to reach {low:.0%} "
        f"to {high:.0%}.",
        "",
        "| not in the prediction | measured | estimated |",
        "|---|---|---|",
    ]
    if rows:
        outside = max(row["outside_allocator_bytes"] for row in rows)
        holes = max(row["fragmentation_bytes"] / row["reserved_bytes"] for row in rows)
        lines += [
            f"| outside of torch's allocator (context, libraries) | {outside / 2**20:.0f} MiB "
            f"| {estimated.get('CUDA context', '?')} |",
            f"| cuBLAS' workspaces | {rows[0]['workspace_bytes'] / 2**20:.0f} MiB "
            f"| {estimated.get('cuBLAS workspaces', '?')} |",
            f"| reserved, not allocated | {holes:.1%} of what is reserved, at most | 5 % |",
        ]
    return lines


def main(argv: list[str] | None = None) -> int:
    """Run the cases; 1 where one has no figure or is off by more than the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/plan_gpu"))
    parser.add_argument("--model", action="append", default=[], help="try this model, and no other but those named")
    parser.add_argument("--case", action="append", default=[], choices=[case.name for case in CASES])
    parser.add_argument("--seconds", type=float, default=330.0, help="begin no case after so long")
    parser.add_argument("--bar", type=float, default=0.05, help="largest error that is still fine")
    options = parser.parse_args(argv)
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        print("error: there is no CUDA device here; --device cpu shows that the script works", file=sys.stderr)
        return 2
    gpu = find_gpu() if device == "cuda" else None
    document: dict[str, Any] = {"about": describe(device, gpu), "cases": []}
    options.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    start_fake_group(WORLD_SIZE)
    try:
        workspaces = measure_workspaces() if device == "cuda" else 0
        for case in CASES:
            if options.case and case.name not in options.case:
                continue
            if time.monotonic() - began > options.seconds:
                row: dict[str, Any] = {"case": case.name, "failure": f"not begun: {options.seconds:.0f} s were over"}
            else:
                row = run_case(case, device, options.model, gpu, workspaces)
            document["cases"].append(row)
            document["seconds"] = time.monotonic() - began
            (options.output / "plan_gpu.json").write_text(json.dumps(document, indent=1) + "\n")
            (options.output / "plan_gpu.md").write_text(render(document))
    finally:
        dist.destroy_process_group()
    print(render(document), flush=True)
    print(f"written: {options.output / 'plan_gpu.json'}, {options.output / 'plan_gpu.md'}")
    off = [row["case"] for row in document["cases"] if "error" not in row or abs(row["error"]) > options.bar]
    if off:
        print(f"without a figure, or off by more than {options.bar:.0%}: {', '.join(off)}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
