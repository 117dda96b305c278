"""What a stop request is made of: signals noted and handed back, the time that is left, and what the seams rest on."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.launcher.api import LaunchConfig
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_fsdp import FSDPConfig
from hf_fsdp.config.generate import LaunchPlan, write_launch_file
from hf_fsdp.integrations.preemption import EXIT_CODE
from hf_fsdp.integrations.wandb import mark_preempting
from hf_fsdp.monitor import grace
from hf_fsdp.monitor.grace import TORCHRUN_SECONDS, SaveDurations, check_grace, grace_seconds
from hf_fsdp.monitor.signals import SAME_REQUEST_SECONDS, SIGNALS, ShieldedInit, SignalWatch, shield_data_workers

REPOSITORY = Path(__file__).resolve().parents[2]
UNDER_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    yield
    assert [signal.getsignal(signum) for signum in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def noted(watch: SignalWatch) -> None:
    """Wait until the thread has seen the signal."""
    deadline = time.monotonic() + 10
    while watch.request is None and time.monotonic() < deadline:
        time.sleep(0.005)


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", SIGNALS)
def test_the_first_signal_is_noted_and_its_repetition_is_the_same_request(
    signum: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with SignalWatch("rank 3") as watch:
        assert watch.request is None
        os.kill(os.getpid(), signum)
        noted(watch)
        os.kill(os.getpid(), signum)  # a second one would end pytest
        time.sleep(0.05)
    assert watch.request is not None and watch.request.signum == signum
    assert 0 < watch.request.age_seconds < 10
    assert capfd.readouterr().err.count("hf-fsdp: rank 3 got SIG") == 1


HANG = """
import ctypes
from hf_fsdp.monitor.signals import SignalWatch
with SignalWatch("rank 0"):
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    print("hangs", flush=True)
    library.pthread_mutex_lock(mutex)  # C that never returns, as a collective whose other ranks are gone
"""


@pytest.mark.parametrize(
    ("first", "second", "pause"),
    [(signal.SIGTERM, signal.SIGUSR1, 0.3), (signal.SIGINT, signal.SIGINT, SAME_REQUEST_SECONDS + 0.3)],
)
def test_the_second_signal_ends_a_process_that_hangs_in_c_at_once(first: int, second: int, pause: float) -> None:
    command = [sys.executable, "-c", HANG]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "hangs\n"
            process.send_signal(first)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(pause)
            process.send_signal(second)
            _, printed = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 128 + second
    assert "the second signal: ended at once" in printed and "KeyboardInterrupt" not in printed


def test_a_person_who_presses_ctrl_c_twice_waits_no_longer_than_a_second() -> None:
    assert SAME_REQUEST_SECONDS <= 1


def test_handlers_and_the_wakeup_of_an_event_loop_are_put_back_after_an_error() -> None:
    got: list[int] = []
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.signal(signal.SIGALRM, lambda signum, frame: got.append(signum))
    signal.set_wakeup_fd(writing)
    try:
        with pytest.raises(ValueError, match="wrong"), SignalWatch("rank 0"):
            os.kill(os.getpid(), signal.SIGALRM)
            assert os.read(reading, 8) == bytes([signal.SIGALRM]), "other signals reach the loop as ever"
            raise ValueError("wrong")
        assert signal.set_wakeup_fd(-1) == writing
        assert got == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)
        os.close(reading)
        os.close(writing)


def test_outside_the_main_thread_nothing_is_watched_and_it_says_so() -> None:
    problems: list[str | None] = []

    def run() -> None:
        with SignalWatch("rank 0") as watch:
            problems.append(watch.problem)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert problems[0] is not None and "outside the main thread" in problems[0]


def test_at_a_prompt_ctrl_c_stays_a_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    before = signal.getsignal(signal.SIGINT)  # ignored in a background job
    with SignalWatch("rank 0"):
        assert signal.getsignal(signal.SIGINT) is before
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def test_a_forked_process_can_be_terminated_and_does_not_speak_for_us() -> None:
    with SignalWatch("rank 0") as watch:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        time.sleep(0.05)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert watch.request is None


# -- processes that load data -----------------------------------------------------------------------------------------


class SignalsItself(torch.utils.data.Dataset[int]):
    """Its process gets what torchrun sends to the group of a rank."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            for signum in SIGNALS:
                os.kill(os.getpid(), signum)
            time.sleep(0.1)
        return index


def test_a_process_that_loads_data_outlives_a_stop_request_and_ends_with_its_loader() -> None:
    inits: list[int] = []
    loader = DataLoader(SignalsItself(), num_workers=1, worker_init_fn=inits.append)
    shield_data_workers(loader)
    shielded = loader.worker_init_fn
    shield_data_workers(loader)
    assert isinstance(shielded, ShieldedInit) and loader.worker_init_fn is shielded, "once"
    assert shielded.original == inits.append
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]


def test_a_process_that_loads_data_still_obeys_the_one_who_started_it() -> None:
    loader = DataLoader(SignalsItself(), num_workers=1)
    shield_data_workers(loader)
    iterator = iter(loader)
    next(iterator)
    (process,) = iterator._workers  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="DataLoader worker"):  # torch's handler of SIGCHLD notices
        process.terminate()
        list(iterator)
    process.join(10)
    assert process.exitcode == 0


