"""One push to the Hub: an exported folder, its card, the commit. Runs on rank 0 only, in a background thread.

Nothing here is collective and nothing touches the model, so training goes on meanwhile. A push that fails leaves its
folder, so that one command finishes it by hand.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import threading
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi

from hf_fsdp.checkpoint.export import export_checkpoint
from hf_fsdp.checkpoint.serving import serving_lines
from hf_fsdp.checkpoint.upload import (
    HubTarget,
    describe_failure,
    name_hub_base,
    not_uploaded,
    replaced_files,
    upload_command,
    upload_export,
)
from hf_fsdp.errors import CheckpointError, HfFsdpError, Problem
from hf_fsdp.integrations.hub_card import CardDraft

# Hidden, and no `checkpoint-*` pattern matches it.
_FOLDER_PREFIX = ".hf-fsdp-hub-"


def push_folder(output_dir: Path, step: int) -> Path:
    """Return where the export of `step` is put together for its push."""
    return output_dir / f"{_FOLDER_PREFIX}{step}"


def remove_push_folders(output_dir: Path, keep: Sequence[Path] = ()) -> None:
    """Remove what earlier pushes left in `output_dir`, but for those in `keep`, which still run."""
    kept = {path.name for path in keep} | {_source_folder(path).name for path in keep}
    for path in output_dir.glob(f"{_FOLDER_PREFIX}*"):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Push:
    """What is pushed and where to.

    Args:
        api: the client.
        target: repository, branch and token.
        folder: where the export is or will be.
        checkpoint: a committed checkpoint to export from; None where `folder` is filled already.
        card: the model card.
        message: the commit's first line.
        step: the optimizer step, for people.
        subfolder: also keep the export under this name in the repository.
        moves_to: where the export goes when all is done; None removes it.
    """

    api: HfApi
    target: HubTarget
    folder: Path
    card: CardDraft
    message: str
    step: int
    checkpoint: Path | None = None
    subfolder: str | None = None
    moves_to: Path | None = None

    def secure(self) -> None:
        """Give the checkpoint's files second names, so that its rotation does not take them away meanwhile."""
        if self.checkpoint is not None:
            _link_tree(self.checkpoint, _source_folder(self.folder))

    def run(self) -> CommitInfo:
        """Export, write the card, upload, and clean up.

        Raises:
            CheckpointError: with the command that pushes by hand.
        """
        is_exported = False
        try:
            self._export()
            is_exported = True
            self._keep_back()
            local_base = name_hub_base(self.folder)
            self.card.write(self.folder)
            commit = upload_export(self.api, self.folder, self.target, message=self.message)
            if self.subfolder:
                # The same blobs, so only names travel.
                message = f"{self.message}, {self.subfolder}"
                upload_export(self.api, self.folder, self.target, message=message, path_in_repo=self.subfolder)
        except Exception as error:
            raise self._failed(error, is_exported) from error
        lines = [f"step {self.step} is on the Hub: {commit.commit_url}"]
        lines += [str(line) for line in serving_lines(self.target.repo_id, self.folder)]
        if local_base:
            lines.append(
                f"warning: adapter_config.json names {local_base}, a folder of this machine, as its base model: "
                "nobody else can load it; set base_model_name_or_path to a repository and push again"
            )
        print_once(lines)
        if self.moves_to is not None:
            move_into(self.folder, self.moves_to)
        shutil.rmtree(self.folder, ignore_errors=True)
        return commit

    def _export(self) -> None:
        if self.checkpoint is None:
            return
        source = _source_folder(self.folder)
        source = source if source.is_dir() else self.checkpoint
        shutil.rmtree(self.folder, ignore_errors=True)
        export_checkpoint(source, self.folder)
        shutil.rmtree(_source_folder(self.folder), ignore_errors=True)

    def _keep_back(self) -> None:
        """Take what is never uploaded out of the folder, so that a push by hand does not upload it either."""
        for name in not_uploaded(self.folder):
            if self.moves_to is not None:
                os.replace(self.folder / name, self.moves_to / name)
            else:
                (self.folder / name).unlink()

    def _failed(self, error: Exception, is_exported: bool) -> CheckpointError:
        shutil.rmtree(_source_folder(self.folder), ignore_errors=True)
        what = str(error) if isinstance(error, HfFsdpError) else describe_failure(error, self.target.token)
        by_hand = upload_command(self.folder, self.target)
        if not is_exported:
            shutil.rmtree(self.folder, ignore_errors=True)
            checkpoint = shlex.quote(str(self.checkpoint))
            by_hand = f"hf-fsdp checkpoint export {checkpoint} -o {shlex.quote(str(self.folder))} && {by_hand}"
        return CheckpointError(f"step {self.step}: {what}", fix=by_hand)


