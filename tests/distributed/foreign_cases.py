"""Checkpoints as Accelerate, FSDP1 and Trainer without FSDP write them, made by their own code and read by ours."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, PartialState
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_fsdp import FSDPCallback, FSDPConfig, apply_fsdp
from hf_fsdp.checkpoint.foreign import ForeignCheckpoint, open_foreign
from hf_fsdp.checkpoint.foreign.names import live_names
from hf_fsdp.checkpoint.load import load_model
from hf_fsdp.checkpoint.optimizer_state import load_optimizer_state
from hf_fsdp.checkpoint.random_state import read_random_state
from hf_fsdp.errors import CheckpointError
from hf_fsdp.sharding.shards import local_box
from hf_fsdp.storage.tensor_source import TensorSource, read_whole
from tests.distributed.behaviour_cases import all_sharded, losses_of, make_arguments
from tests.distributed.resuming import shared_folder
from tests.distributed.tiny_models import VOCABULARY, build_model
from tests.distributed.training import build_dataset, whole

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
CONFIG = FSDPConfig(precision="fp32")


def make_model(method: str, seed: int = 0) -> nn.Module:
    """A tied model, or an untied one with LoRA of rank 1, whose A has one row: nothing for the second rank."""
    if method == "full":
        model = build_model("llama", tied=True)
    else:
        torch.manual_seed(1)
        base = build_model("llama", tied=False)
        config = LoraConfig(r=1, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(base, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and seed:
                parameter.normal_(std=0.1)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as Trainer makes: with and without weight decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    others = [parameter for parameter in trained if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=1e-2)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """The same batches for all ranks, so that no gradient depends on who reads what."""
    losses = []
    for step in range(first, last):
        ids = torch.randint(3, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def save_like_accelerate(
    folder: Path, kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, version: int = 2
) -> None:
    """Accelerate's own functions, with a plugin that says what its plugin would say on GPUs."""
    PartialState(cpu=True)  # its logger wants one
    full = kind == FULL
    if version == 2:
        state_config: Any = SimpleNamespace(offload_to_cpu=full, rank0_only=full)
        optimizer_config: Any = SimpleNamespace()
    elif full:  # offloading to the CPU crashes torch when it is on the CPU already
        state_config, optimizer_config = FullStateDictConfig(False, False), FullOptimStateDictConfig(False, False)
    else:
        state_config, optimizer_config = ShardedStateDictConfig(), ShardedOptimStateDictConfig(False)
    plugin = SimpleNamespace(
        fsdp_version=version,
        state_dict_type=StateDictType[kind],
        state_dict_config=state_config,
        optim_state_dict_config=optimizer_config,
    )
    accelerator = SimpleNamespace(
        num_processes=dist.get_world_size() if version == 2 else 1, process_index=dist.get_rank()
    )
    save_fsdp_model(plugin, accelerator, model, str(folder), adapter_only=True)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
    dist.barrier()


def differences(source: TensorSource, expected: dict[str, torch.Tensor]) -> list[str]:
    """The names that are not equal to the bit: whole, and in every rank's box of three."""
    wrong = sorted(set(expected) ^ set(source.tensors))
    for name in sorted(set(expected) & set(source.tensors)):
        tensor = whole(expected[name])
        info = source.tensors[name]
        equal = info.shape == tuple(tensor.shape) and info.dtype == tensor.dtype
        if not equal or not torch.equal(read_whole(source, name), tensor):
            wrong.append(name)
            continue
        if isinstance(expected[name], DTensor):
            box = local_box(expected[name])
            local = torch.full(box.shape, -7.0, dtype=tensor.dtype)
            source.read(name, box.offsets, local)
            if not torch.equal(local, expected[name].to_local()):
                wrong.append(f"{name} of this rank")
        if tensor.dim():
            for part in range(3):  # as three ranks would read it
                rows = tensor.chunk(3)[part] if part < len(tensor.chunk(3)) else tensor[:0]
                out = torch.full(tuple(rows.shape), -7.0, dtype=tensor.dtype)
                source.read(name, (part * tensor.chunk(3)[0].shape[0], *[0] * (tensor.dim() - 1)), out)
                if not torch.equal(out, rows):
                    wrong.append(f"{name} in thirds")
    return wrong