# -- the time that is left --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "environment", "expected"),
    [
        ("auto", {}, None),
        (45.0, {}, 45.0),
        ("auto", UNDER_TORCHRUN, 30.0),
        (20.0, UNDER_TORCHRUN, 20.0),
        (120.0, UNDER_TORCHRUN, 30.0),
        (120.0, {**UNDER_TORCHRUN, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}, 120.0),
        ("auto", {**UNDER_TORCHRUN, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}, 300.0),
        ("auto", {**UNDER_TORCHRUN, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300", "PET_SHUTDOWN_TIMEOUT": "60"}, 60.0),
        ("auto", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}, None),
    ],
)
def test_the_grace_is_the_smaller_of_the_users_and_the_launchers(
    configured: Any, environment: dict[str, str], expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grace, "launcher_can_be_told", lambda: True)
    assert grace_seconds(configured, environment) == expected
    monkeypatch.setattr(grace, "launcher_can_be_told", lambda: False)
    is_launched = "TORCHELASTIC_RUN_ID" in environment
    assert grace_seconds(configured, environment) == (min(expected or 30, 30) if is_launched else expected)


def test_a_grace_that_the_launcher_does_not_give_is_said_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grace, "launcher_can_be_told", lambda: False)
    assert "cannot be told otherwise" in check_grace(120.5, UNDER_TORCHRUN)[0]
    monkeypatch.setattr(grace, "launcher_can_be_told", lambda: True)
    (line,) = check_grace(120.5, UNDER_TORCHRUN)
    variable, _, value = line.split("export ")[1].split()[0].partition("=")
    assert check_grace(120.5, {**UNDER_TORCHRUN, variable: value}) == []
    assert check_grace("auto", UNDER_TORCHRUN) == check_grace(20.0, UNDER_TORCHRUN) == check_grace(120.0, {}) == []


def test_past_saves_say_how_long_the_next_one_takes() -> None:
    durations = SaveDurations()
    assert durations.expected_seconds() is None, "nothing is known: a full save is tried"
    durations = SaveDurations(num_bytes=4_000, num_model_bytes=1_000, bytes_per_second=100)
    assert durations.expected_seconds() == pytest.approx(60), "40 s by the self-test's speed, and a half on top"
    durations.record(10)
    assert durations.expected_seconds() == pytest.approx(12.5), "what was measured goes before an estimate"
    assert durations.expected_model_seconds() == pytest.approx(12.5 / 4)
    for seconds in (30, 8, 8, 8, 8):
        durations.record(seconds)
    assert durations.seconds == [30, 8, 8, 8, 8]
    assert durations.expected_seconds() == pytest.approx(37.5), "the longest of the last five"
    durations.record(8)
    assert durations.expected_seconds() == pytest.approx(10)


def test_the_launch_file_names_both_graces() -> None:
    plan = LaunchPlan(num_processes=8)
    default = write_launch_file(FSDPConfig(), plan)
    assert "after 30 s the launcher kills" in default and "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300" in default
    stated = write_launch_file(FSDPConfig(checkpoint={"grace_seconds": 89.5}), plan)
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90" in stated and "checkpoint.grace_seconds: 89.5" in stated
    alone = write_launch_file(FSDPConfig(), LaunchPlan(num_processes=1))
    assert "TORCH_ELASTIC" not in alone, "accelerate launch starts one process without torchrun"


# -- what it rests on -------------------------------------------------------------------------------------------------


def test_the_code_is_what_sysexits_calls_a_temporary_failure() -> None:
    assert EXIT_CODE == os.EX_TEMPFAIL


def test_torchruns_agent_reads_the_grace_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1}
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    if grace.launcher_can_be_told():
        assert LaunchConfig(**arguments).shutdown_timeout == TORCHRUN_SECONDS
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "77")
        assert LaunchConfig(**arguments).shutdown_timeout == 77
    assert inspect.signature(PContext.close).parameters["timeout"].default == TORCHRUN_SECONDS


def test_accelerate_launch_takes_torchruns_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.run as torchrun
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import _filter_args

    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGUSR1")
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", "77")
    asked = launch_command_parser().parse_args(["--num_processes", "2", "train.py"])
    filtered = _filter_args(asked, torchrun.get_args_parser(), ["--training_script", "train.py"])
    assert filtered.signals_to_handle == "SIGTERM,SIGUSR1"
    if grace.launcher_can_be_told():
        assert int(filtered.shutdown_timeout) == 77


def test_torchrun_signals_the_whole_group_of_a_rank() -> None:
    assert "os.killpg(self.proc.pid" in inspect.getsource(SubprocessHandler.close), "shield_data_workers is for that"


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (
            Trainer._maybe_log_save_evaluate,
            ("self._evaluate(", "if self.control.should_save:", "self._save_checkpoint("),
        ),
        (Trainer._inner_training_loop, ("self._run_epoch(", "if self.control.should_training_stop:")),
        (Trainer._run_epoch, ("callback_handler.on_substep_end(", "self._maybe_log_save_evaluate(")),
    ],
)
def test_trainer_saves_and_stops_where_the_seams_are(method: Callable[..., Any], expected: tuple[str, ...]) -> None:
    source = inspect.getsource(inspect.unwrap(method))
    for call in expected:
        assert call in source, f"integrations.preemption_seams: {method.__name__} has no {call} any more"


def test_weights_and_biases_is_told_that_the_run_goes_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = importlib.import_module("wandb")
    assert callable(wandb.Run.mark_preempting), "integrations.wandb.mark_preempting"
    told: list[bool] = []
    monkeypatch.setattr(wandb, "run", SimpleNamespace(mark_preempting=lambda: told.append(True)))
    assert mark_preempting() and told == [True]
    monkeypatch.setattr(wandb, "run", None)
    assert not mark_preempting()
