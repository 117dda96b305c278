"""The seams of `push_to_hub`: what goes to the Hub is the exported model and its card, never a checkpoint.

Trainer uploads its `output_dir`: under sharded checkpoints that holds no model, and with it go pickles, logs and
folders half written. Its background pushes fail without a word, and on rank 0 only. Pinned by
`tests/unit/test_hub.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import PushInProgress

from hf_fsdp.checkpoint.upload import HubTarget, describe_failure
from hf_fsdp.errors import CheckpointError
from hf_fsdp.integrations.accelerate import replace_method
from hf_fsdp.integrations.evaluation import is_ours
from hf_fsdp.integrations.hub_card import CARD_ARGUMENTS, draft_card
from hf_fsdp.integrations.hub_push import Push, Pushes, print_once, push_folder, remove_push_folders
from hf_fsdp.integrations.preemption import preemption_of
from hf_fsdp.sharding.mesh import agree_all
from hf_fsdp.sharding.outcome import agreed, wait_for_all_ranks

_STATE = "_hf_fsdp_pushes"
# Ranks that wait for an upload meet this often, so that no collective waits as long as the upload takes.
ROUND_SECONDS = 5.0


def install_hub_seams() -> None:
    """Put the seams in place; calling it again changes nothing."""
    replace_method(Trainer, "init_hf_repo", _init_hf_repo)
    replace_method(Trainer, "push_to_hub", _push_to_hub)
    replace_method(Trainer, "_push_from_checkpoint", _push_from_checkpoint)
    replace_method(Trainer, "_finish_current_push", _finish_current_push)


def _init_hf_repo(
    original: Callable[..., None], trainer: Trainer, token: str | None = None, private: bool | None = None
) -> None:
    """Create the repository on rank 0; where that fails, no rank goes on, and all know the repository's name."""
    if not is_ours(trainer):
        return original(token=token, private=private)
    wanted = trainer.args.hub_model_id or Path(str(trainer.args.output_dir)).absolute().name

    def create() -> None:
        try:
            original(token=token, private=private)
        except Exception as error:
            raise CheckpointError(
                describe_failure(error, token or trainer.args.hub_token),
                fix="hf auth login, or hub_token=... of an account that may write there, and no HF_HUB_OFFLINE; "
                "or push_to_hub=False and push the exported model later",
                source=f"{type(trainer.args).__name__}(push_to_hub=True)",
            ) from error

    agreed(f"open the repository {wanted}", create)
    trainer.hub_model_id = agree_all(trainer.hub_model_id)[0]
    trainer.push_in_progress = None
    strategy = trainer.args.hub_strategy
    if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS) and trainer.is_world_process_zero():
        print_once(
            [
                f"hub_strategy={strategy.value}: exported models are pushed, no optimizer state; "
                "resume from the checkpoints in output_dir"
            ]
        )


