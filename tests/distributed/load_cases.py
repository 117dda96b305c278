"""Models whose ranks read only their own slices, beside the same models loaded whole by every rank."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.integrations import is_fsdp_enabled

from hf_fsdp import FSDPCallback, FSDPConfig, apply_fsdp, audit_sharding, load_sharded
from hf_fsdp.errors import CheckpointError
from hf_fsdp.sharding.agree import checksum
from hf_fsdp.sharding.unread import UnreadParameter
from tests.distributed.harness import forget_accelerate
from tests.distributed.tiny_models import _LLAMA_LIKE as LLAMA_LIKE
from tests.distributed.tiny_models import CONFIGS, VOCABULARY, build_model
from tests.distributed.training import QUIET_ARGUMENTS, build_dataset, whole
from tests.unit.small_models import vision_language_models

Build = Callable[[Callable[..., Any]], nn.Module]


@contextlib.contextmanager
def shared_folder(write: Callable[[Path], Any]) -> Iterator[Path]:
    """A folder that rank 0 filled and all ranks see."""
    name = [tempfile.mkdtemp(prefix="hf-fsdp-load-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    folder = Path(name[0])
    if dist.get_rank() == 0:
        write(folder)
    dist.barrier()
    yield folder
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def ordinary(model_class: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
    """What `load_sharded` stands in for."""
    return model_class.from_pretrained(name, *args, **kwargs)


def unread_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if isinstance(parameter, UnreadParameter)}


def compare(build: Build, config: FSDPConfig, forward: Callable[[nn.Module], torch.Tensor]) -> dict[str, Any]:
    """Build, shard and step once, from files and whole; everything must be equal to the bit."""
    torch.manual_seed(5)
    expected = build(ordinary)
    torch.manual_seed(5)
    model = build(load_sharded)
    unread = unread_names(model)
    buffers = dict(model.named_buffers())
    same_buffers = all(torch.equal(buffer, buffers[name]) for name, buffer in expected.named_buffers())
    for each in (expected, model):
        apply_fsdp(each, config)
        audit_sharding(each)
        each.train()
        torch.manual_seed(7)
        forward(each).backward()
    parameters, others = dict(model.named_parameters()), dict(expected.named_parameters())
    assert parameters.keys() == others.keys() and buffers.keys() == dict(expected.named_buffers()).keys()
    differing = []
    for name, parameter in parameters.items():
        other = others[name]
        assert isinstance(parameter, DTensor) and isinstance(other, DTensor), name
        assert (parameter.dtype, parameter.requires_grad) == (other.dtype, other.requires_grad), name
        assert parameter.to_local().shape == other.to_local().shape and parameter.placements == other.placements, name
        if not torch.equal(whole(parameter), whole(other)):
            differing.append(name)
        gradients = [item.grad for item in (parameter, other) if item.grad is not None]
        assert len(gradients) in (0, 2), name
        if gradients and not torch.equal(whole(gradients[0]), whole(gradients[1])):
            differing.append(f"{name}.grad")
    return {
        "differing": differing,
        "same_buffers": same_buffers,
        "num_buffers": len(buffers),
        "num_unread": len(unread),
        "num_parameters": len(parameters),
        "num_local": sum(item.to_local().numel() for item in model.parameters() if isinstance(item, DTensor)),
        "num_whole": sum(parameter.numel() for parameter in model.parameters()),
        "num_gradients": sum(parameter.grad is not None for parameter in model.parameters()),
        "names": sorted(parameters),
    }


def next_token_loss(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(4, VOCABULARY - 3, (2, 10), generator=generator)
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def _family(family: str, tied: bool, load_dtype: str = "float32", config: Any = "fp32", **settings: Any) -> Any:
    def case(rank: int, world_size: int) -> dict[str, Any]:
        model = build_model(family, tied=tied, dtype=getattr(torch, load_dtype))
        with shared_folder(model.save_pretrained) as folder:
            return compare(
                lambda load: load(AutoModelForCausalLM, folder),
                FSDPConfig(precision=config, **settings),
                next_token_loss,
            )

    return case


TIED = (True, False, True, False, True, True, False)
# Each family once; tied and untied of each are compared in one process, in tests/unit/test_load.py.
FAMILIES = {
    f"{family}-{'tied' if tied else 'untied'}": (family, tied) for family, tied in zip(CONFIGS, TIED, strict=True)
}
CASES: dict[str, Callable[[int, int], Any]] = {name: _family(*settings) for name, settings in FAMILIES.items()}


# -- what is not in the files, and what is not in the model -----------------------------------------------------------


def _missing_head(rank: int, world_size: int) -> dict[str, Any]:
    """A classifier from a causal model's folder: its head is fresh, and the causal head has no place."""
    model = build_model("llama", tied=False)

    def build(load: Callable[..., Any]) -> nn.Module:
        torch.manual_seed(rank)  # every rank would make another head
        return load(AutoModelForSequenceClassification, folder, num_labels=3, pad_token_id=0)

    def loss(model: nn.Module) -> torch.Tensor:
        ids = torch.randint(3, VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(rank))
        return model(input_ids=ids, labels=torch.tensor([0, 2])).loss

    with shared_folder(model.save_pretrained) as folder:
        _, info = load_sharded(AutoModelForSequenceClassification, folder, num_labels=3, output_loading_info=True)
        return {
            **compare(build, FSDPConfig(precision="fp32"), loss),
            "missing": sorted(info["missing_keys"]),
            "unexpected": sorted(info["unexpected_keys"]),
        }


