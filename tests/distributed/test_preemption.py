"""A real signal at one rank: all ranks save the same step and leave; the resumed run has the same losses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp.integrations.preemption import EXIT_CODE
from tests.distributed.harness import REPOSITORY, Outcome, run_cases
from tests.distributed.preemption_cases import CASES, NUM_STEPS

MODULE = "tests.distributed.preemption_cases"
SBATCH = REPOSITORY / "scripts" / "slurm" / "train.sbatch"
LAUNCH_FILE = """\
distributed_type: FSDP
mixed_precision: 'no'
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: false
"""


@dataclass(frozen=True)
class Stopped:
    """A run under the sbatch file that was stopped twice: what each start left behind."""

    folder: Path
    codes: tuple[int, int]
    logs: tuple[str, str]
    saved: tuple[list[str], list[str]]
    requests: str


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """SIGUSR1 to the batch shell, as before a time limit; the next start gets SIGTERM at the launcher."""
    folder = tmp_path_factory.mktemp("stopped")
    environment = stand_in_slurm(folder)
    (folder / "launch.yaml").write_text(LAUNCH_FILE)
    out, logs = folder / "out", (folder / "first.log", folder / "second.log")
    command = [str(SBATCH), str(folder / "launch.yaml"), "-m", MODULE]
    command += ["--output_dir", str(out), "--step_seconds", "0.5"]
    with started(command, logs[0], **environment) as process:
        wait_for(out / "step-2", process, logs[0])
        process.send_signal(signal.SIGUSR1)
        first_code = process.wait(60)
    saved = sorted(path.name for path in out.glob("checkpoint-*"))
    step = int(saved[-1].removeprefix("checkpoint-")) if saved else 0
    with started(command, logs[1], **environment, SLURM_RESTART_COUNT="1") as process:
        wait_for(out / f"step-{step + 1}", process, logs[1])
        (launcher,) = (item for item in family(process.pid) if "accelerate" in " ".join(item.cmdline()[:3]))
        launcher.send_signal(signal.SIGTERM)
        codes = (first_code, process.wait(60))
    both = (saved, sorted(path.name for path in out.glob("checkpoint-*")))
    texts = (logs[0].read_text(), logs[1].read_text())
    requests = Path(environment["REQUESTS"])
    return Stopped(out, codes, texts, both, requests.read_text() if requests.exists() else "")


@pytest.fixture(scope="module")
def two(stopped: Stopped) -> dict[str, Outcome]:
    return run_cases(MODULE, list(CASES), 2, seconds_per_case=240, environment={"PREEMPTED_RUN": str(stopped.folder)})


@pytest.fixture(scope="module")
def one() -> dict[str, Outcome]:
    names = ["uninterrupted", "signal_in_training", "signal_in_evaluation", "signal_in_setup", "short_grace"]
    return run_cases(MODULE, names, 1, seconds_per_case=240)


@pytest.fixture(params=[1, 2], ids=["one_process", "two_processes"])
def ranks(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    found: dict[str, Outcome] = request.getfixturevalue("one" if request.param == 1 else "two")
    return found


def assert_left(ranks: list[dict[str, Any]], step: int, names: list[str]) -> None:
    """Every rank left at `step` with the code for "try again", saw the same checkpoints, and is as it was before."""
    world_size = len(ranks)
    for rank in ranks:
        assert rank["code"] == EXIT_CODE
        assert rank["step"] == step
        assert rank["saved"] == names
        assert rank["handlers_are_back"] and rank["wakeup"] == -1 and rank["is_gone"]
        assert rank["sharded"] == (world_size > 1)
        assert rank["num_local"] < 1.1 * rank["num_whole"] / world_size
    (line,) = (line for line in ranks[0]["lines"] if "exit code" in line)
    assert f"leaving with exit code {EXIT_CODE}" in line
    assert (f"step {step} is saved" if names else "there is nothing new to save") in line
    assert not any(rank["lines"] for rank in ranks[1:])


def losses(outcome: Outcome) -> list[float]:
    return list(outcome.get()[0]["losses"])


# -- under the sbatch file: first, so that its time is not counted with that of the cases ------------------------------


def test_the_sbatch_file_saves_before_the_time_limit_requeues_and_resumes(stopped: Stopped) -> None:
    assert stopped.codes[0] == EXIT_CODE, stopped.logs[0][-3000:]
    assert stopped.requests == "requeue 41\n", "once; after a SIGTERM to the step Slurm does it"
    (name,) = stopped.saved[0]
    step = name.removeprefix("checkpoint-")
    assert f"step {step} is saved; leaving with exit code {EXIT_CODE}" in stopped.logs[0]
    assert f"(step {step})" in stopped.logs[1], "--resume_from_checkpoint auto was added"


def test_signals_to_whole_steps_and_groups_spare_the_processes_that_load_data(stopped: Stopped) -> None:
    for log in stopped.logs:
        assert "DataLoader worker" not in log
        assert "the second signal" not in log, "what Slurm and torchrun both pass on is one request"


# -- one rank gets a signal -------------------------------------------------------------------------------------------


def test_all_ranks_save_the_same_step_and_the_resumed_curve_is_the_same(ranks: dict[str, Outcome]) -> None:
    found = ranks["signal_in_training"].get()
    assert_left([rank["first"] for rank in found], 4, ["checkpoint-4"])
    for rank in found:
        assert rank["first"]["losses"] == losses(ranks["uninterrupted"])[:4]
        assert rank["resumed"]["code"] is None
        assert rank["resumed"]["losses"] == losses(ranks["uninterrupted"])


def test_an_evaluation_is_left_and_its_step_saved(ranks: dict[str, Outcome]) -> None:
    found = ranks["signal_in_evaluation"].get()
    assert_left([rank["first"] for rank in found], 2, ["checkpoint-2"])
    assert {rank["predictions"] for rank in found} == {4}, "all ranks leave at the same batch, of 8 or 16"
    for rank in found:
        assert rank["resumed"]["losses"] == losses(ranks["uninterrupted"])


def test_a_signal_in_the_last_batch_of_an_evaluation_counts_before_the_next_step(two: dict[str, Outcome]) -> None:
    assert_left(two["signal_at_the_end_of_an_evaluation"].get(), 2, ["checkpoint-2"])


def test_a_signal_among_micro_batches_ends_at_the_step_that_they_belong_to(two: dict[str, Outcome]) -> None:
    assert_left(two["signal_in_accumulation"].get(), 3, ["checkpoint-3"])


def test_a_step_that_is_saved_already_is_not_saved_twice(two: dict[str, Outcome]) -> None:
    found = two["signal_after_a_scheduled_save"].get()
    assert_left(found, 3, ["checkpoint-3"])
    assert {rank["predictions"] for rank in found} == {1}


def test_a_save_behind_training_is_committed_before_the_processes_leave(two: dict[str, Outcome]) -> None:
    found = two["signal_behind_an_async_save"].get()
    assert_left([rank["first"] for rank in found], 3, ["checkpoint-1", "checkpoint-2", "checkpoint-3"])
    for rank in found:
        assert rank["resumed"]["losses"] == losses(two["uninterrupted"])


def test_a_signal_during_set_up_stops_all_ranks_without_a_save(ranks: dict[str, Outcome]) -> None:
    assert_left(ranks["signal_in_setup"].get(), 0, [])


def test_a_signal_before_the_first_step_stops_all_ranks_without_a_save(two: dict[str, Outcome]) -> None:
    found = two["signal_before_the_first_step"].get()
    assert_left([rank["at_start"] for rank in found], 0, [])
    assert_left([rank["evaluating"] for rank in found], 0, [])
    assert {rank["predictions"] for rank in found} == {3}


@pytest.mark.parametrize("name", ["between", "same"])
def test_what_is_saved_for_a_stop_is_whole_under_save_only_model(name: str, two: dict[str, Outcome]) -> None:
    whole = two["uninterrupted"].get()[0]["losses"]
    for rank in two["signal_under_save_only_model"].get():
        first, resumed = rank[name]["first"], rank[name]["resumed"]
        assert first["code"] == EXIT_CODE and resumed["code"] is None
        assert resumed["losses"] == whole and resumed["step"] == len(whole)


def test_a_signal_in_the_last_step_leaves_what_comes_after_to_the_resumed_run(two: dict[str, Outcome]) -> None:
    found = two["signal_in_the_last_step"].get()
    assert_left([rank["first"] for rank in found], NUM_STEPS, [f"checkpoint-{NUM_STEPS}"])
    for rank in found:
        assert rank["resumed"]["code"] is None
        assert rank["resumed"]["step"] == NUM_STEPS, "Trainer alone takes one step more"
        assert rank["resumed"]["losses"] == losses(two["uninterrupted"])


def test_a_signal_that_nobody_can_agree_on_any_more_goes_to_the_earlier_handler(two: dict[str, Outcome]) -> None:
    found = two["signal_too_late"].get()
    assert [rank["got"] for rank in found] == [[signal.SIGUSR1], []]
    assert all(rank["code"] is None and rank["step"] == NUM_STEPS for rank in found)


def test_handlers_are_back_after_an_error_and_the_next_training_is_a_whole_one(two: dict[str, Outcome]) -> None:
    for rank in two["error_in_training"].get():
        assert rank["are_back"] and rank["handlers_are_back"]
        assert rank["losses"] == losses(two["uninterrupted"])


def test_what_does_not_fit_into_the_grace_is_left_out_on_all_ranks_and_said(ranks: dict[str, Outcome]) -> None:
    found = ranks["short_grace"].get()
    assert_left([rank["first"] for rank in found], 4, ["checkpoint-2", "checkpoint-4"])
    files = found[0]["files"]
    assert any("optimizer" in name for name in files["checkpoint-2"])
    assert not any("optimizer" in name for name in files["checkpoint-4"])
    assert any("model" in name and name.endswith(".safetensors") for name in files["checkpoint-4"])
    assert all(rank["only_model"] for rank in found)
    (line,) = (line for line in found[0]["first"]["lines"] if "of the grace are left" in line)
    assert "a full save may take 125 s" in line and "only the model is saved" in line
    for rank in found:  # from the last whole one
        assert rank["resumed"]["losses"] == losses(ranks["uninterrupted"])


# -- launchers again --------------------------------------------------------------------------------------------------


def test_a_sigterm_at_the_launcher_ends_in_a_checkpoint_and_the_curve_is_that_of_one_run(
    stopped: Stopped, two: dict[str, Outcome]
) -> None:
    assert stopped.codes[1] == 1, "the launcher's own: the ranks' 75 is lost in it"
    assert f"leaving with exit code {EXIT_CODE}" in stopped.logs[1], stopped.logs[1][-3000:]
    assert len(stopped.saved[1]) == 2
    for rank in two["resumed_run"].get():
        assert rank["code"] is None and rank["step"] == NUM_STEPS
        assert rank["losses"] == losses(two["uninterrupted"])


STAND_IN_SRUN = """\
#!{python}
'''Runs the command after its options; hands SIGUSR1 to every process of the step, as slurmstepd does.'''
import os, signal, subprocess, sys
import psutil
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
variables = {{**os.environ, "SLURM_PROCID": "0", "SLURM_NNODES": "1"}}
process = subprocess.Popen(words, env=variables, start_new_session=True)
def hand_on(signum, frame):
    for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        member.send_signal(signum)
