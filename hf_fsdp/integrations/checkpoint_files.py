"""What a Trainer's checkpoint holds beside tensors: documents of every rank, and what `from_pretrained` wants."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from hf_fsdp.checkpoint.documents import ARGUMENTS_FILE, DATA_FILE, SCALER_FILE, SCHEDULER_FILE, rank_file
from hf_fsdp.checkpoint.find import TRAINER_STATE_FILE
from hf_fsdp.checkpoint.json_state import encode_state
from hf_fsdp.checkpoint.optimizer_state import FRESH_FIX
from hf_fsdp.checkpoint.random_state import read_random_state
from hf_fsdp.errors import CheckpointError
from hf_fsdp.integrations.data_draws import generators_before_next_batch
from hf_fsdp.integrations.data_position import read_data_position
from hf_fsdp.sharding.adapters import DEFAULT_FOLDER, adapter_keys, is_peft_model
from hf_fsdp.storage.files import json_bytes


def build_documents(trainer: Trainer) -> dict[str, bytes]:
    """Return what this rank adds to a checkpoint, as JSON.

    It is small, so it also goes into a checkpoint without the optimizer: a run that goes on from that with a fresh one
    keeps its schedule.
    """
    args = trainer.args
    documents: dict[str, Any] = {
        rank_file(args.process_index): {
            "random": read_random_state(),
            "random_before_next_batch": encode_state(generators_before_next_batch(trainer)),
            "running_loss": {
                "since_last_log": float(trainer._tr_loss),
                "last_logged_step": trainer._globalstep_last_logged,
            },
        }
    }
    if args.process_index == 0:
        update_callback_state(trainer)
        documents[TRAINER_STATE_FILE] = dataclasses.asdict(trainer.state)
        documents[DATA_FILE] = read_data_position(trainer)
        documents[ARGUMENTS_FILE] = json.loads(args.to_json_string())
        documents[SCHEDULER_FILE] = encode_state(trainer.lr_scheduler.state_dict(), "the scheduler")
        if (scaler := trainer.accelerator.scaler) is not None:
            documents[SCALER_FILE] = encode_state(scaler.state_dict(), "the scaler")
    return {name: json_bytes(content) for name, content in documents.items()}


def update_callback_state(trainer: Trainer) -> None:
    """Bring the state of callbacks (early stopping, control) in Trainer's state up to date, as Trainer does."""
    fresh: dict[str, list[Any]] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            fresh.setdefault(type(callback).__name__, []).append(callback.state())
    for name, states in fresh.items():
        trainer.state.stateful_callbacks[name] = states if len(states) > 1 else states[0]


def write_model_files(trainer: Trainer, folder: Path) -> None:
    """Write config, generation config, tokenizer, processor and adapter configs; on rank 0."""
    model: Any = trainer.model
    if is_peft_model(model):
        for adapter in adapter_keys(model):
            name = "default" if adapter == DEFAULT_FOLDER else adapter
            config = model.peft_config[name]
            is_inference, config.inference_mode = config.inference_mode, True
            try:
                config.save_pretrained(folder / adapter)
            finally:
                config.inference_mode = is_inference
    elif (config := getattr(model, "config", None)) is not None and hasattr(config, "save_pretrained"):
        architectures, config.architectures = config.architectures, [type(model).__name__]
        try:
            config.save_pretrained(folder)
        finally:
            config.architectures = architectures
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(folder)
    if (processor := processor_to_save(trainer)) is not None:
        processor.save_pretrained(folder)


def processor_to_save(trainer: Trainer) -> Any:
    """Return what belongs beside the model: a processor, or a tokenizer, or None.

    A collator of pictures has the whole processor where the Trainer may have been given its tokenizer only, or
    nothing. Without it in the folder nobody can prepare a picture as training did.
    """
    given, collator = trainer.processing_class, trainer.data_collator
    whole = getattr(collator, "processor", None)
    if hasattr(whole, "save_pretrained") and (given is None or given is getattr(whole, "tokenizer", None)):
        return whole
    return given if given is not None else getattr(collator, "tokenizer", None)


def restore_schedule(scheduler: Any, optimizer: Optimizer, saved: dict[str, Any], *, is_fresh: bool) -> list[str]:
    """Go on in the learning rate schedule; return lines that a person should see.

    Args:
        scheduler: of this run.
        optimizer: whose learning rates it sets.
        saved: the state of the scheduler before.
        is_fresh: whether the optimizer is: then only the place in the schedule is the saved one, and this run's
            learning rates go on from it, over its own groups.

    Raises:
        CheckpointError: it is a schedule of another kind, whose state says nothing to this one.
    """
    while isinstance(inner := getattr(scheduler, "scheduler", None), LRScheduler):  # Accelerate's around torch's
        scheduler = inner
    own = scheduler.state_dict()
    # Names with an underscore come and go with torch's releases.
    others = sorted(key for key in own.keys() ^ saved.keys() if not key.startswith("_"))
    if others and not (is_fresh and isinstance(scheduler, LambdaLR)):
        kind = type(scheduler).__name__
        if is_fresh:
            return [f"resume: the schedule is {kind} now and was of another kind, so it starts anew"]
        raise CheckpointError(
            f"this run's schedule is {kind} and the checkpoint's is of another kind: only one of them has {others[0]}",
            fix=f"the lr_scheduler_type of the run that saved, or {FRESH_FIX}",
        )
    if is_fresh and isinstance(scheduler, LambdaLR):
        place = int(saved.get("last_epoch", 0))
        rates = [base * scale(place) for base, scale in zip(own["base_lrs"], scheduler.lr_lambdas, strict=True)]
        saved = {**saved, **{key: own[key] for key in ("base_lrs", "lr_lambdas")}, "_last_lr": rates}
    scheduler.load_state_dict(saved)
    if is_fresh:
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=False):
            group["lr"] = rate
    return []


def restore_running_loss(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Let the first log after a resume average over the steps since the last log before it, as without a break."""
    trainer._tr_loss = torch.tensor(saved["since_last_log"], device=trainer.args.device)
    # Trainer's total is divided by the steps of this run alone, and the first log adds those of the run before.
    trainer._total_loss_scalar = -float(saved["since_last_log"])
    trainer._globalstep_last_logged = int(saved["last_logged_step"])