def _other_sizes(rank: int, world_size: int) -> dict[str, Any]:
    """A head of another size, with `ignore_mismatched_sizes`; without it the error of `from_pretrained`."""
    torch.manual_seed(0)
    config = CONFIGS["llama"]()
    config.num_labels = 2
    model = AutoModelForSequenceClassification.from_config(config)

    def build(load: Callable[..., Any]) -> nn.Module:
        return load(AutoModelForSequenceClassification, folder, num_labels=5, ignore_mismatched_sizes=True)

    def loss(model: nn.Module) -> torch.Tensor:
        ids = torch.randint(3, VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(rank))
        return model(input_ids=ids, labels=torch.tensor([0, 4])).loss

    with shared_folder(model.save_pretrained) as folder:
        messages = []
        for load in (ordinary, load_sharded):
            try:
                load(AutoModelForSequenceClassification, folder, num_labels=5)
            except RuntimeError as error:
                messages.append(str(error))
        return {**compare(build, FSDPConfig(precision="fp32"), loss), "messages": messages}


def _resized(rank: int, world_size: int) -> dict[str, Any]:
    """New tokens: their rows follow from the mean of the others, which needs the values."""

    def build(load: Callable[..., Any]) -> nn.Module:
        model = load(AutoModelForCausalLM, folder)
        model.resize_token_embeddings(VOCABULARY + 7)
        return model

    with shared_folder(build_model("llama", tied=False).save_pretrained) as folder:
        return compare(build, FSDPConfig(precision="fp32"), next_token_loss)


def _looked_at(rank: int, world_size: int) -> dict[str, Any]:
    """One rank prints a weight, all ranks change another one."""

    def build(load: Callable[..., Any]) -> nn.Module:
        model = load(AutoModelForCausalLM, folder)
        if rank == 1:
            print(model.model.layers[0].mlp.up_proj.weight.sum())
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight[0] = 3.0
            model.model.norm.weight.data.mul_(2.0)
        return model

    with shared_folder(build_model("llama", tied=True).save_pretrained) as folder:
        return compare(build, FSDPConfig(precision="fp32"), next_token_loss)


