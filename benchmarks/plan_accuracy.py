"""The planner's simulated peak memory against the real peaks of 2 gloo processes, trained by Trainer with our callback.

    python benchmarks/plan_accuracy.py -o docs/results/DATE-plan-accuracy.md --json accuracy.json
    python benchmarks/plan_accuracy.py --cases "full 2x512" "gemma3"
    python benchmarks/plan_accuracy.py --measured accuracy.json           # measure nothing again, only simulate
    python benchmarks/plan_accuracy.py --measure-only --json accuracy.json
    python benchmarks/plan_accuracy.py --dump "gemma3"                    # what was alive at the real peak

Eighteen cases (`plan_accuracy_cases.py`). Every case is trained twice, once under each instrument, on two new
processes; the peak of the steps after the first counts, on rank 0. Simulated is the same `Job`, for the kernels of a
CPU. The bar: within 5 % of the heap in 16 of 18 cases, within 8 % in all, never under by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections import defaultdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.plan_accuracy_cases import CASES, WORLD_SIZE, build_job, find_case
from benchmarks.plan_accuracy_run import INSTRUMENTS, measure, steady_bytes

MIB = 1024**2
CLOSE, FAR, UNDER = 0.05, 0.08, -0.05
# Of 18 cases two may be further off than CLOSE.
NUM_MAY_MISS = 2

Row = dict[str, Any]


def measure_cases(names: list[str], measured: dict[str, Any], num_steps: int, save: Path | None) -> dict[str, Any]:
    """Return case -> instrument -> outcome, running what `measured` does not hold; saved after every run."""
    for name in names:
        for instrument in INSTRUMENTS:
            outcomes = measured.setdefault(name, {})
            if instrument not in outcomes:
                outcomes[instrument] = measure(find_case(name), instrument, num_steps, keep_storages=True)
                peak = steady_bytes(outcomes[instrument]) / MIB
                print(f"measured: {name}: {instrument} {peak:.1f} MiB", flush=True)
                if save is not None:
                    save.write_text(json.dumps(measured))
    return measured


def build_row(name: str, outcomes: dict[str, Any], predicted: dict[str, int] | None) -> Row:
    """Return the numbers of one line of the table, in bytes."""
    heap, count = steady_bytes(outcomes["heap"]), steady_bytes(outcomes["count"])
    rest = outcomes["heap"]["rests"][-1]
    others = {
        "small blocks": rest["heap_small"] - rest["tensors_small"],
        "large blocks": rest["heap_maps"] - rest["tensors_maps"],
    }
    row: Row = {"name": name, "num_parameters": outcomes["heap"]["num_parameters"], "heap": heap, "count": count}
    row["phases"] = {instrument: outcomes[instrument]["steps"][-1]["by_phase"] for instrument in INSTRUMENTS}
    row["first_step"] = {instrument: outcomes[instrument]["steps"][0]["by_phase"] for instrument in INSTRUMENTS}
    row["no_tensors"] = others
    if predicted is not None:
        row |= {"predicted": predicted["peak"], "predicted_phases": predicted["phases"]}
        row |= {"heap_error": predicted["peak"] / heap - 1, "count_error": predicted["peak"] / count - 1}
    return row


def simulate_cases(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return case -> simulated bytes of the peak, and by phase; offloaded ones lie in the same memory here."""
    from hf_fsdp.plan.service import simulate

    found = {}
    for name, simulation in zip(names, simulate([build_job(find_case(name)) for name in names]), strict=True):
        phases = {phase.name: phase.num_bytes + phase.host_bytes for phase in simulation.phases}
        found[name] = {"peak": max(phases.values()), "phases": phases, "num_parameters": simulation.num_parameters}
    return found


def judge(rows: list[Row]) -> list[str]:
    """Return the sentences that say whether the bar was met, against the heap."""
    errors = [row["heap_error"] for row in rows]
    close = sum(abs(error) <= CLOSE for error in errors)
    wanted = len(rows) - NUM_MAY_MISS
    far = max(errors, key=abs)
    under = min(errors)
    return [
        f"- within {CLOSE:.0%} of the heap: {close} of {len(rows)} (bar {wanted}: {_met(close >= wanted)})",
        f"- furthest off: {far:+.1%} (bar {FAR:.0%}: {_met(abs(far) <= FAR)})",
        f"- furthest under: {min(under, 0.0):+.1%} (bar {UNDER:.0%}: {_met(under >= UNDER)})",
        f"- against the count of tensors: {min(row['count_error'] for row in rows):+.1%} to "
        f"{max(row['count_error'] for row in rows):+.1%}",
    ]


def is_met(rows: list[Row]) -> bool:
    """Whether all of the bar is met."""
    return "MISSED" not in "".join(judge(rows))


def _met(is_so: bool) -> str:
    return "met" if is_so else "MISSED"