def _push_to_hub(
    original: Callable[..., Any],
    trainer: Trainer,
    commit_message: str | None = "End of training",
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    private: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Save the whole model, all ranks together, and upload that from rank 0; a failure is raised on all ranks."""
    if not is_ours(trainer):
        return original(commit_message, blocking, token, revision, private, **kwargs)
    args = trainer.args
    if unknown := set(kwargs) - CARD_ARGUMENTS:
        raise TypeError(f"push_to_hub() got unexpected arguments {sorted(unknown)}")
    wait_for_all_ranks("push_to_hub")
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    if trainer.hub_model_id is None:
        trainer.init_hf_repo(token=token, private=private)
    pushes = _pushes_of(trainer)
    _wait_together(pushes)
    pushes.report(is_last=False)
    pushes.skipped = None  # older than what is pushed now
    folder = push_folder(Path(str(args.output_dir)), trainer.state.global_step)
    if trainer.is_world_process_zero():
        remove_push_folders(folder.parent)
    with _without_push(args):
        trainer.save_model(str(folder))
    job: futures.Future[CommitInfo] | None = None

    def begin() -> None:
        nonlocal job
        if not trainer.is_world_process_zero():
            return
        kwargs.setdefault("model_name", str(trainer.hub_model_id).split("/")[-1])
        push = Push(
            api=_api(),
            target=_target(trainer, token, revision),
            folder=folder,
            card=draft_card(trainer, str(trainer.hub_model_id), kwargs, trainer.state.global_step),
            message=commit_message or "End of training",
            step=trainer.state.global_step,
            moves_to=folder.parent,
        )
        job = _start(trainer, push, outlives_script=True)

    agreed(f"prepare the push to {trainer.hub_model_id}", begin)
    if not blocking:
        if job is not None:
            job.add_done_callback(lambda done: pushes.report())
        return job
    _wait_together(pushes)
    pushes.running.clear()
    return agreed(f"push to {trainer.hub_model_id}", lambda: job.result() if job is not None else None)


def _push_from_checkpoint(original: Callable[..., None], trainer: Trainer, checkpoint_folder: str) -> None:
    """Push an export of a committed checkpoint in the background; on rank 0, without a collective."""
    if not is_ours(trainer):
        return original(checkpoint_folder)
    args = trainer.args
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return
    checkpoint = Path(checkpoint_folder)
    if (preemption := preemption_of(trainer)) is not None and preemption.is_leaving:
        print_once([f"{checkpoint.name} is not pushed, because the run was asked to stop; the next save is"])
        return
    pushes = _pushes_of(trainer)
    pushes.report(is_last=False)
    try:
        push = _draft_push(trainer, checkpoint)
        push.secure()
        pushes.skipped = push
        remove_push_folders(checkpoint.parent, keep=pushes.folders())
        if args.hub_always_push or not pushes.in_flight():
            trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
            _start_skipped(trainer)
    except Exception as error:  # training is not to end by it, and least of all on one rank
        reason = describe_failure(error, args.hub_token)
        print_once([f"warning: training goes on, but {checkpoint.name} was not pushed: {reason}"])


def _draft_push(trainer: Trainer, checkpoint: Path) -> Push:
    args, name = trainer.args, str(trainer.hub_model_id)
    step = int(checkpoint.name.rpartition("-")[2])
    by_epoch = args.save_strategy == SaveStrategy.EPOCH
    progress = f"epoch {int(trainer.state.epoch or 0)}" if by_epoch else f"step {step}"
    return Push(
        api=_api(),
        target=_target(trainer),
        folder=push_folder(checkpoint.parent, step),
        card=draft_card(trainer, name, {"model_name": name.split("/")[-1]}, step),
        message=f"Training in progress, {progress}",
        step=step,
        checkpoint=checkpoint,
        subfolder=checkpoint.name if args.hub_strategy == HubStrategy.ALL_CHECKPOINTS else None,
    )


def _finish_current_push(original: Callable[..., None], trainer: Trainer) -> None:
    """At the end of training: all ranks wait for the upload, and its failure is said with the way to repair it."""
    if not is_ours(trainer) or not trainer.args.push_to_hub or trainer.args.hub_strategy == HubStrategy.END:
        return original()
    pushes = _pushes_of(trainer)
    _wait_together(pushes)
    if pushes.skipped is not None:  # the newest one came while an upload was running
        pushes.report(is_last=False)
        _start_skipped(trainer)
    _wait_together(pushes)
    pushes.report()


def _start_skipped(trainer: Trainer) -> None:
    pushes = _pushes_of(trainer)
    push, pushes.skipped = pushes.skipped, None
    if push is not None:
        _start(trainer, push, outlives_script=False)


def _start(trainer: Trainer, push: Push, *, outlives_script: bool) -> futures.Future[CommitInfo]:
    pushes = _pushes_of(trainer)
    job = pushes.start(push, outlives_script=outlives_script)
    trainer.push_in_progress = PushInProgress(pushes.jobs)
    return job


def _wait_together(pushes: Pushes) -> None:
    """Wait on all ranks until the pushes of rank 0 are done; collective."""
    while True:
        futures.wait(pushes.jobs, timeout=ROUND_SECONDS)
        if all(agree_all(all(job.done() for job in pushes.jobs))):
            return


def _pushes_of(trainer: Trainer) -> Pushes:
    if not hasattr(trainer, _STATE):
        setattr(trainer, _STATE, Pushes())
    pushes: Pushes = getattr(trainer, _STATE)
    return pushes


def _target(trainer: Trainer, token: str | None = None, revision: str | None = None) -> HubTarget:
    args = trainer.args
    return HubTarget(
        repo_id=str(trainer.hub_model_id), token=token or args.hub_token, revision=revision or args.hub_revision
    )


@functools.cache
def _api() -> HfApi:
    """Return the client, for the endpoint of the environment."""
    return HfApi(library_name="hf-fsdp")


@contextlib.contextmanager
def _without_push(args: TrainingArguments) -> Iterator[None]:
    """Let `save_model` save and not push what it has saved."""
    kept = args.push_to_hub
    args.push_to_hub = False
    try:
        yield
    finally:
        args.push_to_hub = kept
