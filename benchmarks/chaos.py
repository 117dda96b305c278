"""Hundreds of training runs that are killed at random points of saving, then resumed: what was lost, what was wrong.

    python benchmarks/chaos.py --runs 200 -o docs/results/DATE-chaos.md

Each run is two processes that train a tiny sharded model and save at every step. One of them, or both, get SIGKILL at
a chosen call (write, fsync, rename, unlink, ...; of a write maybe after half of it), or a few milliseconds later;
three runs in ten are killed again when they are resumed, three in ten save steps that are there already. Then the
run is resumed and trained to its end. The suite has eight of them (`tests/chaos/test_kills.py`).

- committed-then-lost: the two newest committed checkpoints (`save_total_limit=2`) are there and whole after the kill.
- resumed-wrong: resuming takes the newest committed one, with the weights and the optimizer's state of that step to
  the bit; every later step, the losses and the end are those of a run that nobody killed.
- hung: a survivor ends by itself within ten seconds.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import platform
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chaos.kills import Verdict, run_many


def write_page(verdicts: list[Verdict], seconds: float, remark: str) -> str:
    """Return the Markdown page of what was run and seen."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
    places = collections.Counter(_place(text) for verdict in verdicts for text in verdict.killed_at)
    survivors = collections.Counter(_error(text) for verdict in verdicts for text in verdict.survivors)
    slowest = max((float(text.split(" s:")[0]) for verdict in verdicts for text in verdict.survivors), default=0.0)
    num_kills = sum(count for place, count in places.items() if not place.startswith("never"))
    lines = [
        f"# {len(verdicts)} runs killed while they saved, {date.today().isoformat()}",
        "",
        f"Measured on {os.cpu_count()} CPU cores ({platform.machine()}), 2 gloo processes a run; "
        f"Python {platform.python_version()}, {packages}. {seconds / 60:.0f} minutes. {remark}".rstrip(),
        f"Command: `{' '.join(['python', *sys.argv])}`. What a run is: `benchmarks/chaos.py`.",
        "",
        "| | |",
        "|---|---:|",
        f"| runs | {len(verdicts)} |",
        f"| kills | {num_kills} |",
        f"| committed, then lost | {sum(bool(verdict.lost) for verdict in verdicts)} |",
        f"| resumed wrong | {sum(bool(verdict.wrong) for verdict in verdicts)} |",
        f"| survivors that hung | {sum(bool(verdict.hung) for verdict in verdicts)} |",
        f"| slowest survivor, from the kill to its end | {slowest:.1f} s |",
        f"| runs in which nothing was committed at the last kill | {sum(v.committed is None for v in verdicts)} |",
        "",
        "| killed before | times |",
        "|---|---:|",
        *(f"| {place} | {count} |" for place, count in places.most_common()),
        "",
        "| a survivor ended with | times |",
        "|---|---:|",
        *(f"| {error} | {count} |" for error, count in survivors.most_common()),
    ]
    bad = [verdict for verdict in verdicts if not verdict.is_good]
    lines += ["", *(f"- seed {v.seed} ({v.words}): {v.lost + v.wrong + v.hung}" for v in bad)]
    return "\n".join(lines).rstrip() + "\n"


def _place(text: str) -> str:
    """Return which call on what kind of path, without numbers."""
    if not text.startswith("rank"):
        return text
    operation, path = text.split(" before ")[1].split(" of ", 1)
    folder, _, inside = path.partition("/")
    kind = "".join("N" if character.isdigit() else character for character in folder)
    return f"`{operation}` {kind.replace('NN', 'N')}{'/…' if inside else ''}"


def _error(text: str) -> str:
    words = text.split(": ", 1)[1]
    if words.startswith("ours"):
        return "hf-fsdp's error: " + "".join("N" if c.isdigit() else c for c in words.split(": ", 1)[1])
    return "torch's error in the next collective of training: " + words.split(":")[0].removeprefix("other ")


def main() -> None:
    """Run them, print each, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write every run's verdict there")
    parser.add_argument("--remark", default="", help="added to the page: what else the machine did")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    verdicts: list[Verdict] = []
    began = time.monotonic()
    for verdict in run_many(range(asked.seed, asked.seed + asked.runs)):
        verdicts.append(verdict)
        state = "good" if verdict.is_good else f"BAD {verdict.lost + verdict.wrong + verdict.hung}"
        print(f"{len(verdicts)}/{asked.runs} seed {verdict.seed} {state}: {verdict.words}", flush=True)
        if asked.output is not None:  # kept up to date: it takes long
            asked.output.write_text(write_page(verdicts, time.monotonic() - began, asked.remark), encoding="utf-8")
        if asked.json is not None:
            asked.json.write_text(json.dumps([dataclasses.asdict(item) for item in verdicts]))
    lost = sum(bool(verdict.lost) for verdict in verdicts)
    wrong = sum(bool(verdict.wrong) for verdict in verdicts)
    hung = sum(bool(verdict.hung) for verdict in verdicts)
    print(f"{len(verdicts)} runs: committed-then-lost = {lost}, resumed-wrong = {wrong}, hung = {hung}")
    if lost or wrong or hung:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