def table(rows: list[Row]) -> list[str]:
    """Return the table's lines; without predictions where nothing was simulated."""
    has_predictions = all("predicted" in row for row in rows)
    head = ["case", "parameters", *(["simulated"] if has_predictions else []), "heap", "count of tensors"]
    head += [
        *(["against heap", "against count"] if has_predictions else []),
        "heap at rest that is no tensor",
        "peak in",
    ]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 2)}---|"]
    for row in rows:
        cells = [row["name"], f"{row['num_parameters'] / 1e6:.0f}M"]
        cells += [_mib(row["predicted"])] if has_predictions else []
        cells += [_mib(row["heap"]), _mib(row["count"])]
        if has_predictions:
            cells += [f"{row['heap_error']:+.1%}", f"{row['count_error']:+.1%}"]
        large, small = row["no_tensors"]["large blocks"], row["no_tensors"]["small blocks"]
        phases = row["phases"]["heap"]
        cells += [f"{_mib(large)} + {_mib(small)}", max(phases, key=phases.__getitem__)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.1f}"


def first_step_table(rows: list[Row]) -> list[str]:
    """Return the first step's phases: its forward and backward hold no optimizer state."""
    phases = list(rows[0]["first_step"]["heap"])
    head = ["case", *(f"{phase}: {instrument}" for phase in phases for instrument in INSTRUMENTS)]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for row in rows:
        cells = [_mib(row["first_step"][instrument][phase]) for phase in phases for instrument in INSTRUMENTS]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return lines


def page(rows: list[Row], num_steps: int) -> str:
    """Return the dated page."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "peft"))
    has_predictions = all("predicted" in row for row in rows)
    smallest = min(row["num_parameters"] for row in rows) / 1e6
    lines = [
        "# Accuracy of the simulated peak memory",
        "",
        f"{len(rows)} trainings of models of {smallest:.0f}M parameters and more by `Trainer` with `FSDPCallback` "
        f"(bf16-mixed, fused AdamW, {num_steps} steps) on {WORLD_SIZE} gloo processes of one thread: {versions}; "
        f"{platform.machine()} CPU, Python {platform.python_version()}; {date.today()}. MiB of rank 0, largest of the "
        "steps after the first. Written by `python benchmarks/plan_accuracy.py`.",
        "",
        "- **simulated**: `hf_fsdp.plan` on the same job, for the kernels of a CPU, in a process of its own.",
        "- **heap** (measured): glibc's blocks in use (`mallinfo2`) between operators, above what they were before the "
        "model was built. **count of tensors** (measured): storages alive, in other runs.",
        "- **heap at rest that is no tensor**: what the heap holds between steps beyond the model's, gradients' and "
        "optimizer's tensors, in large blocks + small ones. It is part of the heap's number and nothing was "
        "subtracted for it. In the case that was looked into (full 2x512, malloc interposed) the large ones came from "
        "libtorch's kernels and MKL, none from the tensor allocator.",
        "",
        *table(rows),
        "",
        *(judge(rows) if has_predictions else ["Nothing was simulated."]),
        "",
        "The first step (measured), whose optimizer state is made at its end:",
        "",
        *first_step_table(rows),
    ]
    return "\n".join([*lines, ""])


def dump(name: str, outcome: dict[str, Any]) -> str:
    """Return what was alive at the real peak, by operator, shape and dtype, largest first."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for item in outcome["storages"]:
        key = (item["made_by"], tuple(item["shape"]), item["dtype"].removeprefix("torch."), item["in_backward"])
        if item["num_bytes"]:
            groups[key].append(item["num_bytes"])
    lines = [f"{name}: alive at the largest count of tensors, {_mib(sum(map(sum, groups.values())))} MiB"]
    for (made_by, shape, dtype, in_backward), sizes in sorted(groups.items(), key=lambda group: -sum(group[1])):
        if sum(sizes) >= MIB / 10:
            where = "backward" if in_backward else ""
            text = "x".join(map(str, shape))
            lines.append(f"{_mib(sum(sizes)):>8} MiB  {len(sizes):>4} x {dtype:<9} {text:<20} {made_by} {where}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--steps", type=int, default=3, help="of each training; the first is not counted")
    parser.add_argument("--measure-only", action="store_true", help="simulate nothing")
    parser.add_argument("--measured", type=Path, help="a file that --json wrote: what it holds is not measured again")
    parser.add_argument("--json", type=Path, help="write what was measured here, after every run")
    parser.add_argument("--dump", metavar="NAME", help="print what was alive at the real peak of a case")
    parser.add_argument("-o", "--output", type=Path, help="write the page here")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps 2 at least: the first step is not counted")
    names = [find_case(name).name for name in args.cases or ()] or [case.name for case in CASES]
    measured = json.loads(args.measured.read_text()) if args.measured and args.measured.exists() else {}
    if args.dump:
        name = find_case(args.dump).name
        found = measured.get(name, {}).get("count")
        found = found or measure(find_case(name), "count", args.steps, keep_storages=True)
        return print(dump(name, found))
    measured = measure_cases(names, measured, args.steps, args.json)
    predictions = {} if args.measure_only else simulate_cases(names)
    rows = [build_row(name, measured[name], predictions.get(name)) for name in names]
    for row in rows:
        simulated = predictions.get(row["name"], {}).get("num_parameters", row["num_parameters"])
        if simulated != row["num_parameters"]:
            raise SystemExit(f"{row['name']}: {simulated} parameters simulated, {row['num_parameters']} trained")
    text = page(rows, args.steps)
    print(text)
    if args.output is not None:
        args.output.write_text(text, encoding="utf-8")
    if not args.measure_only and not is_met(rows):
        raise SystemExit("the bar is missed")


if __name__ == "__main__":
    # Before the process that the ranks are forked from begins, and for it alone: this one has no tensors.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
