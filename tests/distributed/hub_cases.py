"""`push_to_hub` under `FSDPCallback`, against the stand-in of the Hub that `HF_ENDPOINT` names."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftModel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from hf_fsdp import FSDPCallback, FSDPConfig
from hf_fsdp.checkpoint.serving import serving_lines
from hf_fsdp.checkpoint.upload import upload_export
from hf_fsdp.errors import CheckpointError
from hf_fsdp.integrations import hub_push
from hf_fsdp.sharding import mesh
from tests.distributed.hub_stand_in import TOKEN
from tests.distributed.sft_cases import build_rows, build_tokenizer
from tests.distributed.tiny_models import build_model
from tests.distributed.training import QUIET_ARGUMENTS, Run, build_dataset, build_run_model, whole

BASE = "someone/base"


def build_trainer(
    folder: str, world_size: int, repo: str, method: str = "full", async_save: bool = False, **arguments: Any
) -> Trainer:
    """A Trainer that pushes to `repo`; LoRA's base is what is on the stand-in as `someone/base`."""
    config = FSDPConfig(precision="fp32", checkpoint={"async_save": async_save})
    return Trainer(
        model=_come_from_the_hub(build_run_model(Run(method=method, precision="fp32"))),
        args=TrainingArguments(
            **{
                "output_dir": folder,
                **QUIET_ARGUMENTS,
                "max_steps": 4,
                "per_device_train_batch_size": 12 // world_size,
                "learning_rate": 0.05,
                "push_to_hub": True,
                "hub_model_id": repo,
                "hub_token": TOKEN,
                **arguments,
            },
            **config.trainer_kwargs(),
        ),
        train_dataset=build_dataset(),
        processing_class=build_tokenizer(),
        callbacks=[FSDPCallback(config)],
    )


def _come_from_the_hub(model: Any) -> Any:
    """What `from_pretrained("someone/base")` would have noted in the model and in its adapter's config."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    base.config._name_or_path = base.name_or_path = BASE
    for config in getattr(model, "peft_config", {}).values():
        config.base_model_name_or_path = BASE
    return model


def look(trainer: Trainer, folder: str, printed: str = "") -> dict[str, Any]:
    """What the test compares: final weights, what is sharded, what is left in the folder of the run."""
    parameters = dict(trainer.model.named_parameters())
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters.values())
    return {
        "weights": {name: whole(parameter).clone() for name, parameter in parameters.items()},
        "sharded": all(isinstance(parameter, DTensor) for parameter in parameters.values()),
        "halved": held < 0.6 * sum(parameter.numel() for parameter in parameters.values()),
        "files": sorted(os.listdir(folder)),
        "printed": printed,
        "repo": trainer.hub_model_id,
    }


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """One folder for all ranks, which rank 0 makes and removes when all are done with it."""
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(tempfile.TemporaryDirectory()) if mesh.rank() == 0 else ""
        yield mesh.agree_all(own)[0]
        mesh.agree_all(None)


@contextlib.contextmanager
def printing() -> Iterator[io.StringIO]:
    """Catch what is printed, also by background threads."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield out


def at_the_end(method: str, repo: str, rank: int, world_size: int) -> dict[str, Any]:
    """strategy `end`, and `trainer.push_to_hub()` after training."""
    with shared_folder() as folder, printing() as out:
        trainer = build_trainer(folder, world_size, repo, method, hub_strategy="end", save_strategy="no")
        trainer.train()
        commit = trainer.push_to_hub(dataset_name="someone/data", license="apache-2.0")
        return {**look(trainer, folder, out.getvalue()), "commit": str(commit)}


def end_full(rank: int, world_size: int) -> dict[str, Any]:
    return at_the_end("full", "someone/end-full", rank, world_size)


def end_lora(rank: int, world_size: int) -> dict[str, Any]:
    return at_the_end("lora", "someone/end-lora", rank, world_size)


def every_save(rank: int, world_size: int) -> dict[str, Any]:
    """Each checkpoint is pushed in the background, and rotated away at once; then the export of the last is there."""
    with shared_folder() as folder, printing() as out:
        trainer = build_trainer(
            folder,
            world_size,
            "someone/every-save",
            hub_strategy="every_save",
            hub_always_push=True,
            save_strategy="steps",
            save_steps=2,
            save_total_limit=1,
        )
        trainer.train()
        return look(trainer, folder, out.getvalue())