def _rounded(rank: int, world_size: int) -> dict[str, Any]:
    """float32 files loaded in bfloat16 and stored in float32: rounded, as they would be."""
    with shared_folder(build_model("llama", tied=False).save_pretrained) as folder:
        return compare(
            lambda load: load(AutoModelForCausalLM, folder, dtype=torch.bfloat16),
            FSDPConfig(precision="bf16-mixed"),
            next_token_loss,
        )


def _frozen(rank: int, world_size: int) -> dict[str, Any]:
    """Half of the model is frozen, and keeps the dtype of its files."""

    def build(load: Callable[..., Any]) -> nn.Module:
        model = load(AutoModelForCausalLM, folder)
        model.model.layers[:2].requires_grad_(False)
        return model

    with shared_folder(build_model("llama", tied=False, dtype=torch.bfloat16).save_pretrained) as folder:
        return compare(build, FSDPConfig(precision="bf16-mixed"), next_token_loss)


def _both_of_a_tie(are_equal: bool) -> Callable[[int, int], Any]:
    """A folder that holds the head and the embedding of a model that ties them."""

    def write(folder: Path) -> None:
        model = build_model("llama", tied=True)
        model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        head = tensors["model.embed_tokens.weight"].clone()
        save_file({**tensors, "lm_head.weight": head if are_equal else head + 1}, folder / "model.safetensors")

    def case(rank: int, world_size: int) -> dict[str, Any]:
        with shared_folder(write) as folder:
            return compare(
                lambda load: load(AutoModelForCausalLM, folder), FSDPConfig(precision="fp32"), next_token_loss
            )

    return case


# -- adapters ---------------------------------------------------------------------------------------------------------


def _lora(**settings: Any) -> Callable[[int, int], Any]:
    def case(rank: int, world_size: int) -> dict[str, Any]:
        from peft import LoraConfig, get_peft_model

        def build(load: Callable[..., Any]) -> nn.Module:
            model = load(AutoModelForCausalLM, folder)
            torch.manual_seed(1)
            return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))

        with shared_folder(build_model("llama", tied=False, dtype=torch.bfloat16).save_pretrained) as folder:
            return compare(build, FSDPConfig(precision="bf16-mixed"), next_token_loss)

    return case


def _saved_adapter(how: str) -> Callable[[int, int], Any]:
    """An adapter from a folder, through PEFT, or through transformers from the adapter's own folder."""

    def write(folder: Path) -> None:
        from peft import LoraConfig, get_peft_model

        base = build_model("llama", tied=False)
        base.save_pretrained(folder / "base")
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), LoraConfig(r=4))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_()
        adapted.save_pretrained(folder / "adapter")

    def case(rank: int, world_size: int) -> dict[str, Any]:
        from peft import PeftModel

        def build(load: Callable[..., Any]) -> nn.Module:
            if how == "transformers":
                model = load(AutoModelForCausalLM, folder / "adapter")
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_("lora_" in name)
                return model
            base = load(AutoModelForCausalLM, folder / "base")
            return PeftModel.from_pretrained(base, str(folder / "adapter"), is_trainable=True)

        with shared_folder(write) as folder:
            return compare(build, FSDPConfig(precision="fp32"), next_token_loss)

    return case


# -- trainers ---------------------------------------------------------------------------------------------------------


def _trained(folder: Path, build: Callable[..., Trainer]) -> dict[str, Any]:
    """Two steps from files and whole: what was unread when the trainer was ready, and what differs."""
    runs = []
    for load in (ordinary, load_sharded):
        torch.manual_seed(5)
        config = FSDPConfig(precision="fp32")
        with contextlib.redirect_stdout(io.StringIO()):
            model = load(AutoModelForCausalLM, folder)
            output = str(folder / load.__name__)
            trainer = build(model, config, {"output_dir": output, **QUIET_ARGUMENTS, "max_steps": 2})
            unread = unread_names(trainer.model)
            trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        runs.append((losses, {name: whole(item) for name, item in trainer.model.named_parameters()}, unread))
        forget_accelerate()
    (losses, expected, _), (others, found, unread) = runs
    return {
        "losses": [losses, others],
        "differing": [name for name in expected if not torch.equal(expected[name], found[name])],
        "num_unread": len(unread),
        "num_parameters": len(found),
        "num_adapters": sum("lora_" in name for name in found),
    }


