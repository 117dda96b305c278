"""Every optimizer that transformers knows by name is proven, refused with a reason, or known not to have been run."""

from __future__ import annotations

import pytest
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from hf_fsdp.integrations.optimizers import PROVEN_OPTIMIZERS, check_optimizer, why_refused
from hf_fsdp.integrations.trainer import check_training_arguments

# Elementwise, in packages (or on devices) that are not here: let through, and said so in docs/guide.md.
NOT_RUN = {
    "adamw_torch_xla",
    "adamw_torch_npu_fused",
    "adamw_anyprecision",
    "grokadamw",
    "schedule_free_radam",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "stable_adamw",
}
NAMES = [name.value for name in OptimizerNames]


def test_every_name_is_proven_refused_or_listed_as_not_run() -> None:
    refused = {name for name in NAMES if why_refused(name)}
    open_names = set(NAMES) - refused - set(PROVEN_OPTIMIZERS)
    assert open_names <= NOT_RUN, "new in transformers: prove it, refuse it, or list it"
    assert not refused & (NOT_RUN | set(PROVEN_OPTIMIZERS))


@pytest.mark.parametrize("name", [name for name in NAMES if "8bit" in name or "paged" in name or "4bit" in name])
def test_low_bit_and_paged_optimizers_are_refused_and_the_advised_ones_are_not(name: str) -> None:
    (problem,) = check_optimizer(TrainingArguments(use_cpu=True, report_to=[], optim=name))
    assert problem.message.startswith(f"optim={name!r} does not work on sharded parameters in this release: it ")
    named = problem.fix.partition(";")[0].replace("optim=", "").replace("or ", "").strip("()")
    advised = [word.strip("'() ") for word in named.replace("(", ",").split(",")]
    assert sorted(advised) == sorted(PROVEN_OPTIMIZERS)
    for other in advised:
        assert check_optimizer(TrainingArguments(use_cpu=True, report_to=[], optim=other)) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("galore_adamw_layerwise", "works on whole matrices"),
        ("apollo_adamw", "works on whole matrices"),
        ("adafactor", "works on whole matrices"),
        ("lomo", "takes its step inside the backward pass"),
        ("adagrad", "makes its state when it is built"),
        ("lion_32bit", "is bitsandbytes'"),
        ("rmsprop_bnb_32bit", "is bitsandbytes'"),
        ("adamw_8bit", "is bitsandbytes'"),
        ("adamw_torch_8bit", "keeps its state in blocks of a few bits"),
    ],
)
def test_a_refusal_says_why(name: str, reason: str) -> None:
    problems = check_training_arguments(TrainingArguments(use_cpu=True, report_to=[], optim=name))
    assert len(problems) == 1 and reason in problems[0].message
