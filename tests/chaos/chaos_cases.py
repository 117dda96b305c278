"""Saving and resuming under fire, on two processes: full disks, damaged files, folders that are not what they seem."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from hf_fsdp.checkpoint import commit, room, write
from hf_fsdp.checkpoint.save import SaveRequest, begin_save
from hf_fsdp.checkpoint.write import finish_save
from hf_fsdp.errors import CheckpointError
from hf_fsdp.integrations.checkpoint_seams import checkpoints_of
from hf_fsdp.sharding import mesh, outcome
from hf_fsdp.sharding.mesh import agree_all
from tests.chaos import async_cases, copy_cases
from tests.chaos.calls import Calls, in_order
from tests.chaos.lives import build_trainer, state_hash
from tests.chaos.mounted import READ_ONLY, SMALL_DISK
from tests.chaos.order import order_problems
from tests.chaos.saving import (
    failing,
    fingerprint,
    finish,
    names,
    quietly,
    refused,
    save,
    shared_folder,
    slow,
    trained,
)

# -- disks that are full or cannot be written --------------------------------------------------------------------------


def disk_is_full_before(rank: int, world_size: int) -> dict[str, Any]:
    """The room is looked at before the first byte."""
    with shared_folder(os.environ.get(SMALL_DISK)) as folder, contextlib.ExitStack() as stack:
        trainer = trained(folder / "run")
        save(trainer, 1)
        before = fingerprint(folder / "run")
        if SMALL_DISK in os.environ:
            if rank == 0:
                (folder / "filler").write_bytes(bytes(shutil.disk_usage(folder).free - 10 * 2**20))
        else:
            usage = shutil._ntuple_diskusage(2**30, 2**30 - 2**20, 2**20)
            stack.enter_context(mock.patch.object(shutil, "disk_usage", lambda path: usage))
        found = refused(lambda: save(trainer, 2))
        found["intact"] = fingerprint(folder / "run") == before
        stack.close()
        (folder / "filler").unlink() if (folder / "filler").exists() and rank == 0 else None
        agree_all(None)
        save(trainer, 3)
        return {**found, "names": names(folder / "run")}


def disk_fills_up(rank: int, world_size: int) -> dict[str, Any]:
    """The last rank meets the full disk in the middle of its part; the other one is done with its own."""
    with shared_folder(os.environ.get(SMALL_DISK)) as folder:
        trainer = trained(folder / "run")
        save(trainer, 1)
        before = fingerprint(folder / "run")

        def fill(operation: str, path: str) -> None:
            if rank != world_size - 1 or operation != "write" or "shard-00002" not in path:
                return
            if SMALL_DISK not in os.environ:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as stream:
                while True:
                    stream.write(bytes(4096))

        with Calls(folder / "run", rank, fill):
            found = refused(lambda: save(trainer, 2))
        found["intact"] = fingerprint(folder / "run") == before
        (folder / "filler").unlink() if (folder / "filler").exists() and rank == 0 else None
        agree_all(None)
        save(trainer, 3)
        return {**found, "names": names(folder / "run")}


# Rank, operation, a part of the path, what the system says.
FAULTS: dict[str, tuple[int, str, str, int]] = {
    "a shard of the first rank": (0, "write", "model/shard-00001", errno.ENOSPC),
    "a shard of the last rank": (1, "write", "optimizer/shard-00002", errno.ENOSPC),
    "the sync of a shard": (1, "fsync", "model/shard-00002", errno.EIO),
    "a rank's document": (1, "write", "state/rank-00001", errno.EDQUOT),
    "trainer_state.json": (0, "write", "trainer_state", errno.ENOSPC),
    "config.json": (0, "write", "config.json", errno.ENOSPC),
    "the manifest": (0, "write", "manifest", errno.ENOSPC),
    "the sync of a folder": (0, "fsync", "saving-2/optimizer", errno.EIO),
    "the name": (0, "rename", ".hf-fsdp-saving-2", errno.EACCES),
    "the probe": (0, "write", ".probe", errno.EROFS),
}


def faults(rank: int, world_size: int) -> dict[str, Any]:
    """Every kind of write fails once, in a new step and in one that replaces an earlier save of the same step."""
    results = {}
    with shared_folder() as folder:
        for format in ("sharded", "full"):
            trainer = trained(folder / format, format=format)
            save(trainer, 1)
            save(trainer, 2)
            for what, fault in FAULTS.items():
                if format == "full" and "model/" in fault[2]:
                    fault = (0, fault[1], "model.safetensors", fault[3])
                before = fingerprint(folder / format)
                with failing(folder / format, rank, *fault) as hits:
                    found = refused(functools.partial(save, trainer, 2))
                found["intact"] = fingerprint(folder / format) == before
                found["hits"] = sum(agree_all(len(hits)))
                results[f"{what}, {format}"] = found
            save(trainer, 2)
            results[f"then, {format}"] = {"names": names(folder / format)}
    return results


def read_only(rank: int, world_size: int) -> dict[str, Any]:
    """The folder of the run cannot be written: found before the first step, and by a save."""
    with shared_folder() as folder, contextlib.ExitStack() as stack:
        trainer = trained(folder / "run")
        if READ_ONLY in os.environ:
            trainer.args.output_dir = os.environ[READ_ONLY]
        else:
            stack.enter_context(failing(folder / "run", rank, 0, "mkdir", "saving-1", errno.EROFS))
        found = refused(lambda: save(trainer, 1))
        if READ_ONLY not in os.environ:
            stack.enter_context(failing(folder / "run", rank, 0, "mkdir", "self-test", errno.EROFS))
        checkpoints = checkpoints_of(trainer)
        assert checkpoints is not None
        checkpoints.config = checkpoints.config.__class__(self_test=True)
        tested = refused(lambda: quietly(checkpoints.test, trainer.model, Path(trainer.args.output_dir)))
        return {"save": found, "self_test": tested, "is_mounted": READ_ONLY in os.environ}


# -- ranks that do not do the same -------------------------------------------------------------------------------------


def rank_local_folders(rank: int, world_size: int) -> dict[str, Any]:
    with shared_folder() as folder, mock.patch.object(room, "PROBE_SECONDS", 1.0):
        trainer = trained(folder / "run")
        save(trainer, 1)
        if rank == 1:
            trainer.args.output_dir = str(folder / "local")
            os.mkdir(folder / "local")
        found = refused(lambda: save(trainer, 2))
        checkpoints = checkpoints_of(trainer)
        assert checkpoints is not None
        resumed = refused(
            lambda: quietly(checkpoints.resume.resolve, trainer, trainer.args.output_dir + "/checkpoint-1")
        )
        return {"save": found, "resume": resumed, "names": names(folder / "run"), "local": names(folder / "local")}


def one_rank_alone(rank: int, world_size: int) -> dict[str, Any]:
    """One rank saves, as under `if is_main_process`; the other goes on and meets it in the next agreement."""
    results = {}
    with shared_folder() as folder, mock.patch.object(outcome, "ENTRY_TIMEOUT", timedelta(seconds=1.5)):
        trainer = trained(folder / "run")
        trainer.state.global_step = 7
        for alone in range(world_size):
            began, error = time.monotonic(), ""
            try:
                if rank == alone:
                    trainer._save_checkpoint(trainer.model, None)
                else:
                    outcome.agreed("do something else", lambda: None)
            except CheckpointError as raised:
                error = str(raised)
            seconds = time.monotonic() - began
            mesh._agreement_groups.clear()  # it has ended; the next use makes another
            results[f"rank {alone}"] = {"errors": agree_all(error), "seconds": max(agree_all(seconds))}
        save(trainer, 8)
        return {**results, "names": names(folder / "run")}


def two_steps(rank: int, world_size: int) -> dict[str, Any]:
    with shared_folder() as folder:
        trainer = trained(folder / "run")
        found = refused(lambda: save(trainer, 3 + rank))
        save(trainer, 5)
        return {**found, "names": names(folder / "run")}


def staging_removed(rank: int, world_size: int) -> dict[str, Any]:
    """Another run in the same output_dir takes the staging folder for a dead one's, before shards are written."""
    results: dict[str, Any] = {}
    with shared_folder() as folder:
        trainer = trained(folder / "run")
        save(trainer, 1)
        for name, remake in {"gone": False, "remade": True}.items():
            request = SaveRequest(
                output_dir=folder / "run",
                step=2,
                model=trainer.model,
                optimizer=None,
                write_extras=trainer.model.config.save_pretrained,
            )
            staged = begin_save(request)
            if rank == 0:
                shutil.rmtree(staged.folder)
                if remake:
                    staged.folder.mkdir()
            agree_all(None)
            results[name] = refused(lambda: finish_save(staged))  # noqa: B023  # called at once
        return {**results, "names": names(folder / "run")}


