"""The full cross of the parity settings: sharded training on N processes against one process, row by row.

    python benchmarks/parity.py                                    # every row: days on a small machine
    python benchmarks/parity.py --sample 200 --seed 0 -o docs/results/DATE-parity.md
    python benchmarks/parity.py --only family=llama offload=parameters

Settings, models, runs and bars are those of `tests/distributed/parity_cases.py`, whose array covers every *pair* of
values in the suite; here every *combination* can be run. The table counts rows by setting, with the largest error seen
and every row that missed a bar; a sample says so.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import random
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.distributed.harness import run_cases
from tests.distributed.parity_cases import SETTINGS, both_optimizers, case_name, short
from tests.distributed.test_parity import CURVE_BAR, GRADIENT_BAR, WEIGHT_BAR, compare

MODULE = "benchmarks.parity"
ROWS_A_SPAWN = 20


class _Cases(dict[str, Any]):
    """Rows of the cross by their index, made when they are asked for."""

    def __missing__(self, index: str) -> Any:
        return both_optimizers(row_at(int(index)), {})


CASES = _Cases()


def num_rows() -> int:
    """Return the size of the full cross."""
    total = 1
    for values in SETTINGS.values():
        total *= len(values)
    return total


def row_at(index: int) -> dict[str, Any]:
    """Return the row of the full cross with this number."""
    row = {}
    for name, values in SETTINGS.items():
        index, chosen = divmod(index, len(values))
        row[name] = values[chosen]
    return row


def choose_rows(only: list[str], sample: int | None, seed: int) -> list[int]:
    """Return the numbers of the rows to run: those that hold every ``setting=value`` of `only`, or a sample of them."""
    wanted = dict(item.split("=", 1) for item in only)
    unknown = [f"{name}={value}" for name, value in wanted.items() if value not in map(short, SETTINGS.get(name, ()))]
    if unknown:
        known = "; ".join(f"{name}: {', '.join(map(short, values))}" for name, values in SETTINGS.items())
        raise SystemExit(f"unknown: {', '.join(unknown)}\n  known {known}")
    rows = [
        index
        for index in range(num_rows())
        if all(short(row_at(index)[name]) == value for name, value in wanted.items())
    ]
    return rows if sample is None or sample >= len(rows) else sorted(random.Random(seed).sample(rows, sample))


def run_rows(rows: list[int], world_size: int) -> Iterator[tuple[int, str | None, dict[str, float]]]:
    """Run rows in spawns of twenty; yield (row, what went wrong or None, largest errors)."""
    for start in range(0, len(rows), ROWS_A_SPAWN):
        names = [str(index) for index in rows[start : start + ROWS_A_SPAWN]]
        single = run_cases(MODULE, names, world_size=1)
        sharded = run_cases(MODULE, names, world_size=world_size)
        for name in names:
            try:
                twin, ranks = single[name].get()[0], sharded[name].get()
                compare(twin, ranks)
                yield int(name), None, _errors(twin, ranks)
            except AssertionError as error:
                yield int(name), _what_failed(error), {}


def _what_failed(error: AssertionError) -> str:
    """The last line of the message, or the assertion itself where it has none (pytest would write it out)."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else traceback.extract_tb(error.__traceback__)[-1].line or "an assertion failed"


def _errors(twin: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, float]:
    """The largest errors of a row that met the bars, in their units."""
    expected, runs = twin["sgd"], [rank["sgd"] for rank in ranks]
    norm = torch.stack([gradient.double().norm() for gradient in expected["gradients"].values()]).norm()

    def largest(what: str) -> float:
        return max(
            (run[what][name] - value).double().norm().item() for run in runs for name, value in expected[what].items()
        )

    curves = zip(
        twin["adamw"]["losses"] * len(ranks), itertools.chain(*(r["adamw"]["losses"] for r in ranks)), strict=True
    )
    return {
        "gradient": largest("gradients") / norm.item(),
        "weight": largest("weights"),
        "loss": max(abs(a - b) for a, b in curves),
    }


def write_table(results: list[tuple[int, str | None, dict[str, float]]], world_size: int, seconds: float) -> str:
    """Return the Markdown page: what was run, on what, counts by setting, errors, rows that missed."""
    missed = [(row, text) for row, text, _ in results if text is not None]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "peft"))
    worst = {key: max((errors[key] for _, _, errors in results if errors), default=float("nan")) for key in _BARS}
    lines = [
        f"# Parity, {len(results)} of {num_rows()} combinations, {date.today().isoformat()}",
        "",
        f"Measured on {os.cpu_count()} CPU cores ({platform.machine()}), {world_size} gloo processes against one, "
        f"fp32; Python {platform.python_version()}, {packages}. {seconds / 60:.0f} minutes. Command: "
        f"`{' '.join(['python', *sys.argv])}`.",
        "",
        f"{len(results) - len(missed)} met every bar, {len(missed)} did not.",
        "",
        "| largest error | bar | seen |",
        "|---|---|---|",
        *(f"| {words} | {bar:g} | {worst[key]:.1e} |" for key, (words, bar) in _BARS.items()),
        "",
        "| setting | value | rows | met |",
        "|---|---|---|---|",
    ]
    counts: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for row, text, _ in results:
        for name, value in row_at(row).items():
            counts[name, short(value)].append(text is None)
    for name, values in SETTINGS.items():
        lines += [
            f"| {name} | {short(v)} | {len(counts[name, short(v)])} | {sum(counts[name, short(v)])} |" for v in values
        ]
    lines += ["", *(f"- missed: `{case_name(row_at(row))}`: {text}" for row, text in missed)]
    return "\n".join(lines).rstrip() + "\n"


_BARS = {
    "gradient": ("gradient of a tensor, of the global norm", GRADIENT_BAR),
    "weight": ("weight of a tensor after 5 SGD steps (L2)", WEIGHT_BAR),
    "loss": ("loss under AdamW", CURVE_BAR),
}


def main() -> None:
    """Run the rows that were asked for, print each, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sample", type=int, help="run only this many rows, chosen at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    rows, results, began = choose_rows(asked.only, asked.sample, asked.seed), [], time.monotonic()
    for row, text, errors in run_rows(rows, asked.processes):
        results.append((row, text, errors))
        print(f"{len(results)}/{len(rows)} {case_name(row_at(row))}: {text or 'met'}", flush=True)
        if asked.output is not None:  # kept up to date: the cross takes long
            asked.output.write_text(write_table(results, asked.processes, time.monotonic() - began), encoding="utf-8")
    if any(text for _, text, _ in results):
        raise SystemExit("not every row met the bars")


if __name__ == "__main__":
    main()
