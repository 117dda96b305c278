"""What holds for every test: no hub, no accelerator logins, and nothing left behind.

A test that changes the environment, leaves a process group or a thread, or writes into the repository makes another
test pass or fail by order alone. Such a test fails here, by name, at its own teardown.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

# Before any library is imported: they read these once, at import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"

import pytest  # noqa: E402

REPOSITORY = Path(__file__).resolve().parent.parent

# Set by libraries when they are first imported or first used, whatever the test does; no test can undo them.
VARIABLES_OF_LIBRARIES = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TRITON_", "WANDB_SERVICE", "_WANDB_")
# Daemon threads that libraries keep for the life of the process, by the start of their names.
THREADS_OF_LIBRARIES = ("TMonitor", "tqdm", "wandb", "AsyncioThread", "fsspecIO", "ThreadPoolExecutor", "asyncio_")
# Folders at the top of the repository that tools make while tests run.
ENTRIES_OF_TOOLS = {".pytest_cache", ".mypy_cache", ".ruff_cache", "__pycache__", ".hypothesis", "hf_fsdp.egg-info"}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(VARIABLES_OF_LIBRARIES)}


def _repository_entries() -> set[str]:
    return {path.name for path in REPOSITORY.iterdir()} - ENTRIES_OF_TOOLS


def _new_threads(before: set[threading.Thread], patience_seconds: float = 2.0) -> list[str]:
    deadline = time.monotonic() + patience_seconds
    while True:
        alive = [
            thread.name
            for thread in threading.enumerate()
            if thread not in before and not (thread.daemon and thread.name.startswith(THREADS_OF_LIBRARIES))
        ]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.05)


def _process_group_exists() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaks environment variables, a process group, threads or files in the working tree.

    What leaked is undone as far as it can be, so that one test fails and not all that follow.
    """
    environment, threads, entries = _environment(), set(threading.enumerate()), _repository_entries()
    had_group = _process_group_exists()
    yield
    leaks = []

    after = _environment()
    changed = sorted(name for name in environment.keys() | after.keys() if environment.get(name) != after.get(name))
    if changed:
        leaks.append(f"environment variables {changed}: use monkeypatch.setenv, or run it in its own process")
        for name in changed:
            if name in environment:
                os.environ[name] = environment[name]
            else:
                del os.environ[name]

    if not had_group and _process_group_exists():
        sys.modules["torch.distributed"].destroy_process_group()
        leaks.append("a torch.distributed process group: destroy it in the test, or run it in its own process")

    if alive := _new_threads(threads):
        leaks.append(f"threads {alive}: join them in the test")

    if new := sorted(_repository_entries() - entries):
        leaks.append(f"files in the repository {new}: write to tmp_path")

    if leaks:
        pytest.fail("this test leaks " + "\n  and ".join(leaks), pytrace=False)