def works_elsewhere(rank: int, world_size: int) -> dict[str, Any]:
    """`output_dir` is relative, and the process changes its folder while a save is behind training."""
    before = os.getcwd()
    with shared_folder() as folder:
        try:
            os.chdir(folder)
            trainer = build_trainer(Path("run"), {"async_save": True}, save_strategy="no", max_steps=1)
            quietly(trainer.train)
            trainer.state.global_step = 1
            with Calls(folder / "run", rank, slow(0.3, "model/shard")):
                quietly(trainer._save_checkpoint, trainer.model, None)
                os.chdir(before)
                finish(trainer)
        finally:
            os.chdir(before)
        return {"names": names(folder / "run"), "elsewhere": os.path.exists("run")}


# -- checkpoints that were damaged -------------------------------------------------------------------------------------


def flip(path: Path, place: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    index = int(len(content) * place)
    while chr(content[index]).isspace():  # between two values of a JSON file nothing would change
        index += 1
    content[index] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


_MODEL = "model/shard-00002-model-00001-of-00001.safetensors"
_OPTIMIZER = "optimizer/shard-00001-model-00001-of-00001.safetensors"
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a byte of a model shard": lambda folder: flip(folder / _MODEL, 0.99),
    "a byte of a model shard's header": lambda folder: flip(folder / _MODEL, 0.1),
    "a byte of an optimizer shard": lambda folder: flip(folder / _OPTIMIZER, 0.99),
    "a byte of trainer_state.json": lambda folder: flip(folder / "trainer_state.json"),
    "a byte of a rank's state": lambda folder: flip(folder / "state/rank-00001.json"),
    "a byte of config.json": lambda folder: flip(folder / "config.json"),
    "a byte of the manifest": lambda folder: flip(folder / "manifest.json"),
    "a byte of the manifest's end": lambda folder: flip(folder / "manifest.json", 0.97),
    "a shard cut off": lambda folder: truncate(folder / _OPTIMIZER),
    "the manifest cut off": lambda folder: truncate(folder / "manifest.json"),
    "an empty manifest": lambda folder: (folder / "manifest.json").write_bytes(b""),
    "a shard missing": lambda folder: (folder / _MODEL).unlink(),
    "a rank's state missing": lambda folder: (folder / "state/rank-00000.json").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
}
HARMLESS: dict[str, Callable[[Path], Any]] = {
    "an extra file": lambda folder: (folder / "notes.txt").write_text("mine"),
    "an extra shard": lambda folder: shutil.copy(folder / _MODEL, folder / "model/shard-00003.safetensors"),
    "a pickle": lambda folder: (folder / "optimizer.bin").write_bytes(b"\x80\x04cos\nsystem\n"),
}