def live_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint should hold: all weights, or of a PEFT model the trained ones."""
    is_peft = hasattr(model, "peft_config")
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad or not is_peft}


def live_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"state.{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def look_at(foreign: ForeignCheckpoint, weights: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> Any:
    assert foreign.model is not None and foreign.optimizer is not None
    result = {
        "kind": foreign.kind,
        "wrong weights": differences(foreign.model, weights),
        "wrong state": differences(foreign.optimizer, state),
        "num_weights": len(weights),
        "num_state": len(state),
        "decays": [group["settings"]["weight_decay"] for group in foreign.groups["groups"]],
        "without_state": foreign.groups["without_state"],
        "missing": foreign.missing,
    }
    return result


# -- FSDP2 under Accelerate -------------------------------------------------------------------------------------------


def _fsdp2(kind: str, method: str) -> dict[str, Any]:
    """Train, save by Accelerate's functions, read back; then go on from it in a model that began elsewhere."""
    with shared_folder() as folder:
        model = make_model(method)
        apply_fsdp(model, CONFIG)
        optimizer = make_optimizer(model)
        take_steps(model, optimizer, 0, 3)
        save_like_accelerate(Path(folder), kind, model, optimizer)
        foreign = open_foreign(Path(folder), live_names(model, optimizer))
        result = look_at(foreign, live_weights(model), live_state(model, optimizer))
        local = [p.to_local().numel() if isinstance(p, DTensor) else -1 for p in model.parameters()]
        result["local"] = [sum(local), min(local), sum(p.numel() for p in model.parameters())]
        result["losses"] = take_steps(model, optimizer, 3, 6)
        foreign.close()

        other = make_model(method, seed=5)
        apply_fsdp(other, CONFIG)
        other_optimizer = make_optimizer(other)
        foreign = open_foreign(Path(folder), live_names(other, other_optimizer))
        assert foreign.model is not None and foreign.optimizer is not None
        load_model(other, foreign.model, Path(folder))
        load_optimizer_state(other, other_optimizer, foreign.optimizer, foreign.groups)
        foreign.close()
        result["resumed"] = take_steps(other, other_optimizer, 3, 6)
        return result


def fsdp2_full(rank: int, world_size: int) -> dict[str, Any]:
    return _fsdp2(FULL, "full")


def fsdp2_full_lora(rank: int, world_size: int) -> dict[str, Any]:
    return _fsdp2(FULL, "lora")


def fsdp2_sharded(rank: int, world_size: int) -> dict[str, Any]:
    return _fsdp2(SHARDED, "full")


def fsdp2_sharded_lora(rank: int, world_size: int) -> dict[str, Any]:
    return _fsdp2(SHARDED, "lora")


def fsdp2_sharded_lora_with_wrappers_in_names(rank: int, world_size: int) -> dict[str, Any]:
    """The names that Accelerate's activation checkpointing and torch.compile leave; put in by hand here."""
    with shared_folder() as folder:
        model = make_model("lora")
        apply_fsdp(model, CONFIG)
        optimizer = make_optimizer(model)
        take_steps(model, optimizer, 0, 1)
        save_like_accelerate(Path(folder), SHARDED, model, optimizer)
        state = {
            "_orig_mod."
            + name.replace(".layers.1.", ".layers.1._checkpoint_wrapped_module.").replace(".default", ""): p
            for name, p in live_weights(model).items()
        }
        shutil.rmtree(Path(folder, "pytorch_model_fsdp_0"), ignore_errors=True)
        dist.barrier()
        dcp.save({"model": state}, storage_writer=dcp.FileSystemWriter(Path(folder, "pytorch_model_fsdp_0")))
        dist.barrier()
        foreign = open_foreign(Path(folder), live_names(model, optimizer))
        result = look_at(foreign, live_weights(model), live_state(model, optimizer))
        foreign.close()
        return {**result, "keys": sorted(state)[:1]}


