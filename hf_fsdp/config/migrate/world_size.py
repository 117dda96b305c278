"""A mesh that does not fit the processes of the old file, with fixes in that file's keys or the command's options."""

from __future__ import annotations

from dataclasses import replace

from hf_fsdp.config.migrate.draft import Draft
from hf_fsdp.errors import Problem

MESH_KEYS = ("sharding.dp_replicate_size", "sharding.dp_shard_size")


def fixes_for_the_old_file(draft: Draft, problems: list[Problem]) -> list[Problem]:
    """Return `problems` of the new config with fixes that can be followed before there is a new config."""
    machines = draft.old.machines
    processes = machines.num_processes if machines is not None else None
    if processes is None:
        return problems
    fix = _fix(draft, processes)
    return [replace(problem, fix=fix) if problem.message.startswith(MESH_KEYS) else problem for problem in problems]


def _fix(draft: Draft, processes: int) -> str:
    replicas, shards = (draft.lines[key].value if key in draft.lines else None for key in MESH_KEYS)
    keys = {item.name: item.text.partition(":")[0] for item in draft.old.settings if item.name.startswith("dp_")}
    wanted = replicas or 1
    if isinstance(shards, int) and shards > 1:
        return f"num_processes: {shards * wanted}   # {wanted} x {shards}, in a copy of the file"
    if isinstance(shards, int):
        return f"remove {keys['dp_shard_size']} from a copy of the file, and let copies have 2 processes or more"
    fitting = [count for count in range(1, processes // 2 + 1) if processes % count == 0]
    near = 1 if wanted == processes else min(fitting, key=lambda count: (abs(count - wanted), count))
    more = wanted * max(2, -(-processes // wanted))
    option = f"{keys['dp_replicate_size']}: {near}" if "dp_replicate_size" in keys else f"--replicas {near}"
    meaning = f"{near} x {processes // near} processes"
    return f"{option}   # {meaning}; or in a copy of the file, if the run has more processes: num_processes: {more}"
