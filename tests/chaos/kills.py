"""Runs that are killed at a random point of saving, once or twice, then resumed; and what must hold of each.

`python -m tests.chaos.kills --runs 8 --json FILE` is what the suite starts: lives are forked, which a process that
runs pytest should not do. `benchmarks/chaos.py` runs hundreds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_fsdp.storage.files import files_under
from tests.chaos.lives import NUM_RANKS, NUM_STEPS, SURVIVOR_SECONDS, Life, Told, live

SETTINGS: tuple[dict[str, Any], ...] = (
    {"format": "sharded", "async_save": False},
    {"format": "sharded", "async_save": True},
    {"format": "full", "async_save": False},
    {"format": "full", "async_save": True},
)
# An error that names what happened, on a survivor in the middle of a save, comes within this.
ERROR_SECONDS = 10.0


@dataclass
class Verdict:
    """What one run showed; `lost`, `wrong` and `hung` are empty when all is well.

    Args:
        seed: of the run.
        words: what was done, for a person.
        lost: committed checkpoints that are gone or damaged.
        wrong: what a resumed run had or did that it must not.
        hung: survivors that did not end by themselves in time.
        committed: the newest committed step at the last kill, None for none.
        killed_at: the calls before which processes were killed.
        survivors: how survivors ended.
    """

    seed: int
    words: str
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    committed: int | None = None
    killed_at: list[str] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.wrong or self.hung)


class Chaos:
    """Runs that are killed, all in one folder, against lives that were not.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._unbroken: dict[str, Told] = {}

    def unbroken(self, setting: dict[str, Any]) -> Told:
        """Return a life with this setting that nobody killed; lived once."""
        key = json.dumps(setting)
        if key not in self._unbroken:
            place = self._folder / f"unbroken-{len(self._unbroken)}"
            told = live(Life(setting, limit=None), place / "run", place / "life")
            if not told.has_ended_well:
                raise RuntimeError(f"a run that nobody killed failed: {told.errors}")
            first = next(iter(self._unbroken.values()), told)
            if (first.hashes, first.losses) != (told.hashes, told.losses):
                raise RuntimeError("two runs that nobody killed differ: training is not deterministic")
            self._unbroken[key] = told
        return self._unbroken[key]

    def run(self, seed: int) -> Verdict:
        """Kill a run, maybe again when it is resumed, then let it end; return what it showed."""
        choose = random.Random(seed)
        setting = SETTINGS[seed % len(SETTINGS)]
        expected = self.unbroken(setting)
        place = self._folder / f"run-{seed}"
        output_dir = place / "run"
        place.mkdir()
        resume: str | bool | None = None
        steps_left = NUM_STEPS
        words = [f"{setting['format']}{', async' if setting['async_save'] else ''}"]
        if choose.random() < 0.3:  # a run that saves steps that are there already
            start = choose.randrange(1, NUM_STEPS)
            self._begin_with_whole_run(setting, place)
            resume = str(output_dir / f"checkpoint-{start}")
            words.append(f"steps {start + 1} to {NUM_STEPS} again")
            steps_left = NUM_STEPS - start
        verdict = Verdict(seed, "")
        for number in range(1 if choose.random() < 0.7 else 2):
            if not steps_left:
                break
            life, what = _draw(choose, setting, expected, resume, steps_left)
            words.append(what)
            told = live(life, output_dir, place / f"life-{number}")
            _look_after_a_kill(verdict, told, life, output_dir, place / f"life-{number}")
            _look_at_resumed(verdict, told, expected, resume, None)
            resume = True if verdict.committed is not None else None
            steps_left = NUM_STEPS - (verdict.committed or 0)
        if verdict.committed is None:  # saying so, instead of starting anew in silence
            told = live(Life(setting, resume=True), output_dir, place / "life-refused")
            if not all(error and "holds no checkpoint that can be resumed from" in error for error in told.errors):
                verdict.wrong.append(f"nothing was committed, and resuming ended with {told.errors}")
        last = live(Life(setting, resume=resume), output_dir, place / "life-last")
        _look_at_resumed(verdict, last, expected, resume, verdict.committed)
        if not last.has_ended_well:
            verdict.wrong.append(f"the run could not be continued: {last.errors}")
        elif _last_states(last) != expected.hashes[NUM_STEPS]:
            verdict.wrong.append("its last weights and optimizer state are others than those of an unbroken run")
        left = sorted(p.name for p in output_dir.iterdir() if p.name.startswith(".hf-fsdp"))
        if left and last.hashes:  # it saved at least once more, so it has cleaned up
            verdict.wrong.append(f"it left {left}")
        verdict.words = "; ".join(words)
        if verdict.is_good:
            shutil.rmtree(place)
        return verdict

    def _begin_with_whole_run(self, setting: dict[str, Any], place: Path) -> None:
        whole = self._folder / f"unbroken-{list(self._unbroken).index(json.dumps(setting))}"
        shutil.copytree(whole / "run", place / "run")
        shutil.copy(whole / "committed.log", place / "committed.log")


def _last_states(told: Told) -> list[str | None]:
    """Return what the ranks had at their end: after the last step, or after resuming when no step was left."""
    return told.hashes.get(NUM_STEPS) or [first[1] if first is not None else None for first in told.resumed]