def _trainer(rank: int, world_size: int) -> dict[str, Any]:
    def build(model: nn.Module, config: FSDPConfig, arguments: dict[str, Any]) -> Trainer:
        return Trainer(
            model=model,
            args=TrainingArguments(**arguments, per_device_train_batch_size=4, **config.trainer_kwargs()),
            train_dataset=build_dataset(),
            callbacks=[FSDPCallback(config)],
        )

    with shared_folder(build_model("llama", tied=True).save_pretrained) as folder:
        return _trained(folder, build)


def _sft_lora(rank: int, world_size: int) -> dict[str, Any]:
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from tests.distributed.sft_cases import build_rows, build_tokenizer

    def build(model: nn.Module, config: FSDPConfig, arguments: dict[str, Any]) -> Trainer:
        return SFTTrainer(
            model=model,
            args=SFTConfig(**arguments, per_device_train_batch_size=2, max_length=32, **config.trainer_kwargs()),
            train_dataset=build_rows(),
            processing_class=build_tokenizer(),
            callbacks=[FSDPCallback(config)],
            peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        )

    with shared_folder(build_model("llama", tied=False).save_pretrained) as folder:
        return _trained(folder, build)


def _ram_efficient(rank: int, world_size: int) -> dict[str, Any]:
    """What Accelerate's launch files set lets transformers leave fresh weights and buffers empty on all ranks but 0."""
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    assert is_fsdp_enabled()
    return _missing_head(rank, world_size)


# -- files ------------------------------------------------------------------------------------------------------------


def _sharded_index(rank: int, world_size: int) -> dict[str, Any]:
    model = build_model("llama", tied=True)
    with shared_folder(lambda folder: model.save_pretrained(folder, max_shard_size="40KB")) as folder:
        num_files = len(list(folder.glob("*.safetensors")))
        outcome = compare(
            lambda load: load(AutoModelForCausalLM, folder), FSDPConfig(precision="fp32"), next_token_loss
        )
        return {**outcome, "num_files": num_files}


