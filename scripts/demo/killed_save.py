"""What a killed save left on the disk, and whether the run that went on from there computed the same numbers again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"  # the commit mark: a folder without it is no checkpoint
# What the same step must give again, to the last bit. Times differ, and TRL counts tokens anew in every launch.
COMPARED = ("loss", "grad_norm", "learning_rate")

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class KilledSave:
    """What lies in a run's folder after the kill.

    Args:
        step: the step whose save was killed.
        resumable_step: the newest committed checkpoint's.
        staging: the folder of the save that did not end.
    """

    step: int
    resumable_step: int
    staging: Path


def look_at_killed_save(output_dir: Path, step: int, num_ranks: int, exit_code: int) -> KilledSave:
    """Return what the killed save of `step` left.

    Args:
        output_dir: of the run.
        step: where it was to be killed.
        num_ranks: how many processes had written their shards by then.
        exit_code: of the launcher.

    Raises:
        ValueError: the kill did not come, or not between the last shard and the commit.
    """
    if exit_code == 0:
        raise ValueError(f"the run ended by itself: the kill in the save of step {step} never came")
    committed = {int(path.name.rpartition("-")[2]): path for path in output_dir.glob("checkpoint-*") if _is_whole(path)}
    if step in committed:
        raise ValueError(f"the kill came too late: {committed[step]} is committed")
    staging = output_dir / f".hf-fsdp-saving-{step}"
    if not staging.is_dir():
        raise ValueError(f"the run ended (exit {exit_code}) before its save of step {step}")
    if _is_whole(staging):
        raise ValueError(f"the kill came too late: {staging} has its manifest")
    shards = list(staging.glob("optimizer/shard-*.safetensors"))
    if len(shards) != num_ranks:
        raise ValueError(f"the kill came too early: {len(shards)} of {num_ranks} ranks had written their shards")
    if not committed:
        raise ValueError(f"the run was killed in the save of step {step} without an earlier checkpoint to go on from")
    return KilledSave(step=step, resumable_step=max(committed), staging=staging)


def _is_whole(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A run that was killed, and what it computed after it went on.

    Args:
        killed: metrics.jsonl as the killed launch left it.
        resumed: metrics.jsonl when the resumed launch had ended.
        resumed_from: the step of the checkpoint that it went on from.
        killed_at: the step whose save was killed.
    """

    killed: Sequence[Record]
    resumed: Sequence[Record]
    resumed_from: int
    killed_at: int

    def steps(self) -> range:
        """Return the steps that both launches had to compute."""
        return range(self.resumed_from + 1, self.killed_at + 1)

    def pairs(self) -> list[tuple[Record, Record]]:
        """Return (record of the killed launch, record of the resumed one) for each step that both have."""
        killed, resumed = _by_step(self.killed), _by_step(self.resumed)
        return [(killed[step], resumed[step]) for step in self.steps() if step in killed and step in resumed]

    def unmet_claims(self) -> list[str]:
        """Return what does not hold; empty when the steps that were computed twice are equal to the bit."""
        unmet = []
        killed, resumed = _by_step(self.killed), _by_step(self.resumed)
        if not self.steps():
            unmet.append(
                f"no step was computed twice: killed at step {self.killed_at}, resumed from step {self.resumed_from}"
            )
        for step in self.steps():
            if lacking := [name for name, run in (("killed", killed), ("resumed", resumed)) if step not in run]:
                unmet.append(f"step {step} is missing in the metrics of the {' and the '.join(lacking)} launch")
        kept = [record for record in self.killed if record["step"] <= self.resumed_from]
        if list(self.resumed[: len(kept)]) != kept:
            unmet.append(
                f"metrics.jsonl lost what was written up to step {self.resumed_from}: it was not resumed there"
            )
        for one, two in self.pairs():
            if one["seconds"] == two["seconds"]:
                unmet.append(f"step {one['step']} was not computed again: its record is the killed launch's")
            unmet += [
                f"step {one['step']} has {name} {one[name]!r} before the kill and {two[name]!r} after the resume"
                for name in COMPARED
                if one[name] != two[name]
            ]
        return unmet

    def to_mapping(self) -> dict[str, Any]:
        """Return the figures, for results.json."""
        return {
            "killed_in_the_save_of_step": self.killed_at,
            "resumed_from_step": self.resumed_from,
            "steps": [
                {"step": one["step"], **{name: [one[name], two[name]] for name in COMPARED}}
                for one, two in self.pairs()
            ],
            "equal_to_the_bit": not self.unmet_claims(),
        }


def _by_step(records: Sequence[Record]) -> dict[int, Record]:
    return {record["step"]: record for record in records if "loss" in record}