def damages(rank: int, world_size: int) -> dict[str, Any]:
    """What resuming does with each kind of damage to the newest of two checkpoints."""
    results: dict[str, Any] = {}

    def resolve(taken: list[str | None], trainer: Any) -> None:
        found = checkpoints_of(trainer)
        assert found is not None
        taken.append(found.resume.resolve(trainer, True))

    with shared_folder() as folder:
        trainer = trained(folder / "whole")
        save(trainer, 1)
        save(trainer, 2)
        checkpoints = checkpoints_of(trainer)
        assert checkpoints is not None
        for number, (what, damage) in enumerate({**DAMAGES, **HARMLESS}.items()):
            run = folder / f"damaged-{number}"  # a line is said once
            if rank == 0:
                shutil.copytree(folder / "whole", run)
                damage(run / "checkpoint-2")
            before = fingerprint(run)
            trainer.args.output_dir = str(run)
            taken: list[str | None] = []
            lines = quietly(functools.partial(resolve, taken, trainer))
            by_path = refused(
                functools.partial(quietly, checkpoints.resume.resolve, trainer, str(run / "checkpoint-2"))
            )
            results[what] = {
                "taken": [Path(path).name for path in agree_all(taken[0])],
                "lines": [line for line in agree_all(lines)[0].splitlines() if "skipped" in line],
                "by_path": by_path["errors"],
                "untouched": fingerprint(run) == before,
            }
            if rank == 0:
                shutil.rmtree(run)
            agree_all(None)
    return results