def damaged_shards(rank: int, world_size: int) -> dict[str, Any]:
    """A rank's file that is missing or cut off, of the weights and of the optimizer."""
    with shared_folder() as folder:
        model = make_model("full")
        apply_fsdp(model, CONFIG)
        optimizer = make_optimizer(model)
        take_steps(model, optimizer, 0, 1)
        save_like_accelerate(Path(folder), SHARDED, model, optimizer)
        said = {}
        if rank == 0:
            for part in ("pytorch_model_fsdp_0", "optimizer_0"):
                path = Path(folder, part, "__1_0.distcp")
                data = path.read_bytes()
                path.unlink()
                said[f"{part} missing"] = _refusal(folder)
                path.write_bytes(data[: len(data) // 2])
                said[f"{part} cut off"] = _refusal(folder)
                path.write_bytes(data)
                said[f"{part} back"] = _refusal(folder)
        dist.barrier()
        return said


def _refusal(folder: str) -> str:
    try:
        open_foreign(Path(folder)).close()
    except CheckpointError as error:
        return str(error)
    return ""


# -- FSDP1 ------------------------------------------------------------------------------------------------------------


def _fsdp1(kind: str, *, use_orig_params: bool, with_state: bool = True) -> dict[str, Any]:
    """Torch's FSDP1 saved by Accelerate's functions; expected is what FSDP1 itself gathers."""
    with shared_folder() as folder:
        model = FSDP1(
            build_model("llama", tied=False),
            auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        take_steps(model, optimizer, 0, 2)
        if not with_state:  # as after a resume under SHARDED_STATE_DICT, which restores none
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        save_like_accelerate(Path(folder), kind, model, optimizer, version=1)

        target = build_model("llama", tied=False)  # what the checkpoint is for
        apply_fsdp(target, CONFIG)
        target_optimizer = torch.optim.AdamW(target.parameters(), lr=1e-2)
        foreign = open_foreign(Path(folder), live_names(target, target_optimizer))
        if not with_state:
            foreign.close()
            return {"optimizer": foreign.optimizer is not None, "missing": foreign.missing}
        with FSDP1.summon_full_params(model):
            weights = {
                name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()
            }
        with FSDP1.state_dict_type(
            model, StateDictType[FULL], FullStateDictConfig(False, False), FullOptimStateDictConfig(False, False)
        ):
            gathered = FSDP1.optim_state_dict(model, optimizer)["state"]
        state = {f"state.{name}.{key}": value for name, item in gathered.items() for key, value in item.items()}
        result = look_at(foreign, weights, state)
        assert foreign.model is not None and foreign.optimizer is not None
        load_model(target, foreign.model, Path(folder))
        load_optimizer_state(target, target_optimizer, foreign.optimizer, foreign.groups)
        foreign.close()
        result["losses"] = take_steps(model, optimizer, 2, 4)
        result["resumed"] = take_steps(target, target_optimizer, 2, 4)
        return result


def fsdp1_full(rank: int, world_size: int) -> dict[str, Any]:
    return _fsdp1(FULL, use_orig_params=True)


def fsdp1_full_flat(rank: int, world_size: int) -> dict[str, Any]:
    return _fsdp1(FULL, use_orig_params=False)


def fsdp1_sharded(rank: int, world_size: int) -> dict[str, Any]:
    return _fsdp1(SHARDED, use_orig_params=True)


def fsdp1_sharded_flat(rank: int, world_size: int) -> dict[str, Any]:
    return _fsdp1(SHARDED, use_orig_params=False)


def fsdp1_sharded_without_state(rank: int, world_size: int) -> dict[str, Any]:
    return _fsdp1(SHARDED, use_orig_params=True, with_state=False)


# -- without FSDP -----------------------------------------------------------------------------------------------------


def _ddp_trainer(folder: str, method: str) -> Trainer:
    """A Trainer that knows nothing of us, on two processes."""
    arguments = make_arguments(folder, None, save_strategy="steps", save_steps=3, weight_decay=0.1, max_grad_norm=0.5)
    return Trainer(model=make_model(method), args=arguments, train_dataset=build_dataset(20))


def _ddp(method: str) -> dict[str, Any]:
    with shared_folder() as folder:
        trainer = _ddp_trainer(folder, method)
        trainer.train()
        random_state = read_random_state()  # training ended with the save, so the file says the same
        checkpoint = Path(folder, "checkpoint-3")
        model = trainer.model
        target = make_model(method)
        apply_fsdp(target, CONFIG)
        # The optimizer that Trainer would make for it: its groups are what the numbers in optimizer.pt mean.
        target_optimizer = _ddp_trainer_optimizer(folder, target)
        foreign = open_foreign(checkpoint, live_names(target, target_optimizer))
        optimizer = trainer.optimizer.optimizer  # without Accelerate's wrapper
        result = look_at(foreign, live_weights(model), live_state(model, optimizer))
        result["scheduler"] = foreign.scheduler == trainer.lr_scheduler.state_dict()
        result["scaler"] = foreign.scaler is None
        result["random"] = foreign.random_state(dist.get_rank()) == random_state
        result["ranks"] = sorted(foreign.random_files)
        result["trainer_state"] = foreign.trainer_state is not None and foreign.trainer_state.name
        result["numbers"] = open_foreign(checkpoint).missing
        result["other groups"] = _refuses_other_groups(checkpoint, target)
        return result


def _ddp_trainer_optimizer(folder: str, model: nn.Module) -> torch.optim.Optimizer:
    arguments = make_arguments(folder, None, weight_decay=0.1)
    return Trainer(model=model, args=arguments).create_optimizer()


def _refuses_other_groups(checkpoint: Path, model: nn.Module) -> str:
    one_group = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad][:-1])
    try:
        open_foreign(checkpoint, live_names(model, one_group))
    except CheckpointError as error:
        return str(error)
    return ""


def ddp_resumed_under_fsdp(rank: int, world_size: int) -> dict[str, Any]:
    """Six steps of DDP, and three of them again under FSDP from the checkpoint in the middle."""
    with shared_folder() as folder:
        arguments: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "seed": 1}
        arguments |= {"lr_scheduler_type": "linear", "max_grad_norm": 0.5, "weight_decay": 0.1}
        data = build_dataset(24)
        plain = Trainer(model=make_model("full"), args=make_arguments(folder, None, **arguments), train_dataset=data)
        plain.train()
        resumed = Trainer(
            model=make_model("full", seed=5),
            args=make_arguments(folder, CONFIG, **arguments),
            train_dataset=data,
            callbacks=[FSDPCallback()],
        )
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            resumed.train(resume_from_checkpoint=str(Path(folder, "checkpoint-3")))
        return {
            "plain": losses_of(plain),
            "resumed": losses_of(resumed),
            "sharded": all_sharded(resumed.model),
            "rates": [plain.lr_scheduler.get_last_lr(), resumed.lr_scheduler.get_last_lr()],
            "printed": printed.getvalue(),
        }