class EndOfTraining(TrainerCallback):
    """Lets uploads go on when training has ended."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.event.set()

    def upload(self, *args: Any, **kwargs: Any) -> Any:
        assert self.event.wait(timeout=60)
        return upload_export(*args, **kwargs)


def busy(rank: int, world_size: int) -> dict[str, Any]:
    """Saves behind training, and an upload that takes until its end: the newest checkpoint is pushed then."""
    end = EndOfTraining()
    with shared_folder() as folder, printing() as out, mock.patch.object(hub_push, "upload_export", end.upload):
        arguments: dict[str, Any] = {"hub_strategy": "every_save", "save_strategy": "steps", "save_steps": 1}
        trainer = build_trainer(folder, world_size, "someone/busy", async_save=True, **arguments)
        trainer.add_callback(end)
        trainer.train()
        return look(trainer, folder, out.getvalue())


def sft_checkpoint(rank: int, world_size: int) -> dict[str, Any]:
    """SFTTrainer, LoRA, strategy `all_checkpoints`: TRL's card and ours do not fight."""
    config = FSDPConfig(precision="fp32")
    with shared_folder() as folder, printing() as out:
        torch.manual_seed(0)
        trainer = SFTTrainer(
            model=_come_from_the_hub(build_model("llama", tied=False)),
            args=SFTConfig(
                **{
                    "output_dir": folder,
                    **QUIET_ARGUMENTS,
                    "max_steps": 2,
                    "per_device_train_batch_size": 4 // world_size,
                    "learning_rate": 0.05,
                    "max_length": 32,
                    "bf16": False,
                    "push_to_hub": True,
                    "hub_model_id": "someone/sft",
                    "hub_token": TOKEN,
                    "hub_strategy": "all_checkpoints",
                    "save_strategy": "steps",
                    "save_steps": 1,
                    "hub_always_push": True,
                },
                **config.trainer_kwargs(),
            ),
            train_dataset=build_rows(),
            processing_class=build_tokenizer(),
            callbacks=[FSDPCallback(config)],
            peft_config=LoraConfig(r=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        trainer.train()
        trainer.save_model()
        return look(trainer, folder, out.getvalue())


def refused_in_the_background(rank: int, world_size: int) -> dict[str, Any]:
    """The Hub answers 500 to every commit: training ends well, the checkpoint is there, one line says the repair."""
    with shared_folder() as folder, printing() as out:
        trainer = build_trainer(
            folder, world_size, "someone/fails-500", hub_strategy="checkpoint", save_strategy="steps", save_steps=2
        )
        state = trainer.train()
        seen = look(trainer, folder, out.getvalue())
        try:
            trainer.push_to_hub()
            error = ""
        except CheckpointError as refused:
            error = str(refused)
        left = Path(folder, ".hf-fsdp-hub-4")
        return {
            **seen,
            "steps": state.global_step,
            "error": error,
            "left": sorted(os.listdir(left)) if rank == 0 else [],
            "by_hand": _push_by_hand(error, left) if rank == 0 else "",
            "again": trainer.evaluate(build_dataset(12))["eval_loss"] > 0,  # the ranks are still in step
        }


def _push_by_hand(error: str, left: Path) -> str:
    """Run the command of the message, into a repository that takes it, and return its output."""
    (line,) = [line for line in error.splitlines() if line.strip().startswith("fix")]
    words = shlex.split(line.split("fix", 1)[1])
    assert words[:2] == ["hf", "upload"] and words[2] == "someone/fails-500" and words[3] == str(left), words
    words[0], words[2] = str(Path(sys.executable).with_name("hf")), "someone/by-hand"
    environment = {**os.environ, "HF_TOKEN": TOKEN}
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def wrong_token(rank: int, world_size: int) -> dict[str, Any]:
    """A token that the Hub refuses ends every rank at the start, with the same words."""
    with shared_folder() as folder, printing() as out:
        try:
            build_trainer(folder, world_size, "someone/refused", hub_token="hf_wrongTokenThatNobodyMayPrint")
        except CheckpointError as error:
            return {"error": str(error), "printed": out.getvalue()}
    return {"error": "", "printed": ""}


# -- in one process ---------------------------------------------------------------------------------------------------


def single(rank: int, world_size: int) -> dict[str, Any]:
    """The callback in a single process, which is not sharded: the same files go to the Hub."""
    with shared_folder() as folder, printing() as out:
        arguments: dict[str, Any] = {
            "max_steps": 2,
            "hub_strategy": "every_save",
            "save_strategy": "steps",
            "save_steps": 2,
        }
        trainer = build_trainer(folder, world_size, "someone/single", **arguments)
        trainer.train()
        return look(trainer, folder, out.getvalue())


def read_back(rank: int, world_size: int) -> dict[str, Any]:
    """What plain transformers and PEFT load from the stand-in; adapters by the line that is printed after a push."""
    loaded: dict[str, Any] = {}
    for name in ("end-full", "every-save", "busy", "by-hand", "single"):
        loaded[name] = AutoModelForCausalLM.from_pretrained(f"someone/{name}")
    for name in ("end-lora", "sft"):
        folder = Path(snapshot_download(f"someone/{name}"))
        scope: dict[str, Any] = {}
        exec(serving_lines(f"someone/{name}", folder)[0].text, scope)
        loaded[name] = scope["model"]
    base = AutoModelForCausalLM.from_pretrained(BASE)
    loaded["sft/checkpoint-1"] = PeftModel.from_pretrained(base, "someone/sft", subfolder="checkpoint-1")
    return {name: {key: p.detach() for key, p in model.named_parameters()} for name, model in loaded.items()}


PUSHING = {
    case.__name__: case
    for case in (end_full, end_lora, every_save, busy, sft_checkpoint, refused_in_the_background, wrong_token)
}
READING = {"single": single, "read_back": read_back}
CASES = {**PUSHING, **READING}
