"""Bounds by arithmetic: what a structure needs at least and how fast it is at most, before it is simulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from hf_fsdp.plan.candidate import Candidate, PlanRequest
from hf_fsdp.plan.search.evaluation import Evaluation
from hf_fsdp.plan.search.expected_speed import expected_speed
from hf_fsdp.plan.search.exploration import Exploration
from hf_fsdp.plan.search.least_work import kept_activations, least_work
from hf_fsdp.plan.search.structures import SHARDINGS, Structure, describe_structure
from hf_fsdp.plan.simulation import Simulation
from hf_fsdp.units import format_bytes

_Key = tuple[str, str, str]

# Bytes of one stored weight, and of one that is computed with.
_STORED = {"bf16-true": 2}
_COMPUTED = {"fp32": 4}
# Numbers of optimizer state for each trained weight; what is not here counts as none, which keeps the bound one.
_STATES = {"adamw_torch_fused": 2, "adamw_torch": 2, "rmsprop": 1}

# What offload can take from the GPU.
_STATE = ("parameters", "gradients", "optimizer")
_OFFLOADED = {"none": (), "activations": ("activations",), "parameters": _STATE, "both": (*_STATE, "activations")}
# Of a peak that is reckoned from two others and not bounded.
_ABOUT = 0.9


@dataclass(frozen=True, kw_only=True)
class Excluded:
    """A structure that arithmetic ruled out for its memory.

    Args:
        structure: which one.
        candidate: at its smallest micro-batch, without a simulation.
    """

    structure: Structure
    candidate: Candidate


class Bounds:
    """Bounds on structures from those that are explored already.

    Args:
        request: what is planned.
        evaluation: for speeds.
        explorations: by key of the structure; read, and filled by others.
    """

    def __init__(self, request: PlanRequest, evaluation: Evaluation, explorations: Mapping[_Key, Exploration]):
        self._request = request
        self._evaluation = evaluation
        self._explorations = explorations

    # -- memory -------------------------------------------------------------------------------------------------------

    def least_bytes(self, item: Structure) -> tuple[int, str | None]:
        """Return the bytes that `item` needs at least at its smallest micro-batch, and why; (0, None): not known."""
        bounds = [bound for bound in (self._states(item), self._beside_relative(item)) if bound is not None]
        return max(bounds, key=lambda bound: bound[0], default=(0, None))

    def _states(self, item: Structure) -> tuple[int, str] | None:
        """Shards of weights, gradients and optimizer, and all weights where they stay gathered."""
        if item.offload in ("parameters", "both"):
            return None
        shards = self._state_bytes(item)
        if shards is None:
            return None
        words = f"weights, gradients and optimizer state alone are {format_bytes(shards)} on each GPU"
        if item.sharding.endswith("kept") and (whole := self._gathered_bytes()):
            return shards + whole, f"{words}, and all weights stay gathered: {format_bytes(whole)} more"
        return shards, words

    def _state_bytes(self, item: Structure) -> int | None:
        request, copies = self._request, item.config.sharding.dp_replicate_size
        for known in self._explorations.values():
            states = known.simulation(known.known_divisions()[0]).state_bytes
            theirs = known.structure.config.sharding.dp_replicate_size
            return sum(states.values()) * copies // theirs
        return estimate_state_bytes(request, request.num_gpus // copies)

    def _gathered_bytes(self) -> int:
        """All weights in the dtype they are computed in; packed ones as they are stored."""
        compute = _COMPUTED.get(self._request.precision, 2)
        for known in self._explorations.values():
            simulation = known.simulation(known.known_divisions()[0])
            copies = known.structure.config.sharding.dp_replicate_size
            stored = simulation.state_bytes.get("parameters", 0) * self._request.num_gpus // copies
            return min(simulation.num_parameters * compute, stored)
        number = self._request.model.num_parameters
        return 0 if number is None or self._request.method.name == "qlora" else number * compute

    def _beside_relative(self, item: Structure) -> tuple[int, str] | None:
        """What an explored structure of the same kind needs at its smallest micro-batch, and `item` more or less."""
        relative = self._relative(item, "full" if item.checkpointing == "every second" else item.checkpointing)
        if relative is None or relative.structure.key == item.key:
            return None
        first = relative.divisions[0]
        if first not in relative.known_divisions():
            return None  # one row without a mask needs less than what is known
        return self._at(item, relative, first)

    def _at(self, item: Structure, relative: Exploration, division: tuple[int, int]) -> tuple[int, str] | None:
        """What `item` needs at least at `division`, by what `relative` needs there; None: that says nothing."""
        simulation = relative.simulation(division)
        name = f"'{describe_structure(relative.structure, self._request)}'"
        peak = simulation.peak.num_bytes
        if item.offload != relative.structure.offload:
            rest = _without(simulation, _OFFLOADED[item.offload])
            return rest, f"{name} needs {format_bytes(rest)} beside all that is offloaded"
        states = sum(simulation.state_bytes.values())
        more = (self._state_bytes(item) or 0) - states if item.sharding.startswith("copies") else 0
        if item.sharding.endswith("kept"):
            turn = _turning_point(simulation) + more
            whole = self._gathered_bytes()
            if turn + whole >= peak + more:
                with_copies = " with all of its copies" if more else ""
                return turn + whole, (
                    f"when the backward starts, all weights are gathered ({format_bytes(whole)}) beside the "
                    f"{format_bytes(turn)} that {name} holds there{with_copies}"
                )
        if more:
            held = "weights, gradients and optimizer state"
            return peak + more, f"it holds {format_bytes(more)} more of {held} than {name}"
        return peak, f"it needs no less than {name}: {format_bytes(peak)}"

    # -- speed --------------------------------------------------------------------------------------------------------

    def most_tokens_per_second(self, item: Structure) -> float:
        """Return a speed that `item` cannot exceed; infinite where nothing is known, 0 where no micro-batch has room.

        It computes what the plainest structure with its checkpointing does, and moves what it must (`least_work`).
        """
        relative = self._relative(item, item.checkpointing)
        half = None
        if relative is None and item.checkpointing == "every second":
            relative, half = self._relative(item, "none"), self._relative(item, "full")
        if relative is None:
            return float("inf")
        known = relative.known_divisions()
        # Of one row without a mask nothing may be known; it is no faster than the next micro-batch.
        smallest = known[:1] if relative.divisions[0] not in known else []
        return max(
            (self._speed(item, relative, half, one) for one in known if self._may_fit(item, one) or one in smallest),
            default=0.0,
        )

    def _may_fit(self, item: Structure, division: tuple[int, int]) -> bool:
        floor = self._floor(item, division)
        if floor is None:
            return True
        floor = max(0, floor - self._counted_too_early(item, division))
        return self._evaluation.has_room(Exploration(item, self._request).job(*division), floor)

    def _counted_too_early(self, item: Structure, division: tuple[int, int]) -> int:
        """The gradients that a line of steps with accumulation has in a forward, where a single one has none yet."""
        known = self._relative(item, "full" if item.checkpointing == "every second" else item.checkpointing)
        if known is None or division[1] > 1 or known.is_simulated(division):
            return 0
        copies, theirs = (one.config.sharding.dp_replicate_size for one in (item, known.structure))
        return known.simulation(division).state_bytes.get("gradients", 0) * copies // theirs

    def _floor(self, item: Structure, division: tuple[int, int]) -> int | None:
        """What `item` needs about at least at `division`; None: not known."""
        if item.checkpointing != "every second" or self._relative(item, "every second") is not None:
            return self._floor_beside(item, item.checkpointing, division)
        none, full = (self._floor_beside(item, kind, division) for kind in ("none", "full"))
        without = self._relative(item, "none")
        if none is None or full is None or without is None:
            return full
        # Half of the blocks keep what all of them keep without, and offload takes the inputs of the others only.
        if item.offload in ("activations", "both"):
            return full + round(_ABOUT * kept_activations(without.simulation(division)) / 2)
        return max(full, round(_ABOUT * (none + full) / 2))

    def _floor_beside(self, item: Structure, checkpointing: str, division: tuple[int, int]) -> int | None:
        relative = self._relative(item, checkpointing)
        if relative is None or division not in relative.known_divisions():
            return None
        found = self._at(item, relative, division)
        return None if found is None else found[0]

    def _speed(
        self, item: Structure, relative: Exploration, half: Exploration | None, division: tuple[int, int]
    ) -> float:
        job, simulation = Exploration(item, self._request).job(*division), relative.simulation(division)
        work = least_work(item, relative.structure, job, simulation, self._offloadable(item, simulation, division))
        if half is not None and division in half.known_divisions():
            recomputed = half.simulation(division).work.recompute_flops / 2
            work = dataclasses.replace(work, recompute_flops=work.recompute_flops + recomputed)
        return expected_speed(self._request, job, dataclasses.replace(simulation, work=work))

    def _offloadable(self, item: Structure, simulation: Simulation, division: tuple[int, int]) -> float:
        """What offload may move of activations: all of them, or the inputs of layers that are computed again."""
        if item.checkpointing == "none":
            return kept_activations(simulation)
        full = self._relative(item, "full")
        if full is None or division not in full.known_divisions():
            return 0.0
        return kept_activations(full.simulation(division)) / (2 if item.checkpointing == "every second" else 1)

    def _relative(self, item: Structure, checkpointing: str) -> Exploration | None:
        """The plainest explored structure with this checkpointing: the least memory, the least traffic to the host."""
        for offload in ("none", "activations", "parameters", "both"):
            if offload not in ("none", item.offload) and item.offload != "both":
                continue
            for sharding in SHARDINGS:
                known = self._explorations.get((sharding, checkpointing, offload))
                if known is not None:
                    return known
        return None


def estimate_state_bytes(request: PlanRequest, num_shards: int) -> int | None:
    """Return the least bytes of weights, gradients and optimizer state on one GPU; None where no size is known.

    Adapters are left out, and a 4-bit weight counts half a byte, so a simulation never shows less.
    """
    number = request.model.num_parameters
    if number is None:
        return None
    stored = _STORED.get(request.precision, 4)
    method = request.method
    if method.name == "qlora":
        return number // 2 // num_shards
    if method.name == "lora":
        return number * (4 if method.load_dtype == "float32" or request.precision == "fp32" else 2) // num_shards
    if method.trainable:
        return number * 2 // num_shards
    return number * stored * (2 + _STATES.get(request.optimizer, 0)) // num_shards


def _without(simulation: Simulation, names: tuple[str, ...]) -> int:
    """Return the most that is held beside these categories."""
    return max(phase.num_bytes - sum(phase.categories.get(name, 0) for name in names) for phase in simulation.phases)


def _turning_point(simulation: Simulation) -> int:
    """Return what is held when the backward starts, without gathered weights."""
    for phase in simulation.phases:
        if phase.name.startswith("backward"):
            return phase.num_bytes - phase.categories.get("unsharded", 0)
    return 0
