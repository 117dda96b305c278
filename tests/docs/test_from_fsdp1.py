"""docs/from-fsdp1.md: every "before" is read into the YAML beside it, and every "after" trains sharded."""

from __future__ import annotations

import re
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp import FSDPConfig
from hf_fsdp.config.migrate import migrate
from hf_fsdp.config.migrate.python_arguments import FSDP1_ORDER
from hf_fsdp.config.parse import DOTTED_KEYS
from tests.distributed.harness import Outcome, run_cases
from tests.docs.from_fsdp1_page import PAGE, Snippet, read_snippets

SNIPPETS = read_snippets()
HYBRID = "hybrid_sharding"


def run_after_snippets(names: list[str], world_size: int) -> dict[str, Outcome]:
    """Run the "after" of some sections in one spawn."""
    run_id = uuid.uuid4().hex
    environment = {"HF_FSDP_DOCS_RUN": run_id, "ACCELERATE_USE_CPU": "true"}
    try:
        return run_cases(
            "tests.docs.from_fsdp1_cases", names, world_size, environment=environment, seconds_per_case=180
        )
    finally:
        shutil.rmtree(Path(tempfile.gettempdir(), f"hf-fsdp-docs-{run_id}"), ignore_errors=True)


@pytest.fixture(scope="module")
def on_two() -> dict[str, Outcome]:
    return run_after_snippets([snippet.name for snippet in SNIPPETS if snippet.name != HYBRID], 2)


def section_of(text: str) -> str:
    """The `fsdp:` section without the title and what is listed below it."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.name)
def test_a_before_snippet_is_migrated_to_the_yaml_shown(snippet: Snippet, tmp_path: Path) -> None:
    compile(snippet.before, snippet.title, "exec")
    (tmp_path / "before.py").write_text(snippet.before, encoding="utf-8")
    assert section_of(migrate(tmp_path / "before.py").text) == snippet.yaml
    (tmp_path / "fsdp.yaml").write_text(snippet.yaml, encoding="utf-8")
    assert FSDPConfig.from_yaml(tmp_path / "fsdp.yaml").said


EXPECTED: dict[str, dict[str, Any]] = {
    "everything_in_one_call": {"preset": "bf16-mixed", "steps": 2, "reshard": True},
    "a_loop_of_your_own_units_by_size": {"preset": "fp32"},
    "zero_2_and_offload": {"preset": "bf16-mixed", "steps": 2, "reshard": False, "offloaded": True},
    HYBRID: {"preset": "fp32", "replicas": 2},
    "whole_and_sharded_state_dicts": {"preset": "fp32", "steps": 1},
    "accumulation_clipping_and_activation_checkpointing": {"preset": "fp32", "num_checkpointed": 3},
    "fully_shard": {"preset": "bf16-mixed", "offloaded": True},
    "trainingarguments_old_string": {"preset": "bf16-mixed", "steps": 1, "offloaded": True},
}


def test_every_snippet_has_what_it_must_show() -> None:
    assert list(EXPECTED) == [snippet.name for snippet in SNIPPETS]


def check(name: str, outcome: Outcome) -> None:
    for left in outcome.get():
        assert left["sharded"] and left["finite"]
        assert left["num_units"] > 1
        assert 0.4 < left["local_share"] < 0.6  # half on each of two; under hybrid half on each of two, twice
        for key, value in EXPECTED[name].items():
            assert left[key] == value, key


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != HYBRID])
def test_an_after_snippet_runs_sharded_with_that_yaml(name: str, on_two: dict[str, Outcome]) -> None:
    check(name, on_two[name])


def test_the_hybrid_snippet_keeps_two_copies_on_four_processes() -> None:
    check(HYBRID, run_after_snippets([HYBRID], 4)[HYBRID])


def test_what_save_model_wrote_is_what_from_pretrained_loads(on_two: dict[str, Outcome]) -> None:
    for left in on_two["whole_and_sharded_state_dicts"].get():
        assert left["loaded"] == left["kept"] and left["loaded"]


def test_every_argument_of_the_wrapper_is_in_the_page() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Arguments of")[2].partition("\n## ")[0]
    known = set(FSDP1_ORDER) - {"module", "device_mesh"}  # the mesh is in the row of hybrid sharding
    assert {name for name in known if f"`{name}" not in table} == set()


def test_every_key_that_the_page_names_exists() -> None:
    tables = PAGE.read_text(encoding="utf-8").partition("## Arguments of")[2]
    named = set(re.findall(r"`((?:wrap|precision|offload|sharding|checkpoint)\.\w+)", tables))
    assert named and named <= set(DOTTED_KEYS)