def _our_checkpoint(family: str) -> Callable[[int, int], Any]:
    """A checkpoint of a run, as the start of another one; its values are those that were trained."""

    def case(rank: int, world_size: int) -> dict[str, Any]:
        config = FSDPConfig(precision="fp32", checkpoint="sharded")
        torch.manual_seed(0)
        model = CONVERTED[family]() if family in CONVERTED else build_model(family, tied=True)
        with shared_folder(lambda folder: None) as folder, contextlib.redirect_stdout(io.StringIO()):
            arguments = {**QUIET_ARGUMENTS, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
            trainer = Trainer(
                model=model,
                args=TrainingArguments(output_dir=str(folder), **arguments, **config.trainer_kwargs()),
                train_dataset=build_dataset(),
                callbacks=[FSDPCallback(config)],
            )
            trainer.train()
            loaded = load_sharded(type(model), folder / "checkpoint-2")
            unread = unread_names(loaded)
            apply_fsdp(loaded, config)
            trained = {name: whole(item) for name, item in model.named_parameters()}
            found = {name: whole(item) for name, item in loaded.named_parameters()}
            loaded.save_pretrained(folder / "out")
            dist.barrier()
            again = type(model).from_pretrained(folder / "out").state_dict()
        assert trained.keys() == found.keys()
        return {
            "differing": [name for name in trained if not torch.equal(trained[name], found[name])],
            "saved_differing": [name for name in trained if not torch.equal(trained[name], again[name])],
            "num_unread": len(unread),
            "num_parameters": len(found),
        }

    return case


def _hub_snapshot(rank: int, world_size: int) -> dict[str, Any]:
    """A model by its hub name, offline, from a cache that holds it."""

    def write(folder: Path) -> None:
        repository = folder / "models--tiny--llama"
        (repository / "blobs").mkdir(parents=True)
        (repository / "refs").mkdir()
        commit = "0123456789012345678901234567890123456789"
        (repository / "refs" / "main").write_text(commit)
        snapshot = repository / "snapshots" / commit
        build_model("llama", tied=False).save_pretrained(snapshot, max_shard_size="40KB")
        for index, file in enumerate(sorted(snapshot.iterdir())):
            file.rename(repository / "blobs" / str(index))
            file.symlink_to(f"../../blobs/{index}")

    with shared_folder(write) as folder:
        return compare(
            lambda load: load(AutoModelForCausalLM, "tiny/llama", cache_dir=folder),
            FSDPConfig(precision="fp32"),
            next_token_loss,
        )


def _damaged(rank: int, world_size: int) -> dict[str, Any]:
    """What each rank says of folders that are not right, for all or for one rank only."""

    def write(folder: Path) -> None:
        model = build_model("llama", tied=False)
        for name in ("cut", "outside", "gone", "other"):
            model.save_pretrained(folder / name, max_shard_size="40KB")
        first = sorted((folder / "cut").glob("*.safetensors"))[0]
        first.write_bytes(first.read_bytes()[:-10])
        index = folder / "outside" / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        name = next(iter(content["weight_map"]))
        moved = folder / "outside" / content["weight_map"][name]
        moved.rename(folder / "secret.safetensors")
        content["weight_map"] = {
            key: "../secret.safetensors" if file == moved.name else file for key, file in content["weight_map"].items()
        }
        index.write_text(json.dumps(content))
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.add_(1)
        model.save_pretrained(folder / "other" / "rank1")

    def message(do: Callable[[], Any]) -> str:
        try:
            do()
        except CheckpointError as error:
            return str(error)
        return ""

    found = {}
    with shared_folder(write) as folder:
        for name in ("cut", "outside"):
            found[name] = message(functools.partial(load_sharded, AutoModelForCausalLM, folder / name))
            found[name] = found[name].replace(str(folder), "")
        model = load_sharded(AutoModelForCausalLM, folder / "gone")
        dist.barrier()
        if rank == 0:
            for file in (folder / "gone").glob("*.safetensors"):
                file.unlink()
        dist.barrier()
        found["gone"] = message(lambda: apply_fsdp(model, FSDPConfig(precision="fp32")))
        found["gone untouched"] = str(unread_names(model) == {name for name, _ in model.named_parameters()})
        mine = folder / "other" / "rank1" if rank == 1 else folder / "other"
        model = load_sharded(AutoModelForCausalLM, mine)
        found["other"] = message(lambda: apply_fsdp(model, FSDPConfig(precision="fp32")))
    return found


def _read_fails_on_one_rank(rank: int, world_size: int) -> dict[str, Any]:
    """A disk that fails for one rank, in the middle of reading."""
    from hf_fsdp.storage.tensor_source import SafetensorsSource

    with shared_folder(build_model("llama", tied=False).save_pretrained) as folder:
        model = load_sharded(AutoModelForCausalLM, folder)
        source = next(model.lm_head.weight.origin.sources())
        assert isinstance(source, SafetensorsSource)
        original = source.read

        def read(name: str, offsets: Any, out: torch.Tensor) -> None:
            if rank == 1 and name == "model.norm.weight" and offsets[0]:
                raise OSError(5, "Input/output error")
            original(name, offsets, out)

        source.read = read  # type: ignore[method-assign]
        try:
            apply_fsdp(model, FSDPConfig(precision="fp32"))
        except CheckpointError as error:
            return {"error": str(error)}
        return {"error": ""}


def _ordinary_ways(rank: int, world_size: int) -> dict[str, Any]:
    """Models that cannot be left in their files are loaded whole, and a line on rank 0 says why."""

    def write(folder: Path) -> None:
        model = build_model("llama", tied=False)
        model.save_pretrained(folder / "new")
        model.config.save_pretrained(folder / "old")
        torch.save(model.state_dict(), folder / "old" / "pytorch_model.bin")

    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.float32)
    found = {}
    with shared_folder(write) as folder:
        for name, kwargs in {
            "old": {},
            "new": {"quantization_config": four_bits, "dtype": torch.float32},
        }.items():
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                model = load_sharded(AutoModelForCausalLM, folder / name, **kwargs)
            expected = dict(ordinary(AutoModelForCausalLM, folder / name, **kwargs).named_parameters())
            # Packed bits may be NaN as numbers.
            equal = all(checksum(expected[key]) == checksum(parameter) for key, parameter in model.named_parameters())
            found[name] = {"printed": printed.getvalue(), "unread": len(unread_names(model)), "equal": equal}
    return found