def resumed_past_damage(rank: int, world_size: int) -> dict[str, Any]:
    """A whole run that finds its newest checkpoint damaged goes on from the one before, to the same end."""
    with shared_folder() as folder:
        trainer = build_trainer(folder / "run", {}, save_steps=2, max_steps=4)
        quietly(trainer.train)
        whole = state_hash(trainer.model, trainer.optimizer)
        if rank == 0:
            flip(folder / "run/checkpoint-4" / _OPTIMIZER, 0.99)
        agree_all(None)
        again = build_trainer(folder / "run", {}, save_steps=2, max_steps=4)
        lines = quietly(again.train, resume_from_checkpoint=True)
        return {
            "equal": state_hash(again.model, again.optimizer) == whole,
            "lines": [line for line in agree_all(lines)[0].splitlines() if "resume:" in line],
        }


# -- the order of calls ------------------------------------------------------------------------------------------------


def recorded_order(rank: int, world_size: int) -> dict[str, Any]:
    """The calls of three saves of a run, of which the third replaces the second and the first is rotated away."""
    results = {}
    with shared_folder() as folder:
        for format in ("sharded", "full"):
            for is_async in (False, True):
                what = f"{format}{', async' if is_async else ''}"
                run = folder / what / "deep" / "run"
                trainer = trained(run, format=format, async_save=is_async)
                trainer.args.save_total_limit = 1
                problems, gone = {}, []
                for number, step in enumerate((1, 2, 2)):
                    with Calls(run, rank) as calls:
                        save(trainer, step)
                    log = in_order(agree_all(calls.log))
                    problems[f"save {number}"] = order_problems(log, str(run), step)
                    gone += [Path(call.target).name for call in log if call.operation == "rename"]
                results[what] = {"problems": problems, "renames": gone, "names": names(run)}
    return results


# A part of the path of a sync that is left out -> a part of what the look at the order must say.
LEFT_OUT = {
    "model/shard-00002-model-00001-of-00001.safetensors": "between its last write and the manifest",
    "state/rank-00001.json": "between its last write and the manifest",
    "saving-1/config.json": "between its last write and the manifest",
    "manifest.json": "the manifest is not synced before the rename",
    "saving-1/optimizer": "optimizer is not synced between the manifest and the rename",
    "saving-1": "between the manifest and the rename",
    "deep/run": "the folder of the run is not synced after the rename",
    "/deep": "the run may have made the folder in it",
}


def order_without_a_sync(rank: int, world_size: int) -> dict[str, Any]:
    """The test of the test: a save from which one sync is taken out."""
    results = {}
    with shared_folder() as folder:
        trainer = trained(folder / "deep/run")
        for part in LEFT_OUT:

            def without(operation: str, path: str, part: str = part) -> bool:
                return operation == "fsync" and path.endswith(part)

            with Calls(folder / "deep/run", rank, without=without) as calls:
                save(trainer, 1)
            results[part] = order_problems(in_order(agree_all(calls.log)), str(folder / "deep/run"), 1)
            agree_all(None)
            if rank == 0:
                shutil.rmtree(folder / "deep/run/checkpoint-1")
            agree_all(None)
        save(trainer, 1)

        def delete_first(output_dir: Path, manifest: Any) -> Path:
            commit.delete(output_dir / "checkpoint-1")
            return commit.commit(output_dir, manifest)

        with Calls(folder / "deep/run", rank) as calls, mock.patch.object(write, "commit", delete_first):
            save(trainer, 2)
        results["deleted first"] = order_problems(in_order(agree_all(calls.log)), str(folder / "deep/run"), 2)
    return results


CASES: dict[str, Callable[[int, int], Any]] = (
    {
        case.__name__: case
        for case in (
            disk_is_full_before,
            disk_fills_up,
            faults,
            read_only,
            rank_local_folders,
            one_rank_alone,
            two_steps,
            staging_removed,
            works_elsewhere,
            damages,
            resumed_past_damage,
            recorded_order,
            order_without_a_sync,
        )
    }
    | async_cases.CASES
    | copy_cases.CASES
)