signal.signal(signal.SIGUSR1, hand_on)
sys.exit(process.wait())
"""
STAND_IN_SCONTROL = """\
#!/usr/bin/env bash
echo "$@" >>"$REQUESTS"
"""


def stand_in_slurm(folder: Path) -> dict[str, str]:
    """An environment with stand-ins for what Slurm brings."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in (("srun", STAND_IN_SRUN.format(python=sys.executable)), ("scontrol", STAND_IN_SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "REQUESTS": str(folder / "requests"),
        "SLURM_JOB_ID": "41",
        "MAIN_PORT": str(free_port()),
        "HF_FSDP_GRACE_SECONDS": "60",
    }


def test_the_sbatch_file_requeues_no_failure_and_not_without_end(tmp_path: Path) -> None:
    slurm = stand_in_slurm(tmp_path)
    Path(slurm["PATH"].split(":")[0], "srun").write_text('#!/usr/bin/env bash\nexit "$CODE"\n')
    requests = Path(slurm["REQUESTS"])
    words = [str(SBATCH), "launch.yaml", "train.py"]

    def run(*more: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, **slurm, **environment}
        return subprocess.run([*words, *more], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=30)

    refused = run(CODE="0")
    assert refused.returncode == 2 and "say --output_dir" in refused.stderr
    assert run("--output_dir", "out", CODE="1").returncode == 1
    assert run("--output_dir=out", CODE="0").returncode == 0
    assert not requests.exists()
    assert run("--output-dir", "out", CODE=str(EXIT_CODE)).returncode == EXIT_CODE
    assert requests.read_text() == "requeue 41\n"
    capped = run("--output_dir", "out", CODE=str(EXIT_CODE), SLURM_RESTART_COUNT="100")
    assert capped.returncode == EXIT_CODE and "not requeued: 100 times" in capped.stderr
    assert requests.read_text() == "requeue 41\n"


# -- processes --------------------------------------------------------------------------------------------------------


class started:  # noqa: N801 - reads as a verb
    """A process whose output goes to a file; killed with all it started when the block ends."""

    def __init__(self, command: list[str], log: Path, **environment: str):
        variables = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **environment}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=REPOSITORY, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self.process

    def __exit__(self, *exception: object) -> None:
        for process in family(self.process.pid):
            process.kill()
        self.process.wait()


def family(pid: int) -> Iterator[Any]:
    import psutil

    if psutil.pid_exists(pid):
        yield from psutil.Process(pid).children(recursive=True)
        yield psutil.Process(pid)


def wait_for(file: Path, process: subprocess.Popen[bytes], log: Path, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{file.name} did not appear; code {process.poll()}:\n{log.read_text()[-3000:]}")
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
