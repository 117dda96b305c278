"""The names of a checkpoint's JSON files."""

from __future__ import annotations

GROUPS_FILE = "optimizer/groups.json"
EXTRA_STATE_FILE = "state/extra_state.json"
SCHEDULER_FILE = "state/scheduler.json"
SCALER_FILE = "state/scaler.json"
DATA_FILE = "state/data.json"
ARGUMENTS_FILE = "state/training_arguments.json"


def rank_file(rank: int) -> str:
    """Return the name of the document of one rank: its random generators, now and before its next batch was built, and
    its running loss."""
    return f"state/rank-{rank:05d}.json"
