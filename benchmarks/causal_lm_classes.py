"""Every causal language model class of transformers through units, a training step, saving and loading.

    python -m benchmarks.causal_lm_classes --output docs/results/2026-11-30-causal-lm-classes.md

Runs on 2 CPU processes, from the root of the repository (the cases are those of the tests). A class that crashes or
hangs ends its spawn and not the run. `--classes` runs a few; results are kept in `--json` and reused by a later call.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.distributed.class_sweep_cases import CASES
from tests.distributed.harness import run_cases

WORLD_SIZE = 2
# Classes of one spawn: a crash or a time-out starts a new one behind the class that caused it.
CLASSES_PER_SPAWN = 30
LOSS_BAR = 1e-5
GRADIENT_BAR = 1e-6
WEIGHT_BAR = 1e-5


def main() -> int:
    """Run what is not in the JSON file yet, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the table as Markdown; default: print it")
    parser.add_argument("--json", type=Path, help="file that keeps results between calls")
    parser.add_argument("--classes", nargs="*", choices=list(CASES), default=list(CASES), metavar="CLASS")
    parser.add_argument("--seconds", type=float, default=180.0, help="time limit of one class")
    options = parser.parse_args()
    kept: Path | None = options.json
    rows: dict[str, Any] = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    missing = [name for name in options.classes if name not in rows]
    for start in range(0, len(missing), CLASSES_PER_SPAWN):
        part = missing[start : start + CLASSES_PER_SPAWN]
        began = time.monotonic()
        outcomes = run_cases(CASES_MODULE, part, WORLD_SIZE, seconds_per_case=options.seconds)
        for name, outcome in outcomes.items():
            rows[name] = {"crash": outcome.failure[-2000:]} if outcome.failure else {"ranks": outcome.values}
        if kept is not None:
            kept.write_text(json.dumps(rows, indent=1))
        print(f"{start + len(part)} of {len(missing)} classes, {time.monotonic() - began:.0f} s", flush=True)
    table = render({name: rows[name] for name in options.classes})
    if options.output:
        options.output.write_text(table, encoding="utf-8")
    else:
        print(table)
    return 0


CASES_MODULE = "tests.distributed.class_sweep_cases"


# -- the table --------------------------------------------------------------------------------------------------------


def render(rows: dict[str, Any]) -> str:
    """Return the results as a page: what was run, totals, one line a class."""
    lines = [judge(name, row) for name, row in rows.items()]
    count = Counter(
        key for line in lines for key in ("builds", "units", "step", "saves", "halves") if line[key] == "yes"
    )
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
    machine = f"{platform.machine()} CPU, Python {platform.python_version()}"
    text = [
        "# Causal language model classes",
        "",
        f"Every class in `MODEL_FOR_CAUSAL_LM_MAPPING` of transformers, built small (four layers, 32 channels, random "
        f"weights), on {WORLD_SIZE} gloo processes under `precision: fp32`: {packages}; {machine}; {date.today()}. "
        "Written by `python -m benchmarks.causal_lm_classes`.",
        "",
        "- **step**: one SGD step; the mean loss over ranks equals that of one unsharded process on the whole batch "
        f"within {LOSS_BAR}, every gradient within {GRADIENT_BAR} of the global gradient norm, every weight after the "
        f"step within {WEIGHT_BAR}; every parameter is a DTensor.",
        "- **loads**: `save_pretrained` on all ranks writes the names that one process writes, and after "
        "`from_pretrained` in one process every tensor is equal to the bit.",
        "- **halves**: the same step under `wrap: {granularity: attention_and_mlp}`; *refused* where blocks have no "
        "attention and MLP that can be gathered apart.",
        "- Units: blocks + embeddings and heads; the root is one more.",
        "",
        f"Of {len(lines)} classes {count['builds']} build small and train in one process; of these {count['units']} "
        f"get units, {count['step']} take the step, {count['saves']} save and load; {count['halves']} take the step "
        "by halves.",
        "",
        "| class | parameters | units | step | loads | halves | remark |",
        "|---|---:|---:|---|---|---|---|",
    ]
    for line in lines:
        cells = (line[key] for key in ("class", "parameters", "num_units", "step", "saves", "halves", "remark"))
        text.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(text) + "\n"


def judge(name: str, row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of one class."""
    line = dict.fromkeys(("builds", "units", "step", "saves", "halves", "parameters", "num_units", "remark"), "")
    line["class"] = name
    if "crash" in row:
        return {**line, "remark": "crashed or timed out: " + _cell(row["crash"].splitlines()[-1])}
    ranks: Sequence[dict[str, Any]] = row["ranks"]
    first = ranks[0]
    line["parameters"] = f"{first['num_parameters'] / 1000:.0f}K" if "num_parameters" in first else ""
    if "upstream" in first:
        return {**line, "remark": "cannot be trained in one process either: " + _cell(first["upstream"])}
    line["builds"] = "yes"
    layer, halves = ([rank[kind] for rank in ranks] for kind in ("layer", "attention_and_mlp"))
    if "units" in layer[0]:
        line["units"] = "yes"
        units = layer[0]["units"]
        line["num_units"] = f"{units['block']} + {units.get('embedding', 0) + units.get('head', 0)}"
    line["step"] = _step(layer)
    line["saves"] = "yes" if all(_loads(rank) for rank in layer) else "no"
    line["halves"] = _step(halves)
    line["remark"] = _remark(layer, halves)
    return line


def _step(ranks: Sequence[dict[str, Any]]) -> str:
    if any("refused" in rank for rank in ranks):
        return "refused"
    return "yes" if all(is_right(rank) for rank in ranks) else "no"


def is_right(rank: dict[str, Any]) -> bool:
    """Whether the step of this rank is that of one process."""
    return (
        rank.get("unsharded") == []
        and rank.get("loss_error", 1) <= LOSS_BAR
        and rank.get("gradient_error", 1) <= GRADIENT_BAR
        and rank.get("weight_error", 1) <= WEIGHT_BAR
    )


def _loads(rank: dict[str, Any]) -> bool:
    return rank.get("differs_after_load") == [] and rank.get("other_names", []) == []


def _remark(layer: Sequence[dict[str, Any]], halves: Sequence[dict[str, Any]]) -> str:
    parts = []
    for what, found in (("", layer[0]), ("halves: ", halves[0])):
        if "failed" in found or ("refused" in found and not what):
            parts.append(what + found.get("failed", found.get("refused", "")))
        elif "loss_error" in found and not is_right(found):
            keys = ("loss_error", "gradient_error", "weight_error")
            parts.append(what + ", ".join(f"{key.split('_')[0]} off by {found[key]:.1e}" for key in keys))
        if found.get("unsharded"):
            parts.append(f"{what}not sharded: {', '.join(found['unsharded'][:3])}")
        if found.get("differs_after_load"):
            where = " in one process too" if found["differs_after_load"] == found.get("differs_in_one_process") else ""
            parts.append(f"after loading differ{where}: {', '.join(found['differs_after_load'][:3])}")
        if found.get("other_names"):
            parts.append(f"other names in the files: {', '.join(found['other_names'][:3])}")
    return _cell("; ".join(parts))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:220]


if __name__ == "__main__":
    sys.exit(main())
