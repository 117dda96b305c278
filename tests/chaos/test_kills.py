"""Processes that are killed while they save: nothing committed is lost, and what is resumed is what was saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.kills import committed_order
from tests.distributed.harness import REPOSITORY

NUM_RUNS = 8


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    answer = tmp_path_factory.mktemp("kills") / "verdicts.json"
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    command = [sys.executable, "-m", "tests.chaos.kills", "--runs", str(NUM_RUNS), "--json", str(answer)]
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, timeout=600)
    found: list[dict[str, Any]] = json.loads(answer.read_text())
    return found


@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_a_killed_run_goes_on(verdicts: list[dict[str, Any]], seed: int) -> None:
    verdict = verdicts[seed]
    assert verdict["seed"] == seed
    assert (verdict["lost"], verdict["wrong"], verdict["hung"]) == ([], [], []), verdict


def test_runs_were_killed_while_they_saved(verdicts: list[dict[str, Any]]) -> None:
    places = [place for verdict in verdicts for place in verdict["killed_at"]]
    assert sum(place.startswith("rank") for place in places) >= NUM_RUNS - 1, places
    assert any(verdict["committed"] is not None for verdict in verdicts)


def test_order_of_commits_is_read_from_renames(tmp_path: Path) -> None:
    log = tmp_path / "committed.log"
    renames = [".hf-fsdp-saving-1 checkpoint-1", ".hf-fsdp-saving-2 checkpoint-2", ".hf-fsdp-saving-3 checkpoint-3"]
    renames += ["checkpoint-2 .hf-fsdp-replaced-2", ".hf-fsdp-saving-2 checkpoint-2"]
    renames += ["checkpoint-1 .hf-fsdp-deleted-checkpoint-1", "checkpoint-3 .hf-fsdp-replaced-3"]
    log.write_text("\n".join(renames) + "\n")
    assert committed_order(log) == [3, 2]
    assert committed_order(tmp_path / "nothing.log") == []


SURVIVOR = """
import json, sys
from pathlib import Path
from tests.chaos.lives import Life, live
folder = Path(sys.argv[1])
told = live(Life(victim=1, at_step=3), folder / "run", folder / "notes")
(folder / "told.json").write_text(json.dumps([told.errors, told.survivor_seconds]))
"""


def test_the_survivor_of_a_killed_process_says_what_happened(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    subprocess.run([sys.executable, "-c", SURVIVOR, str(tmp_path)], cwd=REPOSITORY, env=environment, check=True)
    (survivor, victim), seconds = json.loads((tmp_path / "told.json").read_text())
    assert victim == "killed" and seconds < 10
    assert survivor.startswith("ours IntegrationError: another process of the run ended")
    assert "after step 2\n" in survivor and 'resume_from_checkpoint="auto"' in survivor