# -- how they are sharded ---------------------------------------------------------------------------------------------


def _offloaded(rank: int, world_size: int) -> dict[str, Any]:
    with shared_folder(build_model("llama", tied=True).save_pretrained) as folder:
        return compare(
            lambda load: load(AutoModelForCausalLM, folder),
            FSDPConfig(precision="fp32", offload="parameters"),
            next_token_loss,
        )


def _converted(family: str) -> Callable[[int, int], Any]:
    """Weights that transformers joins or renames when it loads them."""

    def case(rank: int, world_size: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = CONVERTED[family]()
        with shared_folder(model.save_pretrained) as folder:
            return compare(lambda load: load(type(model), folder), FSDPConfig(precision="fp32"), next_token_loss)

    return case


CONVERTED: dict[str, Callable[[], PreTrainedModel]] = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**LLAMA_LIKE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "llava": vision_language_models()["llava"],
}
CASES |= {
    "bf16-as-fp32": _family("llama", True, "bfloat16", {"preset": "bf16-mixed", "keep_norms_fp32": True}),
    "bf16-true": _family("qwen3", False, "float32", "bf16-true"),
    "halves": _family("llama", False, wrap={"granularity": "attention_and_mlp"}),
    "by-size": _family("gpt2", True, wrap={"policy": "size", "min_num_params": 2000}),
    "offloaded": _offloaded,
    "rounded": _rounded,
    "frozen": _frozen,
    "trainer": _trainer,
    "sft-lora": _sft_lora,
    "ram-efficient": _ram_efficient,
    "missing-head": _missing_head,
    "other-sizes": _other_sizes,
    "resized": _resized,
    "looked-at": _looked_at,
    "both-equal": _both_of_a_tie(True),
    "both-differ": _both_of_a_tie(False),
    "lora": _lora(target_modules="all-linear", r=4),
    "lora-dora": _lora(target_modules=["q_proj"], r=4, use_dora=True),
    "lora-pissa": _lora(target_modules=["q_proj"], r=4, init_lora_weights="pissa"),
    "lora-and-head": _lora(target_modules=["q_proj", "v_proj"], r=4, modules_to_save=["lm_head"]),
    "saved-adapter": _saved_adapter("peft"),
    "adapter-folder": _saved_adapter("transformers"),
    "sharded-index": _sharded_index,
    "hub-snapshot": _hub_snapshot,
    "our-checkpoint": _our_checkpoint("llama"),
    "our-checkpoint-of-experts": _our_checkpoint("mixtral"),
    "damaged": _damaged,
    "one-rank-fails": _read_fails_on_one_rank,
    "ordinary-ways": _ordinary_ways,
    **{name: _converted(name) for name in CONVERTED},
}

# On 4 processes: two copies of two shards, and tensors with fewer rows than ranks can share evenly.
CASES_OF_FOUR: dict[str, Callable[[int, int], Any]] = {
    "two-by-two": _family("llama", True, "bfloat16", "bf16-mixed", sharding={"dp_replicate_size": 2}),
    "four": _family("gemma3", False),
}
CASES |= CASES_OF_FOUR