def ddp_full(rank: int, world_size: int) -> dict[str, Any]:
    return _ddp("full")


def ddp_lora(rank: int, world_size: int) -> dict[str, Any]:
    return _ddp("lora")


def ddp_pytorch_model_bin(rank: int, world_size: int) -> dict[str, Any]:
    """The file that Trainer wrote before safetensors; here with the names that a DDP module gives."""
    with shared_folder() as folder:
        trainer = _ddp_trainer(folder, "full")
        trainer.train()
        checkpoint = Path(folder, "checkpoint-3")
        if rank == 0:
            (checkpoint / "model.safetensors").unlink()
            state = {f"module.{name}": value for name, value in trainer.model.state_dict().items()}
            torch.save(state, checkpoint / "pytorch_model.bin")
        dist.barrier()
        foreign = open_foreign(checkpoint, live_names(trainer.model, trainer.optimizer.optimizer))
        state = live_state(trainer.model, trainer.optimizer.optimizer)
        return look_at(foreign, live_weights(trainer.model), state)


def accelerate_save_state(rank: int, world_size: int) -> dict[str, Any]:
    """A loop of a person's own under DDP: other file names, the same content."""
    with shared_folder() as folder, _environment(ACCELERATE_USE_CPU="true"):
        accelerator = Accelerator(cpu=True)
        model = make_model("full")
        optimizer = make_optimizer(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        take_steps(model, optimizer, 0, 2)
        accelerator.save_state(folder)
        random_state = read_random_state()
        dist.barrier()
        plain = accelerator.unwrap_model(model)
        foreign = open_foreign(Path(folder), live_names(plain, optimizer.optimizer))
        result = look_at(foreign, live_weights(plain), live_state(plain, optimizer.optimizer))
        result["scheduler"] = foreign.scheduler == scheduler.scheduler.state_dict()
        result["random"] = foreign.random_state(rank) == random_state
        return result


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


CASES = {
    case.__name__: case
    for case in (
        fsdp2_full,
        fsdp2_full_lora,
        fsdp2_sharded,
        fsdp2_sharded_lora,
        fsdp2_sharded_lora_with_wrappers_in_names,
        damaged_shards,
        fsdp1_full,
        fsdp1_full_flat,
        fsdp1_sharded,
        fsdp1_sharded_flat,
        fsdp1_sharded_without_state,
        ddp_full,
        ddp_lora,
        ddp_pytorch_model_bin,
        accelerate_save_state,
        ddp_resumed_under_fsdp,
    )
}
