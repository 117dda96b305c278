"""Saving and resuming under fire: each case ends in the right state, or in one clear error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.chaos_cases import CASES, DAMAGES, FAULTS, HARMLESS, LEFT_OUT
from tests.chaos.copy_cases import RUNS
from tests.chaos.mounted import run_cases_mounted

# From the fault to the error on the last rank.
ERROR_SECONDS = 10.0


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    outcomes = run_cases_mounted("tests.chaos.chaos_cases", list(CASES), tmp_path_factory.mktemp("chaos"))
    return lambda name: outcomes[name].get()


def check_refused(found: dict[str, Any], *words: str) -> None:
    """One clear error, the same on all ranks, in time."""
    first = found["errors"][0]
    assert first is not None and all(error == first for error in found["errors"]), found
    assert all(word in first for word in words), (words, first)
    assert "\n  fix   " in first
    assert found["seconds"] < ERROR_SECONDS


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("disk_is_full_before", ("could not save checkpoint-2 on rank 0", "needs", "free")),
        ("disk_fills_up", ("could not save checkpoint-2 on rank 1", "the disk is full", "No space left on device")),
    ],
)
def test_full_disk(outcome: Callable[[str], list[Any]], case: str, words: tuple[str, ...]) -> None:
    for found in outcome(case):
        check_refused(found, *words)
        assert found["intact"]
        # With space again, the next save works; the failed one left nothing.
        assert found["names"] == ["audit.json", "checkpoint-1", "checkpoint-3"]


@pytest.mark.parametrize("format", ["sharded", "full"])
@pytest.mark.parametrize("what", FAULTS)
def test_every_write_may_fail(outcome: Callable[[str], list[Any]], what: str, format: str) -> None:
    for results in outcome("faults"):
        found = results[f"{what}, {format}"]
        assert found["hits"] == 1
        on_rank = 0 if format == "full" and "model/" in FAULTS[what][2] else FAULTS[what][0]
        check_refused(found, f"could not save checkpoint-2 on rank {on_rank}")
        assert found["intact"], "the earlier save of the same step, and the one before it, are as they were"
        assert results[f"then, {format}"]["names"] == ["audit.json", "checkpoint-1", "checkpoint-2"]


def test_read_only_folder(outcome: Callable[[str], list[Any]]) -> None:
    for found in outcome("read_only"):
        check_refused(found["save"], "cannot be written to (Read-only file system)")
        check_refused(found["self_test"], "before the first step", "cannot be written to (Read-only file system)")


def test_rank_local_folders(outcome: Callable[[str], list[Any]]) -> None:
    for found in outcome("rank_local_folders"):
        check_refused(found["save"], "on rank 1", "is not one folder for all processes")
        assert all("ranks were given different resume_from_checkpoint" in error for error in found["resume"]["errors"])
        assert (found["names"], found["local"]) == (["audit.json", "checkpoint-1"], [])


def test_one_rank_saves_alone(outcome: Callable[[str], list[Any]]) -> None:
    for found in outcome("one_rank_alone"):
        for alone in range(2):
            errors = found[f"rank {alone}"]["errors"]
            assert f"save checkpoint-7 was called on rank {alone} and not on all ranks" in errors[alone]
            assert "another rank ended" in errors[1 - alone]
            assert found[f"rank {alone}"]["seconds"] < ERROR_SECONDS
        assert found["names"] == ["audit.json", "checkpoint-8"]


def test_a_staging_folder_that_is_removed_ends_the_save_and_nothing_else(outcome: Callable[[str], list[Any]]) -> None:
    for found in outcome("staging_removed"):
        check_refused(found["gone"], "was removed while it was saved", "one run at a time")
        check_refused(found["remade"], "was changed or removed while it was saved", "one run at a time")
        assert found["names"] == ["audit.json", "checkpoint-1"]


def test_a_save_behind_training_stays_where_it_began(outcome: Callable[[str], list[Any]]) -> None:
    for found in outcome("works_elsewhere"):
        assert found["names"] == ["audit.json", "checkpoint-1"] and not found["elsewhere"]


def test_two_different_steps(outcome: Callable[[str], list[Any]]) -> None:
    for found in outcome("two_steps"):
        check_refused(found, "ranks want to save different things", "(3,", "(4,")
        assert found["names"] == ["audit.json", "checkpoint-5"]


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_seen(outcome: Callable[[str], list[Any]], what: str) -> None:
    for results in outcome("damages"):
        found = results[what]
        assert found["taken"] == ["checkpoint-1"] * 2
        assert len(found["lines"]) == 1 and "resume: checkpoint-2 is skipped: " in found["lines"][0]
        assert "damaged: " in found["lines"][0] or "incomplete: " in found["lines"][0]
        assert all(error and "checkpoint-2" in error for error in found["by_path"])
        assert found["untouched"]


@pytest.mark.parametrize("what", HARMLESS)
def test_what_is_not_ours_is_left_alone(outcome: Callable[[str], list[Any]], what: str) -> None:
    for results in outcome("damages"):
        found = results[what]
        assert found["taken"] == ["checkpoint-2"] * 2
        assert (found["lines"], found["by_path"]) == ([], [None, None])
        assert found["untouched"]


def test_a_run_goes_on_from_before_the_damage(outcome: Callable[[str], list[Any]]) -> None:
    for found in outcome("resumed_past_damage"):
        assert found["equal"]
        assert "checkpoint-4 is skipped: damaged: optimizer/shard-00001" in found["lines"][0]
        assert found["lines"][1].endswith("/checkpoint-2 (step 2)")


@pytest.mark.parametrize("what", ["sharded", "sharded, async", "full", "full, async"])
def test_order_of_calls(outcome: Callable[[str], list[Any]], what: str) -> None:
    for results in outcome("recorded_order"):
        found = results[what]
        assert found["problems"] == {"save 0": [], "save 1": [], "save 2": []}
        assert found["names"] == ["audit.json", "checkpoint-2"]
        assert found["renames"] == [
            *("checkpoint-1", "checkpoint-2", ".hf-fsdp-deleted-checkpoint-1"),
            *(".hf-fsdp-replaced-2", "checkpoint-2"),
        ]


@pytest.mark.parametrize("part", LEFT_OUT)
def test_a_missing_sync_is_seen(outcome: Callable[[str], list[Any]], part: str) -> None:
    for results in outcome("order_without_a_sync"):
        assert any(LEFT_OUT[part] in problem for problem in results[part]), results[part]


def test_an_early_deletion_is_seen(outcome: Callable[[str], list[Any]]) -> None:
    for results in outcome("order_without_a_sync"):
        assert any("comes before the new checkpoint is on the disk" in line for line in results["deleted first"])


def test_a_failure_behind_training(outcome: Callable[[str], list[Any]]) -> None:
    for results in outcome("async_failure"):
        for what, saved in (("in training", 2), ("at its end", 5)):
            found = results[what]
            assert found["hits"] == 1
            assert f"could not save checkpoint-{saved} on rank 1: the disk is full" in found["errors"][0]
            assert found["errors"][0] == found["errors"][1]
            assert len(set(found["steps"])) == 1
        assert results["in training"]["steps"][0] > 2
        assert results["in training"]["names"] == []


def test_one_save_in_flight_and_training_waits_for_the_last(outcome: Callable[[str], list[Any]]) -> None:
    for found in outcome("async_in_flight"):
        assert max(found["in_flight"]) == 1
        assert found["renames"] == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
        assert found["names"] == ["audit.json", *found["renames"]]


def test_an_error_in_training_does_not_take_the_save_with_it(outcome: Callable[[str], list[Any]]) -> None:
    for found in outcome("async_and_an_error"):
        assert found["raised"] and not found["before"]
        assert found["names"] == ["audit.json", "checkpoint-2"]


def test_the_next_step_runs_while_weights_are_copied_and_its_optimizer_waits(
    outcome: Callable[[str], list[Any]],
) -> None:
    for found in outcome("slow_copy"):
        assert found["ended"]["step begins"] == [False, False]
        assert found["ended"]["optimizer stepped"] == [True, True]
        assert len(found["sync"]) == 3 * 4 and found["async"] == found["sync"]


def test_weights_changed_while_they_are_copied_are_not_saved(outcome: Callable[[str], list[Any]]) -> None:
    for found in outcome("changed_meanwhile"):
        assert found["errors"][0] == found["errors"][1]
        assert "could not save checkpoint-2: " in found["errors"][0]
        assert "was changed while it was copied, and not by an optimizer's step" in found["errors"][0]
        assert "checkpoint: {async_save: false}" in found["errors"][0]
        assert found["names"] == ["audit.json", "checkpoint-1"]


def test_a_copy_that_fails_on_one_rank_is_every_ranks_error(outcome: Callable[[str], list[Any]]) -> None:
    for found in outcome("no_memory_for_the_copy"):
        assert found["errors"][0] == found["errors"][1]
        assert "could not save checkpoint-1 on rank 1: MemoryError: no memory" in found["errors"][0]
        assert found["names"] == ["audit.json"] and "checkpoint-1" in found["again"]


@pytest.mark.parametrize("what", RUNS)
def test_what_is_saved_behind_training_is_what_is_saved_at_once(outcome: Callable[[str], list[Any]], what: str) -> None:
    for results in outcome("same_as_at_once"):
        at_once, behind = results[what]
        assert len(at_once) >= 3 and behind == at_once


def test_a_hook_that_comes_while_weights_are_copied_is_called(outcome: Callable[[str], list[Any]]) -> None:
    for found in outcome("another_hook"):
        assert found["stepped"] == ["AdamW", "AdamW"]
        assert found["names"] == ["audit.json", "checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_a_save_in_flight_of_a_run_that_failed_and_those_of_the_next_are_committed(
    outcome: Callable[[str], list[Any]],
) -> None:
    for found in outcome("a_trainer_after_another"):
        assert "the script's own error" in found["error"]
        assert found["first"] == ["audit.json", "checkpoint-2"]
        assert found["second"] == ["audit.json", "checkpoint-1", "checkpoint-2"]


def test_an_optimizer_that_moves_weights_between_training_and_evaluation(
    outcome: Callable[[str], list[Any]],
) -> None:
    for found in outcome("optimizer_with_two_modes"):
        assert len(found["at once"]) == 3 * 2 and found["behind"] == found["at once"]


def test_a_process_that_gets_no_thread_saves_in_training(outcome: Callable[[str], list[Any]]) -> None:
    for found in outcome("no_thread"):
        assert found["names"] == ["audit.json", "checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_a_part_of_a_weight_changed_while_it_is_copied_is_not_saved(outcome: Callable[[str], list[Any]]) -> None:
    for found in outcome("local_change"):
        assert found["errors"][0] == found["errors"][1]
        assert "was changed while it was copied, and not by an optimizer's step" in found["errors"][0]
        assert found["names"] == ["audit.json", "checkpoint-1"]
