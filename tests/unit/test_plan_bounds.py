"""Bounds and words of the search: no structure beats its bound, and no sentence has a name that only the code knows."""

from __future__ import annotations

import re

import pytest

from hf_fsdp.errors import PlanError
from hf_fsdp.plan.job import Method
from hf_fsdp.plan.search.check import OPTIMIZERS
from hf_fsdp.plan.search.evaluation import Evaluation
from hf_fsdp.plan.search.expected_speed import expected_speed
from hf_fsdp.plan.search.exploration import Exploration
from hf_fsdp.plan.search.search import Search, search
from hf_fsdp.plan.search.structures import describe_structure, list_structures
from hf_fsdp.plan.search.unexplored import describe_unexplored
from tests.unit.lawful_steps import LawfulSimulator, make_request, simulate_lawfully

MACHINES = ("8xA100-80G", "4xA100-40G", "2x8xA100-40G", "4x8xA100-40G", "4xL40S-48G", "2xRTX4090-24G")
INTERNAL = re.compile(r"every second|\bkept\b|selective|\bsharded\b|copies kept|\bboth\b| \+ |_")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_no_structure_is_faster_or_smaller_than_its_bounds(machine: str, method: str) -> None:
    """Each structure at each micro-batch that has room, simulated, against the bounds before it was."""
    request = make_request(machine, max_length=4096, method=Method(name=method), global_batch_size=128)
    evaluation = Evaluation(request, LawfulSimulator())
    run = Search(request, evaluation)
    structures = list_structures(request)
    plain = [item for item in structures if (item.sharding, item.offload) == ("sharded", "none")]
    run._wave([item for item in plain if item.checkpointing != "every second"])
    checked = 0
    for item in structures:
        if item.key in run.explorations:
            continue
        exploration = Exploration(item, request)
        floor, _ = run._bounds.least_bytes(item)
        assert floor <= simulate_lawfully(exploration.job(*exploration.divisions[0])).peak.num_bytes, item.key
        most = run._bounds.most_tokens_per_second(item)
        for division in exploration.divisions[1:]:
            job = exploration.job(*division)
            simulation = simulate_lawfully(job)
            if evaluation.has_room(job, simulation.peak.num_bytes):
                assert expected_speed(request, job, simulation) <= most * 1.001, (item.key, division)
                checked += 1
    assert checked > 3


@pytest.mark.parametrize("machine", ["8xA100-80G", "2x8xA100-40G", "4xL40S-48G", "2xRTX4090-24G"])
def test_sentences_have_the_words_of_the_tables(machine: str) -> None:
    plan = search(make_request(machine, max_length=4096, padded=True), simulate=LawfulSimulator())
    sentences = [line for item in plan.candidates for line in (*item.why, item.pruned or "")]
    for line in [*sentences, *plan.notes]:
        assert not INTERNAL.search(line.replace("are kept", "").replace("kept gathered", "")), line
        assert len(line) < 320, line


def test_what_was_left_alone_is_told_in_groups() -> None:
    request = make_request("2x8xA100-80G")
    structures = list_structures(request)
    offloaded = {item.key: "since slower" for item in structures if item.offload != "none"}
    assert describe_unexplored(request, offloaded) == {"since slower": "offload of any kind"}
    partly = {key: why for key, why in offloaded.items() if key[2] != "both"}
    assert describe_unexplored(request, partly) == {
        "since slower": "offload of activations; offload of parameters+optimizer"
    }
    kept = {item.key: "later" for item in structures if item.sharding == "kept" and item.checkpointing != "none"}
    assert describe_unexplored(request, kept) == {"later": "keep gathered with checkpointing of any kind"}
    some = {key: "later" for key in kept if key[1] in ("full", "selective")}
    assert describe_unexplored(request, some) == {"later": "keep gathered with checkpointing keeps attention or full"}
    known = [item.key for item in structures if item.sharding == "kept" and item.key not in some]
    assert describe_unexplored(request, some, known) == {"later": "keep gathered"}
    copies = {item.key: "later" for item in structures if item.sharding == "copies"}
    assert describe_unexplored(request, copies) == {"later": "2 copies x 8, reshard"}


def test_a_structure_is_described_as_in_the_tables() -> None:
    request = make_request("2x8xA100-80G")
    words = {item.key: describe_structure(item, request) for item in list_structures(request)}
    assert words["sharded", "every second", "none"] == "reshard; checkpointing full, 1 block in 2"
    assert words["copies kept", "none", "none"] == "2 copies x 8, keep gathered; checkpointing none"
    assert words["sharded", "full", "parameters"].endswith("checkpointing full; parameters+optimizer in host memory")


def test_known_optimizers_are_those_that_the_simulator_has() -> None:
    from torch import nn

    from hf_fsdp.plan.simulator.optimizer import build_optimizer

    for name in OPTIMIZERS:
        assert build_optimizer(name, nn.Linear(2, 2).parameters()).param_groups
    with pytest.raises(PlanError) as caught:
        build_optimizer("none such", nn.Linear(2, 2).parameters())
    assert caught.value.problems[0].near == ", ".join(OPTIMIZERS)
