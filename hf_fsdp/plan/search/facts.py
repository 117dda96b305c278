"""A finished search as a `Plan`: facts of the model, what was checked, and versions."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from hf_fsdp.config.presets import BLOCK_CLASSES
from hf_fsdp.plan.candidate import Plan
from hf_fsdp.plan.simulation import Simulation

if TYPE_CHECKING:
    from hf_fsdp.plan.search.search import Search

SIMULATED_WITH = ("torch", "transformers", "hf-fsdp")


def assemble_plan(run: Search, *, seconds: float, command: str) -> Plan:
    """Return the plan of a search that found something."""
    best = run.best()
    assert best is not None and best.candidate.simulation is not None
    simulation = best.candidate.simulation
    return Plan(
        request=run.request,
        num_parameters=simulation.num_parameters,
        num_trained=simulation.num_trained,
        candidates=tuple(run.candidates()),
        num_layers=find_num_layers(simulation),
        layer_class=BLOCK_CLASSES.get(str(run.request.model.config.get("model_type", ""))),
        notes=tuple(dict.fromkeys([*simulation.notes, *run.notes()])),
        verified=tuple(_checks(run)),
        versions=find_versions(),
        seconds=seconds,
        command=command,
    )


def find_num_layers(simulation: Simulation) -> int | None:
    """Return the layers of the language model, or None where there are none to count."""
    layers = simulation.simulated_layers
    pair = layers.get("language") or next(iter(layers.values()), None)
    return None if pair is None else pair[1]


def find_versions() -> dict[str, str]:
    """Return program -> version of what simulations depend on."""
    versions = {}
    for name in SIMULATED_WITH:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _checks(run: Search) -> list[str]:
    fitting = run.fitting()
    proven = [item for item in fitting if item.candidate.basis == "simulated"]
    words = [
        f"{run.evaluation.num_simulated} simulations; {len(proven)} of the {len(fitting)} candidates that fit were "
        "simulated at their own micro-batch"
    ]
    if len(proven) < len(fitting):
        words[0] += ", the others lie on a line through two micro-batches of the same structure"
    if run.proof_errors:
        worst = max(run.proof_errors, key=abs)
        how = "right to 0.01%" if abs(worst) < 5e-5 else f"off by {worst:+.2%} at most"
        words.append(f"{len(run.proof_errors)} of them had been predicted by such a line, which was {how}")
    return words