@dataclass
class Pushes:
    """The pushes of one Trainer, one after the other; those that are not reported on yet. Rank 0 has some.

    Attributes:
        running: each push with its job, oldest first.
        skipped: the push of the newest checkpoint, where it came while another was under way.
    """

    running: list[tuple[Push, futures.Future[CommitInfo]]] = field(default_factory=list)
    skipped: Push | None = None

    @property
    def jobs(self) -> list[futures.Future[CommitInfo]]:
        """All jobs, ended or not."""
        return [job for _, job in self.running]

    def in_flight(self) -> list[Push]:
        """Return the pushes that have not ended."""
        return [push for push, job in self.running if not job.done()]

    def folders(self) -> list[Path]:
        """Return the folders that are still needed."""
        return [push.folder for push in (*self.in_flight(), self.skipped) if push is not None]

    def start(self, push: Push, *, outlives_script: bool) -> futures.Future[CommitInfo]:
        """Run `push` in a thread of its own, after the one before: the newest commit must be the newest step.

        Args:
            push: what to run.
            outlives_script: whether the process waits for it at its end. A push of a checkpoint does not: a process
                that has to leave in the middle of training leaves, and the Hub has the commit before.
        """
        before = self.jobs[-1:]
        job: futures.Future[CommitInfo] = futures.Future()

        def work() -> None:
            futures.wait(before)
            if not job.set_running_or_notify_cancel():
                return
            try:
                job.set_result(push.run())
            except BaseException as error:
                job.set_exception(error)

        self.running.append((push, job))
        threading.Thread(target=work, name="hf-fsdp-push", daemon=not outlives_script).start()
        return job

    def report(self, is_last: bool = True) -> None:
        """Say which pushes have failed since the last time, with the way to repair it where no later one follows."""
        newest = self.running[-1:]
        done = [(push, job) for push, job in self.running if job.done()]
        self.running = [entry for entry in self.running if entry not in done]
        for push, job in done:
            if job.cancelled() or (error := job.exception()) is None:
                continue
            problem = error.problems[0] if isinstance(error, HfFsdpError) else error
            is_superseded = not is_last or (push, job) not in newest
            text = problem.message if is_superseded and isinstance(problem, Problem) else problem
            print_once([f"warning: training goes on, but could not push to {push.target.repo_id}: {text}"])


def move_into(folder: Path, output_dir: Path) -> None:
    """Move the exported files of `folder` into `output_dir`, and take away weights there that they replace."""
    there = [path.name for path in output_dir.iterdir() if path.is_file()]
    new = [path.name for path in folder.iterdir()]
    for name in replaced_files(there, new):
        (output_dir / name).unlink()
    for path in folder.iterdir():
        target = output_dir / path.name
        if target.is_dir() and path.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)


_printed: set[str] = set()
_print_lock = threading.Lock()


def print_once(lines: Sequence[str]) -> None:
    """Print each line once in this process, whole, from whichever thread."""
    with _print_lock:
        new = [line for line in lines if line not in _printed]
        _printed.update(new)
        if new:
            print("\n".join(f"hf-fsdp: {line}" for line in new), flush=True)


def _source_folder(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-source")


def _link_tree(source: Path, target: Path) -> None:
    """Make `target` a second name for every file of `source`; without it where the file system has no such links."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except (OSError, shutil.Error):
        with contextlib.suppress(OSError):
            shutil.rmtree(target)