def _draw(
    choose: random.Random, setting: dict[str, Any], expected: Told, resume: str | bool | None, num_steps: int
) -> tuple[Life, str]:
    """Draw who dies, and when: half of the time at any call (most are writes), else at any kind of call."""
    victim = choose.choice([None, 0, NUM_RANKS - 1])
    who = "all ranks" if victim is None else f"rank {victim}"
    operations = expected.operations[victim or 0]
    operations = operations[: len(operations) * num_steps // NUM_STEPS]
    kind = None if choose.random() < 0.5 else choose.choice(sorted(set(operations)))
    call = choose.randrange(len(operations) if kind is None else operations.count(kind))
    delay = choose.uniform(0, 0.05) if choose.random() < 0.25 else None
    late = f" and {1000 * delay:.0f} ms" if delay is not None else ""
    return Life(setting, resume, victim, call, kind, delay), f"{who} killed at {kind or 'call'} {call}{late}"


def _look_after_a_kill(verdict: Verdict, told: Told, life: Life, output_dir: Path, notes: Path) -> None:
    """Look at the folder and at the survivors; nothing of hf-fsdp is used to decide what is committed."""
    killed = notes / "killed.txt"
    verdict.killed_at.append(killed.read_text().strip() if killed.exists() else "never: it did not get there")
    if told.has_ended_well:
        verdict.killed_at[-1] = "never: it had ended"
    elif told.survivor_seconds > SURVIVOR_SECONDS:
        verdict.hung.append(f"a survivor of {verdict.killed_at[-1]}")
    elif life.victim is not None:
        survivor = told.errors[NUM_RANKS - 1 - life.victim]
        verdict.survivors.append(f"{told.survivor_seconds:.1f} s: {str(survivor).splitlines()[0]}")
        if told.survivor_seconds > ERROR_SECONDS:
            verdict.hung.append(f"a survivor took {told.survivor_seconds:.1f} s")
    order = committed_order(notes.parent / "committed.log")
    verdict.committed = order[-1] if order else None
    for step in order[-2:] if life.limit == 2 else order:
        if problem := _lost(output_dir, step, hidden=not told.has_ended_well):
            verdict.lost.append(f"checkpoint-{step}: {problem} ({verdict.killed_at[-1]})")


def committed_order(log: Path) -> list[int]:
    """Return the steps of the checkpoints that are there, by the order in which they were committed.

    The log holds every rename that a run did: from a staging folder to a name, from a name to what is deleted or set
    aside while it is replaced.
    """
    order: list[int] = []
    for line in log.read_text().splitlines() if log.exists() else []:
        source, target = line.split()
        if target.startswith("checkpoint-"):
            step = int(target.rpartition("-")[2])
            if source.startswith(".hf-fsdp-saving-"):
                order = [other for other in order if other != step] + [step]
        elif target.startswith(".hf-fsdp-deleted-checkpoint-"):
            step = int(target.rpartition("-")[2])
            order = [other for other in order if other != step]
    return order


def _lost(output_dir: Path, step: int, hidden: bool) -> str | None:
    """Return what is wrong with a committed checkpoint, read by plain means; it may be set aside after a crash."""
    places = [output_dir / f"checkpoint-{step}", *([output_dir / f".hf-fsdp-replaced-{step}"] if hidden else [])]
    for place in places:
        if (place / "manifest.json").is_file():
            files = json.loads((place / "manifest.json").read_text())["files"]
            wrong = [name for name, (size, _) in files.items() if os.path.getsize(place / name) != size]
            if wrong or set(files) | {"manifest.json"} != set(files_under(place)):
                return f"{wrong} have other sizes, or files are missing"
            return None
    return "it is gone"


def _look_at_resumed(
    verdict: Verdict, told: Told, expected: Told, resume: str | bool | None, committed: int | None
) -> None:
    """Look at what a life had after resuming and after each of its steps."""
    for rank, first in enumerate(told.resumed):
        if first is None or resume is None:
            continue
        step, resumed = first
        if isinstance(resume, str):
            wanted = [int(resume.rpartition("-")[2])]
        else:
            # A kill by the clock may fall between a rename and its note: then the one after is there too.
            wanted = [committed, committed + 1] if committed is not None else [step]
        if step not in wanted:
            verdict.wrong.append(f"rank {rank} resumed from step {step} instead of {wanted[0]}")
        if resumed != expected.hashes[step][rank]:
            verdict.wrong.append(f"rank {rank} had other weights or optimizer state after resuming from step {step}")
    for step, states in told.hashes.items():
        for rank, state in enumerate(states):
            if state is not None and state != expected.hashes[step][rank]:
                verdict.wrong.append(f"rank {rank} had other weights or optimizer state after step {step}")
    if told.has_ended_well and told.losses and told.losses != expected.losses[-len(told.losses) :]:
        verdict.wrong.append(f"losses {told.losses} instead of {expected.losses[-len(told.losses) :]}")


def run_many(seeds: range) -> Iterator[Verdict]:
    """Yield the verdict of a run for every seed."""
    with tempfile.TemporaryDirectory(prefix="hf-fsdp-chaos-") as folder:
        chaos = Chaos(Path(folder))
        for seed in seeds:
            yield chaos.run(seed)


def main() -> None:
    """Run, print a line for each, write all verdicts as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    began, verdicts = time.monotonic(), []
    for verdict in run_many(range(asked.seed, asked.seed + asked.runs)):
        verdicts.append(dataclasses.asdict(verdict))
        print(f"{time.monotonic() - began:6.1f} s {verdict}", flush=True)
    asked.json.write_text(json.dumps(verdicts))


if __name__ == "__main__":
    main()
